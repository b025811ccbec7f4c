"""Conducting a drill: scene after scene, each on a stage of its own, whatever came of the last."""

import secrets
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from perdure.drill.report import DrillReport, SceneReport, Verdict, seconds_between
from perdure.drill.scenes import Scene
from perdure.drill.stage import TENANT, WHO, Stage, open_stage, settings_of_scene
from perdure.drill.tools import gaps_of, tools_with_effects
from perdure.ops.exits import sole_error
from perdure.ops.settings import Settings, masked_url
from perdure.protocol.errors import Conflict, PerdureError
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, ParkedOn
from perdure.runtime import open_service
from perdure.service.base import Service
from perdure.service.repairs import RepairRequest, repair
from perdure.service.runs import cancel_run
from perdure.service.thread_branches import delete_thread
from perdure.service.threads import list_threads
from perdure.store.reader import RunFilter

CLEAR_S_MAX = 60.0
PAGE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be drilled. Times are seconds."""

    scenes: Sequence[Scene]
    lease_s: float
    timeout_s: float
    keeps: bool


async def conduct(settings: Settings, wish: Wish, *, tell: Callable[[str], None]) -> DrillReport:
    """Play the scenes and look at the registered tools. Raises Unavailable without a database."""
    drill_id = secrets.token_hex(4)
    async with open_service(settings) as service:
        tools = await tools_with_effects(service)
        clock = service.core.clock
        started_at = clock.now()
    scenes: list[SceneReport] = []
    for number, scene in enumerate(wish.scenes, 1):
        tell(f"{number}/{len(wish.scenes)} {scene.name}: {scene.title}")
        queue = f"perdure-drill-{drill_id}-{number}"
        own = settings_of_scene(settings, queue, wish.lease_s)
        with tempfile.TemporaryDirectory(prefix="perdure-drill-") as folder:
            scenes.append(await _play(scene, own, Path(folder), wish))
    return DrillReport(
        drill_id=drill_id,
        database=masked_url(settings.db.url),
        tenant=TENANT,
        started_at=started_at,
        finished_at=clock.now(),
        scenes=scenes,
        tools=len(tools),
        gaps=gaps_of(tools),
    )


async def _play(scene: Scene, settings: Settings, folder: Path, wish: Wish) -> SceneReport:
    """Play one scene; what goes wrong in it is told in its report."""
    async with open_stage(settings, folder) as stage:
        clock = stage.core.clock
        begun = clock.now()
        try:
            with anyio.fail_after(wish.timeout_s):
                await scene.play(stage)
                await stage.verify()
        except TimeoutError:
            stage.problems.append(f"it was not over after {wish.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001  # the report tells it, and the next scene is played
            stage.problems.append(_text_of(sole_error(error)))
        took_s = seconds_between(begun, clock.now())
        clears = not wish.keeps and not stage.problems
        cleared = clears and await _clear(stage)
        return SceneReport(
            scene=scene.name,
            title=scene.title,
            verdict=_verdict(stage),
            seconds=took_s,
            healed=stage.healed,
            person=stage.person,
            problems=stage.problems,
            run_ids=sorted(stage.run_ids),
            kept=not cleared,
        )


async def clear_all(settings: Settings) -> int:
    """Delete what drills have left, with its history; return how many threads that were.

    Not while another drill plays: its runs are cancelled too. Raises as `cancel_run` does.
    """
    count = 0
    async with open_service(settings) as service:
        where = RunFilter(unfinished=True)
        while rows := await service.reader.list_runs(TENANT, where, after=None, limit=PAGE):
            for row in rows:
                await _end(service, row)
        while found := (await list_threads(service, WHO, after=None, limit=PAGE)).items:
            for thread in found:
                await delete_thread(service, WHO, thread.thread_id)
            count += len(found)
    return count


async def _end(service: Service, row: RunRow) -> None:
    with suppress(Conflict):  # one that is damaged is put aside by it
        await cancel_run(service, WHO, row.facts.run_id, reason="a drill is over")
    after = await service.reader.find_run(TENANT, row.facts.run_id)
    if after is not None and after.hot.parked_on is ParkedOn.REPAIR:
        fail = RepairRequest(action="fail", reason="a drill is over")
        await repair(service, WHO, row.facts.run_id, fail)
    elif after is not None and after.hot.state not in TERMINAL:
        raise Conflict(f"the run {row.facts.run_id} is held by a worker: is a drill playing?")


async def _clear(stage: Stage) -> bool:
    with anyio.move_on_after(CLEAR_S_MAX):
        return await stage.clear_away()
    stage.problems.append(f"it was not cleared away after {CLEAR_S_MAX:g} s")
    return False


def _verdict(stage: Stage) -> Verdict:
    if stage.problems:
        return "failed"
    return "person" if stage.person else "healed"


def _text_of(error: BaseException) -> str:
    text = error.message if isinstance(error, PerdureError) else str(error)
    return f"{type(error).__name__}: {text}"
