"""What holds when nodes differ: in release, in clock, in what they heard of the store (R-12.1)."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from pydantic import JsonValue

from perdure.agents.code import Context, agent
from perdure.engine.answers import Reply, answer_interrupt
from perdure.engine.core import Core
from perdure.engine.directory import AgentDirectory
from perdure.engine.late import LateResults
from perdure.engine.maintenance import Maintenance
from perdure.engine.submit import submit_run
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import Ask, Finish
from perdure.protocol.errors import IdempotencyMismatch, Invalid
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import Answer, OnExpiry, ParkedOn, RunState
from perdure.store.ports import Store
from perdure.store.requests import AgentRegistration, Requeued, ToolRegistration
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import (
    SETTINGS,
    Embedded,
    SystemClock,
    call,
    new_worker,
    scripted,
)
from perdure.testing.faults import Boundary, BusyStore, FaultyStore, Plan, Trap, When
from perdure.testing.tools import ToolZoo
from tests.flow.rows import Rows
from tests.flow.world import flow

SOON = Ask(title="?", expires_in=timedelta(seconds=0.01), on_expiry=OnExpiry.DENY)


class Ahead(SystemClock):
    """The clock of a node that is two hours ahead."""

    def now(self) -> datetime:
        """Return a time that has not come."""
        return super().now() + timedelta(hours=2)


def _ahead(core: Core) -> Core:
    return replace(core, clock=Ahead(), directory=AgentDirectory(core.reader, Ahead()))


async def _asked(engine: Embedded, agent_id: str, count: int) -> list[str]:
    """Return runs that wait for an answer whose time is over."""
    await engine.start_worker()
    runs = [await engine.submit(agent_id) for _ in range(count)]
    for run_id in runs:
        await engine.wait_waiting(run_id)
    await engine.stop()
    with anyio.fail_after(30):
        while len(await engine.core.reader.due_timers(count, None)) < count:  # noqa: ASYNC110 (only the clock makes them due)
            await anyio.sleep(0.01)
    return runs


@pytest.mark.parametrize("on_incompatible", ["fail", "repair"])
async def test_timers_that_cannot_be_acted_upon_keep_no_other_from_its_turn(
    url: str, on_incompatible: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-8.3, R-20.1: a page of expiries of runs that nobody here can carry on, and a good one.

    What cannot be carried on ends as a worker would end it.
    """
    monkeypatch.setattr("perdure.engine.maintenance.BATCH", 3)
    still = replace(SETTINGS, maintenance_interval_s=60.0, on_incompatible=on_incompatible)
    agent = scripted("asker", [SOON, Finish(answer=1)])
    async with flow(url, [agent], settings=still, start=False) as engine:
        runs = await _asked(engine, "asker", 4)
        for run_id in runs[:3]:
            Rows(url).damage("UPDATE runs SET schema_version = 99 WHERE run_id = ?", run_id)
        upkeep = Maintenance(core=engine.core, tools=engine.tools)
        await upkeep.run_once()
        await upkeep.run_once()
        assert (await engine.run(runs[3])).hot.open_interrupts == 0
        for run_id in runs[:3]:
            hot = (await engine.run(run_id)).hot
            if on_incompatible == "fail":
                assert hot.code is FailureCode.CHECKPOINT_INCOMPATIBLE
            else:
                assert hot.parked_on is ParkedOn.REPAIR
            Rows(url).damage("UPDATE runs SET schema_version = 1 WHERE run_id = ?", run_id)


async def test_the_timer_of_a_run_for_a_newer_release_rests_and_is_left_to_it(url: str) -> None:
    """R-20.4: it is looked at again later, not at every sweep."""
    still = replace(SETTINGS, maintenance_interval_s=60.0)
    async with flow(url, [scripted("asker", [SOON])], settings=still, start=False) as engine:
        (run_id,) = await _asked(engine, "asker", 1)
        later = "UPDATE runs SET schema_version = 99, required_runtime = 99 WHERE run_id = ?"
        Rows(url).damage(later, run_id)
        upkeep = Maintenance(core=engine.core, tools=engine.tools)
        for _ in range(2):
            await upkeep.run_once()
        assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN
        now = "UPDATE runs SET schema_version = 1, required_runtime = 1 WHERE run_id = ?"
        Rows(url).damage(now, run_id)
        await upkeep.run_once()
        assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN  # rests still
        await Maintenance(core=engine.core, tools=engine.tools).run_once()
        assert (await engine.run(run_id)).hot.open_interrupts == 0


