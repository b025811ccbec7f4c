"""How runs enter the store, and how workers take them.

Concurrent `insert_run` calls travel together: whoever gets the lane takes everything that waits
and sends it as one statement; the others find their answer when their turn comes. A call that
meets something (its key, its run, an existing thread, blobs) goes through a transaction alone.
None waits for a row that somebody else has locked: it comes again, behind the others. When the
database is away, all who wait are told so at once.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

import anyio

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.errors import (
    Conflict,
    Gone,
    NotFound,
    PerdureError,
    ThreadBusy,
    Unavailable,
    Unreadable,
)
from perdure.protocol.events import AttemptEvent
from perdure.protocol.ids import RUN, THREAD, hex_of
from perdure.protocol.log import TYPE_NUMBER, NewEvent
from perdure.protocol.records import ThreadBase
from perdure.protocol.runs import RunHot, RunRow
from perdure.protocol.states import AttemptEnd
from perdure.store import beginning, rules
from perdure.store.lineage import branch_base, branched
from perdure.store.postgres.driver import Connection, Row
from perdure.store.postgres.errors import DataRefused, StillBusy, constraint_of, is_outage
from perdure.store.postgres.lanes import PATIENCE_S, Lane, pause
from perdure.store.postgres.moves import leave_aside, supersede
from perdure.store.postgres.moving import columns
from perdure.store.postgres.rows import facts_of, hot_of, keyed_run_of, readable
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.threads import insert_base
from perdure.store.postgres.wire import data_out, digest_out, id_in, id_out, text_out
from perdure.store.requests import Claimed, ClaimWant, Inserted, NewRun

GROUP_MAX = 64
WAITING_MAX = 10_000
GRACE_S = 0.5
"""How long a caller that is cancelled while it sends for others goes on with that."""
_SERVES_SEPARATOR = chr(31)

Clock = Callable[[], datetime] | None


@dataclass(slots=True, eq=False)
class _Waiting:
    """A call on its way: its run, then its answer."""

    new: NewRun
    answer: Inserted | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.error is not None


class _Moved(Exception):
    """Another run became the active one of a thread between two looks."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a new run stands in its thread, and what a new thread says of another."""

    position: int = 1
    active: str | None = None
    base: ThreadBase | None = None
    beside: bool = False

    @property
    def queued(self) -> bool:
        return self.active is not None and not self.beside


