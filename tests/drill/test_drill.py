"""Recovery drills on an installation that has runs and tools of its own (R-19.6)."""

from typing import Any, cast

import anyio
import pytest

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.drill.conduct import Wish, clear_all, conduct
from perdure.drill.report import DrillReport
from perdure.drill.scenes import SCENES, Scene
from perdure.drill.stage import TENANT, WHO, Stage
from perdure.ops.settings import DatabaseSettings, Settings
from perdure.ops.verify import verify
from perdure.protocol.decisions import Finish
from perdure.protocol.states import TERMINAL
from perdure.runtime import open_runtime, open_service
from perdure.service.principal import LOCAL
from perdure.service.runs import RunRequest, create_run, get_run
from perdure.service.threads import list_threads
from perdure.store.reader import RunFilter
from perdure.tools import FunctionTool, Performed, tool

LEASE_S, LEASE_TO_LOSE_S = 30.0, 3.0
SLOW = ("kill-after-tool", "queue-replay")
"""Scenes that wait for a lease to run out."""


@tool(side_effect="write", idempotent=True, timeout_s=5, compensation="call the shop")
def order(amount: int) -> int:
    """Order."""
    return amount


@tool(side_effect="external", idempotent=False, timeout_s=5, compensation="none")
def mail(text: str) -> str:
    """Send a mail."""
    return text


def _take_back(performed: Performed) -> None:
    """Take an order back."""
    del performed


@tool(side_effect="write", idempotent=True, timeout_s=5, compensate=_take_back)
def book(amount: int) -> int:
    """Book."""
    return amount


def installation() -> Catalog:
    """Return an agent with a tool that lacks nothing, one that lacks a part, and one that lacks all."""
    registry = AgentRegistry()
    registry.add_tool(*cast("list[FunctionTool[..., Any]]", [order, mail, book]))
    registry.add(loop_agent("own", "1", ScriptedPlanner(lambda _: Finish(answer=1))))
    return Catalog([registry])


async def drill(url: str, *names: str, scenes: tuple[Scene, ...] = SCENES) -> DrillReport:
    """Play the scenes of these names."""
    wanted = [scene for scene in scenes if scene.name in names]
    lease_s = LEASE_TO_LOSE_S if set(names) & set(SLOW) else LEASE_S
    wish = Wish(scenes=wanted, lease_s=lease_s, timeout_s=60, keeps=False)
    return await conduct(settings_at(url), wish, tell=lambda _: None)


def settings_at(url: str) -> Settings:
    """Return the settings of an installation."""
    return Settings(db=DatabaseSettings(url=url))


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_a_drill_beside_an_installation_heals_tells_the_tools_and_touches_nothing_else(
    url: str,
) -> None:
    """R-19.6: a due run of the installation stays as it is; what was drilled is cleared away."""
    settings = settings_at(url)
    async with open_runtime(settings, installation()) as runtime:
        del runtime  # its tools are registered
    async with open_service(settings) as service:
        wish = RunRequest.model_validate({"input": 1, "options": {"timeouts": {"run_s": 0.01}}})
        due = (await create_run(service, LOCAL, "own", wish)).run
    names = [scene.name for scene in SCENES if scene.name not in SLOW]
    report = await drill(url, *names)
    assert report.passed, report
    assert {scene.scene: scene.verdict for scene in report.scenes} == {
        "duplicate-approval": "healed",
        "approval-timeout": "person",
        "cancel-partial-success": "person",
        "checkpoint-disagreement": "person",
    }
    assert report.tools == 3
    assert {gap.tool: (gap.lacks, gap.by_hand) for gap in report.gaps} == {
        "order": (["compensation"], "call the shop"),
        "mail": (["idempotency", "compensation"], "none"),
    }
    async with open_service(settings) as service:
        assert (await get_run(service, LOCAL, due.run_id)).last_seq == due.last_seq
        assert (await list_threads(service, WHO, after=None, limit=9)).items == []
        rows = await service.reader.list_runs(TENANT, RunFilter(), after=None, limit=99)
        assert len(rows) == 5, "the damaged run and the one that goes on"
        assert all(row.hot.state in TERMINAL for row in rows)
        found: list[object] = []
        await verify(service.reader, on_finding=found.append)
        assert found == []


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_workers_that_die_or_fall_silent_are_drilled_at_once(url: str) -> None:
    """R-19.6, F07: two drills at the same time do not meet."""
    reports: dict[str, DrillReport] = {}

    async def play(name: str) -> None:
        reports[name] = await drill(url, name)

    async with open_service(settings_at(url)), anyio.create_task_group() as group:
        for name in SLOW:
            group.start_soon(play, name)
    assert all(report.passed for report in reports.values()), reports
    verdicts = {name: report.scenes[0].verdict for name, report in reports.items()}
    assert verdicts == {"kill-after-tool": "person", "queue-replay": "healed"}


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_a_scene_that_goes_wrong_is_told_its_runs_are_kept_and_the_next_one_is_played(
    url: str,
) -> None:
    """R-19.6: an error, a time that is over and a wrong effect; clearing takes what was kept."""

    async def raises(stage: Stage) -> None:
        await stage.order("approval")
        raise ValueError("as planted")

    async def pays_twice(stage: Stage) -> None:
        async with stage.worker():
            run_id = await stage.order("approval", timeouts={"approval_s": 600})
            await stage.asked(run_id)
            stage.check(False, healed="", problem="paid twice")

    scenes = (Scene("raises", "", raises), Scene("pays", "", pays_twice))
    report = await drill(url, "raises", "pays", scenes=scenes)
    assert not report.passed
    assert [(scene.verdict, scene.kept) for scene in report.scenes] == [("failed", True)] * 2
    assert report.scenes[0].problems == ["ValueError: as planted"]
    async with open_service(settings_at(url)) as service:
        kept = [run_id for scene in report.scenes for run_id in scene.run_ids]
        for run_id in kept:
            assert (await get_run(service, WHO, run_id)).state not in TERMINAL
        assert await clear_all(settings_at(url)) == len(kept) == 2
        assert await clear_all(settings_at(url)) == 0


async def test_a_scene_that_is_not_cleared_away_in_time_is_told_and_the_drill_goes_on(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-19.6: the report is there, and says which runs are kept."""
    monkeypatch.setattr("perdure.drill.conduct.CLEAR_S_MAX", 0.0)

    async def orders(stage: Stage) -> None:
        await stage.order("approval")

    report = await drill(url, "orders", scenes=(Scene("orders", "", orders),))
    (scene,) = report.scenes
    assert (scene.verdict, scene.kept, len(scene.run_ids)) == ("failed", True, 1)
    assert scene.problems == ["it was not cleared away after 0 s"]
    assert await clear_all(settings_at(url)) == 1
