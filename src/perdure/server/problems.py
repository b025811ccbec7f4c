"""Errors on the wire: RFC 9457 problems with a stable code, by one table.

A problem is `{type, title, status, detail, instance, code, field, errors, details, next_actions}`.
`code` is for programs and never changes its meaning; `field` is a JSON pointer into the body, or
the name of a parameter or header. Unknown errors become `internal`, are logged once with the
request's id, and show nothing of what happened inside.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from fastapi.exceptions import RequestValidationError
from pydantic import Field, JsonValue
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from perdure.protocol.base import Stored
from perdure.protocol.codec import clean, encode, escape_pointer
from perdure.protocol.errors import PerdureError
from perdure.protocol.states import NextAction
from perdure.protocol.wording import sentence_of

log = logging.getLogger("perdure.server")

MEDIA_TYPE = "application/problem+json"
ERRORS_MAX = 20
RETRY_AFTER_S = 1
TELLS_WHEN = frozenset({"quota_exceeded", "unavailable"})
"""Codes of answers that say in `Retry-After` when to try again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a code stands for on this wire. `retry`: the same request may succeed later."""

    status: int
    title: str
    mended_by: str
    retry: bool = False


KINDS: dict[str, Kind] = {
    "malformed": Kind(400, "The request cannot be read", "the caller"),
    "unauthenticated": Kind(401, "The caller must say who it is", "the caller"),
    "forbidden": Kind(403, "The caller may not do this", "an administrator"),
    "not_found": Kind(404, "There is no such object or route", "the caller"),
    "method_not_allowed": Kind(405, "The path does not take this method", "the caller"),
    "not_acceptable": Kind(406, "The answer has no form that is accepted", "the caller"),
    "too_slow": Kind(408, "The request did not arrive in time", "the caller"),
    "conflict": Kind(409, "The object's state forbids the request", "the caller"),
    "idempotency_mismatch": Kind(
        409, "The idempotency key belongs to another request", "the caller"
    ),
    "already_answered": Kind(409, "The interrupt or call has another answer", "the caller"),
    "thread_busy": Kind(409, "The thread has an active run", "the caller", retry=True),
    "history_reset": Kind(409, "The cursor is beyond the end of the log", "the caller"),
    "gone": Kind(410, "The object expired, was cancelled or deleted", "nobody"),
    "too_large": Kind(413, "The request is over a limit", "the caller"),
    "unsupported_media": Kind(415, "The body's media type is not read here", "the caller"),
    "invalid": Kind(422, "The request breaks a schema or a rule", "the caller"),
    "quota_exceeded": Kind(429, "A limit on use is reached", "waiting", retry=True),
    "internal": Kind(500, "The server failed", "the operator"),
    "unreadable": Kind(500, "What is stored cannot be read", "the operator"),
    "unavailable": Kind(503, "The store cannot answer at the moment", "waiting", retry=True),
    "store_full": Kind(507, "The store has no room", "the operator"),
}
"""Every code with its HTTP status. The list grows; a code never changes its meaning."""

_CODE_OF_STATUS = {
    400: "malformed",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "too_slow",
    413: "too_large",
    415: "unsupported_media",
    422: "invalid",
    503: "unavailable",
}


class FieldError(Stored):
    """One thing that is wrong with a request, and where."""

    field: str | None
    detail: str


class Problem(Stored):
    """An error as it is sent (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    field: str | None = None
    errors: list[FieldError] = Field(default_factory=list[FieldError])
    details: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    next_actions: list[NextAction] = Field(default_factory=list[NextAction])


def make_problem(
    code: str,
    detail: str,
    *,
    instance: str = "about:blank",
    field: str | None = None,
    errors: Sequence[FieldError] = (),
    details: Mapping[str, object] | None = None,
) -> Problem:
    """Return a problem by the table."""
    code = code if code in KINDS else "internal"
    kind = KINDS[code]
    return Problem(
        type=f"urn:perdure:problem:{code}",
        title=kind.title,
        status=kind.status,
        detail=_shown(detail),
        instance=instance,
        code=code,
        field=field,
        errors=list(errors),
        details=cast("dict[str, JsonValue]", clean(dict(details or {}))),
        next_actions=[NextAction.WAIT] if kind.retry else [],
    )


def _shown(text: str) -> str:
    """Return text that any JSON can carry, of bounded length."""
    return cast("str", clean(text))[:2000]


def answer(problem: Problem) -> Response:
    """Return the response of a problem."""
    headers: dict[str, str] = {}
    if problem.code == "too_slow":
        headers["Connection"] = "close"  # the rest of the body may still come
    if problem.code in TELLS_WHEN:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Response(
        problem.model_dump_json(), problem.status, headers=headers, media_type=MEDIA_TYPE
    )


def instance_of(scope: Scope) -> str:
    """Return the URI of this occurrence: the request's id."""
    return f"urn:perdure:request:{scope.get('perdure.request_id', 'unknown')}"


def from_error(error: PerdureError, scope: Scope) -> Response:
    """Return the response of one of our own errors."""
    if error.code not in KINDS or error.code == "internal":
        return from_unknown(error, scope)
    return answer(
        make_problem(
            error.code,
            error.message,
            instance=instance_of(scope),
            field=error.field,
            details=error.details,
        )
    )


def from_unknown(error: BaseException, scope: Scope) -> Response:
    """Log an unknown error, once, and return a response that shows nothing of it."""
    log.error(
        "a request failed",
        exc_info=error,
        extra={
            "request_id": scope.get("perdure.request_id"),
            "method": scope.get("method"),
            "path": scope.get("path"),
        },
    )
    return answer(make_problem("internal", "the server failed", instance=instance_of(scope)))


async def on_perdure_error(request: Request, error: Exception) -> Response:
    """Handle one of our own errors; registered with the application."""
    return from_error(cast("PerdureError", error), request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Handle what the framework raises: no route, or no such method."""
    raised = cast("HTTPException", error)
    code = _CODE_OF_STATUS.get(raised.status_code)
    if code is None:
        return from_unknown(error, request.scope)
    detail = (
        "there is no such route: /docs lists them all" if code == "not_found" else raised.detail
    )
    response = answer(make_problem(code, detail, instance=instance_of(request.scope)))
    for name, value in (raised.headers or {}).items():
        response.headers[name] = value
    if raised.status_code == 405:
        response.headers["Allow"] = ", ".join(_methods_of(request))
    return response


def _methods_of(request: Request) -> list[str]:
    """Return all methods that the path takes: the framework names those of one route only.

    Of routes that match, the ones with the fewest parameters are meant: `/v1/runs/cancel` is no run.
    """
    found = [
        route
        for route in request.app.router.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    fewest = min((len(route.param_convertors) for route in found), default=0)
    meant = (route for route in found if len(route.param_convertors) == fewest)
    return sorted({method for route in meant for method in route.methods or ()})


async def on_validation_error(request: Request, error: Exception) -> Response:
    """Handle a request that does not fit its schema."""
    raised = cast("RequestValidationError", error)
    found = [_field_error(item) for item in raised.errors()[:ERRORS_MAX]]
    first = found[0] if found else FieldError(field=None, detail="the request is not valid")
    return answer(
        make_problem(
            "invalid",
            f"{first.field}: {first.detail}" if first.field else first.detail,
            instance=instance_of(request.scope),
            field=first.field,
            errors=found,
        )
    )


def _field_error(item: Mapping[str, object]) -> FieldError:
    place = [str(part) for part in cast("Sequence[object]", item.get("loc", ()))]
    if place == ["body"] and item.get("type") == "missing":
        return FieldError(field="", detail="the request needs a body: a JSON object")
    detail = _shown(sentence_of(item))
    if place[:1] == ["body"]:
        pointer = "".join(f"/{escape_pointer(_shown(part))}" for part in place[1:])
        return FieldError(field=pointer[:500], detail=detail)
    return FieldError(field=place[-1] if place else None, detail=detail)


def table() -> str:
    """Return the documentation of all codes, as Markdown; a test compares it with the file."""
    rows = [
        f"| `{code}` | {kind.status} | {kind.title} | {kind.mended_by} |"
        for code, kind in KINDS.items()
    ]
    return "\n".join([_INTRODUCTION, "| code | status | meaning | mended by |", _RULE, *rows, ""])


_RULE = "|---|---|---|---|"

_INTRODUCTION = """\
# Problems

Every error of the HTTP API is an `application/problem+json` document (RFC 9457):

| member | meaning |
|---|---|
| `type` | `urn:perdure:problem:<code>` |
| `title` | the code's meaning, always the same text |
| `status` | the HTTP status |
| `detail` | what is wrong with this request, for people |
| `instance` | `urn:perdure:request:<id>`; the id stands in `X-Request-Id` and in the server's log |
| `code` | for programs; the list grows, a code never changes its meaning |
| `field` | where: a JSON pointer into the body, or the name of a parameter or header |
| `errors` | all that is wrong, each with `field` and `detail` (at most 20) |
| `details` | facts to act on, such as the first answer of an interrupt or the ids of open ones |
| `next_actions` | what may be done next |

A query parameter that a route does not have, or that is given twice, is `invalid`, as a field of a
body is, with its name as `field`.

A request that is answered with a problem has changed nothing, except where the description says
that the first of two equal requests has.

This table is generated by `perdure.server.problems.table`; `tests/server` compares them.
"""


def encoded(problem: Problem) -> bytes:
    """Return the body of a problem, for places below the framework."""
    return encode(cast("JsonValue", problem.model_dump(mode="json")))
