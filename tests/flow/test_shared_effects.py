"""Effects that runs share: none is undone for one and counted as done by another, none doubled."""

import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.kin import Kin
from perdure.engine.sharing import undone_elsewhere
from perdure.protocol.decisions import Ask, Decision, Finish, GiveUp
from perdure.protocol.errors import Conflict
from perdure.protocol.runs import next_actions
from perdure.protocol.states import Answer, NextAction, RunState, ToolCallStatus
from perdure.store.requests import RetentionRule
from perdure.testing.embedded import call, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import Performed, ToolContext, ToolError, tool
from tests.flow.till import (
    COMPENSATE,
    Till,
    cut_off,
    effects_of,
    follows,
    forked,
    key_of,
    one_of_two_undone,
    retried,
    two_on_one_key,
)
from tests.flow.world import flow


async def test_nothing_goes_on_from_what_was_undone(url: str, zoo: ToolZoo) -> None:
    """R-9.4, R-10.3: a retry had answered with a payment that was refunded, and a fork too."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("look"), call("charge"), Ask(title="?"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        rows = await engine.core.reader.list_checkpoints(run_id, before=None, limit=50)
        await engine.kill_worker()
        await engine.cancel(run_id, options=COMPENSATE)
        with pytest.raises(Conflict):
            await forked(engine, run_id)  # nobody has begun to undo it yet
        await engine.start_worker()
        row = await engine.wait_terminal(run_id)
        assert till.refunds == till.charges
        assert NextAction.RETRY not in next_actions(row.hot)
        for go_on in (retried, forked):
            with pytest.raises(Conflict) as refused:
                await go_on(engine, run_id)
            assert refused.value.details["undone"]
        before = max((row for row in rows if row.step_index <= 1), key=lambda row: -row.seq)
        made = await retried(engine, run_id, checkpoint_id=before.checkpoint_id)
        (asked,) = await engine.wait_waiting(made)
        await engine.answer(asked.interrupt_id, Answer.RESPOND, value=1)
        assert (await engine.wait_terminal(made)).hot.state is RunState.SUCCEEDED
        assert len(set(till.charges)) == 2


async def test_a_call_whose_effect_another_retry_has_undone_gets_a_key_of_its_own(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.6, R-9.4: under the old one the provider answers with the charge that was refunded."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        first, at = await cut_off(engine, zoo)
        till.hangs = False
        second = await retried(engine, first, checkpoint_id=at)
        await engine.wait_waiting(second)
        assert len(till.charges) == 1
        await engine.cancel(second, options=COMPENSATE)
        assert await effects_of(engine, second) == {"charge": ("succeeded", "succeeded")}
        third = await retried(engine, first, checkpoint_id=at)
        (asked,) = await engine.wait_waiting(third)
        await engine.answer(asked.interrupt_id, Answer.RESPOND, value=1)
        assert (await engine.wait_terminal(third)).hot.state is RunState.SUCCEEDED
        assert len(till.charges) == 2
        assert till.refunds == till.charges[:1]


@pytest.mark.parametrize("whose", ["fork", "first"])
async def test_an_effect_that_another_run_stands_on_is_not_undone(
    url: str, zoo: ToolZoo, whose: str
) -> None:
    """R-9.4: the cancel of a fork had refunded the payment of the run beside it, in silence."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        first, beside = await two_on_one_key(engine, zoo)
        till.hangs = False
        runs = [first, beside] if whose == "first" else [beside, first]
        for run_id in runs:
            await engine.wait_waiting(run_id)
        await engine.cancel(runs[0], options=COMPENSATE)
        assert await effects_of(engine, runs[0]) == {"charge": ("succeeded", "none")}
        assert (len(till.charges), till.refunds) == (1, [])
        await engine.cancel(runs[1], options=COMPENSATE)
        assert await effects_of(engine, runs[1]) == {"charge": ("succeeded", "succeeded")}
        assert till.refunds == till.charges


