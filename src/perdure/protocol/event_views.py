"""An event as clients get it."""

from pydantic import JsonValue

from perdure.protocol.base import Stored, Time


class EventView(Stored):
    """An event as it is sent to clients (R-6.1)."""

    event_id: str
    run_id: str
    seq: int
    type: str
    step_index: int
    time: Time
    schema_version: int
    attempt: int
    trace_id: str
    span_id: str
    data: JsonValue
