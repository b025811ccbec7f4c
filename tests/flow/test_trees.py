"""Cancel and end of trees: all below a run ends before it, whatever it does (R-9.5, F47, F48)."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.codec import digest
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Finish, Sleep, Spawn
from perdure.protocol.errors import Gone
from perdure.protocol.events import AttemptEvent, CancelEvent, ChildEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunRow, status_of
from perdure.protocol.states import (
    TERMINAL,
    Answer,
    CancelAction,
    ParkedOn,
    RunState,
    RunStatus,
)
from perdure.store.reader import RunFilter
from perdure.store.requests import AgentRegistration, CancelWish, ClaimWant
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow, types

SHORT = replace(SETTINGS, cancel_deadline_s=0.5)


def spawning(
    name: str, *agents: str, then: Sequence[Decision] = (), wait: bool = True
) -> HostedAgent:
    """An agent that spawns one child of each agent, does the rest, and finishes."""
    first = Spawn(children=tuple(ChildRequest(agent_id=agent) for agent in agents), wait=wait)

    def decide(context: PlannerContext) -> Decision:
        script = [first, *then, Finish(answer="done")]
        return script[min(context.step_index, len(script) - 1)]

    return scripted(name, decide)


HANGING = scripted("hanging", lambda _: call("hang"), tools=["hang"])
ASKING = scripted("asking", lambda _: Ask(title="well?"))
SLEEPING = scripted("sleeping", lambda _: Sleep(duration=timedelta(hours=1)))


async def tree(engine: Embedded, root: str) -> list[RunRow]:
    """Return a root and all below it, oldest first."""
    where = RunFilter(root_run_id=root)
    below = await engine.core.reader.list_runs(None, where, after=None, limit=500)
    return [await engine.run(root), *below[::-1]]


async def wait_tree(engine: Embedded, root: str, size: int) -> list[RunRow]:
    """Return a tree once it has so many runs."""
    with anyio.fail_after(30):
        while len(rows := await tree(engine, root)) < size:
            await engine.wait_event(rows[-1].facts.run_id, "attempt")
            await anyio.sleep(0.01)
    return rows


async def assert_ended(engine: Embedded, root: str, code: FailureCode) -> list[RunRow]:
    """The root has ended with a code, after all below it; nothing new began after a cancel."""
    await engine.wait_terminal(root)
    rows = await tree(engine, root)
    assert rows[0].hot.code is code
    for row in rows:
        assert row.hot.state in TERMINAL
        assert row.hot.finished_at is not None
        assert rows[0].hot.finished_at is not None
        assert row.hot.finished_at <= rows[0].hot.finished_at
        log = await engine.events(row.facts.run_id)
        cancels = [event.seq for event in log if event.type == "cancel"]
        after = [event.type for event in log if cancels and event.seq > cancels[0]]
        assert not {"action", "model", "artifact", "interrupt"} & set(after)
    return rows


async def test_cancel_reaches_a_whole_tree(url: str, zoo: ToolZoo) -> None:
    """SUB-01, SUB-07, R-9.5: children executing, waiting, sleeping and queued on other workers,
    and a grandchild; all end, the root last; finished ones keep their results."""
    quick = scripted("quick", [Finish(answer="kept")])
    middle = spawning("middle", "hanging")
    root = spawning("root", "middle", "asking", "sleeping", "quick")
    agents = [root, middle, HANGING, ASKING, SLEEPING, quick]
    async with flow(url, agents, zoo) as engine:
        await engine.start_worker()
        run_id = await engine.submit("root")
        await zoo.wait_started("hang")
        rows = await wait_tree(engine, run_id, 6)
        by_agent = {row.facts.agent_id: row.facts.run_id for row in rows}
        await engine.wait_waiting(by_agent["asking"])
        await engine.wait_until(
            by_agent["sleeping"], lambda row: row.hot.parked_on is ParkedOn.TIMER
        )
        await engine.wait_terminal(by_agent["quick"])
        await engine.wait_until(run_id, lambda row: row.hot.open_children == 3)
        row = await engine.cancel(run_id)
        assert row.hot.cancel_epoch == 1
        rows = await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        ends = {row.facts.agent_id: row.hot.state for row in rows}
        assert ends["quick"] is RunState.SUCCEEDED
        results = [
            event.state
            for event in data_of(await engine.events(run_id), ChildEvent)
            if event.phase == "result"
        ]
        assert sorted(map(str, results)) == ["failed", "failed", "failed", "succeeded"]
        causes = data_of(await engine.events(by_agent["hanging"]), CancelEvent)
        assert [(event.by, event.source) for event in causes] == [("ada", "parent")]


async def test_a_queued_tree_is_cancelled_without_a_worker(url: str) -> None:
    """R-9.6: nobody holds any of it; the root has ended when the request returns."""
    async with flow(url, [spawning("root", "asking", "asking"), ASKING]) as engine:
        run_id = await engine.submit("root")
        rows = await wait_tree(engine, run_id, 3)
        for row in rows[1:]:
            await engine.wait_waiting(row.facts.run_id)
        await engine.kill_worker()
        row = await engine.cancel(run_id)
        assert row.hot.state is RunState.FAILED
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)


async def test_a_child_does_not_escape_a_cancel(url: str) -> None:
    """SUB-02: the cancel comes between the decision to spawn and the insert: nothing is inserted."""
    engines: list[Embedded] = []
    runs: list[str] = []

    class Slow:
        async def next_step(self, context: PlannerContext) -> Decision:
            wish = CancelWish(action=CancelAction.INTERRUPT, by="ada", source="api")
            await engines[0].core.store.request_cancel(runs[0], wish)  # its signal is lost
            return Spawn(children=(ChildRequest(agent_id="asking"),))

    slow = replace(scripted("slow", [Finish()]), planner=Slow())
    async with flow(url, [slow, ASKING], start=False) as engine:
        engines.append(engine)
        await engine.start_worker()
        await engine.kill_worker()
        runs.append(await engine.submit("slow"))
        await engine.start_worker()
        rows = await assert_ended(engine, runs[0], FailureCode.RUN_CANCELLED)
        assert len(rows) == 1


async def test_a_child_finishes_while_its_parent_is_cancelled(url: str, zoo: ToolZoo) -> None:
    """F48: it keeps its result, which its parent's log holds once; the parent ends as cancelled."""
    quick = scripted("quick", lambda _: Finish(answer="kept"))
    parent = scripted(
        "parent",
        lambda context: (
            call("hang")
            if context.step_index
            else Spawn(children=(ChildRequest(agent_id="quick"),), wait=False)
        ),
        tools=["hang"],
    )
    async with flow(url, [parent, quick], zoo) as engine:
        run_id = await engine.submit("parent")
        await zoo.wait_started("hang")
        [_, child] = await wait_tree(engine, run_id, 2)
        await engine.wait_terminal(child.facts.run_id)
        await engine.cancel(run_id)
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        events = data_of(await engine.events(run_id), ChildEvent)
        assert [event.phase for event in events] == ["spawned", "result"]
        assert (await engine.run(child.facts.run_id)).hot.state is RunState.SUCCEEDED


