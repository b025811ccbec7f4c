"""The `Idempotency-Key` header (R-3.2, decision 34).

A run's key is scoped to tenant and agent and lives as long as the run. Answering and cancelling
are idempotent by themselves: the same request again has the same answer and changes nothing, so
there the header is accepted and not needed.
"""

from typing import Annotated

from fastapi import Header
from starlette.requests import Request
from starlette.responses import Response

from perdure.protocol.errors import Malformed

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


def mark_replayed(response: Response) -> None:
    """Say that the answer is of a request that was made before."""
    response.headers[REPLAYED] = "true"
