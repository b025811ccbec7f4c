"""How the runtime's own `custom` events enter a snapshot; those of authors leave it as it is."""

from contextlib import suppress

from pydantic import JsonValue

from perdure.engine.snapshot import (
    APPROVAL_EVENT_NAME,
    PENDING_EVENT_NAME,
    STATE_EVENT_NAME,
    STATE_UPDATE_EVENT_NAME,
    RunSnapshot,
    StateUpdate,
    chain,
)
from perdure.protocol.breakpoints import BREAKPOINTS_EVENT_NAME, Breakpoint
from perdure.protocol.codec import digest
from perdure.protocol.events import CustomEvent
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    FIELD_EVENTS,
    READ_EVENT_NAME,
    SETTLED_EVENT_NAME,
    slot_of,
)
from perdure.protocol.folding import FoldedField
from perdure.protocol.states import ToolCallStatus


def fold_custom(snapshot: RunSnapshot, data: CustomEvent) -> None:
    """Take what one of the runtime's own events says."""
    if data.name == STATE_EVENT_NAME:
        snapshot.agent_state = data.value
        snapshot.agent_state_digest = digest(data.value)
    elif data.name == STATE_UPDATE_EVENT_NAME and isinstance(data.value, dict):
        _fold_state_update(snapshot, data.value)
    elif data.name in FIELD_EVENTS and isinstance(data.value, dict):
        _fold_field(snapshot, data, data.value)
    elif data.name == BREAKPOINTS_EVENT_NAME and isinstance(data.value, list):
        snapshot.breakpoints = tuple(Breakpoint.model_validate(point) for point in data.value)
    elif data.name == APPROVAL_EVENT_NAME and isinstance(data.value, dict):
        _fold_approval(snapshot, data.value)
    elif data.name == PENDING_EVENT_NAME and isinstance(data.value, dict):
        call = snapshot.open_calls.get(str(data.value.get("tool_call_id")))
        if call is not None:
            ref = data.value.get("external_ref")
            call.status = ToolCallStatus.PENDING
            call.by_callback, call.overdue = True, False
            call.external_ref = None if ref is None else str(ref)
            wait_s = data.value.get("expires_in_s")
            call.wait_s = float(wait_s) if isinstance(wait_s, int | float) else 0.0


def _fold_field(snapshot: RunSnapshot, data: CustomEvent, value: dict[str, JsonValue]) -> None:
    """Keep a write by its place, and what the run sees of a field that outlives it."""
    place = data.position or value.get("at")
    if data.name == FIELD_EVENT_NAME and place is not None:
        snapshot.writes[str(place)] = value
        with suppress(ValueError):  # a damaged write changes nothing; `verify` tells of it
            snapshot.folded.setdefault(slot_of(value), FoldedField()).add(str(place), value)
        chain(snapshot, "write", str(place), digest(value))
    elif data.name == READ_EVENT_NAME:
        slot = slot_of(value)
        snapshot.fields_read[slot] = value
        held = (value["value"],) if "value" in value else ()
        snapshot.folded.setdefault(slot, FoldedField()).begin(held)
        chain(snapshot, "read", digest(value))
    elif data.name == SETTLED_EVENT_NAME:
        places = value.get("places")
        snapshot.knows_settled = True
        snapshot.settled |= frozenset(map(str, places if isinstance(places, list) else ()))
        chain(snapshot, "settled", digest(value))


def _fold_state_update(snapshot: RunSnapshot, value: dict[str, JsonValue]) -> None:
    """Take a state that a person gave; who and why enter the history."""
    state, by, reason = value.get("state"), str(value.get("by")), value.get("reason")
    snapshot.agent_state = state
    snapshot.agent_state_digest = digest(state)
    told = None if reason is None else str(reason)
    chain(snapshot, "state_update", by, told, snapshot.agent_state_digest)
    key = value.get("key")
    if key is not None:
        wanted = state_update_fingerprint(state, told)
        snapshot.state_updates[str(key)] = StateUpdate(snapshot.last_seq, wanted)


def state_update_fingerprint(state: JsonValue, reason: str | None) -> str:
    """Return what makes two updates by hand under one key the same."""
    return digest([state, reason])


def _fold_approval(snapshot: RunSnapshot, value: dict[str, JsonValue]) -> None:
    """Keep who may decide by now, and whether they were told."""
    question = snapshot.open_interrupts.get(str(value.get("approval_id")))
    if question is None:
        return
    match value.get("phase"):
        case "delegated" | "escalated" as phase:
            approvers = value.get("approvers")
            if isinstance(approvers, list):
                question.approvers = tuple(map(str, approvers))
            question.told, question.not_told = False, 0
            if phase == "escalated":
                question.escalate_after_s = None
        case "notified":
            question.told, question.not_told = True, 0
        case "not_notified":
            question.not_told += 1
        case _:
            pass
