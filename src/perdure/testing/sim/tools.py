"""The tools of a simulation. They run inline, on the engine's loop, and never fail by themselves
unless that is what they are for."""

import asyncio
from typing import Any, cast

from pydantic import JsonValue

from perdure.engine.ports import ToolGrant
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.testing.sim.outside import Order, act, chance, pay, receipt, undo, workplace
from perdure.tools import (
    FunctionTool,
    Performed,
    Returned,
    ToolContext,
    failed,
    not_happened,
    pending,
    succeeded,
    tool,
)

APPROVERS, THEIR_BOSS = ("ann", "ben"), "cleo"
ONCE = frozenset({"pay_idempotent", "publish", "transfer", "jot_paid"})
"""Tools whose second execution under a key has no second effect."""

PLAIN_GRANTS = (
    *(ToolGrant(name=name) for name in ("echo", "slow", "draw")),
    *(
        ToolGrant(name=name, approve="never")
        for name in ("pay", "pay_idempotent", "pay_with_lookup", "flaky")
    ),
    ToolGrant(name="publish", approve="always"),
)
GRANTS = (
    *PLAIN_GRANTS,
    *(ToolGrant(name=name, approve="never") for name in ("order", "order_with_lookup")),
    ToolGrant(
        name="transfer",
        approve="always",
        approvers=APPROVERS,
        escalate_after_s=9.0,
        escalate_to=(THEIR_BOSS,),
    ),
)

_WRITE: dict[str, Any] = {
    "side_effect": SideEffect.WRITE,
    "timeout_s": 20.0,
    "trusted": True,
}
_BY_HAND = "refund by hand"
_AGAIN = RetryPolicy(attempts_max=4, backoff_s=0.5)


def all_tools() -> list[FunctionTool[..., Any]]:
    """Return every tool."""
    return cast("list[FunctionTool[..., Any]]", [*_paying(), *_ordering(), *_others()])


def _look(effect_key: str) -> Returned:
    done = workplace.get().outside.find(effect_key)
    if done is None:
        return not_happened()
    return succeeded({"paid": done.amount}, external_ref=receipt(effect_key))


async def _undo(performed: Performed, context: ToolContext) -> Returned:
    return await undo(performed, context, once=False)


async def _undo_once(performed: Performed, context: ToolContext) -> Returned:
    return await undo(performed, context, once=True)


def _paying() -> list[Any]:
    @tool(name="pay", idempotent=False, compensate=_undo, **_WRITE)
    async def _pay(amount: int, context: ToolContext) -> Returned:
        """Pay; a second execution pays again."""
        return await pay("pay", amount, context)

    @tool(
        idempotent=True, compensate=_undo_once, compensate_idempotent=True, retry=_AGAIN, **_WRITE
    )
    async def pay_idempotent(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, however often it runs."""
        return await pay("pay_idempotent", amount, context, once=True)

    @tool(idempotent=False, lookup=_look, compensation=_BY_HAND, **_WRITE)
    async def pay_with_lookup(amount: int, context: ToolContext) -> Returned:
        """Pay; what became of a payment can be looked up."""
        return await pay("pay_with_lookup", amount, context)

    @tool(idempotent=True, retry=_AGAIN, compensation=_BY_HAND, **_WRITE)
    async def publish(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, after a person has approved."""
        return await pay("publish", amount, context, once=True)

    @tool(idempotent=True, compensate=_undo, **_WRITE)
    async def transfer(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, after one of those who may decide has approved."""
        return await pay("transfer", amount, context, once=True)

    return [_pay, pay_idempotent, pay_with_lookup, publish, transfer]


def _ordering() -> list[Any]:
    async def place(name: str, amount: int, context: ToolContext) -> Returned:
        await act(name, amount, context)
        order = Order(tool_call_id=context.tool_call_id, key=context.effect_key, amount=amount)
        workplace.get().outside.on_order(order)
        await asyncio.sleep(chance().random() * 3)
        return pending(external_ref=receipt(context.effect_key), expires_in_s=5.0 + amount % 20)

    @tool(idempotent=False, compensation=_BY_HAND, **_WRITE)
    async def order(amount: int, context: ToolContext) -> Returned:
        """Order; the provider calls back. A second execution orders again."""
        return await place("order", amount, context)

    @tool(idempotent=False, lookup=_look, compensate=_undo, **_WRITE)
    async def order_with_lookup(amount: int, context: ToolContext) -> Returned:
        """Order; the provider calls back, and can be asked what became of it."""
        return await place("order_with_lookup", amount, context)

    return [order, order_with_lookup]


def _others() -> list[Any]:
    @tool(idempotent=True, retry=_AGAIN, compensation=_BY_HAND, **_WRITE)
    async def flaky(amount: int, context: ToolContext) -> Returned:
        """Fail as often as the amount says, then work."""
        if context.execution <= amount % 3:
            return failed("not this time", retryable=True)
        return succeeded(amount)

    @tool(trusted=True)
    def echo(amount: int) -> JsonValue:
        """Return the amount."""
        return amount

    @tool(trusted=True)
    async def slow(amount: int) -> JsonValue:
        """Take some time."""
        await asyncio.sleep(amount % 15 * chance().random())
        return amount

    @tool(trusted=True)
    def draw(amount: int, context: ToolContext) -> str:
        """Make an artifact."""
        context.artifact(f"drawing-{amount}.txt", f"a drawing of {amount}", "text/plain")
        return "drawn"

    return [flaky, echo, slow, draw]
