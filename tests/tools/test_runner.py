"""Timeouts, cancellation, lost slots: a bad tool hurts its own call only (R-5.8, F11, F40, TIM-06)."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest

from perdure.engine.ports import ToolOutcome, ToolRunner
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ToolCallStatus
from perdure.testing.tools import ToolZoo, invocation_of
from perdure.tools import (
    LocalToolRunner,
    ToolContext,
    ToolRegistry,
    tool,
)
from perdure.tools.usercode import UserCode

S = 0.2


@pytest.fixture
async def runner(zoo: ToolZoo) -> AsyncIterator[LocalToolRunner]:
    async with LocalToolRunner(zoo.registry, grace_s=S) as runner:
        yield runner
        zoo.open_gate()


class Late:
    """Collects late outcomes and the threads that they were told on."""

    def __init__(self) -> None:
        self.outcomes: list[ToolOutcome] = []
        self.threads: set[int] = set()
        self.told = anyio.Event()

    def __call__(self, outcome: ToolOutcome) -> None:
        self.outcomes.append(outcome)
        self.threads.add(threading.get_ident())
        self.told.set()

    async def wait(self) -> ToolOutcome:
        with anyio.fail_after(30):
            await self.told.wait()
        assert self.threads == {threading.get_ident()}
        (outcome,) = self.outcomes
        return outcome


def code_of(outcome: ToolOutcome) -> FailureCode | None:
    return None if outcome.result.error is None else outcome.result.error.code


async def test_the_runner_keeps_the_engines_contract(zoo: ToolZoo) -> None:
    runner: ToolRunner = LocalToolRunner(zoo.registry)
    assert runner.find("echo", None) is zoo.spec("echo")
    assert runner.problem_with_args(zoo.spec("slow"), {"seconds": "x"}) is not None


async def test_user_code_runs_off_the_engines_loop_unless_it_is_trusted(
    zoo: ToolZoo, runner: LocalToolRunner
) -> None:
    @tool(trusted=True)
    async def inline() -> int:
        return threading.get_ident()

    zoo.registry.add(inline)
    here = threading.get_ident()
    assert (await runner.invoke(zoo.invocation("which_thread"))).result.output != here
    assert (await runner.invoke(invocation_of(inline.spec))).result.output == here


@pytest.mark.parametrize("name", ["slow", "hang", "swallow_cancel"])
async def test_a_reading_tool_that_takes_too_long_times_out(
    zoo: ToolZoo, runner: LocalToolRunner, name: str
) -> None:
    args = {"seconds": 60.0} if name == "slow" else None
    with anyio.fail_after(30):
        outcome = await runner.invoke(zoo.invocation(name, args, timeout_s=S))
    assert outcome.result.status is ToolCallStatus.TIMED_OUT
    assert code_of(outcome) is FailureCode.TOOL_TIMEOUT
    assert outcome.result.error is not None
    assert outcome.result.error.retryable


async def test_a_side_effect_that_takes_too_long_is_unknown_unless_it_may_be_repeated(
    zoo: ToolZoo, runner: LocalToolRunner
) -> None:
    outcome = await runner.invoke(zoo.invocation("pay_then_hang", {"amount": 5}, timeout_s=S))
    assert outcome.result.status is ToolCallStatus.UNKNOWN
    assert code_of(outcome) is FailureCode.TOOL_OUTCOME_UNKNOWN
    assert len(zoo.payments()) == 1


@pytest.mark.parametrize("name", ["hang", "swallow_cancel"])
async def test_an_abandoned_execution_that_ends_is_told_once_on_the_engines_loop(
    zoo: ToolZoo, runner: LocalToolRunner, name: str
) -> None:
    late = Late()
    outcome = await runner.invoke(zoo.invocation(name, timeout_s=S, on_late=late))
    assert outcome.result.status is ToolCallStatus.TIMED_OUT
    assert late.outcomes == []
    zoo.open_gate()
    told = await late.wait()
    assert (told.result.status, told.result.output) == (ToolCallStatus.SUCCEEDED, "late")
    assert runner.lost_slots == 0


async def test_a_cancelled_call_whose_tool_stops_reports_it_and_stays_cancelled(
    zoo: ToolZoo, runner: LocalToolRunner
) -> None:
    late = Late()
    await cancelled(zoo, runner, "finish_when_cancelled", late)
    told = await late.wait()
    assert told.result.output == "finished all the same"


async def test_a_cancelled_reading_tool_ends_as_cancelled(
    zoo: ToolZoo, runner: LocalToolRunner
) -> None:
    late = Late()
    await cancelled(zoo, runner, "slow", late, {"seconds": 60.0})
    assert (await late.wait()).result.status is ToolCallStatus.CANCELLED


async def test_a_cancelled_side_effect_is_unknown(zoo: ToolZoo, runner: LocalToolRunner) -> None:
    late = Late()
    await cancelled(zoo, runner, "pay_then_hang", late, {"amount": 5})
    assert (await late.wait()).result.status is ToolCallStatus.UNKNOWN


@pytest.mark.parametrize("name", ["hang", "swallow_cancel", "block"])
async def test_a_cancelled_call_whose_tool_goes_on_is_abandoned_after_the_grace(
    zoo: ToolZoo, runner: LocalToolRunner, name: str
) -> None:
    late = Late()
    with anyio.fail_after(30):
        await cancelled(zoo, runner, name, late)
    assert late.outcomes == []
    zoo.open_gate()
    assert (await late.wait()).result.output == "late"


async def cancelled(
    zoo: ToolZoo, runner: LocalToolRunner, name: str, late: Late, args: object = None
) -> None:
    ended: list[ToolOutcome] = []

    async def invoke() -> None:
        invocation = zoo.invocation(name, args, on_late=late)
        ended.append(await runner.invoke(invocation))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(invoke)
        await zoo.wait_started(name)
        tasks.cancel_scope.cancel()
    assert ended == []


async def test_a_swallowed_cancellation_costs_nothing_while_it_is_ignored(
    zoo: ToolZoo, runner: LocalToolRunner
) -> None:
    await runner.invoke(zoo.invocation("swallow_cancel", timeout_s=S))
    assert (await runner.invoke(zoo.invocation("echo", {"value": 1}))).result.output == 1


async def test_a_tool_that_blocks_the_user_loop_delays_its_neighbours_and_no_more(
    zoo: ToolZoo, caplog: pytest.LogCaptureFixture
) -> None:
    """F40, R-5.8."""
    late = Late()
    user_code = UserCode(pulse_s=0.02, pulses_missed_max=3)
    async with user_code, LocalToolRunner(zoo.registry, user_code=user_code) as runner:
        block = zoo.invocation("block", timeout_s=S, on_late=late)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(runner.invoke, block)
                await zoo.wait_started("block")
                # handed to the blocked loop, and moved to its successor
                outcome = await runner.invoke(zoo.invocation("echo", {"value": 1}))
                assert outcome.result.output == 1
        assert user_code.generation == 2
        said = f"the user loop was blocked by block of run {block.run_id}: replaced by"
        assert said in caplog.text
        assert runner.lost_slots == 1
        zoo.open_gate()
        assert (await late.wait()).result.output == "late"
        assert runner.lost_slots == 0


async def test_a_finished_neighbour_of_a_blocking_tool_gets_its_result(zoo: ToolZoo) -> None:
    user_code = UserCode(pulse_s=0.02, pulses_missed_max=3)
    async with user_code, LocalToolRunner(zoo.registry, user_code=user_code) as runner:
        results: list[ToolOutcome] = []

        async def invoke(name: str) -> None:
            results.append(await runner.invoke(zoo.invocation(name, timeout_s=2)))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(invoke, "echo")
                tasks.start_soon(invoke, "block")
                while not results:  # noqa: ASYNC110 (the first result is awaited, not an event)
                    await anyio.sleep(0.002)
                assert results[0].result.status is ToolCallStatus.SUCCEEDED
                zoo.open_gate()


@pytest.mark.slow
async def test_twenty_hung_threads_end_their_calls_and_the_worker_asks_to_be_recycled(
    zoo: ToolZoo,
) -> None:
    """F11, TIM-06: hung threads are lost slots, which are counted and not worked with."""
    async with LocalToolRunner(zoo.registry, slots_max=10, lost_slots_max=20) as runner:
        outcomes: list[ToolOutcome] = []

        async def invoke() -> None:
            outcomes.append(await runner.invoke(zoo.invocation("hang", timeout_s=1.0)))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(invoke)
            assert (runner.lost_slots, runner.wants_recycle) == (10, False)
            assert runner.free_slots == 10
            async with anyio.create_task_group() as tasks:
                for _ in range(10):
                    tasks.start_soon(invoke)
            assert (runner.lost_slots, runner.wants_recycle) == (20, True)
            assert runner.free_slots == 0
            refused = await runner.invoke(zoo.invocation("echo_sync"))
        assert code_of(refused) is FailureCode.TOOL_UNAVAILABLE
        assert {outcome.result.status for outcome in outcomes} == {ToolCallStatus.TIMED_OUT}
        assert zoo.executions["hang"] == 20
        zoo.open_gate()


async def test_a_call_that_gets_no_slot_in_time_never_started(zoo: ToolZoo) -> None:
    async with LocalToolRunner(zoo.registry, slots_max=1) as runner:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.invoke, zoo.invocation("hang"))
            await zoo.wait_started("hang")
            outcome = await runner.invoke(zoo.invocation("pay", {"amount": 1}, timeout_s=S))
            zoo.open_gate()
            assert code_of(outcome) is FailureCode.TOOL_UNAVAILABLE
            assert outcome.result.error is not None
            assert outcome.result.error.retryable
        assert (await runner.invoke(zoo.invocation("echo", {"value": 1}))).result.output == 1
    assert zoo.payments() == []


async def test_a_call_cancelled_while_it_waits_for_a_slot_gives_its_place_up(zoo: ToolZoo) -> None:
    async with LocalToolRunner(zoo.registry, slots_max=1) as runner:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(runner.invoke, zoo.invocation("hang"))
            await zoo.wait_started("hang")
            with anyio.move_on_after(0.01):
                await runner.invoke(zoo.invocation("echo"))
            zoo.open_gate()
        assert runner.free_slots == 1


async def test_parallel_calls_keep_their_own_results(zoo: ToolZoo, runner: LocalToolRunner) -> None:
    """F42, R-4.2."""
    outcomes: dict[int, ToolOutcome] = {}

    async def invoke(number: int) -> None:
        if number == 3:
            invocation = zoo.invocation("raises", {"what": "Exception"})
        else:
            invocation = zoo.invocation("echo", {"value": number})
        outcomes[number] = await runner.invoke(invocation)

    async with anyio.create_task_group() as tasks:
        for number in range(200):
            tasks.start_soon(invoke, number)
    assert code_of(outcomes.pop(3)) is FailureCode.TOOL_ERROR
    assert all(outcome.result.output == number for number, outcome in outcomes.items())


async def test_the_rate_limit_makes_calls_wait_and_refuses_what_would_wait_too_long() -> None:
    """R-5.1."""

    @tool(rate_limit_per_minute=2)
    async def limited() -> str:
        return "done"

    async with LocalToolRunner(ToolRegistry([limited])) as runner:
        invocation = invocation_of(limited.spec, timeout_s=S)
        outcomes = [await runner.invoke(invocation) for _ in range(3)]
    assert [code_of(outcome) for outcome in outcomes] == [None, None, FailureCode.TOOL_UNAVAILABLE]


async def test_a_rate_limited_call_goes_on_when_its_turn_comes() -> None:
    @tool(rate_limit_per_minute=600)
    async def limited() -> str:
        return "done"

    async with LocalToolRunner(ToolRegistry([limited])) as runner:
        for _ in range(603):
            outcome = await runner.invoke(invocation_of(limited.spec))
            assert outcome.result.output == "done"


async def test_lookup_tells_what_became_of_a_payment(zoo: ToolZoo, runner: LocalToolRunner) -> None:
    """R-5.1, R-5.7."""
    invocation = zoo.invocation("pay_with_lookup", {"amount": 5})
    before = await runner.lookup(invocation)
    assert before is not None
    assert before.result.error is not None
    assert (before.result.error.retryable, before.result.error.details) == (
        True,
        {"happened": False},
    )
    await runner.invoke(invocation)
    after = await runner.lookup(invocation)
    assert after is not None
    assert after.result.status is ToolCallStatus.SUCCEEDED
    assert after.result.external_ref == "key-1"


async def test_a_lookup_that_raises_or_is_missing_cannot_say() -> None:
    async def find(effect_key: str, context: ToolContext) -> None:
        raise SystemExit(f"{effect_key} {context.run_id}")

    @tool(lookup=find)
    def looked_up() -> None: ...

    @tool
    def without() -> None: ...

    async with LocalToolRunner(ToolRegistry([looked_up, without])) as runner:
        assert await runner.lookup(invocation_of(looked_up.spec)) is None
        assert await runner.lookup(invocation_of(without.spec)) is None


class TestInline:
    """Trusted tools, and every tool of a runner for simulations."""

    async def test_errors_timeouts_and_own_cancellations_are_handled_alike(
        self, zoo: ToolZoo
    ) -> None:
        async with LocalToolRunner(zoo.registry, inline=True) as runner:
            for name, args in (
                ("cancels_itself", {}),
                ("raises", {"what": "SystemExit"}),
                ("raises_group", {}),
            ):
                outcome = await runner.invoke(zoo.invocation(name, args))
                assert code_of(outcome) is FailureCode.TOOL_ERROR
            slow = zoo.invocation("slow", {"seconds": 60.0}, timeout_s=0.01)
            outcome = await runner.invoke(slow)
        assert outcome.result.status is ToolCallStatus.TIMED_OUT

    async def test_a_cancel_of_the_caller_passes_through(self, zoo: ToolZoo) -> None:
        late = Late()
        async with LocalToolRunner(zoo.registry, inline=True) as runner:
            await cancelled(zoo, runner, "slow", late, {"seconds": 60.0})
            assert late.outcomes == []
            await cancelled(zoo, runner, "finish_when_cancelled", late)
        assert (await late.wait()).result.output == "finished all the same"


class TestStopping:
    """Leaving the runner never hangs on user code."""

    @pytest.mark.parametrize("name", ["hang", "block", "swallow_cancel"])
    async def test_stuck_code_is_left_behind(self, zoo: ToolZoo, name: str) -> None:
        user_code = UserCode(stop_s=0.1)
        with anyio.fail_after(30):
            async with user_code, LocalToolRunner(zoo.registry, user_code=user_code) as runner:
                await runner.invoke(zoo.invocation(name, timeout_s=0.05))

    async def test_tasks_under_way_are_cancelled(self, zoo: ToolZoo) -> None:
        late = Late()
        async with LocalToolRunner(zoo.registry, grace_s=0.0) as runner:
            await runner.invoke(zoo.invocation("slow", {"seconds": 60}, timeout_s=S, on_late=late))
            await late.wait()
        names = [thread.name for thread in threading.enumerate()]
        assert not any(name.startswith(user_name(runner)) for name in names)


def user_name(runner: LocalToolRunner) -> str:
    return runner.user_code.name


async def test_a_place_is_kept_before_a_call_and_given_back_once() -> None:
    """Decision 23: with the last slot taken, or its rate used up, a call is not begun yet."""

    @tool(rate_limit_per_minute=2)
    def rare() -> str:
        """Be rare."""
        return "done"

    @tool
    def plain() -> str:
        """Be plain."""
        return "done"

    async with LocalToolRunner(ToolRegistry([rare, plain]), slots_max=1) as runner:
        kept = runner.reserve(plain.spec, 1.0)
        assert kept is not None
        assert runner.reserve(plain.spec, 1.0) is None
        kept.give_back()
        kept.give_back()
        for _ in range(2):
            again = runner.reserve(rare.spec, 60.0)
            assert again is not None
            made = replace(invocation_of(rare.spec), place=again)
            assert (await runner.invoke(made)).result.output == "done"
            assert runner.reserve(plain.spec, 1.0) is None
            again.give_back()
        assert runner.reserve(rare.spec, 60.0) is None
        assert runner.reserve(rare.spec, 1.0) is not None, "it is refused when it is run"