async def test_a_parent_that_fails_ends_its_children_first(url: str, zoo: ToolZoo) -> None:
    """R-2.2: whatever ends it: its budget here. Its own failure stands in the end."""
    parent = spawning("parent", "hanging", "asking", wait=False, then=[Sleep(duration=timedelta())])
    async with flow(url, [parent, HANGING, ASKING], zoo) as engine:
        run_id = await engine.submit("parent", max_steps=1)
        rows = await assert_ended(engine, run_id, FailureCode.MAX_STEPS)
        assert {row.hot.code for row in rows[1:]} == {FailureCode.RUN_CANCELLED}
        log = await engine.events(run_id)
        assert data_of(log, CancelEvent) == []
        assert types(log).count("error") == 1


async def test_a_rejected_action_ends_the_children_first(url: str, zoo: ToolZoo) -> None:
    """R-2.2, HITL-01: the run waits for a person and has a child; the person says no."""

    def decide(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return Spawn(children=(ChildRequest(agent_id="asking"),), wait=False)
        return call("pay", amount=1)

    parent = scripted("parent", decide, tools=["pay"])
    async with flow(url, [parent, ASKING], zoo) as engine:
        run_id = await engine.submit("parent")
        [question] = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.REJECT)
        rows = await assert_ended(engine, run_id, FailureCode.APPROVAL_REJECTED)
        assert rows[1].hot.code is FailureCode.RUN_CANCELLED
        assert zoo.payments() == []


async def test_a_run_time_counts_for_what_is_below(url: str) -> None:
    """R-10.4: the parent waits for its child when its time is over; the child is cancelled."""
    async with flow(url, [spawning("parent", "asking"), ASKING]) as engine:
        run_id = await engine.submit("parent", timeouts={"run_s": 0.4})
        row = await engine.wait_terminal(run_id)
        assert status_of(row.hot) is RunStatus.TIMED_OUT
        await assert_ended(engine, run_id, FailureCode.RUN_TIMEOUT)


