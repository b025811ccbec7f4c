"""A call that several runs come by with their history is made by one; the others ask first."""

from datetime import timedelta
from typing import Any

import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.ops.verify import verify
from perdure.ops.verify.checks import Finding
from perdure.ops.verify.outside import read_journal
from perdure.protocol.decisions import Ask, Decision, Finish, GiveUp
from perdure.protocol.states import Answer, InterruptKind, RunState
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, RetryRequest, fork, retry
from perdure.service.principal import LOCAL
from perdure.testing.embedded import Embedded, call, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import Performed, ToolContext, ToolError, tool
from tests.flow.test_breakpoints import go_on
from tests.flow.till import COMPENSATE
from tests.flow.world import flow

STOPPED = {RunState.SUCCEEDED, RunState.WAITING_HUMAN}
PAUSED: list[dict[str, Any]] = [{"at": "before_tool"}]


def payer(name: str = "pay", *, asks: bool = False) -> HostedAgent:
    """An agent that pays once, and nobody is asked; it may then ask something."""

    def decide(context: PlannerContext) -> Decision:
        script = (call(name, amount=5), *([Ask(title="?")] if asks else []))
        done = context.step_index
        return script[done] if done < len(script) else Finish(answer="done")

    return scripted("payer", decide, tools=unasked(name))


async def retried(engine: Embedded, run_id: str, **wish: Any) -> str:
    """Retry a run, without its breakpoints."""
    wish["options"] = {"breakpoints": [], **wish.get("options", {})}
    made = await retry(Service(core=engine.core), LOCAL, run_id, RetryRequest.model_validate(wish))
    return made.run.run_id


async def cut_off(engine: Embedded) -> tuple[str, str]:
    """Start a run and cancel it before its payment has begun; return its id and that checkpoint."""
    run_id = await engine.submit("payer", breakpoints=PAUSED)
    await engine.wait_waiting(run_id)
    (at, *_) = await engine.core.reader.list_checkpoints(run_id, before=None, limit=9)
    await engine.cancel(run_id)
    await engine.wait_terminal(run_id)
    return run_id, at.checkpoint_id


async def ended(engine: Embedded, run_id: str) -> None:
    """Wait until a run has succeeded."""
    assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def is_sound(engine: Embedded, zoo: ToolZoo) -> None:
    """Fail when `verify` finds anything in the journal of the payments."""
    found: list[Finding] = []
    await verify(engine.core.reader, on_finding=found.append, journal=read_journal(zoo.journal))
    assert not found


@pytest.mark.parametrize("answer", [Answer.HAPPENED, Answer.RETRY])
async def test_a_second_retry_asks_before_it_makes_the_call_that_the_first_has_made(
    url: str, zoo: ToolZoo, answer: Answer
) -> None:
    """R-5.7, R-10.3: found by the simulation (seed 9309). Both retries had paid, under one key."""
    async with flow(url, [payer()], zoo) as engine:
        first, _ = await cut_off(engine)
        await ended(engine, await retried(engine, first))
        assert len(zoo.payments()) == 1
        second = await retried(engine, first)
        (asked,) = await engine.wait_waiting(second)
        assert (asked.kind, len(zoo.payments())) == (InterruptKind.OUTCOME, 1)
        await engine.answer(asked.interrupt_id, answer)
        await ended(engine, second)
        assert len(zoo.payments()) == (2 if answer is Answer.RETRY else 1)
        await is_sound(engine, zoo)


