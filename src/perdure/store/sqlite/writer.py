"""The one thread that writes to the file, and how work reaches it.

Callers enqueue jobs; the thread takes all that wait (up to `BATCH_MAX` commits and jobs), runs
them in one `BEGIN IMMEDIATE` transaction and answers all waiters with one call into their loop.
While one batch is synced the next gathers: group commit without a timer. Urgent jobs (lease
renewals) go to the front. Nothing is shared with the callers but the two queues under `_ready`.

A job that raises one of our errors is undone by itself. When a batch fails for anything else that
may be the fault of one job, it is rolled back and its jobs are repeated one by one, each commit of
a job in a transaction of its own: the culprit gets its error, the others are written (decision 7).

A simulation has no thread: its loop owns all that happens. It gives the writer its turns (`inline`),
and what waits by then is a batch.
"""

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, TypeVar

from perdure.protocol.base import to_micros
from perdure.protocol.errors import PerdureError, Unavailable, Unreadable
from perdure.store.commits import CommitResult, Refused
from perdure.store.sqlite.answers import Asked, Outcome, answer_all, resolve
from perdure.store.sqlite.committing import write_commits
from perdure.store.sqlite.connection import (
    BUSY_DEADLINE_S,
    begin_immediate,
    is_data_error,
    translate,
)
from perdure.store.sqlite.prepared import Prepared
from perdure.store.sqlite.products import NotPending
from perdure.store.sqlite.transaction import Transaction

BATCH_MAX: Final = 128
WATCH_S: Final = 0.075
JOBS_MAX: Final = 10_000

Clock = Callable[[], datetime]
Work = Callable[[Transaction], object]
Soon = Callable[[Callable[[], None]], object]
"""Has a function called before long, on the loop itself: as `loop.call_soon` does."""

_T = TypeVar("_T")


@dataclass(slots=True)
class Job(Asked):
    """Work for the thread: a function of the transaction, or commits."""

    work: Work | None = None
    commits: Sequence[Prepared] = ()


