"""The acceptance scene of R-7.3: its agent, and one process of it.

`python -m perdure.testing.scene ORDER` does what the order (a JSON document) says: `work` is a
worker until its stdin ends; `submit`, `answer` and `cancel` are what an API process does for one
request, which is repeated as a client would when the answer was lost. The order's plan is the
fault that happens in this process.

The agent calls `pay` beside `echo`, then the idempotent `pay`, a tool that makes an artifact, a
call that needs an approval, and the `pay` that can be looked up. Its answer holds what every call
told it and the digest of all it saw at each decision, so that two runs with equal answers were
equal to their planner byte for byte.
"""

import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import anyio
from pydantic import Field, JsonValue, TypeAdapter

from perdure.agents.catalog import AgentRegistry, Catalog
from perdure.agents.code import Context, agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.answers import Reply, answer_interrupt
from perdure.engine.cancel import cancel_run
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.engine.submit import RunOrder, submit_run
from perdure.ops.exits import run_async
from perdure.ops.settings import ChildrenSettings, DatabaseSettings, Settings, WorkerSettings
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import TENANT_DEFAULT, Model
from perdure.protocol.codec import canonical, digest, digest_bytes
from perdure.protocol.decisions import (
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    Spawn,
    ToolRequest,
)
from perdure.protocol.errors import Unavailable
from perdure.protocol.policies import MAX_ATTEMPTS_DEFAULT
from perdure.protocol.runs import Caller, RunContext, RunOptions
from perdure.protocol.states import Answer, CancelAction
from perdure.runtime import open_core, open_worker
from perdure.store.requests import AgentRegistration, CancelWish
from perdure.telemetry.logs import configure_logs
from perdure.testing.faults import FaultyStore, Plan, Trap
from perdure.testing.scene_tools import Outside, scene_tools

T = TypeVar("T")

AGENT = "scene"
CODE_AGENT = "scene-code"
LEASE_S = 1.0
BRANCHES, LEAVES = 8, 24
"""A `tree` has so many branches, each with so many leaves that hold: 201 runs."""
RUNS_MAX = 50
"""What a worker holds at once: of four that share the leaves of a tree each holds 42 or more."""
TRIES_MAX = 5

Act = Literal["pay", "hold", "gate", "poison", "steps", "code", "tree"]

_ID = re.compile(rb"\b([a-z]{2,3})_[0-9a-f]{32}")
_contexts: TypeAdapter[PlannerContext] = TypeAdapter(PlannerContext)


# ---------------------------------------------------------------- the agent


def _call(*wishes: tuple[str, dict[str, JsonValue]]) -> CallTools:
    return CallTools(calls=tuple(ToolRequest(tool=tool, args=args) for tool, args in wishes))


def _spawn(act: str, children: int) -> Spawn:
    return Spawn(children=(ChildRequest(agent_id=AGENT, input={"act": act}),) * children)


SCRIPTS: dict[str, Sequence[CallTools | Spawn]] = {
    "tree": (_spawn("branch", BRANCHES),),
    "branch": (_spawn("leaf", LEAVES),),
    "leaf": (_call(("hold", {})),),
    "pay": (
        _call(("echo", {"value": {"b": 1, "a": "ä"}}), ("pay", {"amount": 11})),
        _call(("pay_idempotent", {"amount": 12})),
        _call(("draw", {"text": "a drawing"})),
        _call(("publish", {"amount": 13})),
        _call(("pay_with_lookup", {"amount": 14})),
    ),
    "hold": (_call(("pay_idempotent", {"amount": 1})), _call(("hold", {}))),
    "gate": (_call(("pay_at_gate", {"amount": 2})), _call(("echo", {"value": "after"}))),
    "poison": (_call(("echo", {"value": "before"})), _call(("poison", {}))),
    "steps": tuple(
        _call(("pay_idempotent", {"amount": step}), ("echo", {"value": step})) for step in range(5)
    ),
}


