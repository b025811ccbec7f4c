"""The writes that all moves of a run share: its row, its events, its attempt, what wakes it.

Everything is set-oriented and runs inside the caller's transaction, on rows that it has locked.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.log import TYPE_NUMBER, EventData, NewEvent
from perdure.protocol.runs import RunHot
from perdure.protocol.states import AttemptEnd
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import data_out, id_out
from perdure.store.rules import is_suspected

Moved = tuple[str, RunHot]
"""A run's hex digits and its row as it becomes."""


def columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    """Return rows as columns, as the statements take them."""
    return [list(column) for column in zip(*rows, strict=True)]


async def save_moves(connection: Connection, moved: Sequence[Moved]) -> None:
    """Write the columns that moves may change (a commit's own columns stay as they are)."""
    rows = [
        (
            run_id,
            hot.last_seq,
            hot.faults,
            hot.lease_owner,
            hot.lease_token,
            hot.lease_expires_at,
            hot.cancel_epoch,
            hot.cancel_action,
            int(hot.cancel_options),
            hot.parked_on,
            hot.wake_at,
            hot.updated_at,
        )
        for run_id, hot in moved
    ]
    if rows:
        await connection.execute(SQL["move_runs"], *columns(rows))


async def append_events(
    connection: Connection, events: Sequence[tuple[str, RunHot, EventData, int]]
) -> None:
    """Append the last event of each run: (run, row as moved, event, step index)."""
    rows = [
        (
            run_id,
            hot.updated_at,
            hot.last_seq,
            step_index,
            hot.attempt,
            hot.cancel_epoch,
            TYPE_NUMBER[data.type],
            data_out(NewEvent(data=data, step_index=step_index).encoded()),
        )
        for run_id, hot, data, step_index in events
    ]
    if rows:
        await connection.execute(SQL["insert_events"], *columns(rows), SCHEMA_VERSION)


async def end_attempts(connection: Connection, moved: Sequence[Moved], reason: AttemptEnd) -> None:
    """End the running attempts, with the last commit their holders wrote."""
    rows = [
        (run_id, hot.attempt, hot.updated_at, id_out(hot.last_commit_id)) for run_id, hot in moved
    ]
    if rows:
        await connection.execute(SQL["end_attempts"], *columns(rows), reason)


async def wake_or_close(
    connection: Connection, moved: Sequence[Moved], now: datetime, closing: frozenset[str]
) -> None:
    """Make runs claimable at once, or at their `wake_at`; those in `closing` leave `ready` and get
    a closing timer.
    """
    awake = [
        (run_id, hot.wake_at or now, is_suspected(hot))
        for run_id, hot in moved
        if run_id not in closing
    ]
    if awake:
        await connection.execute(SQL["insert_ready"], *columns(awake))
    ending = [run_id for run_id, _ in moved if run_id in closing]
    if ending:
        await connection.execute(SQL["delete_ready"], ending)
        await insert_timers(connection, [(run_id, run_id, now, "close") for run_id in ending])


async def insert_timers(
    connection: Connection, rows: Sequence[tuple[str | UUID, str | UUID, datetime, str]]
) -> None:
    """Set timers or move them: (run, ref, time, kind)."""
    if rows:
        await connection.execute(SQL["insert_timers"], *columns(rows))


async def delete_timers(connection: Connection, rows: Sequence[tuple[str, str, str]]) -> None:
    """Remove timers that may be there: (run, ref, kind)."""
    if rows:
        await connection.execute(SQL["delete_timers"], *columns(rows))
