"""Each limit of time has its own code and event; waiting for people is not working (R-10.4)."""

import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Ask, Decision, Finish, Sleep
from perdure.protocol.events import LateEvent, ResultEvent, TimeoutEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import status_of, waiting_on
from perdure.protocol.states import Answer, RunState, RunStatus, ToolCallStatus, WaitingOn
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import call, calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import Returned, not_happened, tool
from tests.flow.world import data_of, flow, swept_until


def asking(context: PlannerContext) -> Decision:
    """Ask, then finish with the answer."""
    return Finish(answer=context.turns[0].asks[0].value) if context.turns else Ask(title="?")


async def test_the_runs_time_stands_still_while_a_person_is_waited_for(url: str) -> None:
    """R-10.4, R-2.5: an answer after twice the run's time is in time; the wait is counted apart."""
    clock = ShiftingClock()
    async with flow(url, [scripted("asks", asking)], clock=clock) as engine:
        run_id = await engine.submit("asks", timeouts={"run_s": 60})
        (question,) = await engine.wait_waiting(run_id)
        row = await engine.run(run_id)
        assert waiting_on(row.hot) is WaitingOn.PERSON
        assert row.hot.waiting_since is not None
        clock.advance(120)
        await engine.sweep()
        assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="late")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert row.hot.counters.waiting_ms >= 120_000


@pytest.mark.parametrize("how", ["tool", "asleep", "queued"])
async def test_a_run_whose_time_is_over_ends_wherever_it_stands(
    url: str, zoo: ToolZoo, how: str
) -> None:
    """R-10.4, decision 36: held, parked or never claimed: RUN_TIMEOUT, status TIMED_OUT."""

    def decide(_: PlannerContext) -> Decision:
        return call("hang") if how == "tool" else Sleep(duration=timedelta(days=1))

    async with flow(url, [scripted("slow", decide, tools=["hang"])], zoo) as engine:
        if how == "queued":
            await engine.kill_worker()
        run_id = await engine.submit("slow", timeouts={"run_s": 0.3})
        if how == "queued":
            await swept_until(engine, run_id, lambda row: row.hot.state is not RunState.PENDING)
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.RUN_TIMEOUT
        assert status_of(row.hot) is RunStatus.TIMED_OUT
        (told,) = data_of(await engine.events(run_id), TimeoutEvent)
        assert (told.subject, told.limit_ms) == ("run", 300)


async def test_a_tool_that_takes_too_long_is_told_to_the_planner(url: str, zoo: ToolZoo) -> None:
    """R-10.4, TIM-03: the tool's time, with its own code and event; the run goes on."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="gave up") if context.turns else call("hang")

    async with flow(url, [scripted("patient", decide, tools=["hang"])], zoo) as engine:
        run_id = await engine.submit("patient", timeouts={"tool_s": 0.2})
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        (told,) = data_of(log, TimeoutEvent)
        assert (told.subject, told.limit_ms) == ("tool", 200)
        (result,) = data_of(log, ResultEvent)
        assert result.status is ToolCallStatus.TIMED_OUT
        assert result.error is not None
        assert result.error.code is FailureCode.TOOL_TIMEOUT


@pytest.mark.parametrize("trusted", [True, False], ids=["inline", "user loop"])
async def test_a_result_that_comes_as_the_runs_time_is_over_is_the_calls(
    url: str, zoo: ToolZoo, trusted: bool
) -> None:
    """R-10.4, decision 3: found by the simulation (seed 15061). The effect was told as late, and the
    call as one of unknown outcome, though its result was there before the run was ended."""

    @tool(trusted=trusted)
    async def dutiful() -> str:
        """Finish when it is cancelled."""
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep_forever()  # noqa: ASYNC104  # what this tool is for
        return "done"

    zoo.registry.add(dutiful)
    agent = scripted("slow", [call("dutiful")], tools=["dutiful"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("slow", timeouts={"run_s": 0.3})
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.RUN_TIMEOUT
        log = await engine.events(run_id)
        (result,) = data_of(log, ResultEvent)
        assert (result.status, result.output) == (ToolCallStatus.SUCCEEDED, "done")
        assert data_of(log, LateEvent) == []


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_what_a_lookup_tells_counts_for_more_than_a_call_that_was_cut_off(
    url: str, zoo: ToolZoo, how: str
) -> None:
    """R-5.7, decision 3: an execution that was stopped does not know its outcome, its tool does."""
    options: dict[str, Any] = {"timeouts": {"run_s": 0.3}} if how == "deadline" else {}
    agent = scripted("slow", [call("pay_then_hang", amount=3)], tools=unasked("pay_then_hang"))
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("slow", **options)
        await zoo.wait_started("pay_then_hang")
        if how == "cancel":
            await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        (result,) = data_of(log, ResultEvent)
        assert (result.status, result.by) == (ToolCallStatus.SUCCEEDED, "lookup")
        assert data_of(log, LateEvent) == []


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_result_that_comes_while_the_end_is_prepared_is_the_calls(
    url: str, zoo: ToolZoo, how: str
) -> None:
    """R-9.3, decision 3: it came while another call's tool was asked, and was lost altogether."""
    is_asked, may_tell = threading.Event(), threading.Event()

    async def find(effect_key: str) -> Returned:
        del effect_key
        is_asked.set()
        await anyio.to_thread.run_sync(may_tell.wait)
        return not_happened()

    @tool(side_effect="write", idempotent=False, timeout_s=60, lookup=find, compensation="none")
    async def hangs() -> str:
        """Never answer."""
        zoo.begin("hangs")
        await anyio.sleep_forever()
        return ""

    zoo.registry.add(hangs)
    options: dict[str, Any] = {"timeouts": {"run_s": 0.3}} if how == "deadline" else {}
    script = [calls(("hangs", {}), ("pay_late", {"amount": 3}))]
    agent = scripted("two", script, tools=unasked("hangs", "pay_late"))
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("two", **options)
        await zoo.wait_started("hangs")
        await zoo.wait_started("pay_late")
        if how == "cancel":
            await engine.cancel(run_id)
        await anyio.to_thread.run_sync(is_asked.wait)
        zoo.open_gate()
        while not zoo.payments():  # noqa: ASYNC110 (paid on another thread)
            await anyio.sleep(0.002)
        await anyio.sleep(0.05)  # until its result has crossed to the engine's loop
        may_tell.set()
        await engine.wait_terminal(run_id)
        results = {
            result.status: result.output
            for result in data_of(await engine.events(run_id), ResultEvent)
        }
        assert results[ToolCallStatus.SUCCEEDED] == {"paid": 3}


async def test_what_comes_after_a_lost_attempt_was_given_up_is_evidence(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.3, decisions 17 and 27: it went to the results of an attempt that nobody wrote any more."""
    agent = scripted("pays", [call("pay_late", amount=3)], tools=unasked("pay_late"))
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("pays")
        await zoo.wait_started("pay_late")
        await engine.core.store.take_away(run_id, "as the test asks")
        while engine.worker.held_runs:  # noqa: ASYNC110 (until the attempt has given up waiting)
            await anyio.sleep(0.01)
        zoo.open_gate()
        await engine.wait_event(run_id, "late")
        (late,) = data_of(await engine.events(run_id), LateEvent)
        assert (late.status, late.output) == (ToolCallStatus.SUCCEEDED, {"paid": 3})
