"""The world outside that tools change: a provider of payments and orders, and the approvers.

It outlives every worker, and its journals are what a play is judged by.
"""

import asyncio
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from perdure.engine.ports import ApprovalNotice
from perdure.tools import Performed, Returned, ToolContext, succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A line of the provider's journal.

    `disturbed`: the worker was stopped, or a clock was set, between the lease check and the effect.
    """

    key: str
    tool: str
    run_id: str
    amount: int
    execution: int
    worker: str
    disturbed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """An effect that was taken back, under the key of its compensation."""

    key: str
    of: str
    once: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Something ordered, whose result the provider tells by a callback."""

    tool_call_id: str
    key: str
    amount: int


class Outside:
    """The provider's journals. `on_order` has a callback made; `deaf` is how often nobody hears."""

    def __init__(self, chance: random.Random, on_order: Callable[[Order], None]) -> None:
        self.chance = chance
        self.on_order = on_order
        self.deaf = 0.0
        self.journal: list[Effect] = []
        self.undone: list[Undone] = []
        self.notices: list[ApprovalNotice] = []

    def find(self, key: str) -> Effect | None:
        """Return the first effect under a key."""
        return next((effect for effect in self.journal if effect.key == key), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What tools know of the worker they run in. `meet` passes the boundary of an effect."""

    worker: str
    outside: Outside
    meet: Callable[[str], None]
    disturbances: Callable[[], int]


workplace: ContextVar[Workplace] = ContextVar("perdure_sim_workplace")
"""The worker that the running code belongs to, as its tools see it."""


def chance() -> random.Random:
    """Return the chance of the world outside."""
    return workplace.get().outside.chance


async def pay(name: str, amount: int, context: ToolContext, *, once: bool = False) -> Returned:
    """Pay after a while, and tell it after another; with `once`, once per key."""
    await act(name, amount, context, once=once)
    await asyncio.sleep(chance().random() * 3)
    return succeeded({"paid": amount}, external_ref=receipt(context.effect_key))


async def act(name: str, amount: int, context: ToolContext, *, once: bool = False) -> None:
    """Have an effect after a while, and note it; with `once`, once per key."""
    place = workplace.get()
    outside, before = place.outside, place.disturbances()
    await asyncio.sleep(chance().random() * 3)
    place.meet("crash")
    await asyncio.sleep(0)  # where a crash takes hold
    key = context.effect_key
    if not once or outside.find(key) is None:
        effect = Effect(
            key=key,
            tool=name,
            run_id=context.run_id,
            amount=amount,
            execution=context.execution,
            worker=place.worker,
            disturbed=place.disturbances() != before,
        )
        outside.journal.append(effect)
    place.meet("crash_after")


async def undo(performed: Performed, context: ToolContext, *, once: bool) -> Returned:
    """Take an effect back after a while; with `once`, once per key."""
    place = workplace.get()
    undone, key = place.outside.undone, context.effect_key
    await asyncio.sleep(chance().random() * 3)
    place.meet("crash")
    await asyncio.sleep(0)
    if not once or all(one.key != key for one in undone):
        undone.append(Undone(key=key, of=performed.effect_key, once=once))
    place.meet("crash_after")
    await asyncio.sleep(chance().random() * 3)
    return succeeded({"undone": True}, external_ref=performed.external_ref)


async def tell(notice: ApprovalNotice) -> None:
    """Tell approvers that they are asked, unless nobody hears."""
    outside = workplace.get().outside
    await asyncio.sleep(outside.chance.random() * 2)
    if outside.chance.random() < outside.deaf:
        raise ConnectionError("nobody hears")
    outside.notices.append(notice)


def receipt(key: str) -> str:
    """Return the provider's name of what was done under a key."""
    return f"receipt-{key[:8]}"
