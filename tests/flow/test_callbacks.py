"""Calls whose tools answer later, by callback: R-5.10, and what may go wrong between."""

import pytest
from pydantic import JsonValue

from perdure.engine.callbacks import CalledBack, call_back
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import CallTools, Decision, Finish
from perdure.protocol.errors import AlreadyAnswered, Conflict, Gone, Invalid, NotFound, PerdureError
from perdure.protocol.events import LateEvent, ResultEvent, StateEvent, TimeoutEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunRow, waiting_on
from perdure.protocol.states import Answer, ParkedOn, RunState, ToolCallStatus, WaitingOn
from perdure.protocol.tools import ToolResult
from perdure.store.keeping import LATE_PER_EXECUTION_MAX
from perdure.store.requests import LeaseKey, TimerKind
from perdure.testing.embedded import Embedded, call, calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import agent_as_tool
from tests.flow.world import data_of, flow, states, types

NAMES = ("order_later", "order_with_lookup", "order_idempotent", "order_slowly", "echo", "hang")


def agent(wish: CallTools) -> HostedAgent:
    """An agent that makes its calls once and finishes with what they came to."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return wish
        return Finish(answer=[[item.status, item.output] for item in context.turns[0].calls])

    return scripted("buyer", decide, tools=unasked(*NAMES))


def done(output: JsonValue, external_ref: str | None = None) -> ToolResult:
    return ToolResult(status=ToolCallStatus.SUCCEEDED, output=output, external_ref=external_ref)


async def wait_parked(engine: Embedded, run_id: str) -> RunRow:
    return await engine.wait_until(
        run_id, lambda row: row.hot.lease_owner is None and row.hot.parked_on is ParkedOn.CALLBACK
    )


async def call_of(engine: Embedded, run_id: str, place: int = 0) -> ToolCallRow:
    rows = await engine.core.reader.list_tool_calls(run_id, after=None, limit=10)
    return rows[place]


async def give(engine: Embedded, row: ToolCallRow, result: ToolResult) -> CalledBack:
    return await call_back(engine.core, engine.tenant_id, row.tool_call_id, result)


async def refused(
    engine: Embedded, row: ToolCallRow, result: ToolResult, kind: type[PerdureError]
) -> PerdureError:
    with pytest.raises(kind) as caught:
        await give(engine, row, result)
    return caught.value


async def answer_of(engine: Embedded, run_id: str) -> JsonValue:
    row = await engine.wait_terminal(run_id)
    assert row.hot.state is RunState.SUCCEEDED, row.hot.code
    return data_of(await engine.events(run_id), StateEvent)[-1].answer


async def test_a_pending_call_stands_without_a_worker_until_its_callback(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.10, R-2.7: siblings go on; the run parks; one result; the same again changes nothing."""
    wish = calls(("order_later", {"amount": 1}), ("echo", {"value": 2}))
    async with flow(url, [agent(wish)], zoo) as engine:
        run_id = await engine.submit("buyer")
        row = await wait_parked(engine, run_id)
        assert waiting_on(row.hot) is WaitingOn.CALLBACK
        order, echo = await call_of(engine, run_id), await call_of(engine, run_id, 1)
        assert (order.status, order.external_ref) == (ToolCallStatus.PENDING, "order-1")
        assert echo.status is ToolCallStatus.SUCCEEDED
        (execution,) = [
            item
            for item in await engine.core.reader.list_executions(run_id)
            if item.tool_call_id == order.tool_call_id
        ]
        assert execution.outcome is ToolCallStatus.PENDING
        (timer,) = await engine.core.reader.timers_of(run_id)
        assert (timer.kind, timer.ref) == (TimerKind.CALLBACK, order.tool_call_id)
        await engine.kill_worker()

        with pytest.raises(NotFound):
            await call_back(engine.core, "other", order.tool_call_id, done(7))
        with pytest.raises(NotFound):
            await call_back(engine.core, engine.tenant_id, "tc_" + "0" * 32, done(7))
        assert (await refused(engine, order, done([]), Invalid)).field == "/output"
        assert (await engine.run(run_id)).hot == row.hot
        given = await give(engine, order, done(7))
        assert (given.row.status, given.replayed) == (ToolCallStatus.SUCCEEDED, False)
        assert (await give(engine, order, done(7))).replayed
        assert await engine.core.reader.timers_of(run_id) == []
        await engine.start_worker()
        assert await answer_of(engine, run_id) == [["succeeded", 7], ["succeeded", 2]]
        events = await engine.events(run_id)
        (result,) = [
            event.data
            for event in events
            if isinstance(event.data, ResultEvent) and event.data.by == "callback"
        ]
        assert result.external_ref == "order-1"
        assert (await give(engine, order, done(7))).replayed  # also after the end
        assert len(await engine.events(run_id)) == len(events)


