"""Cancelling a run in every state: durable, at once where nobody holds it, and final (R-9)."""

from datetime import timedelta

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.engine.tree import close_unheld
from perdure.protocol.agents import AgentCard
from perdure.protocol.codec import encode
from perdure.protocol.decisions import ChildRequest, Decision, Finish, Sleep, Spawn
from perdure.protocol.errors import Gone
from perdure.protocol.events import CancelEvent, ResultEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import status_of
from perdure.protocol.states import (
    ArtifactStatus,
    CancelAction,
    CancelOption,
    ParkedOn,
    RunState,
    RunStatus,
    ToolCallStatus,
)
from perdure.service.artifacts import list_artifacts, read_content
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.store.reader import RunFilter
from perdure.store.requests import CancelWish, TimerKind
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import ToolContext, tool
from tests.flow.world import data_of, flow, swept_until


def once(tool: str, **args: object) -> HostedAgent:
    """An agent that makes one call and finishes."""
    wish = call(tool, **args)  # pyright: ignore[reportArgumentType]  # JSON of the tests

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="done") if context.turns else wish

    return scripted("once", decide, tools=unasked(tool))


async def assert_cancelled(engine: Embedded, run_id: str) -> StateEvent:
    """Return the terminal event of a run that ended as cancelled, exactly once."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.code is FailureCode.RUN_CANCELLED
    assert status_of(row.hot) is RunStatus.INTERRUPTED
    events = await engine.events(run_id)
    ends = [
        event.data
        for event in events
        if isinstance(event.data, StateEvent) and event.data.state is RunState.FAILED
    ]
    assert len(ends) == 1
    assert [event.data.epoch for event in events if isinstance(event.data, CancelEvent)] == [1]
    return ends[0]


async def test_a_pending_run_ends_at_once_without_a_worker(url: str, zoo: ToolZoo) -> None:
    """R-9.6."""
    async with flow(url, [once("echo")], zoo) as engine:
        await engine.kill_worker()
        run_id = await engine.submit("once")
        row = await engine.cancel(run_id)
        assert row.hot.state is RunState.FAILED
        await assert_cancelled(engine, run_id)
        assert not await engine.core.reader.is_ready(run_id)


async def test_cancelling_twice_changes_nothing(url: str, zoo: ToolZoo) -> None:
    """R-9.1: idempotent, also for a terminal run."""
    async with flow(url, [once("echo")], zoo) as engine:
        run_id = await engine.submit("once")
        await engine.wait_terminal(run_id)
        before = await engine.run(run_id)
        assert (await engine.cancel(run_id)).hot == before.hot
        await engine.kill_worker()
        other = await engine.submit("once")
        first = await engine.cancel(other)
        assert (await engine.cancel(other)).hot == first.hot


async def test_a_planning_run_ends_while_its_model_is_silent(url: str) -> None:
    """R-9.2: the planner's request is given up, its reply is not committed (CAN-11)."""
    asked = anyio.Event()

    class Silent:
        async def next_step(self, context: PlannerContext) -> Decision:
            del context
            asked.set()
            await anyio.sleep_forever()
            raise AssertionError

    agent = HostedAgent(card=AgentCard(agent_id="silent", version="1"), planner=Silent())
    async with flow(url, [agent]) as engine:
        run_id = await engine.submit("silent")
        await asked.wait()
        await engine.cancel(run_id)
        await assert_cancelled(engine, run_id)


async def test_a_model_that_swallows_a_cancellation_commits_nothing(url: str) -> None:
    """CAN-11: the text that came all the same is dropped."""
    asked = anyio.Event()

    class Stubborn:
        async def next_step(self, context: PlannerContext) -> Decision:
            del context
            asked.set()
            with anyio.CancelScope() as scope:
                await anyio.sleep_forever()
            del scope
            return Finish(answer="too late")

    class Swallowing(Stubborn):
        async def next_step(self, context: PlannerContext) -> Decision:
            try:
                return await super().next_step(context)
            except BaseException:  # noqa: BLE001  # what a careless client does
                return Finish(answer="too late")

    agent = HostedAgent(card=AgentCard(agent_id="deaf", version="1"), planner=Swallowing())
    async with flow(url, [agent]) as engine:
        run_id = await engine.submit("deaf")
        await asked.wait()
        await engine.cancel(run_id)
        await assert_cancelled(engine, run_id)


