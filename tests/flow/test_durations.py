"""Times out of bounds end in words, never in a question that is over or an overflow (R-10.4)."""

import math
from datetime import timedelta
from typing import Any, cast

from perdure.agents.code import Context, agent
from perdure.engine.context import PlannerContext
from perdure.engine.ports import PlannerFailure
from perdure.protocol.decisions import Ask, Decision
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import Answer, ParkedOn, RunState
from perdure.testing.embedded import scripted
from tests.flow.world import data_of, flow


async def test_an_author_is_told_the_bounds_of_a_time(url: str) -> None:
    """R-8.3, R-10.4: a planner's and a function's question, a step's and a request's limit."""

    def asks(context: PlannerContext) -> Decision:
        wait = timedelta(seconds=cast("float", context.input))
        return Ask(title="?", expires_in=wait)

    @agent("coded", "1")
    async def coded(ctx: Context, input: dict[str, Any]) -> object:
        seconds = float(input["seconds"])
        match input["what"]:
            case "ask":
                return await ctx.interrupt("?", expires_in=timedelta(seconds=seconds))
            case "step":
                return await ctx.step(lambda: 1, name="one", timeout_s=seconds)
            case _:
                return await ctx.model("hi", timeout_s=seconds)

    async with flow(url, [scripted("asker", asks), coded]) as engine:
        runs = [
            (await engine.submit("asker", seconds, max_attempts=1), "expires_in")
            for seconds in (-1, 0, 1e12)
        ]
        for what, seconds in (("ask", -1), ("ask", 1e12), ("step", 0), ("model", 1e12)):
            wish = {"what": what, "seconds": seconds}
            run_id = await engine.submit("coded", cast("Any", wish), max_attempts=1)
            runs.append((run_id, "more than 0 s"))
        for run_id, told in runs:
            await engine.wait_terminal(run_id)
            failure = data_of(await engine.events(run_id), StateEvent)[-1].failure
            assert failure is not None
            assert told in failure.reason, failure.reason
            assert not await engine.pending(run_id)


async def test_what_is_left_of_a_deadline_is_judged_when_the_question_is_asked(url: str) -> None:
    """R-7.5, R-8.3: a function that was played again after it had passed ended NON_DETERMINISTIC."""
    left_s = [5.0]

    @agent("coded", "1")
    async def coded(ctx: Context, input: object) -> object:
        return await ctx.interrupt("?", expires_in=timedelta(seconds=left_s[0]))

    async with flow(url, [coded]) as engine:
        run_id = await engine.submit("coded")
        (asked,) = await engine.wait_waiting(run_id)
        left_s[0] = -1.0
        await engine.kill_worker()
        await engine.start_worker()
        await engine.answer(asked.interrupt_id, Answer.RESPOND, value="in time")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED


async def test_a_model_that_asks_for_a_wait_without_end_gets_a_day(url: str) -> None:
    """R-10.1: `retry_after_s` of a provider is bounded, and a run sleeps no longer for it."""

    def busy(_: PlannerContext) -> Decision:
        failure = Failure(code=FailureCode.MODEL_ERROR, reason="busy", retryable=True)
        raise PlannerFailure(failure, retry_after_s=math.inf)

    agent = scripted("busy", busy, model_retry=RetryPolicy(attempts_max=2, backoff_s=0.01))
    async with flow(url, [agent]) as engine:
        run_id = await engine.submit("busy")
        row = await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.RETRY)
        assert row.hot.wake_at is not None
        assert row.hot.wake_at - row.hot.updated_at <= timedelta(days=1, seconds=1)
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
