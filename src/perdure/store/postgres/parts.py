"""The rare parts of accepted commits: questions, artifacts, blobs, waking, the thread's queue.

All of them run in the transaction that moved the runs, set-oriented, and only where there are
rows. A part that names a row that is not there, or not pending, is refused with the whole commit.
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from uuid import UUID

from pydantic import ValidationError

from perdure.protocol.errors import Unreadable
from perdure.protocol.ids import hex_of
from perdure.protocol.plain import value
from perdure.protocol.runs import RunOptions
from perdure.protocol.states import TERMINAL, ParkedOn, RunState
from perdure.store.beginning import takes_no_turn
from perdure.store.commits import Commit
from perdure.store.keeping import lasting_digests
from perdure.store.postgres.admission import insert_children
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.errors import DataRefused
from perdure.store.postgres.moving import columns, delete_timers, insert_timers, save_moves
from perdure.store.postgres.rows import hot_of
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import digest_out, digest_out_or_none, id_out, text_out
from perdure.store.rules import next_in_thread

log = logging.getLogger(__name__)


@value
class Accepted:
    """A commit whose run has moved. `queue_of`: the thread in which it was first of a queue."""

    commit: Commit
    at: datetime
    is_held: bool
    queue_of: UUID | None


async def write_parts(
    connection: Connection, accepted: Sequence[Accepted], clock: datetime | None
) -> None:
    """Write what `commit_batch` left; raise DataRefused for what cannot be."""
    await _keep_blobs(connection, accepted, clock)
    await _open_interrupts(connection, accepted, clock)
    await _close_interrupts(connection, accepted)
    await _spend_approvals(connection, accepted)
    await _insert_artifacts(connection, accepted)
    await _discard_artifacts(connection, accepted)
    await _write_relations(connection, accepted, clock)
    await _schedule(connection, accepted, clock)
    for one in accepted:
        if one.queue_of is not None:
            await _hand_over(connection, one.queue_of, clock)


async def _keep_blobs(
    connection: Connection, accepted: Sequence[Accepted], clock: datetime | None
) -> None:
    rows = [
        (hex_of(one.commit.run_id), digest_out(blob.digest), blob.media_type.encode(), blob.data)
        for one in accepted
        for blob in one.commit.blobs
    ]
    if rows:
        await connection.execute(SQL["keep_run_blobs"], clock, *columns(rows))
        uses = [
            (hex_of(one.commit.run_id), digest_out(blob.digest), blob.digest in lasting)
            for one in accepted
            for lasting in (lasting_digests(one.commit),)
            for blob in one.commit.blobs
        ]
        await connection.execute(SQL["use_run_blobs"], *columns(uses))


async def _open_interrupts(
    connection: Connection, accepted: Iterable[Accepted], clock: datetime | None
) -> None:
    rows = [
        (
            hex_of(new.interrupt_id),
            hex_of(one.commit.run_id),
            id_out(new.tool_call_id),
            one.at,
            None if new.expires_in_s is None else max(0.0, new.expires_in_s),
            new.opened_seq,
            new.kind,
            new.on_expiry,
            digest_out_or_none(new.args_digest),
            digest_out_or_none(new.definition_digest),
            text_out(new.key),
        )
        for one in accepted
        for new in one.commit.new_interrupts
    ]
    if not rows:
        return
    opened = await connection.fetch(SQL["insert_interrupt"], clock, *columns(rows))
    expiring = [row for row in opened if row["expires_at"] is not None]
    await insert_timers(
        connection,
        [(row["run_id"], row["interrupt_id"], row["expires_at"], "expiry") for row in expiring],
    )


async def _close_interrupts(connection: Connection, accepted: Iterable[Accepted]) -> None:
    rows = [
        (
            hex_of(close.interrupt_id),
            hex_of(one.commit.run_id),
            one.at,
            close.closed_seq,
            close.status,
            close.answer,
            digest_out_or_none(close.answer_digest),
            text_out(close.answered_by),
            digest_out_or_none(close.effective_digest),
        )
        for one in accepted
        for close in one.commit.interrupt_closes
    ]
    if not rows:
        return
    closed = await connection.fetch(SQL["close_interrupt"], *columns(rows))
    if len(closed) != len(rows):
        raise DataRefused("the interrupt is not pending")
    gone = [(row[1], row[0], kind) for row in rows for kind in ("expiry", "notice")]
    await delete_timers(connection, gone)


async def _spend_approvals(connection: Connection, accepted: Iterable[Accepted]) -> None:
    rows = [
        (hex_of(new.approval_id), new.number)
        for one in accepted
        for new in one.commit.new_executions
        if new.approval_id is not None
    ]
    if rows:
        spent = await connection.fetch(SQL["spend_approval"], *columns(rows))
        if len(spent) != len(rows):
            raise DataRefused("no such approval, or it is spent")


async def _insert_artifacts(connection: Connection, accepted: Iterable[Accepted]) -> None:
    rows = [
        (
            hex_of(new.artifact_id),
            hex_of(one.commit.run_id),
            id_out(new.tool_call_id),
            one.at,
            new.size,
            new.version,
            new.step_index,
            new.seq,
            new.status,
            digest_out(new.digest),
            new.name.encode(),
            new.media_type.encode(),
        )
        for one in accepted
        for new in one.commit.artifacts
    ]
    if rows:
        await connection.execute(SQL["insert_artifact"], *columns(rows))


async def _discard_artifacts(connection: Connection, accepted: Iterable[Accepted]) -> None:
    given = [one.commit for one in accepted if one.commit.discards is not None]
    if not given:
        return
    await connection.execute(SQL["discard_artifacts"], [hex_of(commit.run_id) for commit in given])
    left = [
        (hex_of(commit.run_id), digest_out(digest))
        for commit in given
        for digest in commit.discards or ()
    ]
    if left:
        await connection.execute(SQL["leave_blob"], *columns(left))


async def _write_relations(
    connection: Connection, accepted: Sequence[Accepted], clock: datetime | None
) -> None:
    """Write what ties runs to their parents, their children and their agents."""
    children = [new for one in accepted for new in one.commit.new_children]
    if children:
        await insert_children(connection, children, clock)
    told = [
        (hex_of(one.commit.run_id), hex_of(child), "child")
        for one in accepted
        for child in one.commit.reported
    ]
    told += [
        (hex_of(one.commit.run_id), hex_of(call), "callback")
        for one in accepted
        for call in one.commit.callbacks_over
    ]
    notices = [
        (hex_of(one.commit.run_id), hex_of(due.interrupt_id), due.due_in_s, "notice")
        for one in accepted
        for due in one.commit.notices
    ]
    told += [(run_id, ref, kind) for run_id, ref, in_s, kind in notices if in_s is None]
    waited = [
        (
            hex_of(one.commit.run_id),
            hex_of(new.tool_call_id),
            max(0.0, new.expires_in_s),
            "callback",
        )
        for one in accepted
        for new in one.commit.new_callbacks
    ]
    waited += [(run_id, ref, in_s, kind) for run_id, ref, in_s, kind in notices if in_s is not None]
    if waited:
        await connection.execute(SQL["set_timers"], clock, *columns(waited))
    await delete_timers(connection, told)
    reports = [
        (hex_of(one.commit.reports_to), hex_of(one.commit.run_id))
        for one in accepted
        if one.commit.reports_to is not None
    ]
    if reports:
        await connection.execute(SQL["leave_reports"], clock, *columns(reports))
    handed = [
        (hex_of(one.commit.run_id), *one.commit.handed_to)
        for one in accepted
        if one.commit.handed_to is not None
    ]
    if handed:
        await connection.execute(SQL["hand_over_runs"], *columns(handed))


async def _schedule(
    connection: Connection, accepted: Sequence[Accepted], clock: datetime | None
) -> None:
    """Set what wakes each run: its entry in `ready` and its timers."""
    woken = [
        (hex_of(one.commit.run_id), max(0.0, one.commit.ready_in_s), one.commit.hot.faults > 0)
        for one in accepted
        if one.commit.ready_in_s is not None and not one.is_held and not _ended(one)
    ]
    if woken:
        await connection.execute(SQL["set_ready"], clock, *columns(woken))
    waking = {run_id for run_id, _, _ in woken}
    asleep = [
        run_id
        for one in accepted
        if one.commit.guard.token is None and (run_id := hex_of(one.commit.run_id)) not in waking
    ]
    if asleep:
        await connection.execute(SQL["delete_ready"], asleep)
    asking = [hex_of(one.commit.run_id) for one in accepted if _moves_deadline(one)]
    if asking:
        await connection.execute(SQL["sync_deadlines"], asking)
    closing = [
        (hex_of(one.commit.run_id), max(0.0, one.commit.close_in_s))
        for one in accepted
        if one.commit.close_in_s is not None and not _ended(one)
    ]
    if closing:
        await connection.execute(SQL["set_close_timers"], clock, *columns(closing))


def _ended(one: Accepted) -> bool:
    return one.commit.hot.state in TERMINAL


def _moves_deadline(one: Accepted) -> bool:
    """Tell whether the total time stops or goes on: it stands while a person is waited for."""
    waits = one.commit.hot.state is RunState.WAITING_HUMAN
    waited = one.commit.guard.from_state is RunState.WAITING_HUMAN
    return waits is not waited and not _ended(one)


def _takes_no_turn(options: bytes) -> bool:
    """Tell whether a run is not in its thread's queue. One that cannot be read has its turn."""
    try:
        return takes_no_turn(RunOptions.model_validate_json(options))
    except ValidationError:
        return False


