"""The checks of a campaign find what they are there for, and nothing in a sound run."""

import random
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
import pytest

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Ask, Decision, Finish
from perdure.protocol.states import Answer
from perdure.service.base import Service
from perdure.service.events import Projector
from perdure.store.memory import MemoryDatabase
from perdure.testing.chaos import Record
from perdure.testing.chaos import fleet as fleet_module
from perdure.testing.chaos.agents import Provider
from perdure.testing.chaos.api import Reply
from perdure.testing.chaos.checks import check
from perdure.testing.chaos.clients import Seen, Told, answer_text, text_digest, was_before
from perdure.testing.chaos.faults import FAULTS
from perdure.testing.chaos.fleet import Disturbances, Fleet, Place
from perdure.testing.embedded import Embedded, call, embedded, scripted, unasked
from perdure.testing.proxy import FlakyProxy
from perdure.testing.tools import ToolZoo


@dataclass(slots=True)
class World:
    """A run that has ended, and what its client was told of it."""

    engine: Embedded
    run_id: str
    interrupt_id: str
    told: Told
    payments: list[dict[str, Any]]

    async def findings(self) -> list[str]:
        """Return the names of the checks that find something."""
        record = Record("memory", 1)
        await check(self.engine.core, record, self.told, self.payments, Disturbances())
        return sorted({finding.check for finding in record.findings})


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    """A run that asked, paid and ended, and was followed."""

    def decide(context: PlannerContext) -> Decision:
        steps = (Ask(payload={"amount": 1}), call("pay", amount=2), Finish(answer="done"))
        return steps[context.step_index]

    zoo = ToolZoo(tmp_path / "journal.jsonl")
    async with MemoryDatabase() as database:
        agent = scripted("asks", decide, tools=unasked("pay"))
        async with embedded(database, [agent], tools=zoo.registry) as engine:
            run_id = await engine.submit("asks")
            (question,) = await engine.wait_waiting(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value={"number": 7})
            row = await engine.wait_terminal(run_id)
            projector = Projector(Service(core=engine.core), row)
            seen = Seen(run_id, end={"state": "succeeded"})
            for event in await engine.events(run_id):
                seen.events.append((event.seq, text_digest((await projector.encode(event)).body)))
            text = answer_text("respond", {"number": 7})
            told = Told(
                seen={run_id: seen},
                sent={question.interrupt_id: [text]},
                accepted={question.interrupt_id: {text}},
            )
            paid = [
                {**line, "tool": "pay", "execution": 1, "pid": 1, "at": 0.0}
                for line in zoo.payments()
            ]
            yield World(engine, run_id, question.interrupt_id, told, paid)


def lose_a_run(world: World) -> None:
    """A start was acknowledged, and there is no such run."""
    world.told.seen["run_" + "0" * 32] = Seen("run_" + "0" * 32, end={"state": "succeeded"})


def pay_twice(world: World) -> None:
    """The provider was paid twice without a decision."""
    world.payments.append({**world.payments[0], "execution": 2})


def miss_an_event(world: World) -> None:
    """A client never saw an event in the middle."""
    del world.told.seen[world.run_id].events[2]


def see_another_text(world: World) -> None:
    """A client saw an event with other content."""
    events = world.told.seen[world.run_id].events
    events[1] = (events[1][0], b"")


def miss_the_end(world: World) -> None:
    """A client never came to the end."""
    world.told.seen[world.run_id].end = None


def heed_no_cancel(world: World) -> None:
    """A cancel was accepted, and the run succeeded."""
    world.told.cancelled.add(world.run_id)


def take_an_answer_of_nobody(world: World) -> None:
    """The log has an answer that nobody gave."""
    world.told.sent[world.interrupt_id] = ["respond 1"]


def accept_two_answers(world: World) -> None:
    """Two answers to one question were accepted."""
    world.told.accepted[world.interrupt_id].add("respond 1")


def lose_an_answer(world: World) -> None:
    """An answer was accepted, and no log has it."""
    told, lost = world.told, "int_" + "0" * 32
    told.sent[lost], told.accepted[lost] = ["approve"], {"approve"}


