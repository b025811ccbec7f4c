"""What the runtime mends by itself, and when it stops trying (R-10.1, R-10.2)."""

import logging
import traceback
from collections.abc import Callable

import anyio
import pytest

from perdure.agents.catalog import loop_agent
from perdure.agents.loop.react import ReActPlanner
from perdure.agents.models.scripted import ScriptedModel
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, PlannerFailure, ToolGrant
from perdure.protocol.decisions import Decision, Finish, Sleep
from perdure.protocol.events import (
    ActionEvent,
    ModelEvent,
    ResultEvent,
    RetryEvent,
    StateEvent,
)
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import Answer, AttemptEnd, RunState, ToolCallStatus
from perdure.testing.embedded import call, calls, scripted, unasked
from perdure.testing.tools import WRITE, ToolZoo
from perdure.tools import ToolUnavailable, tool
from perdure.tools.limits import Slots
from tests.flow.world import data_of, flow

QUICK = RetryPolicy(attempts_max=2, backoff_s=0.02)


def failure(code: FailureCode, *, retryable: bool = True) -> Failure:
    """Return a failure of a model."""
    return Failure(code=code, reason="as scripted", retryable=retryable, stage=Stage.PLANNING)


def reacting(*scripts: list[object]) -> HostedAgent:
    """Return an agent whose models answer by their scripts."""
    models = [
        ScriptedModel(script, name=f"m{number}")  # pyright: ignore[reportArgumentType]  # entries of a script
        for number, script in enumerate(scripts, start=1)
    ]
    return loop_agent("asks-models", "1", ReActPlanner(models, model_retry=QUICK))


@pytest.mark.parametrize("code", [FailureCode.MODEL_TIMEOUT, FailureCode.MODEL_ERROR])
async def test_a_model_is_tried_again_and_then_the_next_one_is_asked(
    url: str, code: FailureCode
) -> None:
    """R-10.1, R-10.2: bounded retries with back-off, then the fallback model; each is recorded."""
    agent = reacting([failure(code)] * 5, [failure(code), "an answer"])
    async with flow(url, [agent]) as engine:
        run_id = await engine.submit("asks-models")
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        retries = data_of(log, RetryEvent)
        assert [(item.subject, item.failed, item.failure.code) for item in retries] == [
            ("model", 1, code),
            ("model", 2, code),
            ("model", 3, code),
        ]
        assert all(item.delay_ms >= 10 for item in retries)
        assert [item.model for item in data_of(log, ModelEvent)] == ["m2"]
        assert data_of(log, StateEvent)[-1].answer == "an answer"
        assert row.hot.counters.retries == 3


@pytest.mark.slow
async def test_models_that_all_stay_silent_fail_the_run_with_their_code(url: str) -> None:
    """R-10.1: after the bound of every model."""
    agent = reacting(
        [failure(FailureCode.MODEL_TIMEOUT)] * 9, [failure(FailureCode.MODEL_ERROR)] * 9
    )
    async with flow(url, [agent]) as engine:
        run_id = await engine.submit("asks-models")
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.MODEL_ERROR
        assert len(data_of(await engine.events(run_id), RetryEvent)) == 3


async def test_an_error_that_stays_is_not_tried_again(url: str) -> None:
    """R-10.1, R-10.5: neither what cannot pass, nor a conversation that does not fit."""
    for code in (FailureCode.MODEL_ERROR, FailureCode.CONTEXT_OVERFLOW):
        agent = reacting([failure(code, retryable=False), "too late"])
        async with flow(url, [agent]) as engine:
            run_id = await engine.submit("asks-models")
            row = await engine.wait_terminal(run_id)
            assert row.hot.code is code
            assert data_of(await engine.events(run_id), RetryEvent) == []


