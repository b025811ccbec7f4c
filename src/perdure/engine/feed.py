"""Following a run: read after the cursor, find nothing, wait for a hint or the poll, read again.

There is no second code path for "live" (R-6.4, R-6.6). A cursor holds no connection and no lock
while it waits, and never starts, changes or holds the run. One that was opened with live text
returns fragments of replies as well, once it has caught up with the log; whatever it has sent of
a message it trims from the durable fragments (decision 30).
"""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

import anyio

from perdure.engine.core import Core
from perdure.engine.live import Alignment, Ear, Fragment
from perdure.protocol.errors import HistoryReset, NotFound
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL
from perdure.signals.ports import Wakeup, end_topic, run_topic

ITERATE_S = 60.0
"""How long an iteration waits at once; it waits again when nothing came."""

GATHER_S = 0.02
"""How long live text is gathered before the log is read and the text goes out."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Events behind the seq `after` and before `kept_from` that are not kept (any more)."""

    after: int
    kept_from: int


def unbroken(page: list[RecordedEvent], after: int) -> list[RecordedEvent]:
    """Return the events of a page that follow each other from a seq; [] when the first does not."""
    for place, event in enumerate(page):
        if event.seq != after + 1 + place:
            return page[:place]
    return page


class Cursor:
    """A place in a run's log that moves forward as it is read.

    Where events are missing it stops once: a read returns [] at once, `take_missing` tells which,
    and the next read goes on behind them.
    """

    def __init__(
        self, core: Core, run_id: str, seq: int, wakeup: Wakeup, live: "_Live | None" = None
    ) -> None:
        self._core = core
        self._run_id = run_id
        self._wakeup = wakeup
        self._live = live
        self.seq = seq
        self.ended = False
        """True once the terminal event has been passed and nothing is after it."""
        self.only: frozenset[str] | None = None
        """The types that iterating yields; None for all. `seq` moves over the others as well."""
        self._next: deque[RecordedEvent] = deque()
        self._goes_on = False
        """The run's row said so, and no `state` event has come since."""
        self._missing: Missing | None = None
        self._has_jumped = False

    def __aiter__(self) -> Self:
        """Yield the events up to the run's end, waiting for those that are still to come.

        Go on later behind the `seq` of the last event that was taken; the cursor's own may be
        ahead of it. Events that are not kept any more are passed over: the `seq` tells.
        """
        return self

    async def __anext__(self) -> RecordedEvent:
        while not self._next:
            if self.ended:
                raise StopAsyncIteration
            page = await self.read(wait_s=ITERATE_S)
            self._next.extend(e for e in page if self.only is None or e.type in self.only)
        return self._next.popleft()

    def take_missing(self) -> Missing | None:
        """Return, once, which events the last read found missing."""
        missing, self._missing = self._missing, None
        return missing

    async def read(self, *, wait_s: float, limit: int = 100) -> list[RecordedEvent]:
        """Return the next events, at once if there are any; [] after `wait_s` without one.

        After `ended`, and where events are missing, it returns [] at once.
        """
        give_up = self._core.clock.monotonic() + wait_s
        while True:
            page = await self._page(limit)
            left = give_up - self._core.clock.monotonic()
            if page or self.ended or self._has_jumped or left <= 0:
                return page
            with anyio.move_on_after(min(left, self._core.settings.poll_interval_s)):
                await self._wakeup.wait()

    async def read_live(
        self, *, wait_s: float, limit: int = 100
    ) -> list[RecordedEvent] | list[Fragment]:
        """Return the next events, or what is said beyond the last one; like `read` otherwise.

        Fragments come when the log has nothing new. The text of a `delta` event that was returned
        before as fragments is left out; the event itself comes all the same, for its seq.
        """
        live = self._live
        if live is None:
            return await self.read(wait_s=wait_s, limit=limit)
        give_up = self._core.clock.monotonic() + wait_s
        while True:
            page = [live.alignment.durable(event) for event in await self._page(limit)]
            if self.ended:
                live.alignment.drop_all()
            if page or self.ended or self._has_jumped:
                return page
            heard = live.alignment.live()
            left = give_up - self._core.clock.monotonic()
            if heard or left <= 0:
                return heard
            with anyio.move_on_after(min(left, self._core.settings.poll_interval_s)):
                await self._either(live.ear)

    async def wait(self) -> None:
        """Return when there may be something to read: a hint, not a promise."""
        if self._live is None:
            await self._wakeup.wait()
        else:
            await self._either(self._live.ear)

    async def _either(self, ear: Ear) -> None:
        """Wait until the log may have something, or a moment after something is said."""

        async def log() -> None:
            await self._wakeup.wait()
            group.cancel_scope.cancel()

        async def voice() -> None:
            await ear.wait()
            await anyio.sleep(GATHER_S)  # what comes meanwhile costs no read of its own
            group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(log)
            group.start_soon(voice)

    async def _page(self, limit: int) -> list[RecordedEvent]:
        found = await self._core.reader.events_after(self._run_id, self.seq, limit=limit)
        page = unbroken(found, self.seq)
        self._has_jumped = bool(found) and not page
        if self._has_jumped:
            self._missing = Missing(after=self.seq, kept_from=found[0].seq)
            self.seq = found[0].seq - 1
            return []
        if page:
            self.seq = page[-1].seq
        if any(event.type == "state" for event in page):
            self._goes_on = False
        elif page:
            return page
        if len(found) < limit and not self._goes_on:
            await self._look_for_end()
        return page

    async def _look_for_end(self) -> None:
        """An empty page, or one with the terminal event, may be the last: ask the run's row.

        A run that goes on is not asked for again before it has a new `state` event.
        """
        row = await self._core.reader.find_run(None, self._run_id)
        self._goes_on = row is not None and row.hot.state not in TERMINAL
        if row is None or (not self._goes_on and self.seq >= row.hot.last_seq):
            self.ended = True


