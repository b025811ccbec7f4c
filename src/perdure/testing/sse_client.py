"""An event stream's client by the WHATWG rules, over a bare socket, made to be interrupted.

It can stop reading, be cut after any byte, and go on with `Last-Event-ID`. The end of a stream is
not the end of a run: only a terminal `state` event is, anything else raises `StreamInterrupted`.
"""

import codecs
import json
import socket as sockets
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
from anyio.abc import SocketStream

_TERMINAL = {"succeeded", "failed"}


class StreamInterrupted(Exception):
    """The stream ended before the run did; go on from `last_event_id`."""

    def __init__(self, last_event_id: str, *, clean: bool) -> None:
        super().__init__(f"the stream ended after event {last_event_id or 'none'}")
        self.last_event_id = last_event_id
        self.clean = clean


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One dispatched event."""

    id: str
    type: str
    data: str

    def json(self) -> dict[str, Any]:
        """Return the data as JSON; refuses NaN and the like."""
        found = json.loads(self.data, parse_constant=_refuse)
        return cast("dict[str, Any]", found)

    @property
    def is_end(self) -> bool:
        """Tell whether this is the run's terminal event."""
        view = self.json()
        return view.get("type") == "state" and view["data"]["state"] in _TERMINAL


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


@dataclass(slots=True)
class SseParser:
    """The event stream interpretation of the HTML standard (9.2.6), fed with bytes as they come."""

    last_event_id: str = ""
    retry_ms: int | None = None
    comments: list[str] = field(default_factory=list[str])
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _text: str = ""
    _is_first: bool = True
    _data: list[str] = field(default_factory=list[str])
    _type: str = ""
    _id: str = ""

    def __post_init__(self) -> None:
        self._id = self.last_event_id

    def feed(self, data: bytes) -> list[SseEvent]:
        """Take bytes and return the events they complete."""
        self._text += self._decoder.decode(data)
        if self._is_first and self._text:
            self._is_first = False
            self._text = self._text.removeprefix("\ufeff")
        found: list[SseEvent] = []
        while (line := self._next_line()) is not None:
            event = self._take(line)
            if event is not None:
                found.append(event)
        return found

    def _next_line(self) -> str | None:
        """Return a line without its end (LF, CRLF or CR); None until it is complete."""
        ends = [place for place in (self._text.find("\r"), self._text.find("\n")) if place >= 0]
        if not ends:
            return None
        end = min(ends)
        if self._text[end] == "\r" and end + 1 == len(self._text):
            return None  # a LF may follow in the next bytes
        width = 2 if self._text[end : end + 2] == "\r\n" else 1
        line, self._text = self._text[:end], self._text[end + width :]
        return line

    def _take(self, line: str) -> SseEvent | None:
        if not line:
            return self._dispatch()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "":
                self.comments.append(value)
            case "data":
                self._data.append(value)
            case "event":
                self._type = value
            case "id" if "\0" not in value:
                self._id = value
            case "retry" if value.isascii() and value.isdigit():
                self.retry_ms = int(value)
            case _:
                pass
        return None

    def _dispatch(self) -> SseEvent | None:
        self.last_event_id = self._id
        data, self._data = self._data, []
        event_type, self._type = self._type, ""
        if not data:
            return None
        return SseEvent(self._id, event_type or "message", "\n".join(data))


