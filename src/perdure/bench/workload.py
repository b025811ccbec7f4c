"""Workload W1 on the runtime itself: an agent with a scripted planner and one tool.

Planner and tool are trusted built-in code that runs on the engine's loop; with `isolated` the
tool runs as a user's does, off the loop.
"""

from pydantic import JsonValue

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.bench.payloads import STEPS, args_of, result_of
from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import CallTools, Decision, Finish, ToolRequest
from perdure.tools import tool

AGENT_ID = "bench-w1"


@tool(name="lookup", trusted=True)
def lookup(topic: str, page: int, text: str) -> dict[str, JsonValue]:
    """Return a page of figures."""
    del topic, text
    return result_of(page)


@tool(name="lookup_isolated")
async def lookup_isolated(topic: str, page: int, text: str) -> dict[str, JsonValue]:
    """Return a page of figures, as a user's own tool would."""
    del topic, text
    return result_of(page)


def _decide(name: str, context: PlannerContext) -> Decision:
    step = context.step_index
    if step >= STEPS:
        return Finish(answer="done")
    seed = context.input
    assert isinstance(seed, int)
    return CallTools(calls=(ToolRequest(tool=name, args=args_of(seed, step)),))


def catalog(*, isolated: bool = False) -> Catalog:
    """Return the agent of W1."""
    name = "lookup_isolated" if isolated else "lookup"
    registry = AgentRegistry()
    registry.add_tool(lookup_isolated if isolated else lookup)
    planner = ScriptedPlanner(lambda context: _decide(name, context))
    registry.add(loop_agent(AGENT_ID, "1", planner, tools=[name]))
    return Catalog([registry])
