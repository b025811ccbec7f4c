"""Agents whose runs leave every kind of event that a person may read in the terminal."""

from datetime import timedelta

from perdure.agents.catalog import AgentRegistry, loop_agent
from perdure.agents.code import Context, agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.ports import ToolGrant
from perdure.protocol.decisions import Ask, CallTools, Decision, Finish, Handoff, Sleep, ToolRequest
from perdure.protocol.events import PlanItem
from perdure.protocol.fields import StateField
from perdure.tools.api import Returned, pending
from perdure.tools.decorator import tool

REFERENCE = "tests.cli.workshop:registry"


def undo(call: object) -> dict[str, str]:
    """Take an order back."""
    del call
    return {"undone": "order 1"}


@tool(side_effect="write", idempotent=True, timeout_s=5, compensate=undo)
def order(name: str) -> str:
    """Order something."""
    return f"order of {name}"


@tool(trusted=True, side_effect="external", idempotent=True, timeout_s=5, compensation="none")
def mail(text: str) -> Returned:
    """Send a letter; the answer comes by callback."""
    return pending(external_ref=f"letter {text}")


@tool(side_effect="write")
def poke(name: str) -> str:
    """Change something, and declare nothing about it."""
    return name


def fetch(name: str) -> str:
    """Fetch something: the body of a step."""
    return name.upper()


@agent("leaves_to_rests", "1")
async def leaves_to_rests(ctx: Context, input: object) -> object:
    """Have another agent do it, which asks a person."""
    return await ctx.spawn("rests", input)


@agent("researcher", "1", state=[StateField(name="seen", rule="append")])
async def researcher(ctx: Context, input: object) -> object:
    """Fetch, note, sleep, spawn, and write it down."""
    del input
    found = await ctx.step(fetch, "a")
    ctx.write("seen", [found])
    ctx.emit("progress", {"done": 1})
    await ctx.sleep(0.01)
    child = await ctx.spawn("helper", {"word": found})
    ctx.artifact("notes.txt", f"notes on {found}", "text/plain")
    return child


def _resting(context: PlannerContext) -> Decision:
    if context.state is None:
        return Sleep(
            duration=timedelta(seconds=0.01),
            state="rested",
            plan=(PlanItem(text="rest", status="in_progress"),),
        )
    if not context.turns:
        return CallTools(calls=(ToolRequest(tool="order", args={"name": "tea"}),))
    return Ask(title="Enough?")


def _help(_: PlannerContext) -> Decision:
    return Finish(answer="helped")


registry = AgentRegistry()
registry.add_tool(order, mail, poke)
registry.add(
    researcher,
    leaves_to_rests,
    loop_agent("helper", "1", ScriptedPlanner(_help)),
    loop_agent(
        "pokes",
        "1",
        ScriptedPlanner([CallTools(calls=(ToolRequest(tool="poke", args={"name": "x"}),))]),
        tools=["poke"],
    ),
    loop_agent("rests", "1", ScriptedPlanner(_resting), tools=["order"]),
    loop_agent(
        "mails",
        "1",
        ScriptedPlanner(
            [
                CallTools(calls=(ToolRequest(tool="mail", args={"text": "hi"}),)),
                Finish(answer="sent"),
            ]
        ),
        tools=[ToolGrant(name="mail", approve="never")],
    ),
    loop_agent(
        "hands_over", "1", ScriptedPlanner([Handoff(agent_id="helper", reason="it knows better")])
    ),
)
