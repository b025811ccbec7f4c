"""An event as clients get it, and live text between the events."""

from typing import Literal

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


class DeltaData(Stored):
    """A piece of a message with its place in it, in characters (Unicode code points)."""

    message_id: str
    offset: int
    text: str


class LiveDelta(Stored):
    """Text of a model reply that is not in the log yet, sent without an `id` (R-6.5).

    `text[:offset] + data.text` is the message so far, whether a piece comes live, from the log, or
    again after a reconnect. Only a `model` event that names the message makes its text count.
    """

    run_id: str
    type: Literal["delta"] = "delta"
    live: Literal[True] = True
    step_index: int
    attempt: int
    cancel_epoch: int
    data: DeltaData