@dataclass(slots=True)
class Writer:
    """The thread, its connection and its queues. `before_commit` is a hook for tests.

    With `inline` there is no thread; that has each batch written.
    """

    clock: Clock
    inline: Soon | None = None
    before_commit: Callable[[sqlite3.Connection], None] | None = None
    busy_deadline_s: float = BUSY_DEADLINE_S
    foreign_version: int = 0
    """Changes when another connection has committed; kept up to date once `watch` was called."""
    _urgent: deque[Job] = field(default_factory=deque[Job])
    _jobs: deque[Job] = field(default_factory=deque[Job])
    _ready: threading.Condition = field(default_factory=threading.Condition)
    _open: bool = False
    _watching: bool = False
    _look_at: float = 0.0
    _thread: threading.Thread | None = None
    _connection: sqlite3.Connection | None = None
    _called: bool = False

    def start(self, connection: sqlite3.Connection) -> None:
        """Start the thread on a connection, which is its own from now on."""
        if self.inline is not None:
            self._connection, self._open = connection, True
            return
        self._thread = threading.Thread(
            target=self._serve, args=(connection,), name="sqlite-writer", daemon=True
        )
        self._open = True
        self._thread.start()

    def stop(self) -> None:
        """Write what waits, end the thread and close the connection; blocks."""
        with self._ready:
            self._open = False
            self._ready.notify()
        if self._thread is not None:
            self._thread.join()
        elif self._connection is not None:
            self._serve(self._connection)

    def watch(self) -> None:
        """Look from now on, also while nothing is to be written, whether others have committed."""
        if self._watching:
            return
        with self._ready:
            self._watching = True
            self._ready.notify()

    async def run(self, work: Callable[[Transaction], _T], *, urgent: bool = False) -> _T:
        """Run a function in a transaction of the thread and return its value, once durable."""
        loop = asyncio.get_running_loop()
        job = Job(loop=loop, answer=loop.create_future(), work=work)
        self._put(job, self._urgent if urgent else self._jobs)
        return await job.answer

    async def commit(self, commits: Sequence[Prepared]) -> list[CommitResult]:
        """Write commits; one answer for each, once durable."""
        loop = asyncio.get_running_loop()
        job = Job(loop=loop, answer=loop.create_future(), commits=commits)
        self._put(job, self._jobs)
        return await job.answer

    def _put(self, job: Job, queue: deque[Job]) -> None:
        with self._ready:
            if not self._open:
                raise Unavailable("the database is not open")
            if len(queue) >= JOBS_MAX:
                raise Unavailable("too many writes wait for the database")
            queue.append(job)
            self._ready.notify()
        self._call()

    # ------------------------------------------------------------ without a thread

    def _call(self) -> None:
        """Have what waits written by the next turn."""
        if self.inline is not None and not self._called:
            self._called = True
            self.inline(self._take_turn)

    def _take_turn(self) -> None:
        self._called = False
        if self._connection is None or not (self._open and (self._urgent or self._jobs)):
            return
        resolve(self._write(self._connection, self._next_batch() or []))
        if self._urgent or self._jobs:
            self._call()

    # ------------------------------------------------------------ the thread

    def _serve(self, connection: sqlite3.Connection) -> None:
        while (batch := self._next_batch()) is not None:
            self._look_for_others(connection)
            if batch:
                answer_all(self._write(connection, batch))
        connection.close()

    def _write(self, connection: sqlite3.Connection, batch: list[Job]) -> list[Outcome]:
        try:
            return self._run_batch(connection, batch)
        except Exception as error:  # noqa: BLE001  # the thread must outlive any job
            return [Outcome(job, error=translate(error)) for job in batch]

    def _look_for_others(self, db: sqlite3.Connection) -> None:
        """Read the file's version as this connection sees it: its own commits do not count."""
        now = time.monotonic()
        if not self._watching or now < self._look_at:
            return
        self._look_at = now + WATCH_S
        with suppress(sqlite3.Error):  # a busy file is looked at again
            self.foreign_version = db.execute("PRAGMA data_version").fetchall()[0][0]

    def _next_batch(self) -> list[Job] | None:
        """Wait for work; return nothing to do now and then while watching, None when closed."""
        with self._ready:
            while not self._urgent and not self._jobs:
                if not self._open:
                    return None
                self._ready.wait(WATCH_S if self._watching else None)
                if self._watching:
                    break
            batch, room = list(self._urgent), BATCH_MAX
            self._urgent.clear()
            while self._jobs and room > 0:
                job = self._jobs.popleft()
                batch.append(job)
                room -= max(1, len(job.commits))
            return batch

    def _run_batch(self, db: sqlite3.Connection, batch: list[Job]) -> list[Outcome]:
        try:
            return self._in_transaction(db, lambda tx: _run_all(tx, batch))
        except Exception as error:
            if not _may_be_of_one(error):
                raise
        return [self._run_single(db, job) for job in batch]

    def _in_transaction(self, db: sqlite3.Connection, body: Callable[[Transaction], _T]) -> _T:
        begin_immediate(db, self.busy_deadline_s)
        try:
            now = self.clock()  # read once the lock is held: in order of commits
            value = body(Transaction(db, now, to_micros(now)))
            if self.before_commit is not None:
                self.before_commit(db)
            db.execute("COMMIT")
        except BaseException:
            # a full disk has rolled back already
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return value

    def _run_single(self, db: sqlite3.Connection, job: Job) -> Outcome:
        """Run one job alone; a refused commit is an answer, not an error."""
        try:
            if job.work is not None:
                return Outcome(job, value=self._in_transaction(db, job.work))
            return Outcome(job, value=[self._commit_single(db, one) for one in job.commits])
        except Exception as error:  # noqa: BLE001  # it is answered to the one who asked
            return Outcome(job, error=translate(error))

    def _commit_single(self, db: sqlite3.Connection, prepared: Prepared) -> CommitResult:
        try:
            return self._in_transaction(db, lambda tx: write_commits(tx, [prepared]))[0]
        except Exception as error:
            if not isinstance(error, Unreadable) and not is_data_error(error):
                raise
            told = str(error)
            ours = isinstance(error, NotPending)
            return Refused(reason=told if ours else f"{type(error).__name__}: {told}")


def _may_be_of_one(error: Exception) -> bool:
    """Tell whether one job may be at fault: its data, its rows, its share of the room, or a bug that
    it met.
    """
    if not isinstance(error, sqlite3.Error) or is_data_error(error):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_TOOBIG}


def _run_all(tx: Transaction, batch: Iterable[Job]) -> list[Outcome]:
    """Run all jobs of a batch in one transaction, the commits of all together at the end.

    An error of ours is an answer; what the job had written is undone.
    """
    outcomes: list[Outcome] = []
    committing: list[Job] = []
    for job in batch:
        if job.work is None:
            committing.append(job)
            continue
        tx.db.execute("SAVEPOINT job")
        try:
            outcomes.append(Outcome(job, value=job.work(tx)))
        except PerdureError as error:
            tx.db.execute("ROLLBACK TO job")
            outcomes.append(Outcome(job, error=error))
        tx.db.execute("RELEASE job")
    results = write_commits(tx, [one for job in committing for one in job.commits])
    start = 0
    for job in committing:
        end = start + len(job.commits)
        outcomes.append(Outcome(job, value=results[start:end]))
        start = end
    return outcomes
