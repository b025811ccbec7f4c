"""The agents and tools of a simulation, and the world outside that the tools change.

What an agent does is its run's input: `{"steps": [...]}`, where a step is `["call", [[tool,
amount], ...]]`, `["spawn", [steps, ...], wait]`, `["ask", number]` or `["sleep", seconds]`. The
loop agent and the code agent do the same. Tools run inline, on the engine's loop.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from pydantic import JsonValue

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.code import Context, agent
from perdure.agents.code.errors import AgentFailed, ChildFailed, ToolFailed
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    Sleep,
    Spawn,
    ToolRequest,
)
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.tools import (
    FunctionTool,
    LocalToolRunner,
    Returned,
    ToolContext,
    failed,
    not_happened,
    succeeded,
    tool,
)
from perdure.tools.bridge import Call
from perdure.tools.caught import Caught
from perdure.tools.usercode import UserCode

R = TypeVar("R")

LOOP_AGENT, CODE_AGENT = "loop", "code"

_WRITE: dict[str, Any] = {
    "side_effect": SideEffect.WRITE,
    "timeout_s": 20.0,
    "compensation": "refund by hand",
}
_AGAIN = RetryPolicy(attempts_max=4, backoff_s=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A line of the payment provider's journal.

    `disturbed`: the worker was stopped, or a clock was set, between the lease check and the effect.
    """

    key: str
    tool: str
    run_id: str
    amount: int
    execution: int
    worker: str
    disturbed: bool


