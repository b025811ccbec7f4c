"""One write transaction: its connection, its time, and the few moves that every write shares."""

import logging
import sqlite3
from collections.abc import Container, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from perdure.protocol.base import SCHEMA_VERSION, to_micros
from perdure.protocol.errors import Unreadable
from perdure.protocol.log import TYPE_NUMBER, EventData, NewEvent
from perdure.protocol.runs import RunHot
from perdure.protocol.states import AttemptEnd, ParkedOn
from perdure.store.requests import NewBlob, TimerKind
from perdure.store.rules import Kept, is_suspected, next_in_thread
from perdure.store.sqlite.connection import SQL, fetch_rows, read_row
from perdure.store.sqlite.rows import Row, maybe, pack_digest, pack_hot, pack_id, read_kept

log = logging.getLogger(__name__)

NO_REF = b""


@dataclass(slots=True)
class Transaction:
    """An open `BEGIN IMMEDIATE`. `now` is the store's clock, read once the lock was held."""

    db: sqlite3.Connection
    now: datetime
    now_micros: int

    def one(self, name: str, *values: object) -> Row | None:
        """Return the first row of a statement."""
        rows = fetch_rows(self.db, SQL[name], values)
        return rows[0] if rows else None

    def all(self, name: str, *values: object) -> list[Row]:
        """Return all rows of a statement."""
        return fetch_rows(self.db, SQL[name], values)

    def run(self, name: str, *values: object) -> int:
        """Run a statement; return how many rows it wrote."""
        return self.db.execute(SQL[name], values).rowcount

    def load(self, run: bytes) -> Kept | None:
        """Return a run's hot row."""
        row = self.one("load_hot", run)
        return None if row is None else read_row(read_kept, row)

    def load_one_of_many(self, run: bytes) -> Kept | None:
        """Return the hot row of one run of several; None, and a line in the log, when damaged."""
        try:
            return self.load(run)
        except Unreadable as error:
            log.error("run_%s is left as it is: %s", run.hex(), error)  # noqa: TRY400  # expected: no trace
            return None

    def save(self, run: bytes, kept: Kept) -> None:
        """Write a run's hot row."""
        self.db.execute(SQL["save_hot"], (*pack_hot(kept), run))

    def append(self, run: bytes, hot: RunHot, data: EventData, step_index: int) -> None:
        """Append one event of the store's own; the hot row is already as it leaves it."""
        self.run("insert_event", *pack_own_event(run, hot, data, step_index))

    def end_attempt(self, run: bytes, hot: RunHot, reason: AttemptEnd) -> None:
        """End the running attempt, with the last commit that its holder wrote."""
        commit_id = maybe(pack_id, hot.last_commit_id)
        at = to_micros(hot.updated_at)
        self.run("end_attempt", run, hot.attempt, at, reason.value, commit_id)

    def set_ready(self, run: bytes, hot: RunHot, at: int) -> None:
        """Give the run its entry in `ready`; it must have none."""
        self.run("insert_ready", run, at, is_suspected(hot))

    def begin_closing(self, run: bytes) -> None:
        """Leave a run that nobody holds to the closing timer."""
        self.run("delete_ready", run)
        self.run("insert_timer", run, TimerKind.CLOSE.value, NO_REF, self.now_micros)

    def keep_blobs(
        self, run: bytes, tenant_id: str, blobs: Iterable[NewBlob], lasting: Container[str]
    ) -> None:
        """Keep content once by digest; what is there is only touched. The run uses it now."""
        for blob in blobs:
            digest = pack_digest(blob.digest)
            self.run("insert_blob", tenant_id, digest, blob.media_type, self.now_micros, blob.data)
            self.run("use_blob", run, tenant_id, digest, int(blob.digest in lasting))

    def end_run(self, run: bytes, thread: bytes) -> None:
        """Clear what an ended run leaves: timers, its entry in `ready`, its place in the thread."""
        self.run("delete_ready", run)
        self.run("delete_timers", run)
        active = self.one("find_active_run", thread)
        if active is not None and active[0] == run:
            self._hand_over(thread, run)
        else:
            self.run("leave_thread_queue", thread, run)

    def _hand_over(self, thread: bytes, ended: bytes) -> None:
        """Make the thread's oldest waiting run the active one, and claimable if it queued."""
        row = self.one("next_thread_run", thread)
        self.run("activate_thread", thread, ended, None if row is None else row[0])
        if row is None:
            return
        run: bytes = row[0]
        self.run("leave_thread_queue", thread, run)
        kept = self.load_one_of_many(run)
        if kept is not None and kept.hot.parked_on is ParkedOn.THREAD:
            hot = next_in_thread(kept.hot, self.now)
            self.save(run, Kept(hot=hot, deadline_left=kept.deadline_left))
            self.set_ready(run, hot, to_micros(hot.wake_at or self.now))


def pack_own_event(run: bytes, hot: RunHot, data: EventData, step_index: int) -> tuple[Any, ...]:
    """Return the row of an event of the store's own; `hot` is the row as it leaves it."""
    return (
        run,
        hot.last_seq,
        TYPE_NUMBER[data.type],
        step_index,
        to_micros(hot.updated_at),
        hot.attempt,
        hot.cancel_epoch,
        SCHEMA_VERSION,
        NewEvent(data=data, step_index=step_index).encoded(),
    )