def context_digest(context: PlannerContext) -> str:
    """Return the digest of all that a planner sees, without what differs from run to run.

    Ids become ordinals in order of appearance; times, the trace, the time spent waiting and the
    number of retries are left out: they tell of the disturbance itself.
    """
    seen = cast("dict[str, Any]", _contexts.dump_python(context, mode="json"))
    for name in ("created_at", "trace_id"):
        del seen["facts"][name]
    for name in ("waiting_ms", "retries"):
        del seen["usage"][name]
    known: dict[bytes, bytes] = {}

    def ordinal(found: re.Match[bytes]) -> bytes:
        name = b"%s#%d" % (found.group(1), len(known) + 1)
        return known.setdefault(found.group(0), name)

    return digest_bytes(_ID.sub(ordinal, canonical(seen)))


def _decide(context: PlannerContext) -> Decision:
    act = cast("dict[str, str]", context.input)["act"]
    before = cast("list[JsonValue]", context.state or [])
    digests: list[JsonValue] = [*before, context_digest(context)]
    script = SCRIPTS[act]
    if context.step_index < len(script):
        return script[context.step_index].model_copy(update={"state": digests})
    told: list[JsonValue] = [
        [turn.step_index, call.tool, call.status, call.output]
        for turn in context.turns
        for call in turn.calls
    ]
    return Finish(answer={"told": told, "digests": digests})


def scene_agent() -> HostedAgent:
    """Return the scene's agent; what it does is said by the run's input: `{"act": …}`."""
    unasked = ("pay", "pay_idempotent", "pay_with_lookup", "pay_at_gate", "poison")
    grants = (
        *(ToolGrant(name=name) for name in ("echo", "draw", "hold")),
        *(ToolGrant(name=name, approve="never") for name in unasked),
        ToolGrant(name="publish", approve="always"),
    )
    card = AgentCard(agent_id=AGENT, version="1", tools=tuple(grant.name for grant in grants))
    return HostedAgent(card=card, planner=ScriptedPlanner(_decide), grants=grants)


async def _pay_by_code(ctx: Context, input: object) -> object:
    """Do what the act `pay` does, as a code agent: the same effects, in branches and steps."""
    ctx.emit("begun", {"at": ctx.now().isoformat()})

    async def side() -> list[Any]:
        return [await ctx.tool("echo", value={"b": 1, "a": "ä"}), await ctx.step(sum, [1, 2, 3])]

    told: list[Any] = await ctx.gather(side(), ctx.tool("pay", amount=11))
    told.append(await ctx.tool("pay_idempotent", amount=12))
    ctx.artifact("drawing.txt", "a drawing", "text/plain")
    await ctx.sleep(0.05)
    told.append(await ctx.tool("publish", amount=13))
    told.append(await ctx.tool("pay_with_lookup", amount=14))
    return {"told": told, "random": ctx.random() < 1}


def scene_code_agent() -> HostedAgent:
    """Return the scene's agent that is written as code, with the same grants."""
    return agent(CODE_AGENT, "1", tools=scene_agent().grants)(_pay_by_code)


def scene_catalog(outside: Outside, trap: Trap) -> Catalog:
    """Return the agent with its tools."""
    registry = AgentRegistry()
    registry.add(scene_agent(), scene_code_agent())
    registry.add_tool(*scene_tools(outside, trap))
    return Catalog([registry])


# ---------------------------------------------------------------- what a caller does


def run_order(act: Act, key: str, max_attempts: int = MAX_ATTEMPTS_DEFAULT) -> RunOrder:
    """Return the order of a run; the same key orders the same run again."""
    wish: JsonValue = {"act": act}
    agent_id = CODE_AGENT if act == "code" else AGENT
    return RunOrder(
        agent_id=agent_id,
        input=wish,
        context=RunContext(user_id="ada"),
        options=RunOptions(idempotency_key=key, max_attempts=max_attempts),
        caller=Caller(tenant_id=TENANT_DEFAULT, principal="local"),
        fingerprint=digest([agent_id, wish]),
    )