async def test_a_retry_from_a_checkpoint_before_the_call_asks_before_it_makes_it_again(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7, R-7.4: the retry in between is behind the checkpoint; its payment was made again."""
    async with flow(url, [payer(asks=True)], zoo) as engine:
        first, at = await cut_off(engine)
        between = await retried(engine, first)
        await engine.wait_waiting(between)
        await engine.cancel(between)
        await engine.wait_terminal(between)
        made = await retried(engine, between, checkpoint_id=at)
        (asked,) = await engine.wait_waiting(made)
        assert (asked.kind, len(zoo.payments())) == (InterruptKind.OUTCOME, 1)
        await engine.answer(asked.interrupt_id, Answer.SKIP)
        (asked,) = await engine.wait_waiting(made)
        assert (asked.kind, len(zoo.payments())) == (InterruptKind.INPUT, 1)


async def test_a_retry_asks_before_it_makes_a_call_that_an_older_one_is_to_make(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7: of two that have not begun the older one need not ask."""
    async with flow(url, [payer()], zoo) as engine:
        first, _ = await cut_off(engine)
        await engine.kill_worker()
        later = await engine.core.reader.now() + timedelta(hours=1)
        older = await retried(engine, first, options={"after": later.isoformat()})
        await engine.start_worker()
        younger = await retried(engine, first, options={"multitask_strategy": "optimistic"})
        (asked,) = await engine.wait_waiting(younger)
        assert (asked.kind, zoo.payments()) == (InterruptKind.OUTCOME, [])
        assert (await engine.run(older)).hot.state is RunState.PENDING
        await engine.answer(asked.interrupt_id, Answer.RETRY)
        await ended(engine, younger)
        assert len(zoo.payments()) == 1


async def test_two_retries_share_the_effect_of_a_tool_that_heeds_keys(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.6: nobody is asked, and it is had once."""
    async with flow(url, [payer("pay_idempotent")], zoo) as engine:
        first, _ = await cut_off(engine)
        for _ in range(2):
            await ended(engine, await retried(engine, first))
        assert len({one["key"] for one in zoo.payments()}) == 1


async def test_a_retry_of_a_fork_makes_the_call_of_a_run_that_goes_on_under_a_key_of_its_own(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.6, R-7.4: the fork had ended before it began; its retry and the first run paid under one."""
    async with flow(url, [payer()], zoo) as engine:
        first = await engine.submit("payer", breakpoints=PAUSED)
        await engine.wait_waiting(first)
        await engine.kill_worker()
        made = await fork(Service(core=engine.core), LOCAL, first, ForkRequest())
        await engine.cancel(made.run.run_id)
        await engine.wait_terminal(made.run.run_id)
        await engine.start_worker()
        await ended(engine, await retried(engine, made.run.run_id))
        await go_on(engine, first)
        await ended(engine, first)
        assert len({one["key"] for one in zoo.payments()}) == len(zoo.payments()) == 2
        await is_sound(engine, zoo)


async def test_what_a_retry_had_not_taken_over_is_taken_over_by_its_own_retry(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7, R-10.3: it was forgotten; the planner was asked anew, and a payment made twice."""
    async with flow(url, [payer("pay_late")], zoo) as engine:
        first = await engine.submit("payer")
        await zoo.wait_started("pay_late")
        await engine.cancel(first)
        await engine.wait_terminal(first)
        await engine.kill_worker()
        between = await retried(engine, first)
        await engine.cancel(between)
        await engine.wait_terminal(between)
        zoo.open_gate()
        await engine.start_worker()
        made = await retried(engine, between)
        (asked,) = await engine.wait_waiting(made)
        assert asked.kind is InterruptKind.OUTCOME
        await engine.answer(asked.interrupt_id, Answer.HAPPENED)
        await ended(engine, made)
        assert not await engine.core.reader.list_executions(made)


async def test_a_call_whose_result_was_refused_may_have_acted(url: str, zoo: ToolZoo) -> None:
    """R-5.6, R-5.7: a second retry had paid again, unasked, as the first one's payment counts as
    failed."""
    made: list[str] = []

    @tool(side_effect="external", idempotent=False, timeout_s=30, compensation="by hand")
    async def pay_oddly(context: ToolContext, amount: int) -> Any:
        """Pay, and answer what cannot be stored."""
        del amount
        made.append(context.effect_key)
        return object()

    zoo.registry.add(pay_oddly)

    async with flow(url, [payer("pay_oddly")], zoo) as engine:
        run_id, _ = await cut_off(engine)
        first = await retried(engine, run_id)
        assert (await engine.wait_terminal(first)).hot.state is RunState.SUCCEEDED
        (asked,) = await engine.wait_waiting(await retried(engine, run_id))
        assert asked.kind is InterruptKind.OUTCOME
        assert len(made) == 1
        await engine.answer(asked.interrupt_id, Answer.HAPPENED)


async def test_a_payment_that_is_still_there_is_asked_about_though_another_was_refunded(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7, R-9.4: two retries had paid, the second one as a person wished. When the first one's
    payment was refunded a third retry paid once more, unasked."""
    paid, refunds = list[int](), list[Any]()

    def refund(performed: Performed) -> None:
        refunds.append(performed.output)

    @tool(side_effect="external", idempotent=False, timeout_s=60, compensate=refund)
    async def order(amount: int) -> int:
        """Order; a second execution orders again."""
        del amount
        paid.append(len(paid) + 1)
        return len(paid)

    zoo.registry.add(order)
    beside: dict[str, Any] = {"options": {"multitask_strategy": "optimistic"}}
    async with flow(url, [payer("order", asks=True)], zoo) as engine:
        run_id, _ = await cut_off(engine)
        first = await retried(engine, run_id)
        await engine.wait_waiting(first)
        second = await retried(engine, run_id, **beside)
        (asked,) = await engine.wait_waiting(second)
        await engine.answer(asked.interrupt_id, Answer.RETRY)
        await engine.wait_until(second, lambda row: row.hot.step_index == 1)
        await engine.wait_waiting(second)
        await engine.cancel(second)
        await engine.wait_terminal(second)
        await engine.cancel(first, options=COMPENSATE)
        await engine.wait_terminal(first)
        assert (paid, refunds) == ([1, 2], [1])
        (asked,) = await engine.wait_waiting(await retried(engine, run_id, **beside))
        assert (asked.kind, paid) == (InterruptKind.OUTCOME, [1, 2])


async def test_a_redrive_does_not_ask_about_a_failed_call_that_a_plain_retry_leaves(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.7, R-10.3: the older retry has not begun, and will not make the call anew."""
    made = list[str]()

    @tool(side_effect="external", idempotent=False, timeout_s=60, compensation="by hand")
    async def order(context: ToolContext) -> str:
        """Order, when it is not the first time."""
        made.append(context.run_id)
        if len(made) == 1:
            raise ToolError("closed")
        return "ordered"

    zoo.registry.add(order)

    def decide(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("order")
        return Finish(answer="done") if context.facts.retry_of else GiveUp(reason="no")

    async with flow(url, [scripted("payer", decide, tools=unasked("order"))], zoo) as engine:
        first = await engine.submit("payer")
        await engine.wait_terminal(first)
        later = await engine.core.reader.now() + timedelta(hours=1)
        await retried(engine, first, options={"after": later.isoformat()})
        beside = {"multitask_strategy": "optimistic"}
        second = await retried(engine, first, redrive=True, options=beside)
        row = await engine.wait_until(second, lambda row: row.hot.state in STOPPED)
        assert (row.hot.state, made) == (RunState.SUCCEEDED, [first, second])
