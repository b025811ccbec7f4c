"""A TCP proxy before an HTTP server that treats connections as bad networks and balancers do.

It can end a connection after so many events of a stream, lose the answer to a request that the
server has carried out, and cut connections that are idle; politely (FIN) or not (RST).
"""

import socket as sockets
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.abc
from anyio.abc import SocketStream

CHUNK_BYTES = 65_536
_EVENT = b"\ndata: "
_NO_LINGER = struct.pack("ii", 1, 0)


class _Cut(Exception):
    """The connection is to end now."""


@dataclass(slots=True)
class TcpProxy:
    """The knobs of a running proxy; each applies to connections that are made after."""

    port: int
    events_max: int | None = None
    """Pass on so many events of a stream, then end the connection."""

    loses_answers: int = 0
    """Pass so many requests on, wait for their answers and cut without passing those on."""

    idle_s: float | None = None
    """Cut a connection on which nothing came down for so long."""

    is_polite: bool = True
    """End with FIN, as a balancer does that closes an idle connection; else with RST."""

    connections: int = 0
    cut: int = 0

    async def carry(self, client: SocketStream, server: SocketStream) -> None:
        """Carry bytes both ways until either side ends or the proxy cuts."""
        self.connections += 1
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_upstream, client, server)
                group.start_soon(self._downstream, server, client)
        except* _Cut:
            self.cut += 1
            if not self.is_polite:
                _reset_on_close(client)
        except* (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            pass  # that is how a connection ends

    async def _downstream(self, source: SocketStream, target: SocketStream) -> None:
        left, loses = self.events_max, self.loses_answers > 0
        if loses:
            self.loses_answers -= 1
        while True:
            chunk = b""
            with anyio.move_on_after(self.idle_s):
                chunk = await source.receive(CHUNK_BYTES)
            if not chunk or loses:
                raise _Cut
            if left is not None:
                kept = _first_events(chunk, left)
                left -= kept.count(_EVENT)
                await target.send(kept)
                if len(kept) < len(chunk):
                    raise _Cut
            else:
                await target.send(chunk)


def _first_events(chunk: bytes, left: int) -> bytes:
    """Return a chunk up to where the event after `left` more would begin."""
    place = 0
    for _ in range(left):
        found = chunk.find(_EVENT, place)
        if found < 0:
            return chunk
        place = found + len(_EVENT)
    found = chunk.find(_EVENT, place)
    return chunk if found < 0 else chunk[:found]


def _reset_on_close(client: SocketStream) -> None:
    raw = client.extra(anyio.abc.SocketAttribute.raw_socket)  # noqa: S610  # not Django
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, _NO_LINGER)


async def _upstream(source: SocketStream, target: SocketStream) -> None:
    while True:
        await target.send(await source.receive(CHUNK_BYTES))


@asynccontextmanager
async def tcp_proxy(
    target_port: int, *, port: int, target_host: str = "127.0.0.1"
) -> AsyncGenerator[TcpProxy]:
    """Run a proxy on a port of loopback while the context is open."""
    proxy = TcpProxy(port)

    async def serve(client: SocketStream) -> None:
        async with client:
            try:
                async with await anyio.connect_tcp(target_host, target_port) as server:
                    await proxy.carry(client, server)
            except OSError:
                return

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        try:
            yield proxy
        finally:
            group.cancel_scope.cancel()
