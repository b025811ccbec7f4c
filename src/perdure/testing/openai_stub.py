"""A model server on 127.0.0.1 that speaks Chat Completions as it is on the wire, and misbehaves.

Each request takes the next behaviour of the script; the last one is repeated. Behaviours write
bytes, so line ends, split characters and missing ends are exactly as written here.
"""

import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import ByteStream, Listener, SocketStream

PORT_FIRST = 20_000
PORTS = 10_000
BODY_BYTES_MAX = 64 * 1024 * 1024

USAGE: dict[str, int] = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


class Exchange:
    """One request under way: what was asked, and the means to answer."""

    def __init__(self, stream: ByteStream, head: str, body: dict[str, Any]) -> None:
        self.stream = stream
        self.head = head
        self.body = body

    async def write(self, data: bytes) -> None:
        """Send bytes as they are, in a segment of their own."""
        await self.stream.send(data)

    async def open(self, *, content_type: str = "text/event-stream") -> None:
        """Send the head of a streamed answer that ends with the connection."""
        await self.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nConnection: close\r\n\r\n".encode()
        )

    async def send(self, chunk: dict[str, Any], *, end: str = "\n") -> None:
        """Send one event."""
        data = json.dumps(chunk, ensure_ascii=False)
        await self.write(f"data: {data}{end}{end}".encode())

    async def done(self, *, end: str = "\n") -> None:
        """Send the end marker."""
        await self.write(f"data: [DONE]{end}{end}".encode())

    async def hold(self) -> None:
        """Keep the connection open until the client leaves, saying nothing."""
        while True:
            try:
                await self.stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return

    async def status(
        self, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        """Send a whole answer that is not a stream."""
        data = json.dumps(body).encode()
        lines = [
            f"HTTP/1.1 {status} Status",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
            "Connection: close",
            *(f"{name}: {value}" for name, value in (headers or {}).items()),
        ]
        await self.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


Behaviour = Callable[[Exchange], Awaitable[None]]


@dataclass(slots=True)
class OpenAIStub:
    """The running server. `requests` are the bodies it got, `left` counts clients that left."""

    base_url: str
    script: Sequence[Behaviour]
    requests: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    heads: list[str] = field(default_factory=list[str])
    arrived: anyio.Event = field(default_factory=anyio.Event)
    all_left: anyio.Event = field(default_factory=anyio.Event)
    _open: int = 0

    async def serve(self, stream: ByteStream) -> None:
        """Answer one connection; what the client does to it stays here."""
        self._open += 1
        try:
            async with stream:
                await self._answer(stream)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
            return
        finally:
            self._open -= 1
            if self._open == 0:
                self.all_left.set()

    async def _answer(self, stream: ByteStream) -> None:
        head, body = await _read_request(stream)
        number = len(self.requests)
        self.heads.append(head)
        self.requests.append(body)
        behaviour = self.script[min(number, len(self.script) - 1)]
        self.arrived.set()
        await behaviour(Exchange(stream, head, body))


async def _read_request(stream: ByteStream) -> tuple[str, dict[str, Any]]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    length = next(
        int(line.partition(":")[2])
        for line in text.split("\r\n")
        if line.lower().startswith("content-length:")
    )
    if length > BODY_BYTES_MAX:
        raise ValueError("the request's body is too long")
    parts = [body]
    have = len(body)
    while have < length:
        parts.append(await stream.receive())
        have += len(parts[-1])
    return text, json.loads(b"".join(parts))


@asynccontextmanager
async def openai_stub(*script: Behaviour) -> AsyncGenerator[OpenAIStub]:
    """Run a stub with this script for the time of the block."""
    listener, port = await _listen()
    stub = OpenAIStub(f"http://127.0.0.1:{port}/v1", script or (reply("ok"),))
    raised: Exception | None = None
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, stub.serve)
        try:
            yield stub
        except Exception as error:  # noqa: BLE001  # raised below, outside of the group
            raised = error
        group.cancel_scope.cancel()
    if raised is not None:
        raise raised


async def _listen() -> tuple[Listener[SocketStream], int]:
    """Return a listener below the ephemeral ports, so that it never meets an outgoing one."""
    start = os.getpid() * 37
    for step in range(PORTS):
        port = PORT_FIRST + (start + step * 7) % PORTS
        try:
            return await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port), port
        except OSError:
            continue
    raise OSError("no free port")


# ---------------------------------------------------------------- chunks


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None) -> dict[str, Any]:
    """Return a chunk with one choice."""
    return {
        "id": "chatcmpl-stub",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "stub",
        "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}],
    }


def usage_chunk() -> dict[str, Any]:
    """Return the chunk that `include_usage` asks for: no choice, only the usage."""
    return {**chunk(), "choices": [], "usage": USAGE}


def call_delta(
    index: int | None, call_id: str | None, name: str | None, arguments: str | None
) -> dict[str, Any]:
    """Return the delta of one piece of a tool call; None leaves a field out."""
    function = {"name": name, "arguments": arguments}
    call: dict[str, Any] = {
        "function": {key: value for key, value in function.items() if value is not None}
    }
    if index is not None:
        call["index"] = index
    if call_id is not None:
        call |= {"id": call_id, "type": "function"}
    return {"tool_calls": [call]}