async def test_what_comes_after_the_result_is_late(url: str, zoo: ToolZoo) -> None:
    """R-5.10, F29: another callback of a call that has its result, and of a run that has ended."""
    wish = calls(("order_later", {"amount": 1}), ("order_later", {"amount": 2}))
    async with flow(url, [agent(wish)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await wait_parked(engine, run_id)
        first, second = await call_of(engine, run_id), await call_of(engine, run_id, 1)
        failed = ToolResult(
            status=ToolCallStatus.FAILED,
            error=Failure(code=FailureCode.TOOL_ERROR, reason="sold out"),
        )
        await give(engine, first, failed)
        assert (await engine.run(run_id)).hot.parked_on is ParkedOn.CALLBACK  # for the second
        error = await refused(engine, first, done(1), AlreadyAnswered)
        assert error.details == {"status": "failed", "late": True}
        await refused(engine, first, done(1), AlreadyAnswered)
        for other in (done(7), done(7).model_copy(update={"external_ref": "job-3"})):
            error = await refused(engine, first, other, AlreadyAnswered)
            assert error.details == {"status": "failed", "late": True}
        for number in range(LATE_PER_EXECUTION_MAX - 3):
            await refused(engine, first, done(100 + number), AlreadyAnswered)
        error = await refused(engine, first, done(8), AlreadyAnswered)
        assert error.details == {"status": "failed", "late": False}
        row = await engine.cancel(run_id)
        assert row.hot.code is FailureCode.RUN_CANCELLED  # at once
        ended = await call_of(engine, run_id, 1)
        assert ended.status is ToolCallStatus.UNKNOWN
        error = await refused(engine, second, done(2), Gone)
        assert error.details == {"status": "unknown", "late": True}
        late = [event.data for event in await engine.events(run_id) if event.type == "late"]
        told = [
            (item.tool_call_id, item.output, item.external_ref)
            for item in late
            if isinstance(item, LateEvent)
        ]
        assert told[:3] == [
            (first.tool_call_id, *rest) for rest in ((1, None), (7, None), (7, "job-3"))
        ]
        assert len(told) == LATE_PER_EXECUTION_MAX + 1
        assert told[-1] == (second.tool_call_id, 2, None)
        assert await engine.core.reader.timers_of(run_id) == []


@pytest.mark.parametrize(
    ("tool", "expected"),
    [("order_with_lookup", "found"), ("order_idempotent", "asked again")],
)
async def test_after_its_time_a_call_is_looked_up_or_run_again(
    url: str, zoo: ToolZoo, tool: str, expected: str
) -> None:
    """R-5.10, R-5.7: never a silent second execution."""
    async with flow(url, [agent(call(tool, amount=1, wait_s=0.05))], zoo) as engine:
        run_id = await engine.submit("buyer")
        assert await answer_of(engine, run_id) == [["succeeded", expected]]
        events = await engine.events(run_id)
        timeouts = [event.data for event in events if isinstance(event.data, TimeoutEvent)]
        assert [(item.subject, item.limit_ms) for item in timeouts] == [("callback", 50)]
        assert zoo.executions[tool] == (2 if tool == "order_idempotent" else 1)
        keys = {line["key"] for line in zoo.payments()}
        assert len(keys) == 1


async def test_after_its_time_a_call_that_nobody_knows_of_is_a_question(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.10, R-5.7: the callback that comes then is late; a retry may wait for its own."""
    async with flow(url, [agent(call("order_later", amount=1, wait_s=0.05))], zoo) as engine:
        run_id = await engine.submit("buyer")
        (asked,) = await engine.wait_waiting(run_id)
        assert asked.kind == "outcome"
        order = await call_of(engine, run_id)
        error = await refused(engine, order, done(1), Gone)
        assert error.details == {"status": "running", "late": True}
        await engine.answer(asked.interrupt_id, Answer.RETRY)
        (asked,) = await engine.wait_waiting(run_id)
        assert zoo.executions["order_later"] == 2
        await engine.answer(asked.interrupt_id, Answer.HAPPENED, value=3, external_ref="order-1")
        assert await answer_of(engine, run_id) == [["succeeded", 3]]
        assert types(await engine.events(run_id)).count("late") == 1


@pytest.mark.parametrize("answer", ["pending", "own"])
async def test_a_callback_may_be_faster_than_its_tool(url: str, zoo: ToolZoo, answer: str) -> None:
    """R-5.10: accepted while the call runs, beside its holder; what the tool says then is late."""
    wish = calls(("order_slowly", {"answer": answer}), ("hang", {}))
    async with flow(url, [agent(wish)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await zoo.wait_started("order_slowly")
        await zoo.wait_started("hang")
        order = await call_of(engine, run_id)
        assert order.status is ToolCallStatus.RUNNING
        assert not (await give(engine, order, done("early", "order-9"))).replayed
        zoo.open_gate()
        assert await answer_of(engine, run_id) == [["succeeded", "early"], ["succeeded", "late"]]
        assert zoo.executions["order_slowly"] == 1
        if answer == "own":
            await engine.stop()
        late = types(await engine.events(run_id)).count("late")
        assert late == (1 if answer == "own" else 0)


async def test_a_callback_finds_a_call_whose_worker_is_gone(url: str, zoo: ToolZoo) -> None:
    """R-5.10, F29: the worker died before it could say that the call is pending."""
    async with flow(url, [agent(call("order_slowly", answer="pending"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await zoo.wait_started("order_slowly")
        await engine.kill_worker()
        await give(engine, await call_of(engine, run_id), done("early"))
        row = await engine.run(run_id)
        assert row.hot.lease_owner is not None
        key = LeaseKey(run_id=run_id, token=row.hot.lease_token)
        assert await engine.core.store.release_runs(row.hot.lease_owner, [key]) == 1
        await engine.start_worker()
        assert await answer_of(engine, run_id) == [["succeeded", "early"]]
        assert zoo.executions["order_slowly"] == 1


async def test_a_callback_beside_a_question_waits_for_its_answer(url: str, zoo: ToolZoo) -> None:
    """R-5.10, R-8.2: the run waits for the person first, then for the call that is left."""
    wish = calls(
        ("order_later", {"amount": 1}), ("order_later", {"amount": 2}), ("pay", {"amount": 3})
    )

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return wish
        return Finish(answer=[item.output for item in context.turns[0].calls])

    buyer = scripted("asking", decide, tools=[*unasked("order_later"), "pay"])
    async with flow(url, [buyer], zoo) as engine:
        run_id = await engine.submit("asking")
        (asked,) = await engine.wait_waiting(run_id)
        await give(engine, await call_of(engine, run_id), done(1))
        assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN
        await engine.answer(asked.interrupt_id, Answer.APPROVE)
        await wait_parked(engine, run_id)
        await give(engine, await call_of(engine, run_id, 1), done(2))
        assert await answer_of(engine, run_id) == [1, 2, {"paid": 3}]
        assert states(await engine.events(run_id)).count("waiting_human") == 1


async def test_only_a_call_that_was_handed_to_its_tool_takes_a_callback(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.10, R-13.4: neither one that awaits approval nor one that a child run carries out."""
    child = scripted("child", [call("hang"), Finish(answer="told")], tools=["hang"])
    zoo.registry.add(agent_as_tool("child", name="ask_child"))
    wish = calls(("pay", {"amount": 1}), ("ask_child", {"task": "go"}))
    parent = scripted("parent", [wish], tools=["pay", *unasked("ask_child")])
    async with flow(url, [parent, child], zoo) as engine:
        run_id = await engine.submit("parent")
        await zoo.wait_started("hang")
        for place, status in enumerate(("awaiting_approval", "pending")):
            row = await call_of(engine, run_id, place)
            assert row.status == status
            await refused(engine, row, done(1), Conflict)
        assert "late" not in types(await engine.events(run_id))
        await engine.cancel(run_id)
        zoo.open_gate()
        await engine.wait_terminal(run_id)
