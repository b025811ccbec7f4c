"""The log: the closed union of events, their stored form, and how it is read back."""

from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property

from pydantic import ValidationError

from perdure.protocol.base import SCHEMA_VERSION, Stored
from perdure.protocol.events import (
    ActionEvent,
    ApprovalRequestEvent,
    ArtifactEvent,
    AttemptEvent,
    CancelEvent,
    ChildEvent,
    CompensationEvent,
    CustomEvent,
    DeltaEvent,
    ErrorEvent,
    GapEvent,
    GuardrailEvent,
    HandoffEvent,
    InterruptEvent,
    LateEvent,
    MessageEvent,
    ModelEvent,
    PlanEvent,
    RepairEvent,
    ResultEvent,
    ResumeEvent,
    RetryEvent,
    StateEvent,
    StepEvent,
    TakeoverEvent,
    TimeoutEvent,
    UsageEvent,
)
from perdure.protocol.ids import event_id
from perdure.protocol.schema import Incompatible, upcast
from perdure.protocol.values import BlobRef
from perdure.protocol.wording import all_problems


class Unknown(Stored):
    """An event type of a later release; its data is passed through unread."""

    type: str


EventData = (
    StateEvent
    | ActionEvent
    | ResultEvent
    | ApprovalRequestEvent
    | InterruptEvent
    | ResumeEvent
    | CancelEvent
    | AttemptEvent
    | StepEvent
    | ModelEvent
    | MessageEvent
    | DeltaEvent
    | RetryEvent
    | TimeoutEvent
    | CompensationEvent
    | GuardrailEvent
    | UsageEvent
    | PlanEvent
    | ArtifactEvent
    | HandoffEvent
    | ChildEvent
    | TakeoverEvent
    | ErrorEvent
    | CustomEvent
    | LateEvent
    | RepairEvent
    | GapEvent
)


EVENT_TYPES: tuple[str, ...] = (
    "state",
    "action",
    "result",
    "approval_request",
    "interrupt",
    "resume",
    "cancel",
    "attempt",
    "step",
    "model",
    "message",
    "delta",
    "retry",
    "timeout",
    "compensation",
    "guardrail",
    "usage",
    "plan",
    "artifact",
    "handoff",
    "child",
    "takeover",
    "error",
    "custom",
    "late",
    "repair",
    "gap",
)
"""The closed list. Stores keep the position (from 1) as a small number: append, never reorder."""


TYPE_NUMBER: dict[str, int] = {name: number for number, name in enumerate(EVENT_TYPES, start=1)}


TYPE_NAME: dict[int, str] = {number: name for name, number in TYPE_NUMBER.items()}


_NOT_STORED = {"type"}


@dataclass(slots=True, kw_only=True)
class NewEvent:
    """An event to be recorded. The store gives it seq, time, attempt and epoch."""

    data: EventData
    step_index: int
    _encoded: bytes | None = field(default=None, init=False, repr=False, compare=False)

    def encoded(self) -> bytes:
        """Return the stored JSON of `data`, without its type and without absent fields."""
        if self._encoded is None:
            self._encoded = self.data.__pydantic_serializer__.to_json(
                self.data, exclude=_NOT_STORED, exclude_defaults=True
            )
        return self._encoded


@dataclass(frozen=True, kw_only=True)
class RecordedEvent:
    """An event as it stands in the log. `raw` is the stored JSON of its data."""

    run_id: str
    seq: int
    type: str
    step_index: int
    at: datetime
    attempt: int
    epoch: int
    raw: bytes
    schema_version: int = SCHEMA_VERSION

    @property
    def event_id(self) -> str:
        """Return the id derived from run and seq."""
        return event_id(self.run_id, self.seq)

    @cached_property
    def data(self) -> EventData | Unknown:
        """Return the typed data; `Unknown` for a type of a later release."""
        return parse_event_data(self.type, self.raw, self.schema_version)


_MODELS: dict[str, type[Stored]] = {
    model.model_fields["type"].default: model
    for model in EventData.__args__  # the union is the one list of event models
}


def parse_event_data(
    event_type: str, raw: bytes, version: int = SCHEMA_VERSION
) -> EventData | Unknown:
    """Return the typed data of JSON as it was stored by a schema version.

    Raises DamagedEvent when it does not fit its type, also once it is lifted to the present form.
    """
    model = _MODELS.get(event_type)
    if model is None:
        return Unknown(type=event_type)
    try:
        return model.model_validate_json(upcast(event_type, version, raw))  # pyright: ignore[reportReturnType]  # every value of _MODELS is a member of the union
    except (ValidationError, Incompatible) as error:
        why = all_problems(error) if isinstance(error, ValidationError) else str(error)
        raise DamagedEvent(f"a stored {event_type} event does not fit its type: {why}") from None


def ref_of(data: EventData | Unknown) -> BlobRef | None:
    """Return the content that an event refers to for a value of its own that is too large for it."""
    match data:
        case ActionEvent(args_ref=ref) | ResultEvent(output_ref=ref):
            return ref
        case LateEvent(output_ref=ref) | InterruptEvent(payload_ref=ref):
            return ref
        case ChildEvent(result_ref=ref):
            return ref
        case StateEvent(answer_ref=ref) | ModelEvent(text_ref=ref):
            return ref
        case _:
            return None


class DamagedEvent(ValueError):
    """A stored event cannot be read: the row was damaged, or written by something else."""