async def test_a_question_of_a_run_that_is_to_end_is_gone(url: str, zoo: ToolZoo) -> None:
    """A run that waits for its children to end takes no answer; its question closes with it."""
    deaf = scripted("deaf", lambda _: call("swallow_cancel"), tools=["swallow_cancel"])

    def decide(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return Spawn(children=(ChildRequest(agent_id="deaf"),), wait=False)
        return Ask(title="well?")

    async with flow(url, [scripted("parent", decide), deaf], zoo) as engine:
        run_id = await engine.submit("parent")
        await zoo.wait_started("swallow_cancel")
        [question] = await engine.wait_waiting(run_id)
        await engine.cancel(run_id)
        with pytest.raises(Gone):
            await engine.answer(question.interrupt_id, Answer.RESPOND)
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)


async def test_what_does_not_end_in_time_is_orphaned(url: str) -> None:
    """R-9.5, F47: a child and its child on a worker that stands still with its leases; the tree
    ends within the deadline, and what the worker sends later is refused."""
    root = spawning("root", "stuck")
    stuck = spawning("stuck", "asking")
    async with flow(url, [root], settings=SHORT) as engine:
        await engine.core.store.register(registrations(stuck, ASKING), [])
        run_id = await engine.submit("root")
        [_, child] = await wait_tree(engine, run_id, 2)
        want = ClaimWant(worker_id="wrk_ghost", limit=1, lease_ttl_s=600, serves=(("stuck", "1"),))
        [held] = await engine.core.store.claim_runs(want)
        await engine.cancel(run_id)
        rows = await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        assert rows[1].hot.code is FailureCode.ORPHANED
        assert rows[1].hot.lease_token == held.token + 1
        lost = data_of(await engine.events(child.facts.run_id), AttemptEvent)[-1]
        assert (lost.phase, lost.reason) == ("lost", "orphaned")
        told = data_of(await engine.events(run_id), ChildEvent)[-1]
        assert told.failure is not None
        assert told.failure.code is FailureCode.ORPHANED


def registrations(*agents: HostedAgent) -> list[AgentRegistration]:
    """Return the agents as a worker that nobody started would register them."""
    found: list[AgentRegistration] = []
    for agent in agents:
        card = agent.card.model_dump(mode="json")
        found.append(
            AgentRegistration(
                agent_id=agent.card.agent_id,
                version=agent.card.version,
                card=card,
                digest=digest(card),
            )
        )
    return found


async def test_a_child_on_a_dead_worker_ends_when_its_lease_does(url: str, zoo: ToolZoo) -> None:
    """CAN-01, F47: the reaper takes it; nothing is orphaned, and the thread is free again."""
    clock = ShiftingClock()
    async with flow(url, [spawning("root", "hanging"), HANGING], zoo, clock=clock) as engine:
        run_id = await engine.submit("root")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.cancel(run_id)
        await engine.start_worker()
        rows = await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        assert rows[1].hot.code is FailureCode.RUN_CANCELLED
        zoo.open_gate()
        other = await engine.submit("root", thread_id=rows[0].facts.thread_id)
        assert (await engine.wait_until(other, lambda row: row.hot.attempt == 1)).hot.attempt == 1
        await engine.cancel(other)
        await engine.wait_terminal(other)


async def test_a_report_that_nobody_delivered_is_delivered_by_a_sweep(url: str) -> None:
    """F48: whoever ended the child died at once; the report stands, and is written once."""
    async with flow(url, [spawning("root", "asking"), ASKING]) as engine:
        run_id = await engine.submit("root")
        [_, child] = await wait_tree(engine, run_id, 2)
        await engine.wait_waiting(child.facts.run_id)
        await engine.kill_worker()
        child_id = child.facts.run_id
        wish = CancelWish(action=CancelAction.INTERRUPT, by="ada", source="api")
        await engine.core.store.request_cancel(child_id, wish)
        await engine.sweep()
        await engine.sweep()
        events = data_of(await engine.events(run_id), ChildEvent)
        assert [event.phase for event in events] == ["spawned", "result"]
        assert await engine.core.reader.timers_of(run_id) == []
        assert await engine.core.reader.is_ready(run_id)
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_many_children_end_at_once(url: str) -> None:
    """R-13.1: every result is told once, and the parent woken once for all of them."""
    quick = scripted("quick", [Finish(answer="x")])
    async with flow(url, [spawning("root", *["quick"] * 40), quick]) as engine:
        await engine.start_worker()
        run_id = await engine.submit("root")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert row.hot.attempt == 2
        results = [
            event.child_run_id
            for event in data_of(await engine.events(run_id), ChildEvent)
            if event.phase == "result"
        ]
        assert len(set(results)) == len(results) == 40
