"""Event streams by the WHATWG rules (R-6.3), as an ASGI response of our own.

The stream
- begins with `retry:`; every event is `id: <seq>` and one line `data: <EventView as JSON>`. There
  is no `event:` line: the type stands in the data, and a plain `EventSource.onmessage` sees all;
- of a run with `options.stream`, carries text of replies as it comes: `data:` without `id:`. The
  durable fragment that follows is trimmed; when nothing of it is left, its `id:` stands alone;
- has a comment (`: hb`) whenever nothing was sent for the heartbeat's time;
- ends after the terminal event. An end without one (shutdown, a store that is away, a cut) means
  that the client should come again with `Last-Event-ID`; a comment says why where it can.

Concurrency: one task reads the feed and sends; two more wait for the client's disconnect and for
the server's wish to stop, and cancel it. Nothing is queued: what one read returned is sent before
the next read, so a client that does not read costs one page and the transport's buffer, and is
cut off when a send has not gone through for the stall time. While nothing happens no connection
to the database is held.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio
import anyio.lowlevel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.protocol.errors import PerdureError
from perdure.server.settings import ServerSettings
from perdure.server.stopping import Stopping
from perdure.service.events import EncodedEvent
from perdure.telemetry.metrics import ServerMetrics

log = logging.getLogger("perdure.server")

MEDIA_TYPE = "text/event-stream"
ABORT = "perdure.abort"
"""Name of the ASGI extension that drops the connection without sending what is buffered."""

_PAGE_FIRST = 16
_PAGE_MAX = 256
_CHUNK_BYTES = 32 * 1024
_FAREWELL_S = 1.0


def frame(event: EncodedEvent) -> bytes:
    """Return the bytes of one event. Its body is one line of JSON.

    Live text has no `id`: a client that comes again resumes behind the last event. Without a body
    the `id` alone moves on, and clients dispatch nothing (decision 30).
    """
    if event.seq is None:
        return b"data: %s\n\n" % event.body
    place = b"%d" % event.seq if event.place is None else event.place.encode()
    if not event.body:
        return b"id: %s\n\n" % place
    return b"id: %s\ndata: %s\n\n" % (place, event.body)


def comment(text: str) -> bytes:
    """Return the bytes of a comment, which clients pass over."""
    return f": {text}\n\n".encode()


class Source(Protocol):
    """What a stream reads: the events of a run, or of all runs of a thread."""

    @property
    def ended(self) -> bool:
        """True once there is nothing more to come."""
        ...

    async def read(self, *, wait_s: float, limit: int) -> list[EncodedEvent]:
        """Return what comes next, at once if there is anything; [] after `wait_s` without."""
        ...


class Stalled(Exception):
    """The client did not read for longer than the stall time."""


@dataclass(slots=True)
class _Outlet:
    """Sends within the stall time. `is_open` turns False at the client's disconnect."""

    send: Send
    stall_s: float
    is_open: bool = True
    is_stalled: bool = False
    farewell: bytes = b""

    async def put(self, data: bytes) -> None:
        """Send bytes; raise Stalled when the client does not take them in time."""
        with anyio.move_on_after(self.stall_s) as scope:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})
        if scope.cancelled_caught:
            self.is_stalled = True
            raise Stalled

    async def put_events(self, events: list[EncodedEvent]) -> None:
        """Send events in chunks of bounded size."""
        chunk: list[bytes] = []
        size = 0
        for event in events:
            data = frame(event)
            chunk.append(data)
            size += len(data)
            if size >= _CHUNK_BYTES:
                await self.put(b"".join(chunk))
                chunk, size = [], 0
        if chunk:
            await self.put(b"".join(chunk))


@dataclass(slots=True)
class _PageSize:
    """How many events to read at once, so that a page stays within the buffer's limit."""

    bytes_max: int
    events: int = field(default=_PAGE_FIRST)

    def learn(self, events: list[EncodedEvent]) -> None:
        """Double while events are small, fall back when the largest was not."""
        largest = max(len(event.body) for event in events)
        fitting = max(_PAGE_FIRST, self.bytes_max // (largest + 1))
        self.events = min(_PAGE_MAX, fitting, self.events * 2)


@dataclass(slots=True, kw_only=True)
class StreamContext:
    """What streams share in one server."""

    settings: ServerSettings
    stopping: Stopping
    metrics: ServerMetrics


class EventStream(Response):
    """The events of a run or a thread."""

    media_type = MEDIA_TYPE

    def __init__(
        self,
        open_feed: Callable[[], AbstractAsyncContextManager[Source]],
        context: StreamContext,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, headers={"X-Accel-Buffering": "no", **(headers or {})})
        self.raw_headers = [
            (name, value)
            for name, value in self.raw_headers
            if name not in {b"content-length", b"content-type"}
        ]
        self.raw_headers.append((b"content-type", MEDIA_TYPE.encode()))
        self._open_feed = open_feed
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the run ends, the client leaves or the server stops."""
        outlet = _Outlet(send, self._context.settings.sse_stall_s)
        async with self._open_feed() as feed, self._counted(outlet):
            await self._start(send)
            async with anyio.create_task_group() as group:
                group.start_soon(_watch_client, receive, outlet, group.cancel_scope)
                group.start_soon(self._watch_stop, outlet, group.cancel_scope)
                await self._pump(feed, outlet)
                group.cancel_scope.cancel()
        await _finish(outlet, scope)

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    @asynccontextmanager
    async def _counted(self, outlet: _Outlet) -> AsyncGenerator[None]:
        metrics = self._context.metrics
        metrics.sse_subscribers.inc()
        try:
            yield
        finally:
            metrics.sse_subscribers.dec()
            if outlet.is_stalled:
                metrics.sse_dropped.inc()

    async def _watch_stop(self, outlet: _Outlet, scope: anyio.CancelScope) -> None:
        await self._context.stopping.wait()
        outlet.farewell = comment("the server is stopping, come again")
        scope.cancel()

    async def _pump(self, feed: Source, outlet: _Outlet) -> None:
        """Send until the end. The only place where a stream's error stops."""
        try:
            await self._send_all(feed, outlet)
        except Stalled:
            log.info("an event stream was cut: its client does not read")
        except PerdureError as error:
            outlet.farewell = comment(f"{error.code}, come again")
            log.warning("an event stream ended early", extra={"code": error.code})
        except Exception:
            outlet.farewell = comment("internal, come again")
            log.exception("an event stream failed")

    async def _send_all(self, feed: Source, outlet: _Outlet) -> None:
        settings = self._context.settings
        size = _PageSize(settings.sse_buffer_bytes_max)
        await outlet.put(b"retry: %d\n\n" % settings.sse_retry_ms)
        while not feed.ended:
            events = await feed.read(wait_s=settings.sse_heartbeat_s, limit=size.events)
            if events:
                await outlet.put_events(events)
                size.learn(events)
            elif not feed.ended:
                await outlet.put(comment("hb"))


async def _watch_client(receive: Receive, outlet: _Outlet, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    outlet.is_open = False
    scope.cancel()


async def _finish(outlet: _Outlet, scope: Scope) -> None:
    """End the response: cleanly where the client still reads, by dropping it where not."""
    if not outlet.is_open:
        return
    if not outlet.is_stalled:
        with anyio.move_on_after(_FAREWELL_S):
            await outlet.send(
                {"type": "http.response.body", "body": outlet.farewell, "more_body": False}
            )
            return
    abort = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort()
        await (
            anyio.lowlevel.checkpoint()
        )  # lets the server learn of the loss before this call returns
        await anyio.lowlevel.checkpoint()
