"""When and where runs start: later, in a queue, by priority; and what a lost attempt may cost."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Finish, Spawn
from perdure.protocol.errors import Invalid
from perdure.protocol.events import AttemptEvent, ChildEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow, next_actions, status_of, waiting_on
from perdure.protocol.states import Answer, NextAction, RunState, RunStatus, WaitingOn
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow

DONE = [Finish(answer="done")]


def asking(context: PlannerContext) -> Decision:
    """Ask, then finish."""
    return Finish(answer="asked") if context.turns else Ask(title="?")


def start_at(log: Sequence[RecordedEvent]) -> object:
    """Return when the first event says that the run starts."""
    return data_of(log, StateEvent)[0].start_at


def shown(row: RunRow) -> tuple[RunStatus, WaitingOn]:
    """Return how a run is shown."""
    return status_of(row.hot), waiting_on(row.hot)


async def test_a_delayed_run_is_claimed_once_and_not_before_its_time(url: str) -> None:
    """R-3.4, R-12.7, R-2.3: SUBMITTED until then; the first event says the time; time counts."""
    clock = ShiftingClock()
    async with flow(url, [scripted("plain", DONE)], clock=clock) as engine:
        run_id = await engine.submit("plain", after=3600, timeouts={"run_s": 7200})
        row = await engine.run(run_id)
        assert shown(row) == (RunStatus.SUBMITTED, WaitingOn.TIMER)
        assert next_actions(row.hot) == [NextAction.WAIT, NextAction.CANCEL]
        time = row.hot.wake_at
        assert time is not None
        assert row.hot.deadline_at == row.facts.created_at + timedelta(seconds=7200)
        clock.advance(3600)
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert start_at(log) == time
        (claim,) = [event for event in log if isinstance(event.data, AttemptEvent)][:1]
        assert claim.at >= time
        assert (row.hot.state, row.hot.attempt) == (RunState.SUCCEEDED, 1)

        past = await engine.submit("plain", after="2020-01-01T00:00:00+01:00")
        assert start_at(await engine.events(past)) is None
        await engine.wait_terminal(past)


async def test_a_delayed_run_is_cancelled_before_it_starts(url: str) -> None:
    """R-9.1, R-12.7: it ends at once, and never starts."""
    async with flow(url, [scripted("plain", DONE)]) as engine:
        run_id = await engine.submit("plain", after=3600)
        row = await engine.cancel(run_id)
        assert (status_of(row.hot), row.hot.code) == (
            RunStatus.INTERRUPTED,
            FailureCode.RUN_CANCELLED,
        )
        assert (row.hot.attempt, row.hot.started_at) == (0, None)
        assert not await engine.core.reader.is_ready(run_id)


async def test_a_delayed_run_of_a_busy_thread_waits_for_both(url: str) -> None:
    """R-3.4, CON-05: first for the run before it, then for what is left of its time."""
    async with flow(url, [scripted("asks", asking), scripted("plain", DONE)]) as engine:
        first = await engine.submit("asks")
        (question,) = await engine.wait_waiting(first)
        thread_id = (await engine.run(first)).facts.thread_id
        short = await engine.submit("plain", thread_id=thread_id, after=0.05)
        long = await engine.submit("plain", thread_id=thread_id, after=3600)
        behind = shown(await engine.run(long))
        time = (await engine.run(long)).hot.wake_at
        assert behind == (RunStatus.SUBMITTED, WaitingOn.QUEUE)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="yes")
        await engine.wait_terminal(short)
        row = await engine.run(long)
        assert shown(row) == (RunStatus.SUBMITTED, WaitingOn.TIMER)
        assert row.hot.wake_at == time
        assert time == start_at(await engine.events(long))
        last = await engine.submit("plain", thread_id=thread_id)
        await engine.cancel(long)
        assert (await engine.wait_terminal(last)).hot.state is RunState.SUCCEEDED


async def test_a_start_that_cannot_be_is_refused(url: str) -> None:
    """R-3.4, R-10.4: a year ahead at most, and within the run's total time."""
    async with flow(url, [scripted("plain", DONE)]) as engine:
        with pytest.raises(Invalid) as too_far:
            await engine.submit("plain", after="2999-01-01T00:00:00Z")
        with pytest.raises(Invalid) as too_late:
            await engine.submit("plain", after=10, timeouts={"run_s": 10})
        assert too_far.value.field == too_late.value.field == "/options/after"
        found = await engine.core.reader.list_runs(None, RunFilter(), after=None, limit=1)
        assert found == []


async def test_workers_take_their_queues_only_and_children_stay_in_them(url: str) -> None:
    """R-3.4: a run of another queue is left; a child is of its parent's queue and priority."""
    parent = [
        Spawn(children=(ChildRequest(agent_id="plain"),), wait=True),
        Finish(answer="both"),
    ]
    agents = [scripted("plain", DONE), scripted("parent", parent)]
    async with flow(url, agents, settings=replace(SETTINGS, queues=("slow", "gpu.1"))) as engine:
        left = await engine.submit("plain")
        taken = await engine.submit("parent", queue="slow", priority=7)
        other = await engine.submit("plain", queue="gpu.1")
        assert (await engine.wait_terminal(taken)).hot.state is RunState.SUCCEEDED
        await engine.wait_terminal(other)
        row = await engine.run(left)
        assert (status_of(row.hot), row.hot.attempt) == (RunStatus.QUEUED, 0)
        queues = (await engine.core.reader.backlog()).queues
        assert {name: queue.ready for name, queue in queues.items()} == {"default": 1}
        told = data_of(await engine.events(taken), ChildEvent)
        (child,) = [data.child_run_id for data in told if data.phase == "spawned"]
        assert child is not None
        options = (await engine.run(child)).facts.options
        assert (options.queue, options.priority) == ("slow", 7)


async def test_a_larger_priority_is_taken_first(url: str) -> None:
    """R-3.4: of all that can be claimed."""
    settings = replace(SETTINGS, runs_max=1)
    async with flow(url, [scripted("plain", DONE)], settings=settings) as engine:
        await engine.drain()
        order = [await engine.submit("plain", priority=number) for number in (-100, 0, 100)]
        await engine.start_worker()
        rows = [await engine.wait_terminal(run_id) for run_id in order]
        begun = [row.hot.started_at for row in rows]
        assert begun == sorted(begun, key=str, reverse=True)


async def test_a_lost_attempt_ends_a_run_that_is_not_to_be_recovered(
    url: str, zoo: ToolZoo
) -> None:
    """R-3.4, R-7.6: `recovery_mode` fail; RETRIES_EXHAUSTED after one attempt, not three."""
    agents = [scripted("slow", [call("hang"), *DONE], tools=["hang"])]
    clock = ShiftingClock()
    async with flow(url, agents, zoo, clock=clock) as engine:
        run_id = await engine.submit("slow", recovery_mode="fail")
        await engine.wait_event(run_id, "action")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.start_worker()
        row = await engine.wait_terminal(run_id)
        assert (row.hot.code, row.hot.attempt) == (FailureCode.RETRIES_EXHAUSTED, 1)
