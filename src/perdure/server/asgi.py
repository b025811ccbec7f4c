"""The door: pure ASGI middlewares that every request passes before it is routed.

From the outside in: `Outer` (request id, security headers, access log, metrics), `Boundary` (an
unknown error stops here), `HostCheck`, `OriginCheck`, `BodyDoor` (media type and size). Bodies
are parsed by `StrictRoute`, with the one strict codec (decision 38).

A loopback address is no boundary: a web page can send requests to it. So a Host that is not one of
ours is refused (DNS rebinding), and so is a mutating request from another origin.
"""

import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
from anyio import to_thread
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.protocol.codec import escape_pointer, parse_strict
from perdure.protocol.errors import (
    Forbidden,
    Invalid,
    PerdureError,
    TooLarge,
    TooSlow,
    UnsupportedMedia,
)
from perdure.server import problems
from perdure.server.settings import ServerSettings
from perdure.telemetry.metrics import ServerMetrics

log = logging.getLogger("perdure.server")
access = logging.getLogger("perdure.access")

MUTATING = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_METHODS = MUTATING | {"GET", "HEAD", "OPTIONS"}
PROBES = frozenset({"/livez", "/readyz", "/healthz"})
"""Paths for probes: no host check, as a probe knows an address only, and no access log."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SECURITY_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)


def headers_named(scope: Scope, name: bytes) -> list[str]:
    """Return all values of a header, as text."""
    return [value.decode("latin-1") for found, value in scope["headers"] if found == name]


class Outer:
    """Names the request, adds security headers, logs and counts the answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        new_id: Callable[[], str],
        metrics: ServerMetrics,
        access_log: bool,
    ) -> None:
        self._app = app
        self._new_id = new_id
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = headers_named(scope, b"x-request-id")
        request_id = given[0] if given and _REQUEST_ID.fullmatch(given[0]) else self._new_id()
        scope["perdure.request_id"] = request_id
        seen = _Seen(status=0, is_stream=False)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen.status = message["status"]
                message["headers"] = _with_headers(message["headers"], request_id, seen)
            await send(message)

        started = perf_counter()
        try:
            await self._app(scope, receive, send_named)
        finally:
            self._note(scope, seen, perf_counter() - started)

    def _note(self, scope: Scope, seen: "_Seen", seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        self._metrics.requests.labels(method, route, str(seen.status)).inc()
        if not seen.is_stream:
            self._metrics.request_seconds.labels(route).observe(seconds)
        if self._access_log and scope["path"] not in PROBES:
            access.info(
                "request",
                extra={
                    "method": method,
                    "path": scope["path"],
                    "status": seen.status,
                    "ms": round(seconds * 1000, 1),
                    "request_id": scope["perdure.request_id"],
                },
            )


@dataclass(slots=True)
class _Seen:
    """What became of a response."""

    status: int
    is_stream: bool


def _with_headers(
    headers: Iterable[tuple[bytes, bytes]], request_id: str, seen: _Seen
) -> list[tuple[bytes, bytes]]:
    made = list(headers)
    present = {name.lower() for name, _ in made}
    seen.is_stream = (b"content-type", b"text/event-stream") in made
    made += [pair for pair in _SECURITY_HEADERS if pair[0] not in present]
    made.append((b"x-request-id", request_id.encode()))
    return made


class Boundary:
    """The one place where an unknown error of a request stops: logged once, shown as `internal`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_started = False

        async def send_seen(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        except ClientDisconnect:
            log.debug("a client left before its request was whole")
        except PerdureError as error:
            await _answer(problems.from_error(error, scope), has_started, scope, receive, send)
        except Exception as error:  # noqa: BLE001  # from_unknown logs it with its trace
            await _answer(problems.from_unknown(error, scope), has_started, scope, receive, send)


async def _answer(
    response: Response, has_started: bool, scope: Scope, receive: Receive, send: Send
) -> None:
    if not has_started:
        await response(scope, receive, send)
        return
    abort = scope.get("extensions", {}).get("perdure.abort")
    if abort is not None:
        abort()


class HostCheck:
    """Refuses a Host that is neither loopback nor configured, before anything is routed."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            hosts = headers_named(scope, b"host")
            if len(hosts) != 1 or not is_our_host(hosts[0], self._settings):
                raise Forbidden("the Host header names no host of this server", field="Host")
        await self._app(scope, receive, send)


def is_our_host(text: str, settings: ServerSettings) -> bool:
    """Tell whether a Host header is ours: loopback, the bound address, or configured."""
    text = text.lower()
    if "*" in settings.allowed_hosts or text in settings.allowed_hosts:
        return True
    name = host_name(text)
    if name is None:
        return False
    if name == "localhost" or name in settings.allowed_hosts or name == settings.host.lower():
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return address.is_loopback or settings.host in {"0.0.0.0", "::"}  # noqa: S104  # compared only


def host_name(text: str) -> str | None:
    """Return the host of a Host header without its port; None for what is not one."""
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port
    except ValueError:
        return None
    if parts.hostname is None or parts.path or parts.query or "@" in text:
        return None
    return parts.hostname if port is None or port > 0 else None


class OriginCheck:
    """Refuses mutating requests that another site's page sends."""

    def __init__(self, app: ASGIApp, *, settings: ServerSettings) -> None:
        self._app = app
        self._allowed = frozenset(origin.lower() for origin in settings.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or raise."""
        if scope["type"] == "http" and scope["method"] in MUTATING:
            self._check(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        origins = {origin.lower() for origin in headers_named(scope, b"origin")}
        if origins:
            hosts = headers_named(scope, b"host")
            own = {f"{scheme}://{hosts[0]}".lower() for scheme in ("http", "https") if hosts}
            if origins - own - self._allowed:
                raise Forbidden("the request comes from another origin", field="Origin")
            if origins <= self._allowed:
                return
        if set(headers_named(scope, b"sec-fetch-site")) - {"same-origin", "none"}:
            raise Forbidden("the request comes from another site", field="Sec-Fetch-Site")


class BodyDoor:
    """Refuses bodies that are not JSON (415), too large (413) or too slow (408), also in chunks."""

    def __init__(self, app: ASGIApp, *, bytes_max: int, timeout_s: float) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on with a counted body, or raise."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = headers_named(scope, b"content-length")
        length = int(lengths[0]) if lengths and lengths[0].isdecimal() else 0
        has_body = length > 0 or bool(headers_named(scope, b"transfer-encoding"))
        if scope["method"] in MUTATING:
            _check_media_type(scope, has_body=has_body)
        if length > self._bytes_max:
            raise self._too_large()
        await self._app(scope, self._counted(receive), send)

    def _counted(self, receive: Receive) -> Receive:
        seen, is_whole = 0, False
        deadline = anyio.current_time() + self._timeout_s

        async def counted() -> Message:
            nonlocal seen, is_whole
            if is_whole:  # from now on this waits for the client to leave
                return await receive()
            message: Message | None = None
            with anyio.move_on_at(deadline):
                message = await receive()
            if message is None:
                raise TooSlow(f"the body was not whole after {self._timeout_s:g} seconds")
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
                if seen > self._bytes_max:
                    raise self._too_large()
            return message

        return counted

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"the body is larger than {self._bytes_max} bytes",
            details={"bytes_max": self._bytes_max},
        )


def _check_media_type(scope: Scope, *, has_body: bool) -> None:
    given = headers_named(scope, b"content-type")
    if not given:
        if has_body:
            raise UnsupportedMedia("a body needs Content-Type: application/json")
        return
    kind, _, parameters = given[0].partition(";")
    kind = kind.strip().lower()
    is_json = kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )
    charset = re.search(r"charset\s*=\s*\"?([^\";\s]+)", parameters, re.IGNORECASE)
    if not is_json or len(given) > 1 or (charset and charset[1].lower() not in {"utf-8", "utf8"}):
        raise UnsupportedMedia("the body must be application/json in UTF-8", field="Content-Type")
    if set(headers_named(scope, b"content-encoding")) - {"identity"}:
        raise UnsupportedMedia("an encoded body is not read", field="Content-Encoding")


PARSE_INLINE_BYTES = 64 * 1024
"""A body up to this size is parsed on the loop; a larger one would keep it from all others."""


class _StrictRequest(Request):
    """A request whose body was parsed and validated already."""

    parsed: Any = None

    async def json(self) -> Any:  # the framework's own signature
        return self.parsed


Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class StrictRoute(APIRoute):
    """A route whose body is parsed by the strict codec and validated without conversions.

    A number is no text and a text is no number or truth value. The framework gets the made object.
    A query parameter that the route does not have, or that stands there twice, is refused, as a
    field of a body is.
    """

    def get_route_handler(self) -> Handler:
        """Return the framework's handler behind the strict parser."""
        handle = self._behind_body(super().get_route_handler())
        taken = set(_parameters_of(self.dependant))

        async def handle_known(request: Request) -> Response:
            problems = list(_parameter_problems(request.query_params, taken))
            if problems:
                raise RequestValidationError(problems)
            return await handle(request)

        return handle_known

    def _behind_body(self, handle: Handler) -> Handler:
        if self.body_field is None:
            return handle
        wanted: TypeAdapter[Any] = TypeAdapter(
            cast("type[object]", self.body_field.field_info.annotation)
        )

        def parse(body: bytes) -> object:
            parse_strict(body)
            made = wanted.validate_json(body, strict=True)
            check_texts(made)
            return made

        async def handle_strictly(request: Request) -> Response:
            strict = _StrictRequest(request.scope, request.receive)
            body = await strict.body()
            try:
                if len(body) > PARSE_INLINE_BYTES:
                    strict.parsed = await to_thread.run_sync(parse, body)
                elif body:
                    strict.parsed = parse(body)
            except ValidationError as error:
                raise _not_valid(error) from error
            return await handle(strict)

        return handle_strictly


def _parameters_of(dependant: Dependant) -> Iterator[str]:
    """Give the names of the query parameters that a route and what it depends on take."""
    for parameter in dependant.query_params:
        yield parameter.alias
    for inner in dependant.dependencies:
        yield from _parameters_of(inner)


def _parameter_problems(given: QueryParams, taken: set[str]) -> Iterator[dict[str, object]]:
    """Give what is wrong with the names of query parameters; none is a list."""
    for name, count in Counter(name for name, _ in given.multi_items()).items():
        where = ("query", name[:200])
        if name not in taken:
            known = ", ".join(sorted(taken)) or "none"
            message = f"there is no such parameter here; there are: {known}"
            yield {"type": "unknown_parameter", "loc": where, "msg": message}
        elif count > 1:
            message = f"it is given {count} times; give it once"
            yield {"type": "repeated_parameter", "loc": where, "msg": message}


def _not_valid(error: ValidationError) -> RequestValidationError:
    found = error.errors(include_url=False, include_input=False)
    return RequestValidationError([{**item, "loc": ("body", *item["loc"])} for item in found])


_JSON = cast("object", JsonValue)


def check_texts(made: object, pointer: str = "") -> None:
    """Raise Invalid for a NUL character in a text of a request; JSON values may hold any text."""
    if isinstance(made, str):
        if "\0" in made:
            raise Invalid("the text holds a NUL character", field=pointer)
    elif isinstance(made, BaseModel):
        for name, info in type(made).model_fields.items():
            if cast("object", info.annotation) is not _JSON:
                key = info.alias or name
                check_texts(getattr(made, name), f"{pointer}/{escape_pointer(key)}")
    elif isinstance(made, (list, tuple)):
        for place, item in enumerate(cast("Sequence[object]", made)):
            check_texts(item, f"{pointer}/{place}")
