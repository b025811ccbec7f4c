"""The agents of a simulation, and what they are made of where a process has threads.

What an agent does is its run's input: `{"steps": [...]}`, where a step is `["call", [[tool,
amount], ...]]`, `["spawn", [steps, ...], wait, detach]`, `["ask", number, expires_s]`, `["sleep",
seconds]`, `["tell", topic, number]`, `["note", number]` or `["handoff"]`. Loop and code agents do
the same, and `talk` lets them speak in turn.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from functools import cache
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, cast

from pydantic import JsonValue

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.code import Context, agent
from perdure.agents.code.errors import AgentFailed, ChildFailed, InterruptExpired, ToolFailed
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.agents.patterns.conversation import Participant, conversation
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    Handoff,
    Publish,
    Sleep,
    Spawn,
    ToolRequest,
)
from perdure.protocol.events import PlanItem
from perdure.protocol.states import OnExpiry
from perdure.testing.sim.outside import tell
from perdure.testing.sim.tools import GRANTS, PLAIN_GRANTS, all_tools
from perdure.tools import FunctionTool, LocalToolRunner
from perdure.tools.bridge import Call
from perdure.tools.caught import Caught
from perdure.tools.usercode import UserCode

R = TypeVar("R")

LOOP_AGENT, CODE_AGENT, TALK, HEIR = "loop", "code", "talk", "heir"

ReleaseKind = Literal["first", "beside", "continues", "replaces"]


@cache
def catalog(release: ReleaseKind = "first") -> Catalog:
    """Return the agents of a release with their tools: the same objects for all workers and plays.

    `beside`: both versions are served; `replaces`: the old one is gone, and with `continues` its
    runs go on as new ones.
    """
    return new_catalog(release)


def new_catalog(
    release: ReleaseKind,
    more: Sequence[HostedAgent] = (),
    tools: Sequence[FunctionTool[..., Any]] = (),
) -> Catalog:
    """Return the agents of a release, and more of them, with all tools."""
    registry = AgentRegistry()
    made = versions_of(release, _made)
    registry.add(*made, _loop_agent(HEIR), _talk(), *more)
    registry.add_tool(*all_tools(), *tools)
    registry.on_approval(tell)
    whole = Catalog([registry])
    whole.attach(InlineUserCode())
    return whole


def versions_of(release: ReleaseKind, make: Callable[..., list[HostedAgent]]) -> list[HostedAgent]:
    """Return the versions that a release has of agents; `make` makes those of one version."""
    match release:
        case "first":
            return make("1")
        case "beside":
            return [*make("1"), *make("2")]
        case "continues" | "replaces":
            return make("2", replaces=("1",), continues=release == "continues")


def _made(version: str, **how: Any) -> list[HostedAgent]:
    return [_loop_agent(LOOP_AGENT, version, **how), _code_agent(version, **how)]


# ---------------------------------------------------------------- what they do


def steps_of(value: JsonValue) -> list[Any]:
    """Return the steps of an input; one who takes part in a conversation has less to do."""
    told = cast("dict[str, Any]", value)
    if "steps" in told:
        return told["steps"]
    if "task" in told:
        return told["task"]["steps"][:2]
    return [["call", [["echo", len(told["said"])]]]]


def _news(number: int) -> JsonValue:
    """Return what is published: the input of a subscriber's run."""
    return {"steps": [["call", [["echo", number], ["pay_idempotent", number]]]]}


def _wishes(calls: list[Any]) -> tuple[ToolRequest, ...]:
    return tuple(ToolRequest(tool=name, args={"amount": amount}) for name, amount in calls)


def expires_in(limits: list[Any]) -> timedelta | None:
    """Return how long a question stands."""
    return None if limits in ([], [None]) else timedelta(seconds=limits[0])


