"""Updating the agent's own state of a run by hand (R-11.3)."""

from dataclasses import dataclass

from pydantic import Field, JsonValue

from perdure.engine.state_updates import StateWish, update_state
from perdure.protocol.base import Model
from perdure.protocol.ids import checkpoint_id
from perdure.service.base import Service, check_storable, own_run
from perdure.service.checkpoints import get_checkpoint
from perdure.service.keys import check_key
from perdure.service.principal import Principal
from perdure.service.views import CheckpointView


class StateRequest(Model):
    """The state that takes the place of the agent's own state."""

    state: JsonValue = Field(description="the whole new state; nothing of the old one is kept")
    reason: str | None = Field(default=None, max_length=5000, description="why, for people")


@dataclass(frozen=True, slots=True)
class StateMade:
    """The checkpoint at the update; `created` is False when it stood under the key before."""

    checkpoint: CheckpointView
    created: bool


async def update(
    service: Service,
    principal: Principal,
    run_id: str,
    request: StateRequest,
    *,
    key: str | None = None,
) -> StateMade:
    """Replace the state of a run that waits for a person, or return the update under the key.

    Raises NotFound, Conflict (the run does not wait, is held, or is over), Invalid,
    IdempotencyMismatch.
    """
    row = await own_run(service, principal, run_id)
    check_storable(request.reason, "/reason")
    wish = StateWish(
        state=request.state,
        by=principal.name,
        reason=request.reason,
        key=None if key is None else check_key(key),
    )
    done = await update_state(service.core, row.facts.run_id, wish)
    identifier = checkpoint_id(row.facts.run_id, done.seq)
    view = await get_checkpoint(service, principal, identifier)
    return StateMade(view, created=not done.replayed)
