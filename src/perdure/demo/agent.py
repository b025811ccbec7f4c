"""The sales analyst: an agent that finds falling products and asks before it publishes.

`registry` holds the offline agent, whose planner is a function of what has happened so far;
`make_model_registry` one that a language model drives through the same tools.
"""

from typing import cast

from pydantic import JsonValue

from perdure.agents.catalog import AgentRegistry, loop_agent
from perdure.agents.loop.react import ReActPlanner
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.demo.tools import TOOLS
from perdure.engine.context import CallRecord, PlannerContext
from perdure.engine.ports import Planner
from perdure.protocol.decisions import CallTools, Decision, Finish, GiveUp, ToolRequest
from perdure.protocol.errors import Invalid
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ToolCallStatus

AGENT_ID = "sales-analyst"
MODEL_AGENT_ID = "sales-analyst-llm"
VERSION = "1"

Json = dict[str, JsonValue]

INPUT_SCHEMA: Json = {
    "type": "object",
    "properties": {"region": {"type": "string", "minLength": 1}, "task": {"type": "string"}},
    "required": ["region"],
}

SYSTEM = """\
You analyse retail sales with the tools you are given, and nothing else.
Load the data first. Find the last two full weeks. Find the products of the region whose revenue
fell most between them with falling_products; query_sales answers further questions. Write the
report, publish it under a short name, and finish by naming the products with their figures.
Publishing waits for a person's approval.
"""


def decide(context: PlannerContext) -> Decision:
    """Return the next step of the offline analyst, from the results so far."""
    calls = [call for turn in context.turns for call in turn.calls]
    failed = next((call for call in calls if call.status is not ToolCallStatus.SUCCEEDED), None)
    if failed is not None:
        reason = failed.error.reason if failed.error is not None else str(failed.status)
        return GiveUp(code=FailureCode.TOOL_ERROR, reason=f"{failed.tool}: {reason}")
    done = {call.tool: call for call in calls}
    if "load_sales" not in done:
        return _call("load_sales", {}, "First I load the data.")
    if "full_weeks" not in done:
        return _call("full_weeks", {}, "Which weeks are complete?")
    weeks = cast("list[Json]", done["full_weeks"].output)
    if len(weeks) < 2:
        return GiveUp(reason="the data covers fewer than two full weeks")
    region = cast("Json", context.input)["region"]
    return _after_weeks(done, region, weeks[-2:])


def _after_weeks(done: dict[str, CallRecord], region: JsonValue, weeks: list[Json]) -> Decision:
    before, after = weeks
    question: Json = {"region": region, "before": before["monday"], "after": after["monday"]}
    if "falling_products" not in done:
        return _call("falling_products", question, "Which products fell most?")
    if "write_report" not in done:
        return _call("write_report", question, "I write the report.")
    if "publish_report" not in done:
        report = cast("Json", done["write_report"].output)["report"]
        publication: Json = {"report": report, "name": f"falling-products-{region}"}
        return _call("publish_report", publication, "I publish the report.")
    answer: Json = {
        "region": region,
        "weeks": {"before": before, "after": after},
        "products": done["falling_products"].output,
        "publication": cast("Json", done["publish_report"].output)["reference"],
    }
    return Finish(answer=answer)


def _call(tool: str, args: Json, text: str) -> CallTools:
    return CallTools(calls=(ToolRequest(tool=tool, args=args),), text=text)


def _registry(agent_id: str, planner: Planner, description: str) -> AgentRegistry:
    made = AgentRegistry()
    made.add_tool(*TOOLS)
    made.add(
        loop_agent(
            agent_id,
            VERSION,
            planner,
            tools=[tool.spec.name for tool in TOOLS],
            name="Sales analyst",
            description=description,
            input_schema=INPUT_SCHEMA,
        )
    )
    return made


registry = _registry(
    AGENT_ID,
    ScriptedPlanner(decide),
    "Names the products whose revenue fell most, and publishes a report after approval.",
)


def make_model_registry(model: str, base_url: str | None) -> AgentRegistry:
    """Return the analyst that a language model drives; its key is in OPENAI_API_KEY.

    Raises Invalid when the `openai` extra or a key is missing.
    """
    try:
        from perdure.agents.models.openai import OpenAIModel

        client = OpenAIModel(model, base_url=base_url)
    except (ModuleNotFoundError, ValueError) as error:
        raise Invalid(str(error), field="model") from error
    return _registry(
        MODEL_AGENT_ID,
        ReActPlanner([client], SYSTEM),
        f"The sales analyst, driven by {model}.",
    )
