"""Agents whose fields outlive their runs, and the tools that write to them: the profile `fields`.

What is written follows from a number (`writes_of`), so that a step, a call and an answer name all of
it: `["keep", number, [[tool, amount], ...]]` writes with the decision and has tools called that write,
`["both", number, number]` has two branches write, `["last", number]` writes with the answer, and `["stumble"]` before it may fail. All other
steps are those of the other agents.
"""

import asyncio
import random
from functools import cache
from typing import Any, cast

from pydantic import JsonValue

from perdure.agents.catalog import Catalog, loop_agent
from perdure.agents.code import AgentFailed, Context, agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.protocol.decisions import (
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    GiveUp,
    Handoff,
    Spawn,
    ToolRequest,
    WriteField,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.fields import Reducer, StateField
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.testing.sim.actors import (
    ReleaseKind,
    decide,
    expires_in,
    new_catalog,
    steps_of,
    told_of,
    versions_of,
)
from perdure.testing.sim.outside import chance, pay
from perdure.testing.sim.tools import GRANTS
from perdure.tools import FunctionTool, Returned, ToolContext, failed, succeeded, tool

KEEPER, KEEPER_CODE, KEEPER_HEIR = "keeper", "keeper.code", "keeper.heir"
KEEPERS = (KEEPER, KEEPER_CODE, KEEPER_HEIR)

RANKED_MAX = 3


def _ranked(old: Any, value: Any) -> Any:
    """Keep the largest numbers."""
    return sorted({*(old or []), value}, reverse=True)[:RANKED_MAX]


FIELDS = (
    StateField(name="total", scope="agent", rule="add"),
    StateField(name="marks", scope="agent", rule="append"),
    StateField(name="kinds", scope="agent", rule="union"),
    StateField(name="by_key", scope="agent", rule="merge"),
    StateField(name="low", scope="agent", rule="min"),
    StateField(name="high", scope="agent", rule="max"),
    StateField(
        name="ranked",
        scope="agent",
        rule="reducer",
        reducer=Reducer(name="ranked", version="1", function=_ranked),
    ),
    StateField(name="motto", scope="agent"),
    StateField(name="turns", scope="thread", rule="add"),
    StateField(name="lines", scope="thread", rule="append"),
    StateField(name="title", scope="thread"),
    StateField(name="own", rule="append"),
)
OFTEN: tuple[str, ...] = ("total", "marks", "turns", "lines")
SELDOM: tuple[str, ...] = ("kinds", "by_key", "low", "high", "ranked", "own")
HARDLY: tuple[str, ...] = ("motto", "title")
HARDLY_EVER = 0.06
STUMBLES = 0.6
"""How often a run fails where it may; whoever goes on from it tries again."""


@cache
def writes_of(number: int) -> tuple[tuple[str, JsonValue], ...]:
    """Return the fields and values that a number stands for, in order."""
    drawn = random.Random(f"writes {number}")  # noqa: S311  # to be repeated
    names = drawn.sample(OFTEN, drawn.randint(1, 3))
    names += drawn.sample(SELDOM, drawn.randint(0, 2))
    if drawn.random() < HARDLY_EVER:
        names.append(drawn.choice(HARDLY))
    return tuple((name, _value_of(name, number)) for name in names)


def _value_of(name: str, number: int) -> JsonValue:
    match name:
        case "total" | "turns":
            return number % 97 + 1
        case "kinds":
            return number % 5
        case "by_key":
            return {f"key {number % 4}": number}
        case _:
            return number


def _records(number: int) -> tuple[WriteField, ...]:
    return tuple(WriteField(field=name, value=value) for name, value in writes_of(number))


# ---------------------------------------------------------------- the tools

JOTTING = ("jot", "jot_slow", "jot_flaky", "jot_paid")
JOT_GRANTS = (*GRANTS, *(ToolGrant(name=name, approve="never") for name in JOTTING))
_AGAIN = RetryPolicy(attempts_max=4, backoff_s=0.5)


def _jot(amount: int, context: ToolContext) -> None:
    for name, value in writes_of(amount):
        context.write(name, value)


def _jotting() -> list[FunctionTool[..., Any]]:
    @tool(trusted=True)
    def jot(amount: int, context: ToolContext) -> JsonValue:
        """Write."""
        _jot(amount, context)
        return amount

    @tool(trusted=True)
    async def jot_slow(amount: int, context: ToolContext) -> JsonValue:
        """Write, and take some time."""
        _jot(amount, context)
        await asyncio.sleep(amount % 6 * chance().random())
        return amount

    @tool(trusted=True, retry=_AGAIN, idempotent=True)
    async def jot_flaky(amount: int, context: ToolContext) -> Returned:
        """Write, and fail as often as the amount says, or for good."""
        _jot(amount, context)
        if context.execution <= amount % 3 or amount % 7 == 0:
            return failed("not this time", retryable=amount % 7 != 0)
        return succeeded(amount)

    @tool(
        trusted=True,
        idempotent=True,
        retry=_AGAIN,
        side_effect=SideEffect.WRITE,
        timeout_s=20.0,
        compensation="refund by hand",
    )
    async def jot_paid(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, and write."""
        _jot(amount, context)
        return await pay("jot_paid", amount, context, once=True)

    return cast("list[FunctionTool[..., Any]]", [jot, jot_slow, jot_flaky, jot_paid])


# ---------------------------------------------------------------- the agents


def _decide(context: PlannerContext) -> Decision:
    steps = steps_of(context.input)
    index = context.step_index
    step = steps[index] if index < len(steps) else None
    if step is None and steps and steps[-1][0] == "last":
        step = steps[-1]  # the answer did not stand: children were open
    match step:
        case None | ["last", _]:
            records = () if step is None else _records(step[1])
            return Finish(answer={"fields": dict(context.fields)}, records=records)
        case ["keep", number, calls]:
            return CallTools(calls=_wishes(calls), records=_records(number))
        case ["both", first, second]:
            return CallTools(calls=_wishes([["jot_slow", first], ["jot_slow", second]]))
        case ["spawn", children, wait]:
            requests = tuple(
                ChildRequest(agent_id=KEEPER, input={"steps": steps}) for steps in children
            )
            return Spawn(children=requests, wait=wait)
        case ["handoff"] if context.agent_id != KEEPER_HEIR:
            return Handoff(agent_id=KEEPER_HEIR, reason="it knows more", records=_records(index))
        case ["stumble"] if chance().random() < STUMBLES:
            return GiveUp(code=FailureCode.MODEL_ERROR, reason="no idea", records=_records(index))
        case ["stumble"] | ["handoff"]:
            return CallTools(calls=_wishes([["echo", 0]]))
        case _:
            return decide(context)


def _wishes(calls: list[Any]) -> tuple[ToolRequest, ...]:
    return tuple(ToolRequest(tool=name, args={"amount": amount}) for name, amount in calls)


async def _work(ctx: Context, value: Any) -> object:
    for step in steps_of(value):
        match step:
            case ["keep", number, calls]:
                _write(ctx, number)
                await ctx.gather(*(_call(ctx, name, amount) for name, amount in calls))
            case ["both", first, second]:
                await ctx.gather(_branch(ctx, first), _branch(ctx, second))
            case ["last", number]:
                _write(ctx, number)
            case ["stumble"]:
                if chance().random() < STUMBLES:
                    raise AgentFailed("no idea", code=FailureCode.MODEL_ERROR)
            case _:
                await _do(ctx, step)
    return {"fields": {one.name: ctx.read(one.name) for one in FIELDS}}


async def _do(ctx: Context, step: list[Any]) -> None:
    """Do a step that writes nothing."""
    match step:
        case ["call", calls]:
            await ctx.gather(*(_call(ctx, name, amount) for name, amount in calls))
        case ["spawn", children, _]:
            runs = [ctx.spawn(KEEPER_CODE, {"steps": steps}) for steps in children]
            await ctx.gather(*(told_of(run) for run in runs))
        case ["ask", number, *limits]:
            wait = expires_in(limits)
            asked = ctx.interrupt({"amount": number}, expires_in=wait, on_expiry="deny")
            await told_of(asked)
        case ["sleep", seconds]:
            await ctx.sleep(seconds)
        case _:
            await ctx.step(len, "step", name="count")


async def _call(ctx: Context, name: str, amount: int) -> Any:
    return await told_of(ctx.tool(name, amount=amount))


async def _branch(ctx: Context, number: int) -> None:
    """Write before and after something that takes its time."""
    _write(ctx, number)
    await told_of(ctx.tool("slow", amount=number % 9))
    _write(ctx, number + 1)


def _write(ctx: Context, number: int) -> None:
    for name, value in writes_of(number):
        ctx.write(name, value)


@cache
def keeping_catalog(release: ReleaseKind = "first") -> Catalog:
    """Return the agents of a release whose fields outlive their runs, beside all others."""
    return new_catalog(release, [*versions_of(release, _made), _loop(KEEPER_HEIR)], _jotting())


def _made(version: str, **how: Any) -> list[HostedAgent]:
    code = agent(KEEPER_CODE, version, tools=JOT_GRANTS, state=FIELDS, **how)(_work)
    return [_loop(KEEPER, version, **how), code]


def _loop(agent_id: str, version: str = "1", **how: Any) -> HostedAgent:
    planner = ScriptedPlanner(_decide)
    return loop_agent(agent_id, version, planner, tools=JOT_GRANTS, state=list(FIELDS), **how)
