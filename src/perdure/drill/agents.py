"""The drill's agent and its tools, each with another declaration of what may be done again.

They are registered as `perdure.drill…`, so that nobody takes them for an installation's own; only
the drill serves them, from a queue of its own.
"""

import os
import signal
import time
from typing import Any, cast

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.drill.outside import LOOK_S, Outside
from perdure.engine.context import PlannerContext
from perdure.engine.ports import ToolGrant
from perdure.protocol.decisions import Ask, CallTools, Decision, Finish, ToolRequest
from perdure.protocol.states import SideEffect
from perdure.tools import (
    FunctionTool,
    Performed,
    Returned,
    ToolContext,
    not_happened,
    succeeded,
    tool,
)

AGENT = "perdure.drill"
VERSION = "1"
PREFIX = "perdure.drill."
REPEATED, FOUND, PLAIN = f"{PREFIX}pay_by_key", f"{PREFIX}pay_with_lookup", f"{PREFIX}pay"
REFUNDED, GATED, ASKED = f"{PREFIX}pay_back", f"{PREFIX}pay_at_gate", f"{PREFIX}pay_if_approved"
AMOUNT = 7
TIMEOUT_S = 150.0
MORTAL_S_MAX = 60.0

AnyTool = FunctionTool[..., Any]

_CALLED: dict[str, tuple[tuple[str, ...], ...]] = {
    "kill": ((REPEATED, FOUND, PLAIN),),
    "approval": ((ASKED,),),
    "replay": ((GATED,),),
    "cancel": ((REFUNDED, PLAIN), (GATED,)),
    "damage": ((REPEATED,),),
}
"""The calls of each scene, step by step."""


def _decide(context: PlannerContext) -> Decision:
    scene = str(context.input)
    steps = _CALLED[scene]
    if len(context.turns) < len(steps):
        names = steps[len(context.turns)]
        wishes = tuple(ToolRequest(tool=name, args={"amount": AMOUNT}) for name in names)
        return CallTools(calls=wishes)
    if scene == "damage" and len(context.turns) == len(steps):
        return Ask(title="A recovery drill: go on?")
    return Finish(answer=[call.status for turn in context.turns for call in turn.calls])


def make_catalog(outside: Outside, *, mortal: bool = False) -> Catalog:
    """Return the agent with its tools. A mortal process dies by SIGKILL once three have paid."""
    registry = AgentRegistry()
    registry.add_tool(*_tools(outside, mortal=mortal))
    grants = [ToolGrant(name=name, approve="never") for name in (REPEATED, FOUND, PLAIN)]
    grants += [ToolGrant(name=name, approve="never") for name in (REFUNDED, GATED)]
    registry.add(
        loop_agent(
            AGENT,
            VERSION,
            ScriptedPlanner(_decide),
            tools=[*grants, ToolGrant(name=ASKED, approve="always")],
            name="Recovery drill",
            description="What `perdure drill` runs; nothing else serves it.",
        )
    )
    return Catalog([registry])


WRITE: dict[str, Any] = {"side_effect": SideEffect.WRITE, "timeout_s": TIMEOUT_S}
BY_HAND: dict[str, Any] = {**WRITE, "compensation": "a drill: nothing real was paid"}


def _tools(outside: Outside, *, mortal: bool) -> list[AnyTool]:
    return [*_in_doubt(outside, mortal=mortal), _paying_back(outside), *_orderly(outside)]


def _in_doubt(outside: Outside, *, mortal: bool) -> list[AnyTool]:
    """Return the tools whose process dies before their results are known."""

    def receipt(context: ToolContext, amount: int) -> Returned:
        if mortal:
            _die_with_the_others(outside, context.run_id)
        return succeeded({"paid": amount}, external_ref=f"receipt-{context.effect_key}")

    def look(effect_key: str) -> Returned:
        paid = outside.find(effect_key)
        if paid is None:
            return not_happened()
        return succeeded({"paid": paid["amount"]}, external_ref=f"receipt-{effect_key}")

    @tool(name=REPEATED, idempotent=True, **BY_HAND)
    def pay_by_key(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, however often it runs."""
        outside.began(context.run_id, REPEATED)
        outside.pay_once(context.run_id, REPEATED, context.effect_key, amount)
        return receipt(context, amount)

    @tool(name=FOUND, idempotent=False, lookup=look, **BY_HAND)
    def pay_with_lookup(amount: int, context: ToolContext) -> Returned:
        """Pay; what became of a payment can be looked up."""
        outside.began(context.run_id, FOUND)
        outside.pay(context.run_id, FOUND, context.effect_key, amount)
        return receipt(context, amount)

    @tool(name=PLAIN, idempotent=False, **BY_HAND)
    def pay(amount: int, context: ToolContext) -> Returned:
        """Pay; a second execution pays again, and nobody can tell whether it did."""
        outside.began(context.run_id, PLAIN)
        outside.pay(context.run_id, PLAIN, context.effect_key, amount)
        return receipt(context, amount)

    return cast("list[AnyTool]", [pay_by_key, pay_with_lookup, pay])


def _paying_back(outside: Outside) -> AnyTool:
    def refund(performed: Performed, context: ToolContext) -> dict[str, int]:
        """Pay back."""
        del performed
        outside.pay_once(context.run_id, REFUNDED, context.effect_key, -AMOUNT)
        return {"refunded": AMOUNT}

    @tool(name=REFUNDED, idempotent=False, compensate=refund, compensate_idempotent=True, **WRITE)
    def pay_back(amount: int, context: ToolContext) -> Returned:
        """Pay; it can be paid back."""
        outside.pay(context.run_id, REFUNDED, context.effect_key, amount)
        return succeeded({"paid": amount})

    return cast("AnyTool", pay_back)


def _orderly(outside: Outside) -> list[AnyTool]:
    @tool(name=GATED, idempotent=True, **BY_HAND)
    def pay_at_gate(amount: int, context: ToolContext) -> Returned:
        """Wait at the gate the first time, then pay once per key."""
        outside.began(context.run_id, GATED)
        if context.execution == 1:
            outside.wait_at_gate(context.run_id)
        if not context.stop_requested:
            outside.pay_once(context.run_id, GATED, context.effect_key, amount)
        return succeeded({"paid": amount})

    @tool(name=ASKED, idempotent=True, **BY_HAND)
    def pay_if_approved(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, after a person has approved."""
        outside.began(context.run_id, ASKED)
        outside.pay_once(context.run_id, ASKED, context.effect_key, amount)
        return succeeded({"paid": amount})

    return cast("list[AnyTool]", [pay_at_gate, pay_if_approved])


def _die_with_the_others(outside: Outside, run_id: str) -> None:
    """Wait until all three calls have taken effect, then kill this process: no result is kept."""
    give_up = time.monotonic() + MORTAL_S_MAX
    while len(outside.payments(run_id)) < len(_CALLED["kill"][0]) and time.monotonic() < give_up:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)
