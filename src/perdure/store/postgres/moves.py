"""Writes of those who do not hold the run, and of holders who give it up (decisions 2, 3, 27).

Each function runs inside the caller's transaction: lock, read, ask `rules`, write.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from perdure.protocol.errors import NotFound, Unreadable
from perdure.protocol.ids import RUN, hex_of
from perdure.protocol.runs import RunHot
from perdure.protocol.states import TERMINAL, AttemptEnd
from perdure.store import keeping, rules
from perdure.store.postgres.driver import Connection, Row
from perdure.store.postgres.moving import (
    append_events,
    columns,
    delete_timers,
    end_attempts,
    save_moves,
    wake_or_close,
)
from perdure.store.postgres.rows import hot_of
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import digest_in, digest_out, id_in, text_out
from perdure.store.requests import CancelWish, LateKept, LateResult, LeaseKey, Requeued, TimerKind

log = logging.getLogger(__name__)


async def _lock(connection: Connection, run_id: str, clock: datetime | None) -> Row | None:
    rows = await connection.fetch(SQL["lock_run"], hex_of(run_id), clock)
    return rows[0] if rows else None


def _known(row: Row) -> RunHot | None:
    """Return the hot half of one run of several; None, and a line in the log, when it is damaged."""
    try:
        return hot_of(row)
    except Unreadable as error:
        log.error("run_%s is left as it is: %s", row["run_id"].hex, error)  # noqa: TRY400  # expected: no trace
        return None


async def cancel(
    connection: Connection, run_id: str, wish: CancelWish, clock: datetime | None
) -> RunHot | None:
    """Accept a cancel, or return the row as it is; None when there is no such run."""
    row = await _lock(connection, run_id, clock)
    if row is None:
        return None
    before = hot_of(row)
    if not rules.accepts_cancel(before, wish):
        return before
    return await _cancel(connection, row, wish, clock)


async def supersede(
    connection: Connection, run_id: str, wish: CancelWish, clock: datetime | None
) -> bool:
    """Cancel a thread's active run for another; False when it ends anyway. Its row is locked."""
    row = await _lock(connection, run_id, clock)
    if row is None or not rules.accepts_cancel(hot_of(row), wish):
        return False
    await _cancel(connection, row, wish, clock)
    return True


async def _cancel(
    connection: Connection, row: Row, wish: CancelWish, clock: datetime | None
) -> RunHot:
    """Cancel a run whose row is locked, and all below it."""
    now: datetime = row["clock"]
    hot, key = rules.cancel(hot_of(row), wish, now), row["run_id"].hex
    moved, wishes = [(key, hot)], [wish]
    for below in await _lock_below(connection, key, clock):
        child = _known(below)
        if child is None:
            continue
        if child.state not in TERMINAL and rules.accepts_cancel(child, wish):
            moved.append((below["run_id"].hex, rules.cancel(child, wish, now)))
            wishes.append(rules.cascaded(wish))
    await save_moves(connection, moved)
    await append_events(
        connection,
        [
            (key, hot, rules.cancel_event(hot, mine), hot.step_index)
            for (key, hot), mine in zip(moved, wishes, strict=True)
        ],
    )
    unheld = [(key, hot) for key, hot in moved if hot.lease_owner is None]
    if unheld:
        await wake_or_close(connection, unheld, row["now"], frozenset(key for key, _ in unheld))
    return hot


async def _lock_below(connection: Connection, key: str, clock: datetime | None) -> list[Row]:
    """Lock all unfinished runs below one that is locked, in order of id.

    The tree is read again once its rows are locked, until nothing new is found: a child whose
    parent is locked cannot be added any more.
    """
    locked: dict[str, Row] = {}
    while True:
        found = await connection.fetch(SQL["runs_below"], [key, *locked])
        fresh = sorted(row["run_id"].hex for row in found if row["run_id"].hex not in locked)
        if not fresh:
            return list(locked.values())
        for row in await connection.fetch(SQL["lock_runs"], fresh, clock):
            locked[row["run_id"].hex] = row


async def take_away(
    connection: Connection, run_id: str, reason: str, clock: datetime | None
) -> bool:
    """Take a held run from its holder; False when nobody holds it."""
    row = await _lock(connection, run_id, clock)
    if row is None or row["lease_owner"] is None:
        return False
    before, key = hot_of(row), hex_of(run_id)
    moved = [(key, rules.lose(run_id, before, row["clock"], closing=True))]
    await save_moves(connection, moved)
    event = rules.lost_event(before, reason)
    await append_events(connection, [(key, moved[0][1], event, before.step_index)])
    await end_attempts(connection, moved, AttemptEnd.LEASE_LOST)
    await wake_or_close(connection, moved, row["now"], frozenset({key}))
    return True


async def record_late(connection: Connection, late: LateResult, clock: datetime | None) -> LateKept:
    """Append a `late` event unless it is there; raise NotFound without the run."""
    row = await _lock(connection, late.run_id, clock)
    if row is None:
        raise NotFound("no such run")
    call = hex_of(late.tool_call_id)
    given = keeping.late_digest(late)
    rows = await connection.fetch(SQL["find_late"], call, late.execution)
    what = keeping.what_of_late([digest_in(found["digest"]) for found in rows], given)
    if what is not LateKept.RECORDED:
        return what
    key, now = hex_of(late.run_id), row["clock"]
    hot = rules.note_late(hot_of(row), now)
    await save_moves(connection, [(key, hot)])
    await append_events(connection, [(key, hot, rules.late_event(late), late.step_index)])
    blobs = {blob.digest: blob for blob in late.blobs}
    if blobs:
        kept = [
            (key, digest_out(blob.digest), blob.media_type.encode(), blob.data)
            for _, blob in sorted(blobs.items())
        ]
        await connection.execute(SQL["keep_run_blobs"], clock, *columns(kept))
        uses = [(key, digest, True) for _, digest, _, _ in kept]
        await connection.execute(SQL["use_run_blobs"], *columns(uses))
    written = (late.execution, late.attempt, late.epoch, hot.last_seq, late.status)
    told = (text_out(late.external_ref), digest_out(given))
    await connection.execute(SQL["insert_late"], call, key, hot.updated_at, *written, *told)
    return what