async def test_an_effect_that_a_fork_goes_on_from_is_undone_only_when_the_fork_is_cancelled_too(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: a fork that goes on shares the payment; its own cancel leaves it to the run that paid."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        for is_cancelled in (False, True):
            first = await engine.submit("buyer")
            await engine.wait_waiting(first)
            beside = await forked(engine, first)
            await engine.wait_waiting(beside)
            if is_cancelled:
                await engine.cancel(beside, options=COMPENSATE)
                assert await effects_of(engine, beside) == {}
            await engine.cancel(first, options=COMPENSATE)
            became = "succeeded" if is_cancelled else "none"
            assert await effects_of(engine, first) == {"charge": ("succeeded", became)}
        assert till.refunds == till.charges[1:]


async def test_a_redrive_does_not_have_effects_again_that_came_after_the_failed_calls(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3, R-5.7: it had charged a second time, under another key."""
    till = Till(is_working=False)
    zoo.registry.add(*till.tools(zoo))
    script = [call("look"), call("charge"), GiveUp(reason="no idea")]
    async with flow(url, [follows(*script)], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_terminal(run_id)
        with pytest.raises(Conflict) as refused:
            await retried(engine, run_id, redrive=True)
        assert refused.value.details["behind"]
        await engine.wait_terminal(await retried(engine, run_id))
        assert len(till.charges) == 1


async def test_a_call_in_flight_that_is_abandoned_is_told_as_one_that_may_have_happened(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-5.5: it had been told not to have happened, as its tool is idempotent; a fork had
    then charged under a key of its own."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await zoo.wait_started("charge")
        (at, *_) = await engine.core.reader.list_checkpoints(run_id, before=None, limit=9)
        await engine.cancel(run_id, options=COMPENSATE)
        assert await effects_of(engine, run_id) == {"charge": ("unknown", "none")}
        till.hangs = False
        made = await forked(engine, run_id, checkpoint_id=at.checkpoint_id)
        assert (await engine.wait_terminal(made)).hot.state is RunState.SUCCEEDED
        assert await key_of(engine, made) == await key_of(engine, run_id)
        assert len(till.charges) == 1


@pytest.mark.parametrize("name", ["charge_slowly", "charge_oddly"])
async def test_an_effect_whose_result_came_too_late_or_was_refused_is_told_at_the_end(
    url: str, zoo: ToolZoo, name: str
) -> None:
    """R-9.4: what may be in the world is listed, whatever the planner was told of the call."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call(name), Ask(title="?"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        rows = await engine.core.reader.list_checkpoints(run_id, before=None, limit=50)
        await engine.cancel(run_id, options=COMPENSATE)
        timed_out = name == "charge_slowly"
        status = ToolCallStatus.TIMED_OUT if timed_out else ToolCallStatus.FAILED
        assert await effects_of(engine, run_id) == {name: (status, "none")}
        (made_call,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=9)
        at = min((row for row in rows if row.seq >= made_call.action_seq), key=lambda row: row.seq)
        made = await forked(engine, run_id, checkpoint_id=at.checkpoint_id)
        await engine.wait_waiting(made)
        assert len(till.charges) == 1
        assert await key_of(engine, made) == await key_of(engine, run_id)


async def test_of_two_that_are_to_undo_one_effect_one_does(url: str, zoo: ToolZoo) -> None:
    """R-9.4: both had refunded one charge, and both had told that nobody did."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        first, beside = await two_on_one_key(engine, zoo)
        till.hangs = False
        for run_id in (first, beside):
            await engine.wait_waiting(run_id)
        await engine.kill_worker()
        for run_id in (first, beside):
            await engine.cancel(run_id, options=COMPENSATE)
        await engine.start_worker()
        became = [await effects_of(engine, run_id) for run_id in (first, beside)]
        told = sorted(one["charge"][1] for one in became)
        assert (told, till.refunds) == (["none", "succeeded"], till.charges)


async def test_a_retry_behind_a_payment_that_a_fork_has_undone_is_refused(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-10.3: the fork had the payment under the same key, and was cancelled last."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        first, _ = await one_of_two_undone(engine, zoo, till)
        for go_on in (retried, forked):
            with pytest.raises(Conflict):
                await go_on(engine, first)


async def test_an_approved_call_of_a_second_retry_does_not_act_under_a_refunded_key(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.6, R-9.4: it was in no doubt when it was taken over, as it had only been asked for."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))

    def decide(context: PlannerContext) -> Decision:
        script = (call("charge"), Ask(title="?"))
        done = context.step_index
        return script[done] if done < len(script) else Finish(answer="done")

    async with flow(url, [scripted("buyer", decide, tools=["charge"])], zoo) as engine:
        first = await engine.submit("buyer")
        await engine.wait_waiting(first)
        (at, *_) = await engine.core.reader.list_checkpoints(first, before=None, limit=9)
        await engine.cancel(first)
        await engine.wait_terminal(first)
        for charges in (1, 2):
            made = await retried(engine, first, checkpoint_id=at.checkpoint_id)
            (asked,) = await engine.wait_waiting(made)
            await engine.answer(asked.interrupt_id, Answer.APPROVE)
            await engine.wait_until(made, lambda row: row.hot.step_index == 1)
            await engine.wait_waiting(made)
            assert len(till.charges) == charges
            await engine.cancel(made, options=COMPENSATE)
            assert await effects_of(engine, made) == {"charge": ("succeeded", "succeeded")}
        assert till.refunds == till.charges


async def test_what_was_undone_is_known_when_its_history_is_gone(url: str, zoo: ToolZoo) -> None:
    """R-6.8, R-9.4: the end tells it, and is kept."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        first, at = await cut_off(engine, zoo)
        till.hangs = False
        second = await retried(engine, first, checkpoint_id=at)
        beside = await forked(engine, first, checkpoint_id=at)
        for run_id in (beside, second):
            await engine.wait_waiting(run_id)
        for run_id in (beside, second):
            await engine.cancel(run_id, options=COMPENSATE)
            await engine.wait_terminal(run_id)
        assert till.refunds == till.charges
        rule = RetentionRule(state=RunState.FAILED, older_than_s=0)
        await engine.core.store.expire_history([rule], after=None, limit=10)
        assert (await engine.run(second)).hot.retained_from_seq > 1
        family = await undone_elsewhere(Kin(engine.core), (await engine.run(first)).facts)
        assert family == {till.charges[0]: "succeeded"}


async def test_a_plain_retry_does_not_hold_a_failed_call_that_a_redrive_makes(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-10.3: it asks, and will never make the call; the redrive's payment stayed."""
    works, bought, refunds = list[bool](), list[str](), list[str]()

    def refund(performed: Performed) -> None:
        refunds.append(performed.effect_key)

    @tool(side_effect="external", idempotent=True, timeout_s=60, compensate=refund)
    async def buy(context: ToolContext) -> str:
        """Buy, when the shop is open."""
        if not works:
            raise ToolError("closed")
        bought.append(context.effect_key)
        return "bought"

    zoo.registry.add(buy)

    def decide(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("buy")
        return Ask(title="?") if context.facts.retry_of else GiveUp(reason="no")

    async with flow(url, [scripted("buyer", decide, tools=unasked("buy"))], zoo) as engine:
        first = await engine.submit("buyer")
        await engine.wait_terminal(first)
        await engine.wait_waiting(await retried(engine, first))
        works.append(True)
        beside = {"multitask_strategy": "optimistic"}
        second = await retried(engine, first, redrive=True, options=beside)
        await engine.wait_waiting(second)
        await engine.cancel(second, options=COMPENSATE)
        assert await effects_of(engine, second) == {"buy": ("succeeded", "succeeded")}
        assert refunds == bought