async def test_a_slow_timer_keeps_no_lease_from_being_taken_away(url: str) -> None:
    """R-12.1: what a timer waits for is another task's affair than the reaper's."""

    class Stuck:
        """A reader whose timers never come."""

        def __init__(self, core: Core) -> None:
            self._reader = core.reader

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        async def due_timers(self, *_: object) -> list[object]:
            """Never answer."""
            await anyio.sleep_forever()
            return []

    class Told:
        """A store that tells when it was asked to take leases away."""

        def __init__(self, store: Store) -> None:
            self._store = store
            self.asked = anyio.Event()

        def __getattr__(self, name: str) -> object:
            return getattr(self._store, name)

        async def requeue_expired(self, limit: int) -> list[Requeued]:
            """Take leases away, for the second time at least."""
            if self.first:
                self.first = False
            else:
                self.asked.set()
            return await self._store.requeue_expired(limit)

        first = True

    async with flow(url, [], start=False) as engine:
        told = Told(engine.core.store)
        core = replace(engine.core, reader=Stuck(engine.core), store=told)
        async with anyio.create_task_group() as group:
            group.start_soon(Maintenance(core=core, tools=None).run)
            with anyio.fail_after(30):
                await told.asked.wait()
            group.cancel_scope.cancel()


async def test_what_a_newer_release_registered_breaks_nothing_here(url: str, zoo: ToolZoo) -> None:
    """R-20.4: unknown fields pass by; what makes no sense at all is as if it were not there."""
    edit = call("pay", amount=5)
    payer = scripted("payer", [edit, Finish(answer=1)], tools=["pay"])
    async with flow(url, [payer], zoo) as engine:
        card = payer.card.model_dump(mode="json")
        newer: dict[str, JsonValue] = {**card, "agent_id": "newer", "new_field": 1}
        odd: dict[str, JsonValue] = {"agent_id": "odd", "version": ["no", "text"]}
        agents = [
            AgentRegistration(agent_id=str(one["agent_id"]), version="1", card=one, digest="0" * 64)
            for one in (newer, odd)
        ]
        specs = [spec.model_dump(mode="json") for spec in engine.catalog.tool_specs()]
        (pay,) = [spec for spec in specs if spec["name"] == "pay"]
        tools = [
            ToolRegistration(name="pay", version="1", spec=pay | {"new_field": 1}, digest="0" * 64),
            ToolRegistration(name="odd", version="1", spec={"name": 7}, digest="0" * 64),
        ]
        await engine.core.store.register(agents, tools)
        assert (await engine.submit_order(engine.order("newer"))).created
        run_id = await engine.submit("payer")
        (question,) = await engine.wait_waiting(run_id)
        with pytest.raises(Invalid):  # the schema of the newer declaration still counts
            await engine.answer(question.interrupt_id, Answer.EDIT, args={"amount": "much"})
        await engine.answer(question.interrupt_id, Answer.EDIT, args={"amount": 6})
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_claim_whose_answer_is_lost_counts_no_fault(url: str, tmp_path: Path) -> None:
    """R-10.2: the run was never tried; it goes back at once and is carried out."""
    agent = scripted("one", [Finish(answer=1)])
    async with flow(url, [agent]) as engine:
        await engine.stop()
        plan = Plan(boundary=Boundary.CLAIM, when=When.ACK_LOST, report=tmp_path / "report")
        core = replace(engine.core, store=FaultyStore(engine.core.store, Trap(plan)))
        run_id = await engine.submit("one", recovery_mode="fail")
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        row = await engine.wait_terminal(run_id)
        assert plan.report.exists()
        assert (row.hot.state, row.hot.faults) == (RunState.SUCCEEDED, 0)
        attempts = await engine.core.reader.list_attempts(run_id)
        assert [one.end_reason for one in attempts] == ["drained", "finished"]


async def test_a_known_key_is_answered_by_its_run_also_when_it_would_be_refused_today(
    url: str,
) -> None:
    """R-3.2: the agent takes less by now, or is gone from the registry."""
    async with flow(url, [scripted("one", [Finish(answer=1)])], start=False) as engine:
        card = AgentCard(agent_id="one", version="1")
        await _register(engine, card)
        order = engine.order("one", "text", idempotency_key="k")
        first = await engine.submit_order(order)
        schema = {"type": "object"}
        await _register(engine, card.model_copy(update={"version": "2", "input_schema": schema}))
        core = replace(engine.core, directory=AgentDirectory(engine.core.reader, engine.core.clock))
        again = await submit_run(core, order)
        assert (again.created, again.row.facts.run_id) == (False, first.row.facts.run_id)
        with pytest.raises(IdempotencyMismatch):
            await submit_run(core, replace(order, fingerprint="0" * 64))
        with pytest.raises(Invalid):
            await submit_run(core, replace(order, options=engine.order("one").options))
        await engine.start_worker()
        await engine.wait_terminal(first.row.facts.run_id)


