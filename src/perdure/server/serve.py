"""Running the application on uvicorn so that it stops at once and cleanly.

On SIGTERM or SIGINT the stopping event is set first: idle streams and waits end by themselves,
with a clean last frame, before uvicorn waits for connections to close. Its own grace period is
the backstop. A server without authentication listens on loopback unless told otherwise.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import struct
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from perdure.protocol.errors import Invalid
from perdure.server.problems import MEDIA_TYPE, encoded, make_problem
from perdure.server.settings import ServerSettings
from perdure.server.sse import ABORT
from perdure.server.stopping import Stopping

log = logging.getLogger("perdure.server")


DEAD_PEER_MS = 60_000
"""How long what was sent may stay unacknowledged, where the system can be told: a stream's
heartbeats then find out a peer that is gone without a word, long before the system's own limit."""

LINGER_S = 2.0
"""How long a refused client may go on sending before its connection is closed."""

_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)
_UNIX: int | None = getattr(socket, "AF_UNIX", None)


class AbortableProtocol(H11Protocol):
    """HTTP/1.1 whose connection the application can drop without sending what is buffered."""

    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Bound how long a silent peer is kept; hand the application the means to drop it."""
        raw = transport.get_extra_info("socket")
        if raw is not None and _USER_TIMEOUT is not None and raw.family != _UNIX:
            raw.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, DEAD_PEER_MS)
        super().connection_made(transport)
        self.app = _with_abort(self.app, transport)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as a problem, like everything else that is refused."""
        body = encoded(make_problem("malformed", msg.rstrip(".")))
        head = (
            f"HTTP/1.1 400 Bad Request\r\ncontent-type: {MEDIA_TYPE}\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Take what comes; after a refusal let it go, for closing on it would reset the connection
        and the answer with it."""
        if not self._refused:
            super().data_received(data)


_NO_LINGER = struct.pack("ii", 1, 0)
"""SO_LINGER with no time: closing resets the connection and frees what the kernel still holds."""


def _with_abort(app: ASGIApp, transport: asyncio.Transport) -> ASGIApp:
    def abort() -> None:
        raw = transport.get_extra_info("socket")
        if raw is not None:
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        transport.abort()

    async def abortable(scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("extensions", {})[ABORT] = abort
        await app(scope, receive, send)

    return abortable


class Server(uvicorn.Server):
    """A uvicorn server that tells the application before it waits for it."""

    def __init__(self, config: uvicorn.Config, stopping: Stopping) -> None:
        super().__init__(config)
        self._stopping = stopping
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remember the loop, for the signal handler, and start."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ask streams and waits to end, then the server."""
        self.stop_streams()
        super().handle_exit(sig, frame)

    def stop(self) -> None:
        """Stop as by a signal; called on the server's loop."""
        self.stop_streams()
        self.should_exit = True

    def stop_streams(self) -> None:
        """Set the stopping event; may be called from a signal handler or another thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)


def check_binding(host: str, *, insecure: bool) -> None:
    """Raise Invalid for an address that is not loopback, unless `insecure` is set."""
    if insecure or is_loopback(host):
        return
    raise Invalid(
        f"refusing to listen on {host}: there is no authentication yet, so anybody who "
        "reaches this address could start, read and cancel runs. Listen on 127.0.0.1 behind a "
        "proxy that authenticates, or set server.insecure (PERDURE_SERVER__INSECURE=true) if the "
        "network is closed.",
        field="server.host",
    )


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_server(app: ASGIApp, settings: ServerSettings, stopping: Stopping) -> Server:
    """Return a server for the application. Raises Invalid for a binding that is refused."""
    check_binding(settings.host, insecure=settings.insecure)
    if not is_loopback(settings.host):
        log.warning("listening without authentication", extra={"host": settings.host})
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=AbortableProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(settings.shutdown_grace_s),
    )
    return Server(config, stopping)