@pytest.mark.parametrize("tool", ["slow", "block", "hang", "swallow_cancel"])
async def test_a_running_tool_does_not_keep_a_cancelled_run(
    url: str, zoo: ToolZoo, tool: str
) -> None:
    """R-9.2, CAN-06, TIM-03: waiting is over with a cancel: after the grace period the call is given up."""
    agent = once(tool, seconds=30) if tool == "slow" else once(tool)
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("once")
        await zoo.wait_started(tool)
        row = await engine.cancel(run_id)
        assert row.hot.cancel_epoch == 1
        await assert_cancelled(engine, run_id)
        results = [event.data for event in await engine.events(run_id) if event.type == "result"]
        assert [result.status for result in results if isinstance(result, ResultEvent)] == [
            ToolCallStatus.CANCELLED
        ]
        other = await engine.submit("once") if tool == "slow" else None
        if other is not None:
            await engine.cancel(other)


async def test_a_result_that_comes_within_the_grace_period_is_kept(url: str, zoo: ToolZoo) -> None:
    """R-9.2: what a cancelled call answers in time is its result."""
    async with flow(url, [once("finish_when_cancelled")], zoo) as engine:
        run_id = await engine.submit("once")
        await zoo.wait_started("finish_when_cancelled")
        await engine.cancel(run_id)
        await assert_cancelled(engine, run_id)
        (call_row,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=5)
        assert call_row.status in {ToolCallStatus.SUCCEEDED, ToolCallStatus.CANCELLED}


async def test_an_effect_that_came_after_the_cancel_is_shown_as_late(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.3: refused, recorded with its reference, never merged."""
    async with flow(url, [once("pay_late", amount=9)], zoo) as engine:
        run_id = await engine.submit("once")
        await zoo.wait_started("pay_late")
        await engine.cancel(run_id)
        end = await assert_cancelled(engine, run_id)
        assert end.effects is not None
        assert [effect["status"] for effect in end.effects] == [ToolCallStatus.UNKNOWN]
        zoo.open_gate()
        while not await engine.core.reader.list_late(run_id):
            await anyio.lowlevel.checkpoint()
        (late,) = await engine.core.reader.list_late(run_id)
        assert late.status is ToolCallStatus.SUCCEEDED
        assert (await engine.run(run_id)).hot.state is RunState.FAILED


async def test_a_cancel_without_a_signal_is_heeded_at_the_next_heartbeat(
    url: str, zoo: ToolZoo
) -> None:
    """CAN-02: notifications lost; the renewal carries the epoch."""
    async with flow(url, [once("slow", seconds=30)], zoo) as engine:
        run_id = await engine.submit("once")
        await zoo.wait_started("slow")
        wish = CancelWish(action=CancelAction.INTERRUPT, by="ada", source="api")
        hot = await engine.core.store.request_cancel(run_id, wish)
        assert hot is not None
        assert status_of(hot) is RunStatus.CANCEL_REQUESTED
        await assert_cancelled(engine, run_id)


async def test_a_sleeping_run_ends_at_once(url: str) -> None:
    """R-9.6: a parked run needs no worker to end."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer=1) if context.step_index else Sleep(duration=timedelta(days=1))

    async with flow(url, [scripted("sleeper", decide)]) as engine:
        run_id = await engine.submit("sleeper")
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is not None)
        await engine.cancel(run_id)
        await assert_cancelled(engine, run_id)


