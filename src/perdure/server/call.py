"""What a route works with: the service, who calls, and the forms an answer can take."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import Depends, Header, Query
from fastapi.openapi.models import Example
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from perdure.protocol.codec import encode
from perdure.protocol.errors import Malformed
from perdure.protocol.values import WAIT_SECONDS_MAX
from perdure.server.app import ServerState, state_of
from perdure.service.base import Service
from perdure.service.principal import LOCAL, Principal

JSON = "application/json"
STREAM = "text/event-stream"

ItemT = TypeVar("ItemT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Call:
    """One request with who sent it."""

    request: Request
    state: ServerState
    principal: Principal

    @property
    def service(self) -> Service:
        """The use cases."""
        return self.state.service


async def call_of(request: Request) -> Call:
    """Return the call. Until authentication lands every caller is the local principal."""
    return Call(request, state_of(request), LOCAL)


InCall = Annotated[Call, Depends(call_of)]

Wait = Annotated[
    float,
    Query(
        ge=0,
        le=WAIT_SECONDS_MAX,
        allow_inf_nan=False,
        description="seconds to wait for the run's end; the run goes on when the client leaves",
    ),
]

AcceptHeader = Annotated[
    str | None,
    Header(alias="Accept", description=f"`{JSON}` or `{STREAM}`", include_in_schema=False),
]

EventsAfter = Annotated[
    str | None,
    Query(
        max_length=40,
        json_schema_extra={"pattern": "^[0-9]{0,18}$"},
        description="the seq of the last event that is known",
    ),
]

EventTypes = Annotated[
    str | None,
    Query(max_length=500, description="only events of these types, separated by commas"),
]

EventGranularity = Annotated[
    str | None,
    Query(
        max_length=100,
        description="only events of these groups of types, separated by commas: state, step, "
        "message, delta, custom; added to `types`",
    ),
]


def names_in(text: str | None) -> list[str]:
    """Return the names of a list that is separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


LastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        json_schema_extra={"pattern": "^[0-9]{0,18}$"},
        description="as `after`, and stronger; sent by a client that reconnects",
    ),
]


_PLACE = {"pattern": r"^(t1\.[0-9]{1,18}(\.[0-9]{1,18}-[0-9]{1,18})*)?$"}
"""Told to those who generate requests; for all others a place is opaque."""

ThreadAfter = Annotated[
    str | None,
    Query(
        max_length=40_000,
        json_schema_extra=_PLACE,
        description="a `place`, or the `id` of the last event that is known",
    ),
]

ThreadLastEventId = Annotated[
    str | None,
    Header(
        alias="Last-Event-ID",
        max_length=40_000,
        json_schema_extra=_PLACE,
        description="as `after`, and stronger; sent by a client that reconnects",
    ),
]


def one(view: BaseModel, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return the answer with one object, encoded once."""
    return Response(view.model_dump_json(), status, headers=headers, media_type=JSON)


def page(items: Iterable[BaseModel], next_cursor: str | None) -> Response:
    """Return the answer with a page of objects, encoded once."""
    body = b",".join(item.model_dump_json().encode() for item in items)
    tail = encode({"next": next_cursor})
    return Response(b'{"items":[' + body + b"]," + tail[1:], media_type=JSON)


def wants_stream(accept: str | None, *, default: bool) -> bool:
    """Tell whether an Accept header prefers a stream to JSON; `default` where it does not say.

    Raises a 406 when it takes neither.
    """
    if accept is None:
        return default
    ranges = [_media_range(part) for part in accept.split(",") if part.strip()]
    stream, json = _quality(ranges, STREAM), _quality(ranges, JSON)
    if stream == json == 0 and ranges:
        raise HTTPException(406, f"the answer is {JSON} or {STREAM}")
    return default if stream == json else stream > json


def _media_range(text: str) -> tuple[str, float]:
    name, *parameters = (part.strip().lower() for part in text.split(";"))
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            return name, float(value) if re.fullmatch(r"[01](\.\d{0,3})?", value) else 0.0
    return name, 1.0


def _quality(ranges: Sequence[tuple[str, float]], media_type: str) -> float:
    """Return the quality of a media type by its most exact range (RFC 9110, 12.5.1)."""
    for name in (media_type, media_type.split("/")[0] + "/*", "*/*"):
        found = [quality for range_name, quality in ranges if range_name == name]
        if found:
            return max(found)
    return 0.0


def event_cursor(last_event_id: str | None, after: str | None) -> int:
    """Return the seq to go on after; the header wins. Raises Malformed where one of them is no seq."""
    for text, field in ((last_event_id, "Last-Event-ID"), (after, "after")):
        if text and not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise Malformed("not the seq of an event", field=field)
    return int(last_event_id or after or 0)


def trace_of(request: Request) -> str | None:
    """Return the trace id of a W3C traceparent header; None when there is none that is valid."""
    text = request.headers.get("traceparent", "")
    found = re.fullmatch(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*", text)
    if found is None or text.startswith("ff") or set(found[1]) == {"0"}:
        return None
    return found[1]


def example(value: Mapping[str, object]) -> dict[str, Example]:
    """Return the one example of a body, as OpenAPI wants it."""
    return {"example": Example(value=dict(value))}