async def test_a_tool_that_may_be_repeated_is_tried_again_with_the_same_key(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.1, R-10.2, R-5.6: TOOL_UNAVAILABLE; the executions are attempts of one call."""
    keys: list[str] = []

    @tool(idempotent=True, retry=RetryPolicy(attempts_max=3, backoff_s=0.02), **WRITE)
    def order(context: object = None) -> str:
        """Fail twice, then work."""
        keys.append("tried")
        if len(keys) < 3:
            raise ToolUnavailable("down")
        return "ordered"

    zoo.registry.add(order)
    agent = scripted(
        "orders",
        lambda context: Finish(answer="ok") if context.turns else call("order"),
        tools=unasked("order"),
    )
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("orders")
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        retries = data_of(log, RetryEvent)
        assert [(item.subject, item.failed) for item in retries] == [("tool", 1), ("tool", 2)]
        assert {item.failure.code for item in retries} == {FailureCode.TOOL_UNAVAILABLE}
        (result,) = data_of(log, ResultEvent)
        assert (result.status, result.executions) == (ToolCallStatus.SUCCEEDED, 3)
        executions = await engine.core.reader.list_executions(run_id)
        assert [item.number for item in executions] == [1, 2, 3]
        assert len({item.tool_call_id for item in executions}) == 1
        assert len(data_of(log, ActionEvent)) == 1


@pytest.mark.parametrize("failures", [1, 5])
async def test_what_retries_could_not_mend_reaches_the_planner(
    url: str, zoo: ToolZoo, failures: int
) -> None:
    """R-10.1, R-5.4: a tool without retries, or whose retries are used up, is told as data."""
    agent = scripted(
        "tells",
        lambda context: (
            Finish(answer=context.turns[0].calls[0].error and "told")
            if context.turns
            else call("flaky", failures=failures)
        ),
        tools=unasked("flaky"),
    )
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("tells")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        assert result.status is ToolCallStatus.FAILED
        assert result.error is not None
        assert result.error.code is FailureCode.TOOL_UNAVAILABLE


def _poison(context: PlannerContext) -> Decision:
    if context.input == "poison":
        raise RuntimeError("a fault of the agent's code")
    return Finish(answer="well")


def _known(context: PlannerContext) -> Decision:
    if context.input == "poison":
        raise PlannerFailure(failure(FailureCode.INTERNAL, retryable=False))
    return Finish(answer="well")


@pytest.mark.parametrize(
    ("decide", "attempts", "code"),
    [
        (_poison, 2, FailureCode.RETRIES_EXHAUSTED),
        (_poison, 1, FailureCode.INTERNAL),
        (_known, 1, FailureCode.INTERNAL),
    ],
)
async def test_a_poison_run_is_given_up_and_takes_no_worker_down(
    url: str, decide: Callable[[PlannerContext], Decision], attempts: int, code: FailureCode
) -> None:
    """R-10.2, BUD-08: attempts are recorded and bounded; the same worker goes on with others."""
    async with flow(url, [scripted("poison", decide)]) as engine:
        worker = engine.worker
        run_id = await engine.submit("poison", "poison", max_attempts=attempts)
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is code
        rows = await engine.core.reader.list_attempts(run_id)
        assert len(rows) == attempts
        ends = [AttemptEnd.ERROR] * (attempts - 1) + [AttemptEnd.FINISHED]
        assert [item.end_reason for item in rows] == ends
        again = data_of(await engine.events(run_id), RetryEvent)
        assert [item.subject for item in again] == ["attempt"] * (attempts - 1)
        other = await engine.submit("poison", "fine")
        assert (await engine.wait_terminal(other)).hot.state is RunState.SUCCEEDED
        assert engine.worker is worker


def _misspelt(_: PlannerContext) -> Decision:
    return Sleep.model_validate({"seconds": 1})


async def test_a_planners_error_is_told_by_its_own_line_and_trace(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R-10.2: in one line what was wrong and where; the log shows the author's code, not ours."""
    async with flow(url, [scripted("sleepy", _misspelt)]) as engine:
        with caplog.at_level(logging.WARNING, "perdure.engine.worker"):
            run_id = await engine.submit("sleepy", max_attempts=2)
            row = await engine.wait_terminal(run_id)
        (ended,) = [
            event.failure
            for event in data_of(await engine.events(run_id), StateEvent)
            if event.failure is not None
        ]
    assert row.hot.code is FailureCode.RETRIES_EXHAUSTED
    assert ended.reason.startswith(
        "2 attempts failed; the last one: ValidationError: Sleep: duration: is missing; "
        "seconds: there is no such field (test_retries.py:"
    )
    told = [record for record in caplog.records if "failed" in record.getMessage()]
    assert len(told) == 2
    for record in told:
        assert "Sleep: duration: is missing" in record.getMessage()
        assert record.exc_info is not None
        frames = [frame.name for frame in traceback.extract_tb(record.exc_info[2])]
        assert frames == ["_misspelt", "model_validate"]


async def test_each_call_in_back_off_is_tried_at_its_own_time(url: str, zoo: ToolZoo) -> None:
    """R-10.1: two back-offs in one step, and a sibling's question that nobody has answered yet."""
    at: dict[str, list[float]] = {"soon": [], "later": []}

    def flaky(name: str) -> None:
        at[name].append(anyio.current_time())
        if len(at[name]) == 1:
            raise ToolUnavailable("not yet")

    @tool(retry=RetryPolicy(attempts_max=2, backoff_s=0.1, jitter=False))
    async def soon() -> str:
        """Fail once."""
        flaky("soon")
        return "here"

    @tool(retry=RetryPolicy(attempts_max=2, backoff_s=1.0, jitter=False))
    async def later() -> str:
        """Fail once."""
        flaky("later")
        return "here"

    zoo.registry.add(soon)
    zoo.registry.add(later)
    wish = calls(("soon", {}), ("later", {}), ("pay", {"amount": 1}))
    agent = scripted(
        "waits",
        lambda context: Finish(answer="done") if context.turns else wish,
        tools=["soon", "later", ToolGrant(name="pay", approve="always")],
    )
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("waits")
        (question,) = await engine.wait_waiting(run_id)
        log = await engine.events(run_id)
        assert [item.status for item in data_of(log, ResultEvent)] == ["succeeded"] * 2
        assert at["soon"][1] - at["soon"][0] >= 0.1
        assert at["later"][1] - at["later"][0] >= 1.0
        assert at["soon"][1] < at["later"][1]
        await engine.answer(question.interrupt_id, Answer.APPROVE)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_call_that_waits_for_a_place_was_not_begun(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decision 23, R-5.7: no row says that it was, so a crash in between asks nobody what became
    of it; once there is a place it runs, its sibling as well."""
    stuck = scripted("stuck", [call("hang"), Finish(answer=1)], tools=["hang"])
    pair = calls(("echo", {"value": 1}), ("echo", {"value": 2}))
    waits = scripted("waits", [pair, Finish(answer=2)], tools=["echo"])
    async with flow(url, [stuck, waits], zoo) as engine:
        monkeypatch.setattr(engine.tools, "_slots", Slots(1))
        first = await engine.submit("stuck")
        await zoo.wait_started("hang")
        second = await engine.submit("waits")
        await engine.wait_event(second, "action")
        assert await engine.core.reader.list_executions(second) == []
        zoo.open_gate()
        for run_id in (first, second):
            assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert len(await engine.core.reader.list_executions(second)) == 2
