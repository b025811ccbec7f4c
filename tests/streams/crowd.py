"""A crowd of stream clients that lose their connections at any byte, and what they saw."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import anyio
from pydantic import JsonValue

from perdure.protocol.codec import decode
from perdure.protocol.log import RecordedEvent
from perdure.store.reader import Reader
from perdure.testing.sse_client import SseClient, SseEvent, SseStream, StreamInterrupted

PAGE = 200
CUT_BYTES_MAX = 4000
AWAY_S_MAX = 0.05


@dataclass(slots=True)
class Viewer:
    """One client that follows a run to its end and loses the first `cuts` of its connections."""

    client: SseClient
    chance: random.Random
    cuts: int
    seen: list[SseEvent] = field(default_factory=list[SseEvent])
    cut: int = 0

    async def follow(self) -> None:
        """Read until the terminal event, coming again after every cut."""
        while not (self.seen and self.seen[-1].is_end):
            if self.cut >= self.cuts:
                await self._read(None)
            elif self.chance.random() < 0.1:
                await self._leave_before_the_answer()
            else:
                await self._read(self.chance.randrange(CUT_BYTES_MAX))
            if self.chance.random() < 0.3:
                await anyio.sleep(self.chance.uniform(0, AWAY_S_MAX))

    async def _read(self, cut_after: int | None) -> None:
        async with self.client.connect(cut_after=cut_after) as stream:
            assert stream.status == 200, stream.status
            try:
                while (event := await stream.next()) is not None:
                    self.seen.append(event)
                assert stream.is_clean or cut_after is not None
            except StreamInterrupted:
                assert cut_after is not None, "the server ended a stream before its run"
                self.cut += 1

    async def _leave_before_the_answer(self) -> None:
        client = self.client
        request = (
            f"GET {client.path} HTTP/1.1\r\nHost: {client.host}:{client.port}\r\n"
            f"Last-Event-ID: {client.last_event_id}\r\n\r\n"
        ).encode()
        async with await anyio.connect_tcp(client.host, client.port) as socket:
            await socket.send(request[: self.chance.randrange(1, len(request) + 1)])
        self.cut += 1

    async def come_again(self) -> int:
        """Connect once more and return the status of the answer."""
        async with self.client.connect() as stream:
            return stream.status


async def is_cut(stream: SseStream, seen: list[SseEvent]) -> bool:
    """Read a stream to where it ends; tell whether that is before the end of its run."""
    try:
        while (event := await stream.next()) is not None:
            seen.append(event)
    except StreamInterrupted:
        return True
    return False


async def stored_log(reader: Reader, run_id: str) -> list[RecordedEvent]:
    """Return the whole log of a run, from the store."""
    log: list[RecordedEvent] = []
    while page := await reader.events_after(run_id, len(log), limit=PAGE):
        log += page
    return log


def assert_shown(shown: object, kept: JsonValue) -> None:
    """Fail unless all that is kept is shown; defaults may stand beside it."""
    if isinstance(kept, dict):
        assert isinstance(shown, dict)
        for name, value in kept.items():
            assert_shown(cast("dict[str, object]", shown)[name], value)
    else:
        assert shown == kept


def assert_exact(seen: Sequence[SseEvent], stored: Sequence[RecordedEvent]) -> None:
    """Fail unless each stored event was seen once, in order, with what is stored of it.

    A `state` event shows more than is stored (its status and code); nothing may show less.
    """
    views = [event.json() for event in seen]
    found = [(event.id, view["seq"], view["type"]) for event, view in zip(seen, views, strict=True)]
    assert found == [(str(event.seq), event.seq, event.type) for event in stored]
    for view, event in zip(views, stored, strict=True):
        kept = decode(event.raw)
        assert isinstance(kept, dict)
        kept.pop("type", None)
        assert_shown(view["data"], kept)
        assert view["event_id"] == event.event_id