LIES: dict[Callable[[World], None], list[str]] = {
    lose_a_run: ["lost"],
    pay_twice: ["journal"],
    miss_an_event: ["streams"],
    see_another_text: ["streams"],
    miss_the_end: ["streams"],
    heed_no_cancel: ["cancel"],
    take_an_answer_of_nobody: ["answers"],
    accept_two_answers: ["answers"],
    lose_an_answer: ["answers"],
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
async def test_each_lie_is_found_by_the_check_for_it(
    world: World, lie: Callable[[World], None]
) -> None:
    """P3 of issue 4: a campaign that finds nothing has looked."""
    assert await world.findings() == []
    lie(world)
    assert await world.findings() == LIES[lie]


async def test_a_payment_is_excused_by_a_stopped_process_only_where_it_can_be(
    world: World,
) -> None:
    """Decision 17: a worker that stood still may act once more, then; an idempotent tool never
    doubles."""
    disturbances = Disturbances({2: [(100.0, 120.0)]})
    for tool, at, expected in (
        ("pay", 110.0, []),
        ("pay", 121.0, ["journal"]),
        ("pay_idempotent", 110.0, ["journal"]),
    ):
        again = {**world.payments[0], "execution": 2, "pid": 2, "at": at}
        payments = [{**line, "tool": tool} for line in (*world.payments, again)]
        record = Record("memory", 1)
        await check(world.engine.core, record, world.told, payments, disturbances)
        assert [finding.check for finding in record.findings] == expected


def test_a_disturbance_is_over_some_time_after_its_process_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It excuses no later payment of the process, and none before it."""
    now = [100.0]
    monkeypatch.setattr(fleet_module, "time", SimpleNamespace(time=lambda: now[0]))
    disturbances = Disturbances()
    disturbances.begin(7)
    disturbances.begin(7)
    assert [disturbances.excuses(7, at) for at in (99.0, 100.0, 1e9)] == [False, True, True]
    now[0] = 110.0
    disturbances.end(7)
    assert disturbances.excuses(7, 1e9), "it is also cut off"
    disturbances.end_all(7)
    last = 110.0 + fleet_module.AFTERWARDS_S
    assert [disturbances.excuses(7, at) for at in (last, last + 1)] == [True, False]
    assert not disturbances.excuses(8, 100.0)


def test_a_loss_that_was_armed_ends_with_its_scene() -> None:
    """The answers of transactions after a fault are not lost for it."""
    proxy = FlakyProxy(0)
    proxy.lose_answer(2)
    assert not proxy.is_lost()
    proxy.lose_no_answer()
    assert (proxy.is_lost(), proxy.lost) == (False, 0)


ENDS_AT_FIRST = """
import pathlib, sys, time
first = pathlib.Path("first")
if not first.exists():
    first.touch()
    sys.exit(3)
print("ready", flush=True)
time.sleep(60)
"""


async def test_a_process_that_ends_by_itself_is_found_and_one_that_was_killed_is_not(
    tmp_path: Path,
) -> None:
    """The place is filled again each time, and is disturbed by one at a time."""
    record, chance = Record("memory", 1), random.Random(1)  # noqa: S311  # to be repeated
    fleet = Fleet(record=record, folder=tmp_path)
    async with anyio.create_task_group() as group:
        place = fleet.add(group, "worker-0", [], {})
        place.command = [sys.executable, "-c", ENDS_AT_FIRST]
        with anyio.fail_after(15):
            await _until_started(place, 2)
            async with fleet.taken(chance, fleet.workers) as places:
                assert places == [place]
                async with fleet.taken(chance, fleet.workers) as others:
                    assert others == []
                fleet.kill(place, 0.0)
            await _until_started(place, 3)
        fleet.closing = True
        fleet.kill(place, 0.0)
    assert [finding.check for finding in record.findings] == ["processes"]
    assert record.counts["processes"] == {"started": 3, "killed": 2}


async def test_closing_a_fleet_ends_a_process_that_is_just_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left behind to be killed at the end of a campaign."""
    opening, go_on, opened = anyio.Event(), anyio.Event(), anyio.open_process

    async def held_up(*args: Any, **options: Any) -> anyio.abc.Process:
        opening.set()
        await go_on.wait()
        return await opened(*args, **options)

    monkeypatch.setattr(anyio, "open_process", held_up)
    record = Record("memory", 1)
    fleet = Fleet(record=record, folder=tmp_path)
    with anyio.fail_after(15):
        async with anyio.create_task_group() as group:
            place = fleet.add(group, "worker-0", [], {})
            place.command = [sys.executable, "-c", "import time; time.sleep(60)"]
            await opening.wait()
            async with anyio.create_task_group() as closing:
                closing.start_soon(fleet.close)
                await anyio.wait_all_tasks_blocked()
                go_on.set()
    assert record.findings == []
    assert record.counts["processes"] == {"started": 1, "told to end while they started": 1}


async def _until_started(place: Place, starts: int) -> None:
    while place.starts < starts or not place.is_ready:  # noqa: ASYNC110  # a process rings no bell
        await anyio.sleep(0.02)


def test_a_provider_pays_once_per_key_only_where_it_is_asked_to(tmp_path: Path) -> None:
    """What the journal check relies on."""
    provider = Provider(tmp_path)
    for execution in (1, 2):
        provider.pay("pay", "eff_a", 1, execution)
        provider.pay_once("pay_idempotent", "eff_b", 2, execution)
    assert [(line["key"], line["execution"]) for line in provider.payments()] == [
        ("eff_a", 1),
        ("eff_a", 2),
        ("eff_b", 1),
    ]
    assert provider.find("eff_c") is None


def test_every_fault_has_ids_of_the_catalogue_and_a_name_of_its_own() -> None:
    """Page docs/reference/faults.md: rows cite their scenes."""
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert all(fault.ids and fault.act.__doc__ for fault in FAULTS)


@pytest.mark.parametrize(
    ("code", "active", "before"),
    [
        ("thread_busy", "run_1", True),
        ("thread_busy", "run_2", False),
        ("thread_busy", None, False),
        ("conflict", "run_1", False),
    ],
)
def test_a_refusal_beside_a_started_run_is_excused_only_where_another_run_was_active(
    code: str, active: str | None, before: bool
) -> None:
    """R-3.2: a key whose run exists answers with that run, also while the run is active."""
    refused = Reply(409, {"code": code, "details": {"run_id": active}}, replayed=False)
    assert was_before(refused, {"run_2"}) is before
