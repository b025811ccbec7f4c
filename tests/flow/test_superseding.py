"""A run that takes the place of its thread's active run: interrupt and rollback (R-11.1)."""

from datetime import timedelta

import pytest

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Finish, Sleep, Spawn
from perdure.protocol.errors import Conflict
from perdure.protocol.events import CancelEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.runs import status_of
from perdure.protocol.states import ArtifactStatus, CancelAction, RunState, RunStatus
from perdure.service.artifacts import list_artifacts
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, RetryRequest, fork, retry
from perdure.service.principal import LOCAL
from perdure.store.reader import RunFilter
from perdure.testing.builders import new_run
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from perdure.tools import ToolUnavailable, tool
from tests.flow.world import data_of, flow

STATUS = {"interrupt": RunStatus.INTERRUPTED, "rollback": RunStatus.CANCELED}


def talks(context: PlannerContext) -> Decision:
    """Draw and hang when the input says so; else finish with the inputs that are seen."""
    if context.input == "hang":
        return call("hang") if context.turns else call("draw", text="a plan")
    seen = [part.text for item in context.messages for part in item.parts if part.type == "text"]
    return Finish(answer=[*seen, str(context.input)])


TALKING = scripted("talks", talks, tools=["draw", "hang"])


async def answer_of(engine: Embedded, run_id: str) -> object:
    """Return the answer of a run that succeeds."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.state is RunState.SUCCEEDED, row.hot.code
    return data_of(await engine.events(run_id), StateEvent)[-1].answer


@pytest.mark.parametrize("strategy", ["interrupt", "rollback"])
async def test_the_active_run_is_cancelled_and_what_waits_keeps_its_place(
    url: str, zoo: ToolZoo, strategy: str
) -> None:
    """R-11.1, R-9.1, R-9.7, CON-05: after `rollback` nobody sees what the run was asked."""
    async with flow(url, [TALKING], zoo) as engine:
        service = Service(core=engine.core)
        first = await engine.submit("talks", "hang")
        await zoo.wait_started("hang")
        thread = (await engine.run(first)).facts.thread_id
        between = await engine.submit("talks", "between", thread_id=thread)
        order = engine.order(
            "talks", "new", thread_id=thread, multitask_strategy=strategy, idempotency_key="k"
        )
        new = (await engine.submit_order(order)).row.facts.run_id
        row = await engine.wait_terminal(first)
        assert (row.hot.code, status_of(row.hot)) == (FailureCode.RUN_CANCELLED, STATUS[strategy])
        kept = strategy == "interrupt"
        for run_id in (between, new):
            answer = await answer_of(engine, run_id)
            assert isinstance(answer, list)
            assert ("hang" in answer) is kept
        runs = [await engine.run(run_id) for run_id in (first, between, new)]
        assert runs[0].hot.finished_at is not None
        assert runs[1].hot.started_at is not None
        assert runs[0].hot.finished_at <= runs[1].hot.started_at
        assert [one.hot.cancel_epoch for one in runs] == [1, 0, 0]
        (cancel,) = data_of(await engine.events(first), CancelEvent)
        assert (cancel.by, cancel.source) == ("local", "thread")
        assert new in (cancel.reason or "")
        # the tombstone: its calls and its artifact as a draft that is marked
        calls = await engine.core.reader.list_tool_calls(first, after=None, limit=5)
        assert ("draw", "drawing-7") in [(one.tool, one.external_ref) for one in calls]
        (drawn,) = (await list_artifacts(service, LOCAL, first, after=None, limit=5)).items
        assert drawn.status is ArtifactStatus.CANCELLED
        if strategy == "rollback":
            with pytest.raises(Conflict):
                await fork(service, LOCAL, first, ForkRequest())
        else:
            await fork(service, LOCAL, first, ForkRequest(input="go on"))
        # the same request again cancels nothing, whatever is active by now
        busy = await engine.submit("talks", "hang", thread_id=thread)
        await zoo.wait_started("hang", 2)
        again = await engine.submit_order(order)
        assert (again.row.facts.run_id, again.created) == (new, False)
        assert (await engine.run(busy)).hot.cancel_epoch == 0
        await engine.cancel(busy, CancelAction.ROLLBACK)
        last = await engine.submit("talks", "last", thread_id=thread)
        assert str(await answer_of(engine, last)).count("hang") == kept


def waits_for(what: object) -> Decision:
    """Return the decision by which a run comes to wait."""
    match what:
        case "person":
            return Ask(title="well?")
        case "sleep":
            return Sleep(duration=timedelta(days=1))
        case "children":
            return Spawn(children=(ChildRequest(agent_id="asks"),))
        case _:
            return call("unlucky")


@pytest.mark.parametrize("what", ["person", "sleep", "children", "back-off"])
async def test_a_run_that_waits_is_superseded_at_once_and_does_nothing_more(
    url: str, zoo: ToolZoo, what: str
) -> None:
    """R-9.6, CAN-09, R-11.1: no worker is needed to end it, no retry comes afterwards."""
    tried = 0

    @tool(idempotent=True, retry=RetryPolicy(attempts_max=5, backoff_s=60, jitter=False))
    async def unlucky() -> None:
        """Be unavailable."""
        nonlocal tried
        tried += 1
        raise ToolUnavailable("down")

    zoo.registry.add(unlucky)

    def decide(context: PlannerContext) -> Decision:
        done = context.turns or context.input == "new"
        return Finish(answer="done") if done else waits_for(context.input)

    agents = [
        scripted("waits", decide, tools=["unlucky"]),
        scripted("asks", lambda _: Ask(title="?")),
    ]
    clock = ShiftingClock()
    async with flow(url, agents, zoo, clock=clock) as engine:
        first = await engine.submit("waits", what)
        if what == "back-off":
            await engine.wait_event(first, "retry")
        else:
            await engine.wait_until(
                first, lambda row: row.hot.attempt == 1 and row.hot.lease_owner is None
            )
            of_first = RunFilter(parent_run_id=first)
            for child in await engine.core.reader.list_runs(None, of_first, after=None, limit=2):
                await engine.wait_waiting(child.facts.run_id)  # else the worker dies with it
            await engine.kill_worker()
        before = tried
        thread = (await engine.run(first)).facts.thread_id
        new = await engine.submit("waits", "new", thread_id=thread, multitask_strategy="interrupt")
        if what != "back-off":
            row = await engine.run(first)
            assert (row.hot.state, row.hot.code) == (RunState.FAILED, FailureCode.RUN_CANCELLED)
            assert await engine.core.reader.is_ready(new)
            assert await engine.pending(first) == []
            await engine.start_worker()
        assert await answer_of(engine, new) == "done"
        assert (await engine.run(first)).hot.code is FailureCode.RUN_CANCELLED
        if what == "back-off":
            clock.advance(120)  # longer than the back-off
            await engine.sweep()
            await engine.wait_terminal(await engine.submit("waits", "new"))
        assert tried == before
        assert len(await engine.core.reader.list_attempts(first)) == 1


async def test_a_run_is_superseded_although_the_caller_dies_in_between(
    url: str, zoo: ToolZoo
) -> None:
    """R-11.1: the cancel is stored with the new run; nobody has to signal it or to end the run."""
    async with flow(url, [TALKING, scripted("asks", lambda _: Ask(title="?"))], zoo) as engine:
        for agent, text in (("talks", "hang"), ("asks", "go")):
            first = await engine.submit(agent, text)
            if agent == "talks":
                await zoo.wait_started("hang")
            else:
                await engine.wait_waiting(first)
            thread = (await engine.run(first)).facts.thread_id
            new = new_run(thread_id=thread, agent_id="talks", strategy="rollback", input="new")
            inserted = await engine.core.store.insert_run(new)
            assert inserted.superseded == first
            await engine.sweep()
            assert (await engine.wait_terminal(first)).hot.code is FailureCode.RUN_CANCELLED
            assert await answer_of(engine, new.run_id) == ["new"]


async def test_a_retry_that_is_rolled_back_leaves_what_it_retried(url: str) -> None:
    """R-9.1: the thread is as before the retry: the first input is seen again."""

    def decide(context: PlannerContext) -> Decision:
        if context.input == "breaks":
            return Ask(title="?") if context.step_index == 0 else Finish(answer="late")
        seen = [part.text for one in context.messages for part in one.parts if part.type == "text"]
        return Finish(answer=list(seen))

    async with flow(url, [scripted("asks", decide)]) as engine:
        first = await engine.submit("asks", "breaks")
        await engine.wait_waiting(first)
        await engine.cancel(first)
        made = await retry(Service(core=engine.core), LOCAL, first, RetryRequest())
        thread = made.run.thread_id
        hidden = await engine.submit("asks", "one", thread_id=thread, multitask_strategy="rollback")
        assert (await engine.wait_terminal(made.run.run_id)).hot.code is FailureCode.RUN_CANCELLED
        assert await answer_of(engine, hidden) == ["breaks"]
