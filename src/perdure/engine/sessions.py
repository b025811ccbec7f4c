"""What a planner's session may ask the engine for."""

from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.history import load_value
from perdure.engine.ports import (
    Clock,
    HostedAgent,
    PlannerSession,
    SessionPlanner,
)
from perdure.protocol.values import Value


@dataclass(frozen=True, slots=True)
class CoreSurroundings:
    """The engine as a session sees it. Implements `SessionSurroundings`."""

    core: Core

    @property
    def clock(self) -> Clock:
        """The engine's clock."""
        return self.core.clock

    async def load(self, tenant_id: str, value: Value) -> JsonValue:
        """Return a recorded value whole; raise LookupError when its content is not stored."""
        return await load_value(self.core, tenant_id, value)


def session_of(core: Core, agent: HostedAgent) -> PlannerSession | None:
    """Return a session for one attempt, when the agent's planner keeps something in memory."""
    planner = agent.planner
    return planner.open(CoreSurroundings(core)) if isinstance(planner, SessionPlanner) else None