async def submit_act(
    core: Core, act: Act, key: str, max_attempts: int = MAX_ATTEMPTS_DEFAULT
) -> str:
    """Submit a run and return its id."""
    return (await submit_run(core, run_order(act, key, max_attempts))).row.facts.run_id


async def cancel_act(core: Core, run_id: str) -> None:
    """Cancel a run, as an API process without tools does."""
    wish = CancelWish(action=CancelAction.INTERRUPT, by="ada", source="api", reason="enough")
    await cancel_run(core, TENANT_DEFAULT, run_id, wish)


async def approve(core: Core, interrupt_id: str) -> None:
    """Approve a call."""
    reply = Reply(answer=Answer.APPROVE, by="ada")
    await answer_interrupt(core, TENANT_DEFAULT, interrupt_id, reply)


async def register_agent(core: Core) -> None:
    """Register the agents without a worker, so that runs can be ordered."""
    cards = [hosted.card for hosted in (scene_agent(), scene_code_agent())]
    agents = [
        AgentRegistration(
            agent_id=card.agent_id,
            version=card.version,
            card=card.model_dump(mode="json"),
            digest=digest(card.model_dump(mode="json")),
        )
        for card in cards
    ]
    await core.store.register(agents, [])


async def repeated(request: Callable[[], Awaitable[T]]) -> T:
    """Send a request again while its answer is lost, as clients do."""
    for _ in range(TRIES_MAX - 1):
        try:
            return await request()
        except Unavailable:
            continue
    return await request()


# ---------------------------------------------------------------- the process


class Order(Model):
    """What one process of the scene has to do. `subject` is a run's or an interrupt's id."""

    do: Literal["work", "submit", "answer", "cancel"]
    db_url: str
    folder: Path
    plan: Plan | None = None
    act: Act = "pay"
    key: str = "scene"
    subject: str = ""
    lease_s: float = Field(default=LEASE_S, ge=0.5)


def scene_settings(db_url: str, lease_s: float = LEASE_S) -> Settings:
    """Return the settings of every process of a scene, its clients included."""
    return Settings(
        db=DatabaseSettings(url=db_url, pool_max=3),
        worker=WorkerSettings(
            runs_max=RUNS_MAX,
            lease_ttl_s=lease_s,
            poll_interval_s=0.1,
            tool_timeout_s=60,
            drain_grace_s=5,
        ),
        children=ChildrenSettings(cancel_deadline_s=max(3.0, lease_s / 4)),
    )


@asynccontextmanager
async def open_scene(order: Order, trap: Trap) -> AsyncGenerator[Core]:
    """Open the engine's surroundings as the runtime does, with the trap in the store."""
    async with open_core(scene_settings(order.db_url, order.lease_s)) as core:
        yield replace(core, store=FaultyStore(core.store, trap))


async def _work(order: Order) -> None:
    trap = Trap(order.plan)
    settings = scene_settings(order.db_url, order.lease_s)
    catalog = scene_catalog(Outside(order.folder), trap)
    async with (
        open_scene(order, trap) as core,
        open_worker(core, settings, catalog) as worker,
        anyio.create_task_group() as group,
    ):

        async def until_told() -> None:
            await anyio.wait_readable(sys.stdin.fileno())
            worker.drain()

        group.start_soon(until_told)
        await worker.run()
        group.cancel_scope.cancel()


async def _request(order: Order) -> None:
    async with open_scene(order, Trap(order.plan)) as core:
        match order.do:
            case "answer":
                await repeated(lambda: approve(core, order.subject))
            case "cancel":
                await repeated(lambda: cancel_act(core, order.subject))
            case _:
                await repeated(lambda: submit_act(core, order.act, order.key))


def main() -> None:
    """Carry the order out."""
    order = Order.model_validate_json(sys.argv[1])
    configure_logs("info", "json")
    run_async(lambda: _work(order) if order.do == "work" else _request(order))


if __name__ == "__main__":
    main()