class Admission:
    """Inserts runs on a lane of its own."""

    def __init__(self, lane: Lane, clock: Clock) -> None:
        self._lane = lane
        self._clock = clock
        self._turn = anyio.Lock()
        self._waiting: list[_Waiting] = []

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()

    async def insert_run(self, new: NewRun) -> Inserted:
        """See `Store.insert_run`."""
        started, failed = time.monotonic(), 0
        while True:
            mine = await self._travel(new)
            if mine.answer is not None:
                return mine.answer
            assert mine.error is not None, "who is done has one of them"
            if not isinstance(mine.error, StillBusy):
                raise mine.error
            if time.monotonic() - started > PATIENCE_S:
                raise Unavailable("a row that the run needs stayed locked by another writer")
            await pause(failed)
            failed += 1

    async def _travel(self, new: NewRun) -> _Waiting:
        """Wait for this call's turn, and send all that wait unless another did so before."""
        if len(self._waiting) >= WAITING_MAX:
            raise Unavailable("too many runs wait for the database")
        mine = _Waiting(new)
        self._waiting.append(mine)
        try:
            async with self._turn:
                while not mine.is_done:
                    await self._flush()
        finally:
            if mine in self._waiting:
                self._waiting.remove(mine)
        return mine

    async def _flush(self) -> None:
        """Send the first that wait. Those that a cancellation left without an answer wait again."""
        group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
        sending, sent = anyio.CancelScope(shield=True), anyio.Event()

        async def send() -> None:
            with sending:
                await self._send(group)
            sent.set()

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(send)
                try:
                    await sent.wait()
                finally:
                    if not sent.is_set():
                        sending.deadline = anyio.current_time() + GRACE_S
        finally:
            self._waiting[:0] = [one for one in group if not one.is_done]

    async def _send(self, group: Sequence[_Waiting]) -> None:
        together = [one for one in group if _travels(one.new)]
        if together and _are_distinct(together):
            try:
                await self._insert_together(together)
            except Exception as error:  # noqa: BLE001 - each of them finds out alone
                if is_outage(error):
                    self._fail_all(group, error)
        for one in group:
            if not one.is_done:
                await self._insert_alone(one)
                if one.error is not None and is_outage(one.error):
                    self._fail_all(group, one.error)

    def _fail_all(self, group: Sequence[_Waiting], error: Exception) -> None:
        """Tell all of a group, and all who wait behind it, that nothing can be written."""
        for one in (*group, *self._waiting):
            if not one.is_done:
                one.error = error
        self._waiting.clear()

    async def _insert_together(self, group: Sequence[_Waiting]) -> None:
        runs = [(one.new, _Place()) for one in sorted(group, key=_by_key)]
        now = await self._lane.run(lambda c: _insert(c, runs, self._now()))
        for one in group:
            one.answer = _inserted(one.new, now, queued=False)

    async def _insert_alone(self, one: _Waiting) -> None:
        try:
            for _ in range(3):
                try:
                    one.answer = await self._lane.run(lambda c: self._in_transaction(c, one.new))
                except DataRefused as error:
                    if constraint_of(error) in _KEYS:
                        continue  # somebody else's insert came first: look again
                    raise
                return
            raise Conflict("an id of the run is in use")
        except DataRefused as error:
            one.error = Conflict(str(error))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller who sent the run
            one.error = error

    async def _in_transaction(self, connection: Connection, new: NewRun) -> Inserted:
        async with connection.transaction():
            known = await _find_known(connection, new)
            if known is not None:
                return known
            await _hold_origin(connection, new)
            superseded, place = await self._enter_thread(connection, new)
            if place.active is not None and new.options.multitask_strategy == "fork":
                new = branched(new, place.active)
                place = await _place(connection, new)
            if new.branches_from is not None:
                place = await _branch_off(connection, new, self._now())
            new = replace(new, event=beginning.first_event(new, superseded, place.base))
            if new.blobs:
                await keep_blobs(connection, new, self._now())
            now = await _insert(connection, [(new, place)], self._now())
        return _inserted(new, now, queued=place.queued, superseded=superseded)

    async def _enter_thread(self, connection: Connection, new: NewRun) -> tuple[str | None, _Place]:
        """Lock the run's thread; cancel its active run before that, when the new one asks for it.

        Rows of runs are locked before threads (decision 4). While the active run's row is locked,
        it stays the active one; if another had taken its place before, all is undone and tried
        again.
        """
        wish = beginning.superseding(new)
        if wish is None or new.creates_thread:
            return None, await _place(connection, new)
        for _ in range(_TRIES):
            with suppress(_Moved):
                async with connection.transaction():
                    seen = await _active_run(connection, new)
                    done = seen is not None and await supersede(connection, seen, wish, self._now())
                    place = await _place(connection, new)
                    if place.active not in {seen, None}:
                        raise _Moved
                    return (seen if done else None), place
        raise Conflict("the thread's active run changes all the time")


async def _active_run(connection: Connection, new: NewRun) -> str | None:
    """Return the active run of a thread of the tenant, as it is seen without locks."""
    rows = await connection.fetch(SQL["find_thread"], hex_of(new.thread_id), new.tenant_id)
    if not rows or rows[0]["active_run_id"] is None:
        return None
    return id_in(RUN, rows[0]["active_run_id"])


async def _branch_off(connection: Connection, new: NewRun, clock: datetime | None) -> _Place:
    """Write what the run's new thread says of the one that it branches from."""
    rows = await connection.fetch(SQL["find_place"], id_out(new.branches_from), clock)
    if not rows or rows[0]["deleted_at"] is not None:
        raise Gone("the thread was deleted")
    source = id_in(THREAD, rows[0]["thread_id"])
    base = branch_base(new, source, rows[0]["input_position"], rows[0]["now"])
    return _Place(position=base.from_position + 1, base=await insert_base(connection, base, clock))


_TRIES = 20
_KEYS = {"runs_pkey", "runs_by_key", "threads_pkey", "run_state_pkey"}


def _by_key(one: _Waiting) -> tuple[str, str]:
    return (one.new.idempotency_key or "", one.new.run_id)


