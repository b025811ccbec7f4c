"""What a caller says of a run reaches policy, planner and tools as it was said (R-3.3)."""

from typing import Any

from pydantic import JsonValue

from perdure.control.policy import DefaultPolicy
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, PolicyDecision
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.runs import RunContext, RunFacts
from perdure.protocol.states import RunState
from perdure.protocol.tools import ToolSpec
from perdure.testing.embedded import call, embedded, scripted
from perdure.testing.tools import ToolZoo
from perdure.tools import ToolContext, tool
from tests.flow.world import assert_sound, database_at

CONTEXT: dict[str, JsonValue] = {
    "user_id": "ada",
    "tenant_id": "default",
    "scope": ["sales", "é\u2028"],
    "locale": "de-CH",
    "nested": {"a": [1, None, {"b": 0.5}], "": False},
}


class Listening(DefaultPolicy):
    """The default policy, noting what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[RunFacts] = []

    def judge(
        self, agent: HostedAgent, facts: RunFacts, spec: ToolSpec, args: JsonValue
    ) -> PolicyDecision:
        self.heard.append(facts)
        return super().judge(agent, facts, spec, args)


async def test_the_context_reaches_policy_planner_and_tools_unchanged(
    url: str, zoo: ToolZoo
) -> None:
    """R-3.3: the same value everywhere, extra fields included, also after a restart."""
    seen: dict[str, Any] = {}

    @tool
    def look_around(context: ToolContext) -> str:
        """Note what the tool is told."""
        seen["tool"] = (context.run, context.caller)
        return "looked"

    def decide(context: PlannerContext) -> Decision:
        seen[f"planner {context.step_index}"] = (context.facts.context, context.facts.caller)
        return Finish(answer="seen") if context.turns else call("look_around")

    zoo.registry.add(look_around)
    policy = Listening()
    agent = scripted("looker", decide, tools=["look_around"])
    async with database_at(url) as database:
        async with embedded(database, [agent], tools=zoo.registry, policy=policy) as engine:
            run_id = await engine.submit("looker", context=CONTEXT)
            row = await engine.wait_terminal(run_id)
        await assert_sound(database)
    assert row.hot.state is RunState.SUCCEEDED
    expected = (RunContext.model_validate(CONTEXT), row.facts.caller)
    seen["policy"] = (policy.heard[0].context, policy.heard[0].caller)
    assert set(seen) == {"planner 0", "policy", "tool", "planner 1"}
    assert all(found == expected for found in seen.values())
    assert row.facts.context.model_dump(mode="json") == CONTEXT
    assert (row.facts.caller.tenant_id, row.facts.caller.principal) == ("default", "local")
