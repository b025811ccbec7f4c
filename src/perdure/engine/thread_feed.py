"""Following all runs of a thread at once, with the guarantees of a run's stream (R-6.3, R-11.2).

The place in a thread's history is a vector (decision 31): up to which place of the thread its
runs are known, and how far each of them that has not ended was read. Places are given out under
the thread's lock, so a run that is not known yet always stands behind the known ones, whichever
process made it and however many run in parallel. Runs that are neither open nor new have ended and
were read to their end.

Each open run is followed by a task that only notes that the run may have news; one reader reads,
run by run: what was missed in order of the runs' inputs, then in turn, so that a busy run starves
nobody.
A thread does not end.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import anyio.abc

from perdure.engine.core import Core
from perdure.engine.feed import Cursor, Missing, follow
from perdure.engine.live import Fragment
from perdure.protocol.errors import HistoryReset, Malformed
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL
from perdure.signals.ports import thread_topic
from perdure.store.reader import PlacedRun

OPEN_RUNS_MAX = 1000
"""Runs followed at once; further ones are taken up as these end."""

LOOKS_PER_POLL = 20
"""Open runs that are looked at when nothing was heard for the poll interval, in turn."""

_PAGE = 100
_TEXT = re.compile(r"t1\.\d{1,18}(\.\d{1,18}-\d{1,18})*", re.ASCII)


@dataclass(slots=True)
class Place:
    """A place in a thread's history. `known`: all runs up to there; `open`: seqs by place."""

    known: int = 0
    open: dict[int, int] = field(default_factory=dict[int, int])

    def text(self) -> str:
        """Return the place as clients keep it, without looking into it."""
        parts = [f"{position}-{seq}" for position, seq in sorted(self.open.items())]
        return ".".join(["t1", str(self.known), *parts])


def read_place(text: str, field: str) -> Place:
    """Return the place that a text stands for; raise Malformed for any other text."""
    if not _TEXT.fullmatch(text):
        raise Malformed("not a place in the events of a thread", field=field)
    _, known, *parts = text.split(".")
    pairs = [part.split("-") for part in parts]
    place = Place(int(known), {int(position): int(seq) for position, seq in pairs})
    if len(pairs) > OPEN_RUNS_MAX or any(position > place.known for position in place.open):
        raise Malformed("not a place in the events of a thread", field=field)
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStart:
    """Where a stream of a thread begins, with the runs that are open there."""

    thread_id: str
    place: Place
    runs: list[PlacedRun]