async def _register(engine: Embedded, card: AgentCard) -> None:
    body = card.model_dump(mode="json")
    one = AgentRegistration(
        agent_id=card.agent_id, version=card.version, card=body, digest=card.version * 64
    )
    await engine.core.store.register([one], [])


async def test_only_the_clock_of_the_store_decides_what_is_over(url: str) -> None:
    """Decision 36, R-8.3: a node two hours ahead answers, and counts no two hours of waiting."""
    asks = Ask(title="?", expires_in=timedelta(hours=1))
    async with flow(url, [scripted("asker", [asks, Finish(answer=1)])]) as engine:
        run_id = await engine.submit("asker")
        (question,) = await engine.wait_waiting(run_id)
        core = _ahead(engine.core)
        reply = Reply(answer=Answer.RESPOND, by="ada", value=1)
        answered = await answer_interrupt(core, "default", question.interrupt_id, reply)
        assert not answered.replayed
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert row.hot.counters.waiting_ms < 60_000


async def test_a_start_is_delayed_by_the_clock_of_the_store(url: str) -> None:
    """R-3.8: in an hour is in an hour, whatever the node's clock says."""
    async with flow(url, [scripted("one", [Finish(answer=1)])], start=False) as engine:
        core, before = _ahead(engine.core), await engine.core.reader.now()
        await engine.start_worker()
        await engine.stop()
        made = await submit_run(core, engine.order("one", after=3600))
        wake_at = made.row.hot.wake_at
        assert wake_at is not None
        assert timedelta(0) <= wake_at - before - timedelta(hours=1) < timedelta(minutes=1)


async def test_a_sleep_ends_by_the_clock_of_the_store(url: str) -> None:
    """R-12.7, F26: begun on a node two hours ahead, ended on another."""

    @agent("sleeper", "1")
    async def sleeper(ctx: Context, input: object) -> object:
        await ctx.sleep(3600)
        return "awake"

    clock = ShiftingClock()
    async with flow(url, [sleeper], start=False, clock=clock) as engine:
        core = _ahead(engine.core)
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        run_id = await engine.submit("sleeper")
        await engine.wait_until(run_id, lambda row: row.hot.wake_at is not None)
        await engine.stop()
        clock.advance(3601)
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_busy_row_keeps_no_run_from_its_end(url: str) -> None:
    """R-20.1: another writer has the row locked for a moment; the end is sent again."""

    async with flow(url, [scripted("one", [Finish(answer=1)])]) as engine:
        await engine.stop()
        run_id = await engine.submit("one")
        Rows(url).damage("UPDATE runs SET schema_version = 99 WHERE run_id = ?", run_id)
        core = replace(engine.core, store=BusyStore(engine.core.store, 1))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        row = await engine.wait_terminal(run_id)
        assert (row.hot.code, row.hot.attempt) == (FailureCode.CHECKPOINT_INCOMPATIBLE, 1)
        Rows(url).damage("UPDATE runs SET schema_version = 1 WHERE run_id = ?", run_id)


async def test_an_answer_reads_no_messages_and_late_results_wait_in_a_bounded_queue(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-12.4: who writes beside the holder needs no thread; a store that stays away costs memory
    for a bounded number of late results."""

    class NoMessages:
        """A reader that is asked for no messages."""

        def __init__(self, core: Core) -> None:
            self._reader = core.reader

        def __getattr__(self, name: str) -> object:
            assert name != "list_messages"
            return getattr(self._reader, name)

    asker = scripted("asker", [Ask(title="?"), Finish(answer=1)])
    async with flow(url, [scripted("one", [Finish(answer=1)]), asker]) as engine:
        thread = (await engine.wait_terminal(await engine.submit("one"))).facts.thread_id
        run_id = await engine.submit("asker", thread_id=thread)
        (question,) = await engine.wait_waiting(run_id)
        core = replace(engine.core, reader=NoMessages(engine.core))
        reply = Reply(answer=Answer.RESPOND, by="ada", value=1)
        await answer_interrupt(core, "default", question.interrupt_id, reply)
        await engine.wait_terminal(run_id)
        monkeypatch.setattr("perdure.engine.late.LATE_MAX", 2)
        monkeypatch.setattr("perdure.engine.late.late_result", _given)
        late = LateResults(engine.core)
        kept: list[Any] = [SimpleNamespace(run_id=f"r{number}") for number in range(3)]
        for one in kept:
            late.keep(one, kept[0], kept[0])
        assert list(late.waiting) == kept[1:]


def _given(item: Any, *_: Any) -> Any:
    return item
