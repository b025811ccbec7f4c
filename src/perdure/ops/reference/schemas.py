"""JSON Schemas of what callers send and see (R-1.1), one document each."""

from collections.abc import Iterator
from typing import Any, cast, get_args

from pydantic import BaseModel, TypeAdapter

from perdure.protocol.agents import AgentCard, AgentView
from perdure.protocol.decisions import Decision
from perdure.protocol.event_views import EventView, LiveDelta
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.log import EventData
from perdure.protocol.messages import Message
from perdure.protocol.runs import Run, RunContext, RunOptions
from perdure.protocol.states import RunStatus
from perdure.protocol.tools import ToolSpec
from perdure.server.problems import Problem
from perdure.service.runs import RunRequest
from perdure.service.views import (
    ArtifactView,
    AttemptView,
    CheckpointView,
    EventPage,
    InterruptView,
    LateView,
    Snapshot,
    StepView,
    ThreadEventPage,
    ThreadView,
    ToolCallView,
    ToolView,
)

Schema = dict[str, Any]

_SENT: dict[str, type[BaseModel]] = {
    "agent": AgentView,
    "agent-card": AgentCard,
    "artifact": ArtifactView,
    "attempt": AttemptView,
    "checkpoint": CheckpointView,
    "event": EventView,
    "event-page": EventPage,
    "thread-event-page": ThreadEventPage,
    "live-delta": LiveDelta,
    "failure": Failure,
    "interrupt": InterruptView,
    "late": LateView,
    "message": Message,
    "problem": Problem,
    "run": Run,
    "snapshot": Snapshot,
    "step": StepView,
    "thread": ThreadView,
    "tool": ToolView,
    "tool-call": ToolCallView,
    "tool-spec": ToolSpec,
}

_TAKEN: dict[str, Any] = {
    "decision": Decision,
    "run-context": RunContext,
    "run-options": RunOptions,
    "run-request": RunRequest,
}


class SentState(StateEvent):
    """A `state` event as it is sent: with the protocol status, and the code beside the failure."""

    status: RunStatus
    code: FailureCode | None


def event_models() -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each event type with the model of its data as clients see it."""
    for model in cast("tuple[type[BaseModel], ...]", get_args(EventData)):
        name = str(model.model_fields["type"].default)
        yield name, SentState if name == "state" else model


def event_schema(name: str, model: type[BaseModel]) -> Schema:
    """Return the schema of an event's `data`; the type stands beside it, not in it."""
    schema = model.model_json_schema(mode="serialization")
    del schema["properties"]["type"]
    schema["required"] = [field for field in schema["required"] if field != "type"]
    schema["title"] = f"data of a {name} event"
    return schema


def schemas() -> dict[str, Schema]:
    """Return every schema by its name."""
    found = {name: model.model_json_schema(mode="serialization") for name, model in _SENT.items()}
    found |= {name: TypeAdapter(kind).json_schema() for name, kind in _TAKEN.items()}
    found |= {f"event-{name}": event_schema(name, model) for name, model in event_models()}
    return {name: _headed(name, schema) for name, schema in sorted(found.items())}


def _headed(name: str, schema: Schema) -> Schema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:perdure:schema:v1:{name}",
        **schema,
    }