async def test_a_run_of_a_dead_worker_is_cancelled_when_its_lease_expires(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.6, CAN-01, F01."""
    clock = ShiftingClock()
    async with flow(url, [once("hang")], zoo, clock=clock) as engine:
        run_id = await engine.submit("once")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        row = await engine.cancel(run_id)
        assert status_of(row.hot) is RunStatus.CANCEL_REQUESTED
        await engine.start_worker()
        await assert_cancelled(engine, run_id)
        attempts = await engine.core.reader.list_attempts(run_id)
        assert all(attempt.ended_at is not None for attempt in attempts)
        zoo.open_gate()
        row = await engine.run(run_id)
        after = await engine.submit("once", thread_id=row.facts.thread_id)
        assert (await engine.wait_terminal(after)).hot.state is RunState.SUCCEEDED


async def test_a_worker_without_the_tool_leaves_a_call_to_one_that_can_look_it_up(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.2, R-5.7: its end is not `unknown` while another may know; it does not wait for ever."""
    clock = ShiftingClock()
    agent = once("pay_then_hang", amount=5)
    async with (
        flow(url, [agent], zoo, clock=clock) as engine,
        flow(url, [scripted("idle", [Finish()])], clock=clock, start=False) as foreign,
    ):
        runs = [await engine.submit("once") for _ in range(2)]
        await zoo.wait_started("pay_then_hang", 2)
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await foreign.sweep()
        for run_id in runs:
            await foreign.cancel(run_id)
            await foreign.sweep()
            assert (await engine.run(run_id)).hot.state is RunState.EXECUTING
        assert await close_unheld(engine.core, runs[0], TimerKind.CLOSE, engine.tools)
        clock.advance(foreign.core.settings.cancel_deadline_s)
        await swept_until(foreign, runs[1], lambda row: row.hot.finished_at is not None)
        told: list[tuple[ToolCallStatus, str]] = []
        for run_id in runs:
            await assert_cancelled(engine, run_id)
            (result,) = data_of(await engine.events(run_id), ResultEvent)
            told.append((result.status, result.by))
        assert told == [(ToolCallStatus.SUCCEEDED, "lookup"), (ToolCallStatus.UNKNOWN, "runtime")]


LONG = "too long for an event " * 1000


def _sketches(context: PlannerContext) -> Decision:
    """Make artifacts, one of the text that is returned too, have a child make one, and wait."""
    match context.step_index:
        case 0:
            return calls(("copy", {"text": LONG}), ("draw", {"text": "mine"}))
        case 1:
            return call("draw", text="ours")
        case 2:
            return Spawn(children=(ChildRequest(agent_id="below"),), wait=False)
        case _:
            return call("hang") if context.input == "held" else Sleep(duration=timedelta(days=1))


@pytest.mark.parametrize("how", ["held", "waiting"])
async def test_what_a_cancelled_run_made_is_discarded_when_it_is_asked(
    url: str, zoo: ToolZoo, how: str
) -> None:
    """R-9.7: its content is not given out any more, and goes where nothing else uses it."""

    @tool
    def copy(text: str, context: ToolContext) -> str:
        """Keep the text as it is recorded, and return it."""
        context.artifact("copy.json", encode(text), "application/json")
        return text

    zoo.registry.add(copy)
    nap = Sleep(duration=timedelta(days=1))
    agents = [
        scripted("sketches", _sketches, tools=[*unasked("hang"), "copy", "draw"]),
        scripted("below", [call("draw", text="below"), nap], tools=["draw"]),
        scripted("other", [call("draw", text="ours"), Finish()], tools=["draw"]),
    ]
    async with flow(url, agents, zoo) as engine:
        service = Service(core=engine.core)

        async def drawn(run_id: str) -> dict[ArtifactStatus, list[str]]:
            found = await list_artifacts(service, LOCAL, run_id, after=None, limit=9)
            by_status: dict[ArtifactStatus, list[str]] = {}
            for item in found.items:
                by_status.setdefault(item.status, []).append(item.artifact_id)
            return by_status

        other = await engine.submit("other")
        await engine.wait_terminal(other)
        run_id = await engine.submit("sketches", how)
        await engine.wait_event(run_id, "child")
        where = RunFilter(parent_run_id=run_id)
        [child] = await engine.core.reader.list_runs(None, where, after=None, limit=2)
        below = child.facts.run_id
        await engine.wait_until(below, lambda row: row.hot.parked_on is ParkedOn.TIMER)
        if how == "held":
            await zoo.wait_started("hang")
        else:
            await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.TIMER)
        assert set(await drawn(run_id)) == {ArtifactStatus.FINAL}
        await engine.cancel(run_id, options=CancelOption.DISCARD_ARTIFACTS)
        for ended in (run_id, below):
            row = await swept_until(engine, ended, lambda row: row.hot.finished_at is not None)
            assert row.hot.code is FailureCode.RUN_CANCELLED
            [(status, found)] = (await drawn(ended)).items()
            assert (status, len(found)) == (ArtifactStatus.DISCARDED, 3 if ended == run_id else 1)
            for artifact_id in found:
                with pytest.raises(Gone):
                    await read_content(service, LOCAL, artifact_id)
        swept = await engine.core.store.expire_blobs(0, after=None, limit=10)
        assert swept.deleted == 2  # `mine` and `below`
        [shared] = (await drawn(other))[ArtifactStatus.FINAL]
        assert (await read_content(service, LOCAL, shared)).data == b"ours"
