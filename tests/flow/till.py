"""A shop with a till: agents that charge, and runs that go on from each other's histories."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.events import StateEvent
from perdure.protocol.states import CancelOption
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, RetryRequest, fork, retry
from perdure.service.principal import LOCAL
from perdure.testing.embedded import Embedded, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import Performed, Returned, ToolContext, ToolError, succeeded, tool
from tests.flow.world import data_of

COMPENSATE = CancelOption.COMPENSATE


@dataclass(slots=True)
class Till:
    """A provider that heeds keys: one charge for each, which may be refunded once."""

    charges: list[str] = field(default_factory=list[str])
    refunds: list[str] = field(default_factory=list[str])
    hangs: bool = False
    freed: set[str] = field(default_factory=set[str])
    """Runs whose charges do not hang."""
    is_working: bool = True

    def take(self, key: str) -> None:
        """Charge, unless it was done under this key before."""
        if key not in self.charges:
            self.charges.append(key)

    def tools(self, zoo: ToolZoo) -> list[Any]:
        """Return its tools, which run apart from the engine's loop."""
        more: dict[str, Any] = {"side_effect": "external", "idempotent": True}

        def refund(performed: Performed) -> None:
            self.refunds.append(performed.effect_key)

        @tool(compensate=refund, timeout_s=60, **more)
        async def charge(context: ToolContext) -> Returned:
            """Charge once for each key, and answer when the till does not hang."""
            self.take(context.effect_key)
            zoo.begin("charge")
            while self.hangs and context.run_id not in self.freed:  # noqa: ASYNC110 (set from another loop)
                await asyncio.sleep(0.002)
            return succeeded("charged", external_ref=context.effect_key)

        @tool(compensate=refund, timeout_s=0.1, **more)
        async def charge_slowly(context: ToolContext) -> str:
            """Charge, and answer too late."""
            self.take(context.effect_key)
            await asyncio.sleep(30)
            return "charged"

        @tool(compensate=refund, timeout_s=60, **more)
        async def charge_oddly(context: ToolContext) -> Any:
            """Charge, and answer what cannot be stored."""
            self.take(context.effect_key)
            return object()

        @tool
        async def look() -> str:
            """Look, when it works."""
            if not self.is_working:
                raise ToolError("it does not work")
            return "seen"

        return [charge, charge_slowly, charge_oddly, look]


def follows(*script: Decision) -> HostedAgent:
    """An agent that follows a script, then answers."""

    def decide(context: PlannerContext) -> Decision:
        done = context.step_index
        return script[done] if done < len(script) else Finish(answer="done")

    names = ("charge", "charge_slowly", "charge_oddly")
    return scripted("buyer", decide, tools=[*unasked(*names), "look"])


async def retried(engine: Embedded, run_id: str, **wish: Any) -> str:
    """Retry a run as a caller would."""
    made = await retry(Service(core=engine.core), LOCAL, run_id, RetryRequest(**wish))
    return made.run.run_id


async def forked(engine: Embedded, run_id: str, **wish: Any) -> str:
    """Fork a run as a caller would."""
    made = await fork(Service(core=engine.core), LOCAL, run_id, ForkRequest(**wish))
    return made.run.run_id


async def key_of(engine: Embedded, run_id: str) -> str:
    """Return the effect key of a run's one call."""
    (made,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=9)
    return made.effect_key


async def effects_of(engine: Embedded, run_id: str) -> dict[Any, tuple[Any, Any]]:
    """Return what the end of a run tells of its own effects: outcome and undoing, by tool."""
    await engine.wait_terminal(run_id)
    end = data_of(await engine.events(run_id), StateEvent)[-1]
    return {one["tool"]: (one["status"], one["compensation"]) for one in end.effects or []}


async def cut_off(engine: Embedded, zoo: ToolZoo) -> tuple[str, str]:
    """Start a run, cancel it while it charges; return its id and the checkpoint with the open call."""
    run_id = await engine.submit("buyer")
    await zoo.wait_started("charge")
    (at, *_) = await engine.core.reader.list_checkpoints(run_id, before=None, limit=9)
    await engine.cancel(run_id)
    await engine.wait_terminal(run_id)
    return run_id, at.checkpoint_id


async def two_on_one_key(engine: Embedded, zoo: ToolZoo) -> tuple[str, str]:
    """Start a run and fork it while it charges; return both ids when both charge."""
    run_id = await engine.submit("buyer")
    await zoo.wait_started("charge")
    beside = await forked(engine, run_id)
    await zoo.wait_started("charge", 2)
    return run_id, beside


async def one_of_two_undone(engine: Embedded, zoo: ToolZoo, till: Till) -> tuple[str, str]:
    """Cancel two runs on one key, of which the second, as the last, undoes what both charged."""
    first, beside = await two_on_one_key(engine, zoo)
    till.hangs = False
    for run_id in (first, beside):
        await engine.wait_waiting(run_id)
    await engine.cancel(first)
    await engine.wait_terminal(first)
    await engine.cancel(beside, options=COMPENSATE)
    assert await effects_of(engine, beside) == {"charge": ("succeeded", "succeeded")}
    return first, beside