async def _expired(
    connection: Connection, limit: int, clock: datetime | None
) -> list[tuple[Row, RunHot]]:
    """Lock up to so many rows whose leases have expired and that can be read."""
    found: list[tuple[Row, RunHot]] = []
    place: tuple[datetime, str] = (datetime.min.replace(tzinfo=UTC), "0" * 32)
    for _ in range(rules.EXPIRED_PAGES_MAX):
        rows = await connection.fetch(SQL["expired_leases"], clock, limit - len(found), *place)
        read = [(row, _known(row)) for row in rows]
        found += [(row, hot) for row, hot in read if hot is not None]
        if len(found) >= limit or not rows:
            break
        place = rows[-1]["lease_expires_at"], rows[-1]["run_id"].hex
    return found


async def requeue_expired(
    connection: Connection, limit: int, clock: datetime | None
) -> list[Requeued]:
    """Take expired leases away, the longest expired first. Rows that cannot be read stay."""
    found = await _expired(connection, limit, clock)
    if not found:
        return []
    now: datetime = found[0][0]["now"]
    answers: list[Requeued] = []
    moved: list[tuple[str, RunHot]] = []
    lost: list[tuple[str, RunHot]] = []
    for row, before in found:
        lost.append((row["run_id"].hex, before))
        exhausted = rules.is_exhausted(before, row["max_attempts"])
        cancelled = before.cancel_epoch > 0
        run_id = id_in(RUN, row["run_id"])
        hot = rules.lose(run_id, before, now, closing=exhausted or cancelled)
        moved.append((row["run_id"].hex, hot))
        answers.append(Requeued(run_id=run_id, exhausted=exhausted, cancel_requested=cancelled))
    await save_moves(connection, moved)
    await append_events(
        connection,
        [
            (key, hot, rules.lost_event(before), hot.step_index)
            for (key, hot), (_, before) in zip(moved, lost, strict=True)
        ],
    )
    await end_attempts(connection, moved, AttemptEnd.LEASE_LOST)
    closing = frozenset(
        hex_of(one.run_id) for one in answers if one.exhausted or one.cancel_requested
    )
    await wake_or_close(connection, moved, now, closing)
    return answers


async def release(
    connection: Connection, worker_id: str, leases: Sequence[LeaseKey], clock: datetime | None
) -> int:
    """Hand back the runs that the worker still holds; return how many.

    A row that is busy or cannot be read is left: its lease expires.
    """
    tokens = {hex_of(lease.run_id): lease.token for lease in leases}
    rows = await connection.fetch(SQL["lock_free_runs"], sorted(tokens), clock)
    moved: list[tuple[str, RunHot]] = []
    for row in rows:
        key, hot = row["run_id"].hex, _known(row)
        if hot is not None and rules.holds(hot, worker_id, tokens[key]):
            moved.append((key, rules.give_back(hot, row["now"])))
    if not moved:
        return 0
    await save_moves(connection, moved)
    await end_attempts(connection, moved, AttemptEnd.DRAINED)
    closing = frozenset(key for key, hot in moved if hot.cancel_epoch > 0)
    await wake_or_close(connection, moved, rows[0]["now"], closing)
    return len(moved)


async def quarantine(
    connection: Connection,
    run_id: str,
    token: int | None,
    reason: str,
    step_index: int | None,
    seq: int | None,
    clock: datetime | None,
) -> bool:
    """Put a run aside: a held one by its token, one that nobody holds without."""
    row = await _lock(connection, run_id, clock)
    if row is None:
        return False
    before, key = hot_of(row), hex_of(run_id)
    if not rules.may_put_aside(before, token, seq):
        return False
    hot = rules.put_aside(before, row["clock"])
    await _put_aside(connection, key, hot, reason, step_index)
    if token is not None:
        await end_attempts(connection, [(key, hot)], AttemptEnd.ERROR)
    return True


async def leave_aside(connection: Connection, row: Row, reason: str) -> None:
    """Put a locked run aside that cannot be claimed; one whose hot row is damaged stays as it is.

    The caller takes its entry out of `ready`.
    """
    log.error("%s is put aside: %s", id_in(RUN, row["run_id"]), reason)
    with suppress(Unreadable):
        hot = rules.put_aside(hot_of(row), row["now"])
        await _put_aside(connection, row["run_id"].hex, hot, reason, None)


async def _put_aside(
    connection: Connection, key: str, hot: RunHot, reason: str, step_index: int | None
) -> None:
    step_index = hot.step_index if step_index is None else step_index
    await save_moves(connection, [(key, hot)])
    await append_events(connection, [(key, hot, rules.repair_event(reason), step_index)])
    await connection.execute(SQL["delete_ready"], [key])
    await delete_timers(connection, [(key, key, TimerKind.CLOSE)])
