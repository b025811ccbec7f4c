"""A TCP proxy before a PostgreSQL server that fails on request.

It can lose the server's answer to the n-th transaction (the transaction is applied, the client
never learns of it), delay answers, cut connections and refuse new ones. It understands just enough
of the protocol to know where an answer ends; connect with `sslmode=disable`.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, SocketStream

CHUNK_BYTES = 65_536
_PORT_FIRST, _PORT_LAST = 21_000, 21_999
_READY, _COMPLETE = b"Z", b"C"
_IDLE = b"I"


class _Cut(Exception):
    """The connection is to end now."""


@dataclass(slots=True)
class _Answers:
    """Splits the server's stream into answers: everything up to and with ReadyForQuery."""

    buffer: bytearray = field(default_factory=bytearray)
    completed: bool = False

    def feed(self, chunk: bytes) -> list[tuple[bytes, bool]]:
        """Return the whole messages of a chunk: (bytes, does it end a transaction)."""
        self.buffer += chunk
        found: list[tuple[bytes, bool]] = []
        while len(self.buffer) >= 5:
            size = 1 + int.from_bytes(self.buffer[1:5])
            if len(self.buffer) < size:
                break
            message = bytes(self.buffer[:size])
            del self.buffer[:size]
            self.completed = self.completed or message[:1] == _COMPLETE
            ends = message[:1] == _READY and message[5:6] == _IDLE and self.completed
            if message[:1] == _READY:
                self.completed = False
            found.append((message, ends))
        return found


@dataclass(slots=True)
class FlakyProxy:
    """The knobs of a running proxy."""

    port: int
    delay_s: float = 0.0
    refuses: bool = False
    halves_answer: bool = False
    """Pass on half of what the server says next, then cut."""

    halves_request: bool = False
    """Pass on half of what a client says next, then cut."""

    lost: int = 0
    halved: int = 0
    _lose_after: int | None = None
    _cut: anyio.Event = field(default_factory=anyio.Event)

    def lose_answer(self, after: int = 1) -> None:
        """Lose the answer to the `after`-th transaction from now, and the connection with it."""
        self._lose_after = after

    def lose_no_answer(self) -> None:
        """Lose none any more that has not been lost yet."""
        self._lose_after = None

    def cut_all(self) -> None:
        """Cut every connection."""
        self._cut.set()
        self._cut = anyio.Event()

    def half_of_answer(self, chunk: bytes) -> bytes | None:
        """Return what is passed on of a chunk that is to be cut; None for one that is not."""
        if not self.halves_answer:
            return None
        self.halves_answer = False
        self.halved += 1
        return chunk[: len(chunk) // 2]

    def half_of_request(self, chunk: bytes) -> bytes | None:
        """Return what is passed on of a chunk that is to be cut; None for one that is not."""
        if not self.halves_request:
            return None
        self.halves_request = False
        self.halved += 1
        return chunk[: len(chunk) // 2]

    def is_lost(self) -> bool:
        """Count a transaction's end; tell whether its answer is to be lost."""
        if self._lose_after is None:
            return False
        self._lose_after -= 1
        if self._lose_after > 0:
            return False
        self._lose_after = None
        self.lost += 1
        return True

    async def until_cut(self) -> None:
        """Return when all connections are to be cut."""
        await self._cut.wait()
        raise _Cut


@asynccontextmanager
async def flaky_proxy(
    target_port: int, target_host: str = "127.0.0.1"
) -> AsyncGenerator[FlakyProxy]:
    """Run a proxy before a server while the context is open."""
    listener, port = None, 0
    for port in range(_PORT_FIRST, _PORT_LAST):
        try:
            listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
            break
        except OSError:
            continue
    assert listener is not None, "no free port"
    proxy = FlakyProxy(port)

    async def serve(client: SocketStream) -> None:
        async with client:
            if proxy.refuses:
                return
            try:
                async with await anyio.connect_tcp(target_host, target_port) as server:
                    await _carry(proxy, client, server)
            except OSError:
                return

    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        try:
            yield proxy
        finally:
            group.cancel_scope.cancel()


async def _carry(proxy: FlakyProxy, client: SocketStream, server: SocketStream) -> None:
    """Carry bytes both ways until either side ends or the proxy cuts."""
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_upstream, proxy, client, server)
            group.start_soon(_downstream, proxy, server, client)
            group.start_soon(proxy.until_cut)
    except* (_Cut, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        pass  # that is how a connection ends here


async def _upstream(proxy: FlakyProxy, source: ByteReceiveStream, target: ByteSendStream) -> None:
    try:
        while True:
            chunk = await source.receive(CHUNK_BYTES)
            if (half := proxy.half_of_request(chunk)) is not None:
                await target.send(half)
                raise _Cut
            await target.send(chunk)
    except anyio.EndOfStream:
        raise _Cut from None


async def _downstream(proxy: FlakyProxy, source: ByteReceiveStream, target: ByteSendStream) -> None:
    answers, held = _Answers(), bytearray()
    try:
        while True:
            chunk = await source.receive(CHUNK_BYTES)
            if proxy.delay_s:
                await anyio.sleep(proxy.delay_s)
            if (half := proxy.half_of_answer(chunk)) is not None:
                await target.send(bytes(held) + bytes(answers.buffer) + half)
                raise _Cut
            for message, ends in answers.feed(chunk):
                held += message
                if ends and proxy.is_lost():
                    raise _Cut
                if message[:1] != _COMPLETE:  # a completed statement waits for its ReadyForQuery
                    await target.send(bytes(held))
                    held.clear()
    except anyio.EndOfStream:
        raise _Cut from None
