"""The events of all runs of a thread, in pages and followed live (R-6.3).

Each event names its run, as in the run's own stream. The place to resume from is opaque: it holds
how far every run that has not ended was read. What is written of a run after its end (`late`
results) stands in that run's own events.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from perdure.engine.live import Fragment
from perdure.engine.thread_feed import (
    Batch,
    ThreadCursor,
    ThreadStart,
    follow_thread,
    read_place,
    start_at,
)
from perdure.protocol.codec import encode
from perdure.protocol.errors import HistoryReset, PerdureError
from perdure.service.base import Service
from perdure.service.events import EncodedEvent, Projector, gap_frame
from perdure.service.principal import Principal
from perdure.service.threads import own_thread


@dataclass(slots=True)
class ThreadFeed:
    """A place in a thread's events that moves forward as they are read."""

    service: Service
    cursor: ThreadCursor
    _projectors: dict[int, Projector] = field(default_factory=dict[int, Projector])

    @property
    def ended(self) -> bool:
        """A thread does not end."""
        return False

    @property
    def place(self) -> str:
        """Where to go on from."""
        return self.cursor.place.text()

    async def read(self, *, wait_s: float, limit: int) -> list[EncodedEvent]:
        """Return the next events, at once if there are any; [] after `wait_s` without one."""
        batch = await self.cursor.read(wait_s=wait_s, limit=limit)
        if batch is None:
            return []
        if batch.missing is not None:
            frame = await gap_frame(self.service, batch.row, batch.missing)
            return [self._placed(batch.position, frame)]
        projector = self._projector(batch)
        found: list[EncodedEvent] = []
        for item in batch.items:
            if isinstance(item, Fragment):
                found.append(projector.live(item))
            else:
                found.append(self._placed(batch.position, await projector.encode(item)))
        return found

    def _projector(self, batch: Batch) -> Projector:
        found = self._projectors.get(batch.position)
        if found is None:
            open_now = self.cursor.place.open
            self._projectors = {
                position: kept
                for position, kept in self._projectors.items()
                if position in open_now
            }
            found = self._projectors[batch.position] = Projector(self.service, batch.row)
        return found

    def _placed(self, position: int, event: EncodedEvent) -> EncodedEvent:
        assert event.seq is not None
        self.cursor.place.open[position] = event.seq
        return replace(event, place=self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadPage:
    """Events of a thread; `place` goes on behind them, `more` tells whether to at once."""

    events: list[EncodedEvent]
    place: str
    more: bool

    def body(self) -> bytes:
        """Return the page as JSON, a `ThreadEventPage`."""
        tail = encode({"next": self.place if self.more else None, "place": self.place})
        items = b",".join(event.body for event in self.events)
        return b'{"items":[' + items + b"]," + tail[1:]


async def thread_start(
    service: Service, principal: Principal, thread_id: str, after: str, *, last_event_id: str = ""
) -> ThreadStart:
    """Return where to begin behind a place, "" for the start of the thread; the header wins.

    Raises NotFound, Gone, Malformed (no place), HistoryReset (not of this thread, or beyond its events).
    """
    wanted = read_place(after or "t1.0", "after")
    if last_event_id:
        wanted = read_place(last_event_id, "Last-Event-ID")
    thread = await own_thread(service, principal, thread_id)
    if wanted.known > thread.last_position:
        raise HistoryReset("the cursor is beyond the end of this thread; read it from the start")
    return await start_at(service.core, thread_id, wanted)


@asynccontextmanager
async def follow(service: Service, start: ThreadStart) -> AsyncGenerator[ThreadFeed]:
    """Follow a thread with live text; holds no connection while nothing happens."""
    async with follow_thread(service.core, start, live=True) as cursor:
        yield ThreadFeed(service, cursor)


async def read_page(service: Service, start: ThreadStart, *, limit: int) -> ThreadPage:
    """Return events behind a place, run by run in order of their inputs."""
    events: list[EncodedEvent] = []
    problem: PerdureError | None = None
    place = ""
    async with follow_thread(service.core, start) as cursor:
        feed = ThreadFeed(service, cursor)
        try:
            while len(events) < limit:
                found = await feed.read(wait_s=0, limit=limit - len(events))
                if not found:
                    break
                events += found
        except PerdureError as error:
            problem = error  # raised outside of the group, which would wrap it
        place = feed.place
    if problem is not None:
        raise problem
    return ThreadPage(events=events, place=place, more=len(events) >= limit)