@dataclass(frozen=True, slots=True)
class _Live:
    """The live side of a cursor. The log is read before any text goes out."""

    ear: Ear
    alignment: Alignment


@asynccontextmanager
async def follow(
    core: Core,
    run_id: str,
    after: int,
    *,
    live: bool = False,
    only: frozenset[str] | None = None,
) -> AsyncGenerator[Cursor]:
    """Open a cursor behind seq `after`; with `live`, for fragments of replies as well.

    `async for event in cursor` yields events until the run has ended, of the types in `only`
    (`granularity.wanted_types`) when it is given (R-6.10).

    Raises NotFound for an unknown run, HistoryReset when `after` is beyond the log.
    """
    row = await core.reader.find_run(None, run_id)
    if row is None:
        raise NotFound("no such run", field="run_id")
    if after > row.hot.last_seq:
        raise HistoryReset("the cursor is beyond the log", details={"last_seq": row.hot.last_seq})
    async with core.signals.subscribe(run_topic(run_id)) as wakeup:
        if not live or not row.facts.options.stream or row.hot.state in TERMINAL:
            cursor = Cursor(core, run_id, after, wakeup)
            cursor.only = only
            yield cursor
            return
        dropped = core.metrics.engine.fragments_dropped
        with core.live.listen(run_id, dropped) as ear:
            alignment = Alignment(ear, dropped, attempt=row.hot.attempt, epoch=row.hot.cancel_epoch)
            cursor = Cursor(core, run_id, after, wakeup, _Live(ear, alignment))
            cursor.only = only
            yield cursor


async def wait_for_end(core: Core, run_id: str, wait_s: float) -> RunRow:
    """Return the run once it is terminal, or as it stands after `wait_s`. Raises NotFound."""
    give_up = core.clock.monotonic() + wait_s
    async with core.signals.subscribe(end_topic(run_id)) as wakeup:
        while True:
            row = await core.reader.find_run(None, run_id)
            if row is None:
                raise NotFound("no such run", field="run_id")
            left = give_up - core.clock.monotonic()
            if row.hot.state in TERMINAL or left <= 0:
                return row
            with anyio.move_on_after(min(left, core.settings.poll_interval_s)):
                await wakeup.wait()
