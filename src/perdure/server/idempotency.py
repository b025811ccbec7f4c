"""The `Idempotency-Key` header (R-3.2, decision 34).

A run's key is scoped to tenant and agent and lives as long as the run; that of a new thread to the
tenant, that of a message to its thread. Answering and cancelling are idempotent by themselves: the
same request again has the same answer and changes nothing, so there the header is accepted and not
needed.
"""

from typing import Annotated

from fastapi import Header
from starlette.requests import Request

from perdure.protocol.errors import Malformed
from perdure.server.openapi import header

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"

NaturalKey = Annotated[
    str | None,
    Header(
        alias=HEADER,
        description="accepted and not needed: the same request again changes nothing",
    ),
]
RunKey = Annotated[
    str | None,
    Header(
        alias=HEADER,
        description="1 to 255 bytes; the same key returns the same run (as the body's option)",
    ),
]
CreateKey = Annotated[
    str | None,
    Header(
        alias=HEADER,
        description="1 to 255 bytes; the same key returns the same object",
    ),
]
LOCATION = {"Location": header("the object's path")}
MADE_HEADERS = {
    REPLAYED: {
        "description": "`true` when what stands under the key was made before",
        "schema": {"type": "string", "enum": ["true"]},
    },
}
"""The documented headers of an answer that may be a replay."""


def key_of(request: Request) -> str | None:
    """Return the header's key as text; raise Malformed for two headers or bytes without text."""
    found = [value for name, value in request.scope["headers"] if name == b"idempotency-key"]
    if not found:
        return None
    if len(found) > 1:
        raise Malformed("the header stands twice", field=HEADER)
    try:
        return str(found[0], "utf-8")
    except UnicodeDecodeError:
        raise Malformed("the header is not UTF-8", field=HEADER) from None


def made_headers(location: str, *, created: bool) -> dict[str, str]:
    """Return the headers of an answer with the object that stands under a request."""
    headers = {"Location": location}
    if not created:
        headers[REPLAYED] = "true"
    return headers