async def _hand_over(connection: Connection, thread: UUID, clock: datetime | None) -> None:
    """Make the thread's oldest unfinished run the active one, and claimable if it queued.

    A run that cannot be read has its turn all the same, and stands. The thread is locked; the next run's row is locked before it is judged, and judged again when
    another writer ended it meanwhile.
    """
    place = 0
    while True:
        rows = await connection.fetch(SQL["next_thread_run"], thread, place)
        if rows and _takes_no_turn(rows[0]["options"]):
            place = rows[0]["input_position"]
            continue
        if not rows:
            await connection.execute(SQL["activate_thread"], thread, None)
            return
        following: UUID = rows[0]["run_id"]
        (row,) = await connection.fetch(SQL["lock_run"], following, clock)
        if row["finished_at"] is None:
            break
    await connection.execute(SQL["activate_thread"], thread, following)
    if row["parked_on"] == ParkedOn.THREAD:
        try:
            hot = hot_of(row)
        except Unreadable as error:
            log.error("run_%s cannot begin: %s", following.hex, error)  # noqa: TRY400  # expected: no trace
            return
        moved = next_in_thread(hot, row["now"])
        await save_moves(connection, [(following.hex, moved)])
        at = moved.wake_at or row["now"]
        await connection.execute(SQL["insert_ready"], [following], [at], [hot.faults > 0])