def _travels(new: NewRun) -> bool:
    alone = new.blobs or new.origin_run_id is not None or new.branches_from is not None
    return new.creates_thread and not alone


def _are_distinct(group: Sequence[_Waiting]) -> bool:
    keys = [
        (one.new.tenant_id, one.new.agent_id, one.new.idempotency_key)
        for one in group
        if one.new.idempotency_key is not None
    ]
    run_ids, threads = {one.new.run_id for one in group}, {one.new.thread_id for one in group}
    return len(set(keys)) == len(keys) and len(run_ids) == len(threads) == len(group)


def _inserted(
    new: NewRun, now: datetime, *, queued: bool, superseded: str | None = None
) -> Inserted:
    row = RunRow(
        facts=beginning.first_facts(new, now), hot=beginning.first_hot(new, now, queued=queued)
    )
    return Inserted(row=row, created=True, fingerprint=new.fingerprint, superseded=superseded)


async def _find_known(connection: Connection, new: NewRun) -> Inserted | None:
    rows = await connection.fetch(
        SQL["find_idempotent_run"],
        hex_of(new.run_id),
        new.tenant_id,
        new.agent_id,
        text_out(new.idempotency_key),
    )
    if not rows:
        return None
    return keyed_run_of(rows[0])


async def _hold_origin(connection: Connection, new: NewRun) -> None:
    if new.origin_run_id is None:
        return
    rows = await connection.fetch(SQL["lock_origin"], hex_of(new.origin_run_id))
    if not rows or rows[0]["retained_from_seq"] > 1:
        raise Gone("the history that the run is to share is no longer kept")


async def _place(connection: Connection, new: NewRun) -> _Place:
    """Lock the run's thread and return the run's place in it."""
    rows = await connection.fetch(SQL["lock_thread"], hex_of(new.thread_id))
    if new.creates_thread:
        if rows:
            raise Conflict("the thread exists")
        return _Place()
    if not rows or rows[0]["tenant_id"] != new.tenant_id:
        raise NotFound("no such thread")
    if rows[0]["deleted_at"] is not None:
        raise Gone("the thread was deleted")
    found = rows[0]["active_run_id"]
    active = None if found is None else id_in(RUN, found)
    if active is not None and new.options.multitask_strategy == "reject":
        raise ThreadBusy("the thread has an active run", details={"run_id": active})
    return _Place(
        position=rows[0]["last_position"] + 1,
        active=active,
        beside=beginning.takes_no_turn(new.options),
    )


async def keep_blobs(connection: Connection, new: NewRun, clock: datetime | None) -> None:
    """Keep the contents of a new run once by digest."""
    blobs = {blob.digest: blob for blob in new.blobs}
    rows = [
        (new.tenant_id, digest_out(blob.digest), blob.media_type.encode(), blob.data)
        for _, blob in sorted(blobs.items())
    ]
    await connection.execute(SQL["insert_blob"], clock, *columns(rows))
    uses = [(hex_of(new.run_id), new.tenant_id, digest) for _, digest, _, _ in rows]
    await connection.execute(SQL["use_blobs"], *columns(uses))


async def insert_children(
    connection: Connection, children: Sequence[NewRun], clock: datetime | None
) -> None:
    """Write the children of commits, in the caller's transaction; those whose thread is new first.

    Raises DataRefused when the thread of another is not there.
    """
    for new in children:
        if new.blobs:
            await keep_blobs(connection, new, clock)
    fresh = [(new, _Place()) for new in children if new.creates_thread]
    if fresh:
        await _insert(connection, fresh, clock)
    lasting = [new for new in children if not new.creates_thread]
    for new in sorted(lasting, key=lambda new: new.thread_id):  # threads in order: no deadlock
        try:
            place = await _place(connection, new)
        except PerdureError as error:
            raise DataRefused(error.message) from error
        await _insert(connection, [(new, place)], clock)


async def _insert(
    connection: Connection, runs: Sequence[tuple[NewRun, _Place]], clock: datetime | None
) -> datetime:
    """Write runs in one statement; return the time they carry."""
    rows = [_cells(new, place) for new, place in runs]
    (row,) = await connection.fetch(
        SQL["insert_run"], clock, SCHEMA_VERSION, SCHEMA_VERSION, *columns(rows)
    )
    return row["now"]