def decide(context: PlannerContext) -> Decision:
    """Do the next step of the input."""
    steps = steps_of(context.input)
    if context.step_index >= len(steps):
        told: list[JsonValue] = [
            [turn.step_index, call.tool, call.status]
            for turn in context.turns
            for call in turn.calls
        ]
        return Finish(answer={"told": told})
    match steps[context.step_index]:
        case ["call", calls]:
            return CallTools(calls=_wishes(calls))
        case ["spawn", children, wait, *detach]:
            requests = (
                ChildRequest(agent_id=LOOP_AGENT, input={"steps": steps}, detach=any(detach))
                for steps in children
            )
            return Spawn(children=tuple(requests), wait=wait)
        case ["ask", number, *limits]:
            wait = expires_in(limits)
            on_expiry = OnExpiry.DENY if number % 4 else OnExpiry.FAIL
            return Ask(payload={"amount": number}, expires_in=wait, on_expiry=on_expiry)
        case ["sleep", seconds]:
            return Sleep(duration=timedelta(seconds=seconds))
        case ["tell", topic, number]:
            record = Publish(topic=topic, value=_news(number))
            return CallTools(calls=_wishes([["echo", number]]), records=(record,))
        case ["note", number]:
            plan = (PlanItem(text=f"note {number}"),)
            return CallTools(calls=_wishes([["draw", number]]), plan=plan)
        case ["handoff"] if context.agent_id != HEIR:
            return Handoff(agent_id=HEIR, reason="it knows more")
        case ["handoff"]:
            return CallTools(calls=_wishes([["echo", 0]]))
        case other:
            raise ValueError(f"no such step: {other}")


async def _work(ctx: Context, value: Any) -> object:
    told: list[Any] = []
    for step in steps_of(value):
        match step:
            case ["call", calls]:
                wishes = [ctx.tool(name, amount=amount) for name, amount in calls]
                told += await ctx.gather(*(told_of(wish) for wish in wishes))
            case ["spawn", children, _, *detach]:
                runs = [
                    ctx.spawn(CODE_AGENT, {"steps": steps}, detach=any(detach))
                    for steps in children
                ]
                told += await ctx.gather(*(told_of(run) for run in runs))
            case ["ask", number, *limits]:
                told.append(await _both(ctx, number, expires_in(limits)))
            case ["sleep", seconds]:
                await ctx.sleep(seconds)
            case ["tell", topic, number]:
                ctx.publish(topic, _news(number))
            case ["note", number]:
                ctx.emit("note", {"number": number, "chance": ctx.random()})
                ctx.plan([f"note {number}"])
                ctx.artifact(f"note-{number}.txt", f"{ctx.now()} {ctx.uuid()}", "text/plain")
            case ["handoff"]:
                told.append(ctx.now().isoformat())
            case other:
                raise AgentFailed(f"no such step: {other}")
        told.append(await ctx.step(len, told, name="count"))
    return {"told": told}


async def _both(ctx: Context, number: int, expires_in: timedelta | None) -> Any:
    """Ask two questions at once, for answers by order to go wrong; one of them may expire."""
    return await ctx.gather(
        told_of(ctx.interrupt({"amount": number}, expires_in=expires_in, on_expiry="deny")),
        ctx.interrupt({"amount": number + 1}),
    )


async def told_of(work: Awaitable[Any]) -> Any:
    """Return what came of it: the value, or the name of the failure."""
    try:
        return await work
    except (ToolFailed, ChildFailed, InterruptExpired) as error:
        return type(error).__name__


# ---------------------------------------------------------------- the agents


def mixed_agents() -> tuple[HostedAgent, HostedAgent]:
    """Return the loop agent and the code agent, for tools of the same names elsewhere."""
    return _loop_agent(LOOP_AGENT, tools=PLAIN_GRANTS), _code_agent(tools=PLAIN_GRANTS)


def _loop_agent(
    agent_id: str, version: str = "1", tools: Sequence[ToolGrant] = GRANTS, **how: Any
) -> HostedAgent:
    return loop_agent(agent_id, version, ScriptedPlanner(decide), tools=tools, **how)


def _code_agent(version: str = "1", tools: Sequence[ToolGrant] = GRANTS, **how: Any) -> HostedAgent:
    return agent(CODE_AGENT, version, tools=tools, **how)(_work)


def _talk() -> HostedAgent:
    names = ((LOOP_AGENT, "ada"), (CODE_AGENT, "bob"))
    people = [Participant(name=name, agent_id=agent_id) for agent_id, name in names]
    return conversation(TALK, "1", people, turns_max=3, on_failure="go_on", answer="all")


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

    def run_async(self, body: Callable[[], Awaitable[R]], label: str = "") -> Call[R]:
        """Start the body as a task."""
        call: Call[R] = Call(body, label)
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


def inline_tools(agents: Catalog) -> LocalToolRunner:
    """Return a runner that runs everything on the engine's loop."""
    return LocalToolRunner(agents.tools, user_code=InlineUserCode(), inline=True, grace_s=1.0)
