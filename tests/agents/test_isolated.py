"""A user's planner off the engine's loop: what it does hurts its own decision only."""

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from perdure.agents.loop.isolated import IsolatedPlanner, PlannerBroken
from perdure.engine.context import PlannerContext
from perdure.engine.ports import PlannerFailure
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.failures import Failure, FailureCode
from perdure.tools.usercode import UserCode
from tests.agents.contexts import context_of


@pytest.fixture
async def code() -> AsyncGenerator[UserCode]:
    async with UserCode(pulse_s=0.02, pulses_missed_max=2, stop_s=0.5) as running:
        yield running


def attached(code: UserCode, planner: Any, **options: float) -> IsolatedPlanner:
    isolated = IsolatedPlanner(planner, **options)
    isolated.attach(code)
    return isolated


class AsyncPlanner:
    def __init__(self) -> None:
        self.thread = ""

    async def next_step(self, context: PlannerContext) -> Decision:
        self.thread = threading.current_thread().name
        return Finish(answer=context.input)


class SyncPlanner:
    def __init__(self) -> None:
        self.thread = ""

    def next_step(self, context: PlannerContext) -> Decision:
        self.thread = threading.current_thread().name
        return Finish(answer=context.input)


@pytest.mark.parametrize("make", [AsyncPlanner, SyncPlanner])
async def test_a_users_planner_decides_in_a_thread_of_its_own(
    code: UserCode, make: Callable[[], AsyncPlanner | SyncPlanner]
) -> None:
    planner = make()
    decision = await attached(code, planner).next_step(context_of(input="x"))
    assert decision == Finish(answer="x")
    assert planner.thread != threading.current_thread().name


async def test_a_bare_function_is_a_planner_and_a_dict_of_the_right_form_a_decision(
    code: UserCode,
) -> None:
    def decide(context: PlannerContext) -> Any:
        return {"kind": "finish", "answer": context.input}

    assert await attached(code, decide).next_step(context_of(input=1)) == Finish(answer=1)


async def test_the_planners_own_failure_passes_through(code: UserCode) -> None:
    failure = Failure(code=FailureCode.CONTEXT_OVERFLOW, reason="too long")

    def decide(_: PlannerContext) -> Decision:
        raise PlannerFailure(failure, retry_after_s=3)

    with pytest.raises(PlannerFailure) as caught:
        await attached(code, decide).next_step(context_of())
    assert (caught.value.failure, caught.value.retry_after_s) == (failure, 3)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(1), KeyboardInterrupt()])
@pytest.mark.parametrize("asynchronous", [True, False])
async def test_whatever_it_raises_is_a_fault_of_the_agents_code(
    code: UserCode, error: BaseException, asynchronous: bool
) -> None:
    def decide(_: PlannerContext) -> Decision:
        raise error

    async def decide_later(_: PlannerContext) -> Decision:
        await checkpoint()
        raise error

    with pytest.raises(PlannerBroken, match=type(error).__name__) as raised:
        await attached(code, decide_later if asynchronous else decide).next_step(context_of())
    assert raised.value.__cause__ is error  # whose traceback shows the author where


@pytest.mark.parametrize("value", [None, "finish", {"kind": "dance"}, 5])
async def test_what_is_no_decision_is_a_fault_of_the_agents_code(
    code: UserCode, value: object
) -> None:
    def decide(_: PlannerContext) -> Any:
        return value

    with pytest.raises(PlannerBroken, match="no decision"):
        await attached(code, decide).next_step(context_of())


async def test_a_planner_that_never_decides_is_given_up(code: UserCode) -> None:
    release = threading.Event()

    def decide(_: PlannerContext) -> Any:
        return release.wait()

    planner = attached(code, decide, timeout_s=0.05, grace_s=0.01)
    try:
        with anyio.fail_after(30), pytest.raises(PlannerFailure) as caught:
            await planner.next_step(context_of())
        assert caught.value.failure.code is FailureCode.INTERNAL
        assert caught.value.failure.retryable
        assert code.lost_slots == 1
    finally:
        release.set()


async def test_a_cancel_is_over_at_once_though_the_planner_swallows_it(code: UserCode) -> None:
    begun = threading.Event()

    async def decide(_: PlannerContext) -> Decision:
        begun.set()
        with suppress(anyio.get_cancelled_exc_class()):
            await anyio.sleep(60)
        await anyio.sleep(60)
        return Finish()

    planner = attached(code, decide, grace_s=0.02)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(planner.next_step, context_of())
            await anyio.to_thread.run_sync(begun.wait)
            group.cancel_scope.cancel()


async def test_a_planner_that_was_not_attached_says_so() -> None:
    with pytest.raises(RuntimeError, match="attached"):
        await IsolatedPlanner(SyncPlanner()).next_step(context_of())


def test_something_without_next_step_is_refused() -> None:
    with pytest.raises(TypeError, match="next_step"):
        IsolatedPlanner(object())  # pyright: ignore[reportArgumentType]  # the mistake under test
