"""What a run may use is checked before it is spent (R-4.3, R-4.4, R-5.3)."""

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import JsonValue

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import CallTools, Decision, Finish, ModelUse, ToolRequest
from perdure.protocol.events import ActionEvent, ResultEvent, StateEvent, Usage
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.testing.embedded import Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow

USE = ModelUse(model="m", usage=Usage(input_tokens=10, output_tokens=4, cost=0.5))


def spending(context: PlannerContext) -> Decision:
    """Ask the model once and call a tool once in every step, without an end."""
    wish = ToolRequest(tool="slow", args={"seconds": 0.02 + context.step_index / 1000})
    return CallTools(calls=(wish,), model_uses=(USE,))


def failure_of(events: list[RecordedEvent]) -> Failure:
    """Return the failure of the terminal event."""
    failure = data_of(events, StateEvent)[-1].failure
    assert failure is not None
    return failure


async def ended(engine: Embedded, agent: str, **options: Any) -> list[RecordedEvent]:
    """Return the log of a run that failed."""
    run_id = await engine.submit(agent, **options)
    row = await engine.wait_terminal(run_id)
    events = await engine.events(run_id)
    assert row.hot.state is RunState.FAILED
    assert row.hot.code is failure_of(events).code
    return events


@pytest.mark.parametrize(
    ("name", "limit", "steps"),
    [
        ("model_calls", 2, 2),
        ("tool_calls", 2, 2),
        ("tokens", 28, 2),
        ("output_tokens", 5, 2),
        ("cost", 0.9, 2),
        ("context_tokens", 10, 1),
        ("wall_time_s", 0.03, None),
    ],
)
async def test_a_budget_that_is_used_up_ends_the_run(
    url: str, zoo: ToolZoo, name: str, limit: float, steps: int | None
) -> None:
    """R-4.3: every kind of budget, with what was used and what was allowed."""
    async with flow(url, [scripted("spender", spending, tools=["slow"])], zoo) as engine:
        events = await ended(engine, "spender", budget={name: limit}, max_steps=30)
        failure = failure_of(events)
        assert failure.code is FailureCode.BUDGET_EXCEEDED
        assert failure.details["budget"] == name
        assert failure.details["limit"] == limit
        done = zoo.executions.get("slow", 0)
        assert done == steps if steps is not None else done < 30


async def test_the_steps_of_a_run_are_bounded(url: str, zoo: ToolZoo) -> None:
    """R-4.3: MAX_STEPS after exactly as many."""
    async with flow(url, [scripted("spender", spending, tools=["slow"])], zoo) as engine:
        events = await ended(engine, "spender", max_steps=3)
        assert failure_of(events).code is FailureCode.MAX_STEPS
        assert zoo.executions["slow"] == 3


async def test_parallel_calls_do_not_overshoot_their_budget(url: str, zoo: ToolZoo) -> None:
    """R-4.3, BUD-01: of eight calls in one step six run; the planner is told of the others."""
    wishes = CallTools(
        calls=tuple(ToolRequest(tool="echo", args={"value": number}) for number in range(8))
    )

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return wishes
        return Finish(answer=[record.status for record in context.turns[0].calls])

    async with flow(url, [scripted("many", decide, tools=["echo"])], zoo) as engine:
        run_id = await engine.submit("many", budget={"tool_calls": 6})
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        results = data_of(await engine.events(run_id), ResultEvent)
        denied = [result for result in results if result.status is ToolCallStatus.DENIED]
        assert zoo.executions == {"echo": 6}
        assert [result.error and result.error.code for result in denied] == [
            FailureCode.BUDGET_EXCEEDED
        ] * 2


async def test_the_same_call_beyond_its_limit_is_a_loop(url: str, zoo: ToolZoo) -> None:
    """R-4.4, F44: ends at once, with a digest of the arguments; other arguments do not count."""

    def decide(context: PlannerContext) -> Decision:
        step = context.step_index
        return call("echo", value="other" if step == 1 else {"b": 1, "a": 2})

    async with flow(url, [scripted("looper", decide, tools=["echo"])], zoo) as engine:
        events = await ended(engine, "looper", loop_limit=3)
        failure = failure_of(events)
        assert failure.code is FailureCode.LOOP_DETECTED
        assert "`options.loop_limit`" in failure.reason
        assert zoo.executions == {"echo": 4}
        digests = [action.args_digest for action in data_of(events, ActionEvent)]
        assert failure.details == {"tool": "echo", "args_digest": digests[0]}
        assert digests[1] != digests[0]


WRONG: dict[str, tuple[Callable[[], Decision], FailureCode]] = {
    "arguments": (lambda: call("slow", seconds="soon"), FailureCode.TOOL_ARGUMENT_INVALID),
    "tool": (lambda: call("fly"), FailureCode.TOOL_NOT_FOUND),
    "answer": (lambda: Finish(answer="four"), FailureCode.OUTPUT_INVALID),
}


@pytest.mark.parametrize("kind", list(WRONG))
async def test_a_planner_that_stays_wrong_fails_after_its_corrections(
    url: str, zoo: ToolZoo, kind: str
) -> None:
    """R-5.3, R-10.1, F39: told as data so many times, then the run ends with that code."""
    make, code = WRONG[kind]
    steps: list[int] = []

    def decide(context: PlannerContext) -> Decision:
        steps.append(context.step_index)
        return make()

    options: dict[str, JsonValue] = {"corrections_max": 2, "output_schema": {"type": "integer"}}
    async with flow(url, [scripted("wrong", decide, tools=["slow"])], zoo) as engine:
        events = await ended(engine, "wrong", **options)
        assert failure_of(events).code is code
        assert steps == [0, 1, 2]
        assert zoo.executions == {}


async def test_a_corrected_call_starts_the_budget_anew(url: str, zoo: ToolZoo) -> None:
    """R-5.3: the planner sees what was wrong, and goes on when it is right."""
    told: list[str] = []

    def decide(context: PlannerContext) -> Decision:
        step = context.step_index
        if context.turns and context.turns[-1].calls[0].error is not None:
            told.append(context.turns[-1].calls[0].error.reason)
        if step == 4:
            return Finish(answer="done")
        return call("slow", seconds=0.001 if step in {1, 3} else "soon")

    async with flow(url, [scripted("learner", decide, tools=["slow"])], zoo) as engine:
        run_id = await engine.submit("learner", corrections_max=1)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert len(told) == 2
        assert all("seconds" in reason for reason in told)
        assert zoo.executions == {"slow": 2}