@dataclass(slots=True)
class SseStream:
    """One connection. Not calling `next` is a client that does not read."""

    socket: SocketStream
    parser: SseParser
    status: int
    headers: Mapping[str, str]
    cut_after: int | None = None
    body_bytes: int = 0
    is_clean: bool = False
    raw: bytearray = field(default_factory=bytearray)
    _wire: bytearray = field(default_factory=bytearray)
    _chunk_left: int = 0
    _ready: list[SseEvent] = field(default_factory=list[SseEvent])
    _is_over: bool = False
    _has_ended: bool = False
    _returned_id: str | None = None

    @property
    def last_event_id(self) -> str:
        """The place to go on from: of the last event returned, or a later one without data."""
        return self.parser.last_event_id if not self._ready else self._returned_id or ""

    async def next(self) -> SseEvent | None:
        """Return the next event; None after the terminal one; raise StreamInterrupted."""
        while not self._ready:
            if self._is_over:
                if self._has_ended:
                    return None
                raise StreamInterrupted(self.parser.last_event_id, clean=self.is_clean)
            await self._read()
        event = self._ready.pop(0)
        self._returned_id = event.id
        self._has_ended = self._has_ended or event.is_end
        return event

    async def rest(self) -> list[SseEvent]:
        """Return all events up to the end of the run."""
        found: list[SseEvent] = []
        while (event := await self.next()) is not None:
            found.append(event)
        return found

    async def wait_for_comment(self, text: str) -> None:
        """Read until a comment has come that begins with `text`."""
        while not any(comment.startswith(text) for comment in self.parser.comments):
            if self._is_over:
                raise StreamInterrupted(self.parser.last_event_id, clean=self.is_clean)
            await self._read()

    async def _read(self) -> None:
        while (body := self._unchunk()) is None:
            try:
                self._wire += await self.socket.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._is_over = True
                return
        if not body:
            self._is_over = self.is_clean = True
            return
        if self.cut_after is not None and self.body_bytes + len(body) >= self.cut_after:
            body = body[: self.cut_after - self.body_bytes]
            self._is_over = True
            await self.socket.aclose()
        self.body_bytes += len(body)
        self.raw += body
        self._ready += self.parser.feed(body)

    def _unchunk(self) -> bytes | None:
        """Return what has come of the body, also of half a chunk; empty at its end, None for none.

        Like a browser's: what a chunk's cut leaves is read.
        """
        if not self._chunk_left:
            start = 2 if self._wire.startswith(b"\r\n") else 0  # the end of the chunk before
            end = self._wire.find(b"\r\n", start)
            if end < 0:
                return None
            self._chunk_left = int(self._wire[start:end], 16)
            del self._wire[: end + 2]
            if not self._chunk_left:
                return b""
        body = bytes(self._wire[: self._chunk_left])
        del self._wire[: self._chunk_left]
        self._chunk_left -= len(body)
        return body or None


@dataclass(slots=True)
class SseClient:
    """Where a stream is, and how far it was read over all connections."""

    host: str
    port: int
    path: str
    method: str = "GET"
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    last_event_id: str = ""

    @asynccontextmanager
    async def connect(
        self, *, cut_after: int | None = None, receive_buffer: int | None = None
    ) -> AsyncGenerator[SseStream]:
        """Open a connection that goes on after the last event seen.

        `cut_after`: drop it after so many bytes of the body; `receive_buffer`: the socket's own.
        Raises StreamInterrupted when it is lost before the answer's head, OSError without one.
        """
        async with await anyio.connect_tcp(self.host, self.port) as socket:
            if receive_buffer is not None:
                _shrink(socket, receive_buffer)
            try:
                await socket.send(self._request())
                status, headers, rest = await _read_head(socket)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                raise StreamInterrupted(self.last_event_id, clean=False) from None
            parser = SseParser(last_event_id=self.last_event_id)
            stream = SseStream(
                socket, parser, status, headers, cut_after, _returned_id=self.last_event_id
            )
            stream._wire += rest  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  # made here
            try:
                yield stream
            finally:
                self.last_event_id = stream.last_event_id

    def _request(self) -> bytes:
        headers = {
            "Host": f"{self.host}:{self.port}",
            "Accept": "text/event-stream",
            **self.headers,
        }
        if self.last_event_id:
            headers["Last-Event-ID"] = self.last_event_id
        if self.body:
            headers["Content-Type"] = "application/json"
            headers["Content-Length"] = str(len(self.body))
        lines = [f"{self.method} {self.path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


def _shrink(socket: SocketStream, size: int) -> None:

    raw = socket.extra(anyio.abc.SocketAttribute.raw_socket)  # noqa: S610  # not Django
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, size)


async def _read_head(socket: SocketStream) -> tuple[int, dict[str, str], bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await socket.receive()
    head, _, rest = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in lines)
    return int(first.split()[1]), {name.lower(): value.strip() for name, value in pairs}, rest


async def follow_to_the_end(client: SseClient, *, cuts: list[int] | None = None) -> list[SseEvent]:
    """Return a run's events, coming again after every interruption; `cuts` makes the first ones."""
    found: list[SseEvent] = []
    pending = list(cuts or [])
    while True:
        cut_after = pending.pop(0) if pending else None
        try:
            async with client.connect(cut_after=cut_after) as stream:
                if stream.status == 204:
                    return found
                while (event := await stream.next()) is not None:
                    found.append(event)
                return found
        except StreamInterrupted:
            await anyio.sleep(0.001)  # lets others work where all connections fail at once