class Outside:
    """The payment provider: it outlives every worker."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.journal: list[Effect] = []

    def find(self, key: str) -> Effect | None:
        """Return the first payment under a key."""
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


@cache
def catalog() -> Catalog:
    """Return the agents with their tools: the same objects for all workers of all plays."""
    registry = AgentRegistry()
    registry.add(_loop_agent(), _code_agent())
    registry.add_tool(*_tools())
    made = Catalog([registry])
    made.attach(InlineUserCode())
    return made


# ---------------------------------------------------------------- the agents


def mixed_agents() -> tuple[HostedAgent, HostedAgent]:
    """Return the loop agent and the code agent, for tools of the same names elsewhere."""
    return _loop_agent(), _code_agent()


_GRANTS = (
    *(ToolGrant(name=name) for name in ("echo", "slow", "draw")),
    *(
        ToolGrant(name=name, approve="never")
        for name in ("pay", "pay_idempotent", "pay_with_lookup", "flaky")
    ),
    ToolGrant(name="publish", approve="always"),
)


def _loop_agent() -> HostedAgent:
    return loop_agent(LOOP_AGENT, "1", ScriptedPlanner(_decide), tools=_GRANTS)


def _steps_of(value: JsonValue) -> list[Any]:
    return cast("list[Any]", cast("dict[str, Any]", value)["steps"])


def _decide(context: PlannerContext) -> Decision:
    steps = _steps_of(context.input)
    if context.step_index >= len(steps):
        told: list[JsonValue] = [
            [turn.step_index, call.tool, call.status]
            for turn in context.turns
            for call in turn.calls
        ]
        return Finish(answer={"told": told})
    match steps[context.step_index]:
        case ["call", calls]:
            wishes = (ToolRequest(tool=name, args={"amount": amount}) for name, amount in calls)
            return CallTools(calls=tuple(wishes))
        case ["spawn", children, wait]:
            requests = (
                ChildRequest(agent_id=LOOP_AGENT, input={"steps": steps}) for steps in children
            )
            return Spawn(children=tuple(requests), wait=wait)
        case ["ask", number]:
            return Ask(payload={"amount": number})
        case ["sleep", seconds]:
            return Sleep(duration=timedelta(seconds=seconds))
        case other:
            raise ValueError(f"no such step: {other}")


async def _work(ctx: Context, value: Any) -> object:
    told: list[Any] = []
    for step in value["steps"]:
        match step:
            case ["call", calls]:
                wishes = [ctx.tool(name, amount=amount) for name, amount in calls]
                told += await ctx.gather(*(_told(wish) for wish in wishes))
            case ["spawn", children, _]:
                runs = [ctx.spawn(CODE_AGENT, {"steps": steps}) for steps in children]
                told += await ctx.gather(*(_told(run) for run in runs))
            case ["ask", number]:
                told.append(await _both(ctx, number))
            case ["sleep", seconds]:
                await ctx.sleep(seconds)
            case other:
                raise AgentFailed(f"no such step: {other}")
        told.append(await ctx.step(len, told, name="count"))
    return {"told": told}


async def _both(ctx: Context, number: int) -> Any:
    """Ask two questions at once, for answers by order to go wrong."""
    return await ctx.gather(
        ctx.interrupt({"amount": number}), ctx.interrupt({"amount": number + 1})
    )


async def _told(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except (ToolFailed, ChildFailed) as error:
        return type(error).__name__


def _code_agent() -> HostedAgent:
    return agent(CODE_AGENT, "1", tools=_GRANTS)(_work)


# ---------------------------------------------------------------- the tools


def _chance() -> random.Random:
    return workplace.get().outside.chance


async def _pay(name: str, amount: int, context: ToolContext, *, once: bool = False) -> Returned:
    """Pay after a while, and tell it after another; with `once`, once per key."""
    place = workplace.get()
    outside, before = place.outside, place.disturbances()
    await asyncio.sleep(_chance().random() * 3)
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
    await asyncio.sleep(_chance().random() * 3)
    return succeeded({"paid": amount}, external_ref=f"receipt-{key[:8]}")


def _tools() -> list[FunctionTool[..., Any]]:
    def look(effect_key: str) -> Returned:
        paid = workplace.get().outside.find(effect_key)
        if paid is None:
            return not_happened()
        return succeeded({"paid": paid.amount}, external_ref=f"receipt-{effect_key[:8]}")

    @tool(trusted=True, idempotent=False, **_WRITE)
    async def pay(amount: int, context: ToolContext) -> Returned:
        """Pay; a second execution pays again."""
        return await _pay("pay", amount, context)

    @tool(trusted=True, idempotent=True, retry=_AGAIN, **_WRITE)
    async def pay_idempotent(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, however often it runs."""
        return await _pay("pay_idempotent", amount, context, once=True)

    @tool(trusted=True, idempotent=False, lookup=look, **_WRITE)
    async def pay_with_lookup(amount: int, context: ToolContext) -> Returned:
        """Pay; what became of a payment can be looked up."""
        return await _pay("pay_with_lookup", amount, context)

    @tool(trusted=True, idempotent=True, retry=_AGAIN, **_WRITE)
    async def publish(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, after a person has approved."""
        return await _pay("publish", amount, context, once=True)

    @tool(trusted=True, idempotent=True, retry=_AGAIN, **_WRITE)
    async def flaky(amount: int, context: ToolContext) -> Returned:
        """Fail as often as the amount says, then work."""
        if context.execution <= amount % 3:
            return failed("not this time", retryable=True)
        return succeeded(amount)

    return cast(
        "list[FunctionTool[..., Any]]",
        [pay, pay_idempotent, pay_with_lookup, publish, flaky, *_reading()],
    )


def _reading() -> list[Any]:
    @tool(trusted=True)
    def echo(amount: int) -> JsonValue:
        """Return the amount."""
        return amount

    @tool(trusted=True)
    async def slow(amount: int) -> JsonValue:
        """Take some time."""
        await asyncio.sleep(amount % 15 * _chance().random())
        return amount

    @tool(trusted=True)
    def draw(amount: int, context: ToolContext) -> str:
        """Make an artifact."""
        context.artifact(f"drawing-{amount}.txt", f"a drawing of {amount}", "text/plain")
        return "drawn"

    return [echo, slow, draw]


# ---------------------------------------------------------------- user code without threads


class InlineUserCode(UserCode):
    """User code on the engine's own loop: nothing is lost, nothing blocks another."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    @property
    def lost_slots(self) -> int:
        """Return 0."""
        return 0

    @property
    def exhausted(self) -> bool:
        """Return False."""
        return False

    def run_async(self, body: Callable[[], Awaitable[R]]) -> Call[R]:
        """Start the body as a task."""
        call: Call[R] = Call(body)
        call.claim()
        call.home = self
        call.task = asyncio.get_running_loop().create_task(_execute(call))
        return call

    def run_sync(self, body: Callable[[], R]) -> Call[R]:
        """Run the body at once."""

        async def run() -> R:
            return body()

        return self.run_async(run)

    def request_stop(self, call: Call[Any]) -> None:
        """Cancel the call's task."""
        if call.task is not None:
            call.task.cancel()

    def abandon(self, call: Call[R], on_late: Callable[[Call[R]], None]) -> None:
        """Give a call up; `on_late` is called if it ends all the same."""
        call.abandon(0.0, on_late)


async def _execute(call: Call[Any]) -> None:
    call.entered = True
    with Caught() as caught:
        call.value = await call.body()
    call.error = caught.error
    call.settle()


def inline_tools() -> LocalToolRunner:
    """Return a runner that runs everything on the engine's loop."""
    return LocalToolRunner(catalog().tools, user_code=InlineUserCode(), inline=True, grace_s=1.0)
