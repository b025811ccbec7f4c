"""What a planner's session may ask the engine for."""

from dataclasses import dataclass
from datetime import datetime, timedelta

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
class StoreTime:
    """The store's time, counted on from the claim: the worker's own clock may be wrong by hours."""

    clock: Clock
    claimed_at: datetime
    mark: float
    """What the monotonic clock showed at the claim."""

    def now(self) -> datetime:
        """Return the time of day."""
        return self.claimed_at + timedelta(seconds=self.clock.monotonic() - self.mark)

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return self.clock.monotonic()


@dataclass(frozen=True, slots=True)
class CoreSurroundings:
    """The engine as a session sees it. Implements `SessionSurroundings`."""

    core: Core
    clock: Clock

    async def load(self, tenant_id: str, value: Value) -> JsonValue:
        """Return a recorded value whole; raise LookupError when its content is not stored."""
        return await load_value(self.core, tenant_id, value)


def session_of(core: Core, agent: HostedAgent, time: StoreTime) -> PlannerSession | None:
    """Return a session for one attempt, when the agent's planner keeps something in memory."""
    planner = agent.planner
    return (
        planner.open(CoreSurroundings(core, time)) if isinstance(planner, SessionPlanner) else None
    )