def _cells(new: NewRun, place: _Place) -> tuple[Any, ...]:
    return (
        hex_of(new.run_id),
        hex_of(new.thread_id),
        hex_of(new.message_id),
        new.creates_thread,
        place.queued,
        place.position,
        new.options.faults_max,
        new.required_runtime,
        new.priority,
        new.tenant_id,
        new.agent_id,
        new.agent_version,
        new.queue,
        new.trace_id,
        new.fingerprint.encode(),
        text_out(new.idempotency_key),
        new.input.model_dump_json(exclude_defaults=True).encode(),
        new.context.model_dump_json(exclude_defaults=True).encode(),
        new.options.model_dump_json(exclude_defaults=True).encode(),
        new.caller.model_dump_json(exclude_defaults=True).encode(),
        new.options.timeouts.run_s,
        new.event.step_index,
        TYPE_NUMBER[new.event.data.type],
        data_out(new.event.encoded()),
        new.caller.principal.encode(),
        id_out(new.retry_of),
        id_out(new.forked_from),
        id_out(new.origin_run_id),
        new.origin_seq,
        hex_of(new.root_run_id or new.run_id),
        id_out(new.parent_run_id),
        new.depth,
        new.detached,
        new.start_at,
    )


# ---------------------------------------------------------------- claiming


async def claim(connection: Connection, want: ClaimWant, clock: datetime | None) -> list[Claimed]:
    """Take runs, inside the caller's transaction: `ready` first, then the rows; never waiting."""
    serves = [agent + _SERVES_SEPARATOR + version for agent, version in want.serves]
    chosen = await connection.fetch(
        SQL["claim_candidates"],
        clock,
        serves,
        list(want.queues),
        want.runtime_version,
        want.limit,
        want.suspects_max,
    )
    if not chosen:
        return []
    order = [row["run_id"] for row in chosen]
    locked = await connection.fetch(SQL["lock_ready_runs"], sorted(order), clock)
    rows = {row["run_id"]: row for row in locked}
    stale = [run_id for run_id, row in rows.items() if not _is_free(row)]
    taken: list[tuple[Any, ...]] = []
    claims: list[Claimed] = []
    for row in (rows[run_id] for run_id in order if run_id in rows and _is_free(rows[run_id])):
        try:
            claim, event = _claimed(row, want)
            taken.append(_taken_cells(row["run_id"], claim.row.hot, event))
            claims.append(claim)
        except Unreadable as error:
            stale.append(row["run_id"])
            await leave_aside(connection, row, error.message)
    if taken or stale:
        await _take(connection, want.worker_id, taken, [*stale, *(cells[0] for cells in taken)])
    return claims


def _is_free(row: Row) -> bool:
    """Tell whether an entry in `ready` is true; one that is not is only removed."""
    return row["lease_owner"] is None and row["finished_at"] is None


@readable
def _claimed(row: Row, want: ClaimWant) -> tuple[Claimed, AttemptEvent]:
    """Return a run as taken, and the event that says so."""
    now: datetime = row["now"]
    hot = rules.take(hot_of(row), want, now)
    previous = None if row["end_reason"] is None else AttemptEnd(row["end_reason"])
    claim = Claimed(
        row=RunRow(facts=facts_of(row), hot=hot),
        token=hot.lease_token,
        input_position=row["input_position"],
        deadline_in_s=rules.seconds_left(hot, now),
    )
    return claim, rules.claim_event(hot, want.worker_id, previous)


async def _take(
    connection: Connection, worker_id: str, cells: list[tuple[Any, ...]], gone: list[object]
) -> None:
    cells.sort(key=lambda cell: cell[0])
    await connection.execute(
        SQL["take_runs"],
        *(columns(cells) or [[] for _ in range(9)]),
        worker_id,
        TYPE_NUMBER["attempt"],
        SCHEMA_VERSION,
        gone,
    )


def _taken_cells(run: UUID, hot: RunHot, data: AttemptEvent) -> tuple[Any, ...]:
    return (
        run,
        hot.updated_at,
        hot.lease_expires_at,
        hot.last_seq,
        hot.attempt,
        hot.lease_token,
        hot.cancel_epoch,
        hot.step_index,
        data_out(NewEvent(data=data, step_index=hot.step_index).encoded()),
    )