async def start_at(core: Core, thread_id: str, place: Place) -> ThreadStart:
    """Return where to begin. Raises HistoryReset for a place that the thread does not have."""
    runs: list[PlacedRun] = []
    for position, seq in place.open.items():
        found = await core.reader.thread_runs(thread_id, after=position - 1, limit=1)
        if not found or found[0].position != position or seq > found[0].row.hot.last_seq:
            raise HistoryReset("the cursor is not of this thread, or beyond its events")
        runs.append(found[0])
    return ThreadStart(thread_id=thread_id, place=place, runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one run of the thread has to say: events, live text, or which events are not kept."""

    position: int
    row: RunRow
    items: list[RecordedEvent] | list[Fragment]
    missing: Missing | None = None


@dataclass(slots=True, kw_only=True)
class _Branch:
    """One open run."""

    position: int
    row: RunRow
    cursor: Cursor
    scope: anyio.CancelScope
    is_behind: bool = True


class ThreadCursor:
    """A place in a thread that moves forward as it is read. Made by `follow_thread`."""

    def __init__(
        self, core: Core, start: ThreadStart, group: anyio.abc.TaskGroup, *, live: bool
    ) -> None:
        self.place = Place(start.place.known, dict(start.place.open))
        self._core = core
        self._thread_id = start.thread_id
        self._resumed = sorted(start.runs, key=lambda placed: placed.position)
        self._group = group
        self._live = live
        self._branches: dict[int, _Branch] = {}
        self._marked: dict[int, None] = {}
        self._news = anyio.Event()
        self._may_have_runs = True

    async def read(self, *, wait_s: float, limit: int = 100) -> Batch | None:
        """Return what comes next of some run, at once if there is anything; None after `wait_s`.

        Whoever takes an event notes its seq in `place`.
        """
        give_up = self._core.clock.monotonic() + wait_s
        while True:
            self._news = anyio.Event()
            while self._resumed:
                placed = self._resumed.pop(0)
                await self._open(placed, self.place.open[placed.position])
            await self._discover()
            batch = await self._next(limit)
            left = give_up - self._core.clock.monotonic()
            if batch is not None or left <= 0:
                return batch
            with anyio.move_on_after(min(left, self._core.settings.poll_interval_s)) as scope:
                await self._news.wait()
            if scope.cancelled_caught:
                self._look_around()

    async def listen(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Hear of new runs until cancelled."""
        async with self._core.signals.subscribe(thread_topic(self._thread_id)) as wakeup:
            task_status.started()
            while True:
                await wakeup.wait()
                self._may_have_runs = True
                self._news.set()

    # ------------------------------------------------------------ runs

    async def _discover(self) -> None:
        """Take up runs that were not known."""
        while self._may_have_runs and len(self._branches) < OPEN_RUNS_MAX:
            self._may_have_runs = False
            found = await self._core.reader.thread_runs(
                self._thread_id, after=self.place.known, limit=_PAGE
            )
            for placed in found:
                self.place.known = placed.position
                self.place.open[placed.position] = 0
                await self._open(placed, 0)
            self._may_have_runs = self._may_have_runs or len(found) == _PAGE

    async def _open(self, placed: PlacedRun, seq: int) -> None:
        position, row = placed.position, placed.row
        if row.hot.state in TERMINAL and seq >= row.hot.last_seq:
            del self.place.open[position]
            return
        cursor, scope = await self._group.start(self._follow, position, row, seq)
        self._branches[position] = _Branch(position=position, row=row, cursor=cursor, scope=scope)
        self._mark(position)

    async def _follow(
        self,
        position: int,
        row: RunRow,
        after: int,
        *,
        task_status: anyio.abc.TaskStatus[tuple[Cursor, anyio.CancelScope]],
    ) -> None:
        """Note whenever a run may have news, until it was read to its end."""
        with anyio.CancelScope() as scope:
            async with follow(self._core, row.facts.run_id, after, live=self._live) as cursor:
                task_status.started((cursor, scope))
                while True:
                    await cursor.wait()
                    self._mark(position)

    def _mark(self, position: int) -> None:
        self._marked[position] = None
        self._news.set()

    def _look_around(self) -> None:
        """Nothing was heard: look for new runs, and at some of the open ones, in turn."""
        self._may_have_runs = True
        for position in list(self._branches)[:LOOKS_PER_POLL]:
            self._branches[position] = self._branches.pop(position)
            self._marked[position] = None

    # ------------------------------------------------------------ events

    async def _next(self, limit: int) -> Batch | None:
        while self._marked:
            position = self._whose_turn()
            del self._marked[position]  # before the read: what comes meanwhile marks it again
            branch = self._branches.get(position)
            if branch is None:
                continue
            items = await branch.cursor.read_live(wait_s=0, limit=limit)
            if (missing := branch.cursor.take_missing()) is not None:
                self._marked[position] = None
                return Batch(position=position, row=branch.row, items=[], missing=missing)
            if items:
                branch.is_behind = branch.is_behind and len(items) == limit
                self._marked[position] = None
                return Batch(position=position, row=branch.row, items=items)
            if branch.cursor.ended:
                branch.scope.cancel()
                del self._branches[position]
                del self.place.open[position]
        return None

    def _whose_turn(self) -> int:
        """Return the first run that was never caught up with, else the one that waits longest."""
        behind = (
            position
            for position in self._marked
            if (branch := self._branches.get(position)) is not None and branch.is_behind
        )
        return min(behind, default=next(iter(self._marked)))


@asynccontextmanager
async def follow_thread(
    core: Core, start: ThreadStart, *, live: bool = False
) -> AsyncGenerator[ThreadCursor]:
    """Follow a thread from a place; with `live`, text of its replies as well."""
    async with anyio.create_task_group() as group:
        cursor = ThreadCursor(core, start, group, live=live)
        await group.start(cursor.listen)
        try:
            yield cursor
        finally:
            group.cancel_scope.cancel()
