"""An agent as a tool: a call starts a child run, and its answer is the call's one result (R-13.4).

The engine starts the child; nothing of it runs in the tool runner, and no worker is held while
the child runs. The call is judged and approved like any other, and each of the child's own calls
by the child's permissions.
"""

from pydantic import JsonValue

from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.tools.api import ForeignTool, Operation, ToolContext, ToolUnavailable

ANY_INPUT: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"task": {"type": "string", "description": "what the agent is to do"}},
    "required": ["task"],
}
"""What an agent is asked for when nothing else is said."""


def agent_as_tool(
    agent_id: str,
    *,
    name: str | None = None,
    version: str = "1",
    description: str = "",
    input_schema: dict[str, JsonValue] | None = None,
    side_effect: SideEffect = SideEffect.READ,
    risk: str = "low",
) -> ForeignTool:
    """Return a tool whose calls are child runs of the newest version of an agent.

    The call's arguments are the child's input. `side_effect` is what the policy judges the call
    by: by default it runs unasked, like any tool that only reads.
    """
    spec = ToolSpec.model_validate(
        {
            "name": name or agent_id,
            "version": version,
            "description": description or f"Ask the agent {agent_id}.",
            "input_schema": input_schema or ANY_INPUT,
            "side_effect": side_effect,
            "idempotent": True,
            "timeout_s": 60.0,
            "compensation": "cancelling the run cancels what it started",
            "risk": risk,
            "agent": agent_id,
        }
    )
    return ForeignTool(spec=spec, call=Operation(run=_never, is_async=False))


def _never(context: ToolContext, args: JsonValue) -> object:
    del context, args
    raise ToolUnavailable("the engine starts a child run for this call")