# ---------------------------------------------------------------- behaviours


def deltas(
    pieces: Sequence[dict[str, Any]], *, finish: str | None = "stop", usage: bool = True
) -> Behaviour:
    """Stream these deltas, then the finish, the usage and the end marker."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        await exchange.send(chunk({"role": "assistant", "content": ""}))
        for piece in pieces:
            await exchange.send(chunk(piece))
        if finish is not None:
            await exchange.send(chunk(finish=finish))
        if usage:
            await exchange.send(usage_chunk())
        await exchange.done()

    return behave


def reply(text: str, *, finish: str = "stop") -> Behaviour:
    """Stream a text, one word a delta."""
    words = text.split(" ")
    pieces = [word + " " for word in words[:-1]] + words[-1:]
    return deltas([{"content": piece} for piece in pieces if piece], finish=finish)


def call_tools(*calls: tuple[str, str], finish: str = "tool_calls") -> Behaviour:
    """Stream tool calls (name, argument text), the arguments in two pieces each."""
    pieces: list[dict[str, Any]] = []
    for index, (name, arguments) in enumerate(calls):
        middle = len(arguments) // 2
        pieces += [
            call_delta(index, f"call_{index}", name, ""),
            call_delta(index, None, None, arguments[:middle]),
            call_delta(index, None, None, arguments[middle:]),
        ]
    return deltas(pieces, finish=finish)


def many_calls(count: int = 100, name: str = "look") -> Behaviour:
    """Stream many parallel calls."""
    return call_tools(*((name, f'{{"n": {number}}}') for number in range(count)))


def malformed_call(name: str = "look") -> Behaviour:
    """Stream a tool call whose arguments are not JSON."""
    return call_tools((name, '{"n": 1, "text": "unend'))


def unknown_tool() -> Behaviour:
    """Stream a call of a tool that was not offered."""
    return call_tools(("no_such_tool", "{}"))


def empty() -> Behaviour:
    """Finish without having said anything."""
    return deltas([])


def stall(after: int = 3) -> Behaviour:
    """Send some deltas, then nothing more; the socket stays open and ignores the client."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        for number in range(after):
            await exchange.send(chunk({"content": f"w{number} "}))
        await exchange.hold()

    return behave


def silent() -> Behaviour:
    """Take the request and never answer, not even a head."""
    return Exchange.hold


def trickle(after: int = 3, *, every_s: float = 0.005) -> Behaviour:
    """Send some deltas, then only keep-alives: comments and chunks without content."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        for number in range(after):
            await exchange.send(chunk({"content": f"w{number} "}))
        while True:
            await exchange.write(b": keep-alive\n\n")
            await exchange.send(chunk({"content": ""}))
            await anyio.sleep(every_s)

    return behave


def cut(after: int = 3) -> Behaviour:
    """Send some deltas and close the connection."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        for number in range(after):
            await exchange.send(chunk({"content": f"w{number} "}))

    return behave


def no_end_marker(text: str, *, hold: bool = False) -> Behaviour:
    """Send a whole reply with its finish, but neither usage nor [DONE]; `hold` keeps it open."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        await exchange.send(chunk({"content": text}))
        await exchange.send(chunk(finish="stop"))
        if hold:
            await exchange.hold()

    return behave


def no_finish(text: str) -> Behaviour:
    """Send text and [DONE], but no finish reason."""
    return deltas([{"content": text}], finish=None)


def awkward_text(text: str) -> Behaviour:
    """Stream a text with CRLF line ends, raw U+2028, one byte a segment (UNI-06)."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        data = b"".join(
            f"data: {json.dumps(piece, ensure_ascii=False)}\r\n\r\n".encode()
            for piece in (chunk({"content": text}), chunk(finish="stop"), usage_chunk())
        )
        for byte in data:
            await exchange.write(bytes([byte]))
        await exchange.done(end="\r\n")

    return behave


def raw(data: bytes) -> Behaviour:
    """Send these bytes as the body of the stream."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        await exchange.write(data)

    return behave


def error_in_stream(error: dict[str, Any], *, after: int = 1) -> Behaviour:
    """Send some deltas, then an error instead of the rest."""

    async def behave(exchange: Exchange) -> None:
        await exchange.open()
        for number in range(after):
            await exchange.send(chunk({"content": f"w{number} "}))
        await exchange.send({"error": error})

    return behave


def status(
    code: int, error: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> Behaviour:
    """Refuse with a status."""

    async def behave(exchange: Exchange) -> None:
        await exchange.status(code, {"error": error or {"message": "refused"}}, headers)

    return behave


def rate_limited(retry_after: str = "7") -> Behaviour:
    """Refuse with 429 and Retry-After."""
    error = {"message": "slow down", "code": "rate_limit_exceeded"}
    return status(429, error, {"Retry-After": retry_after})


def overflow() -> Behaviour:
    """Refuse because the conversation does not fit."""
    message = "This model's maximum context length is 8192 tokens."
    return status(400, {"message": message, "code": "context_length_exceeded"})
