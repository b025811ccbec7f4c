"""Who judges the calls of a decision: policy, guardrails and what its agent may use."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from perdure.engine.core import EngineSettings
from perdure.engine.directory import AgentDirectory
from perdure.engine.ports import (
    HostedAgent,
    Policy,
    ToolRunner,
)
from perdure.engine.topics import Subscriber
from perdure.engine.view import RunView
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import (
    CallTools,
    Decision,
    Handoff,
    Operate,
    Spawn,
    ToolRequest,
)
from perdure.protocol.plain import no_entries, no_items
from perdure.protocol.tools import ToolSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What decides whether a requested call may run."""

    agent: HostedAgent
    tools: ToolRunner
    policy: Policy
    settings: EngineSettings = EngineSettings()
    notifies: bool = False
    """Approvers can be told: this process has a way to do so."""
    cards: dict[tuple[str, str | None], AgentCard | None] = field(default_factory=no_entries)
    """Agents that a decision names, as `learn` found them registered."""
    subscribers: list[Subscriber] = field(default_factory=no_items)
    """Who subscribes to what a decision publishes, as `learn_subscribers` found them."""

    async def learn(self, directory: AgentDirectory, decision: Decision) -> None:
        """Look up the agents that a decision names: drafting it does not wait."""
        named: list[tuple[str, str | None]] = []
        match decision:
            case Spawn():
                named = [(child.agent_id, child.version) for child in decision.children]
            case Handoff():
                named = [(decision.agent_id, decision.version)]
            case CallTools() | Operate():
                specs = [self.spec_of(request) for request in decision.calls]
                named = [(spec.agent, None) for spec in specs if spec is not None and spec.agent]
                if isinstance(decision, Operate):
                    named += [(child.agent_id, child.version) for child in decision.children]
            case _:
                pass
        await self._look_up(directory, named)

    async def learn_open(self, directory: AgentDirectory, view: RunView) -> None:
        """Look up the agents of calls that can be made now."""
        specs = [self.tools.find(call.tool, call.version) for call in view.runnable_calls()]
        named = [(spec.agent, None) for spec in specs if spec is not None and spec.agent]
        await self._look_up(directory, named)

    async def _look_up(
        self, directory: AgentDirectory, named: Iterable[tuple[str, str | None]]
    ) -> None:
        for agent_id, version in named:
            self.cards[agent_id, version] = await directory.find(agent_id, version)

    def spec_of(self, request: ToolRequest) -> ToolSpec | None:
        """Return the tool an agent means, when it is granted; its grant may pin the version."""
        for grant in self.agent.grants:
            if grant.name == request.tool:
                return self.tools.find(request.tool, grant.version or request.version)
        return None

    def granted(self) -> list[ToolSpec]:
        """Return the tools the planner may ask for."""
        found = (self.tools.find(grant.name, grant.version) for grant in self.agent.grants)
        return [spec for spec in found if spec is not None]
