"""What is no longer kept: the history of ended runs, and content that nothing uses (R-6.8)."""

import logging
from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from perdure.protocol.errors import Unreadable
from perdure.protocol.ids import RUN, hex_of
from perdure.store import keeping
from perdure.store.commits import SweptContent
from perdure.store.postgres.driver import Connection, Row
from perdure.store.postgres.rows import hot_of
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import id_in
from perdure.store.requests import RetentionRule, Swept

log = logging.getLogger(__name__)

_BEFORE_ALL = "0" * 32


async def expire_history(
    connection: Connection,
    keep: Sequence[RetentionRule],
    after: str | None,
    limit: int,
    clock: datetime | None,
) -> Swept:
    """Drop what is due of the next runs. Busy rows and damaged ones are left."""
    start = _BEFORE_ALL if after is None else hex_of(after)
    older_than_s = keeping.shortest_keep_s(keep)
    if older_than_s is None:
        return Swept(runs=0, after=None)
    page = await connection.fetch(SQL["page_of_runs"], start, limit, clock, older_than_s)
    due = [row for row in page if _is_due(row, keep)]
    last = id_in(RUN, page[-1]["run_id"]) if len(page) == limit else None
    if not due:
        return Swept(runs=0, after=last)
    sizes = [row["terminal_seq"] - row["retained_from_seq"] for row in due]
    count = keeping.histories_at_once(sizes)
    if count < len(due):
        last = id_in(RUN, due[count - 1]["run_id"])
    dropped = await drop_unshared(connection, [row["run_id"] for row in due[:count]], clock)
    return Swept(runs=len(dropped), after=last)


async def drop_unshared(
    connection: Connection, due: list[UUID], clock: datetime | None
) -> Sequence[Row]:
    """Drop the history of those ended runs that no other run shares it with."""
    locked = await connection.fetch(SQL["lock_free_runs"], sorted(due), clock)
    due = [row["run_id"] for row in locked]
    shared = {row["run_id"] for row in await connection.fetch(SQL["find_sharer"], due)}
    free = [run for run in due if run not in shared]
    return await connection.fetch(SQL["drop_history"], free)


def _is_due(row: Row, keep: Sequence[RetentionRule]) -> bool:
    """Tell whether a run's history is to go; never that of a run that cannot be read."""
    try:
        return keeping.history_is_due(hot_of(row), row["tenant_id"], keep, row["now"])
    except Unreadable as error:
        log.error("the history of run_%s stays: %s", row["run_id"].hex, error)  # noqa: TRY400  # expected: no trace
        return False


async def expire_blobs(
    connection: Connection,
    older_than_s: float,
    after: str | None,
    limit: int,
    clock: datetime | None,
) -> SweptContent:
    """Delete, of the next content by its key, what no run uses."""
    digest, _, tenant_id = (after or ":").partition(":")
    (row,) = await connection.fetch(
        SQL["delete_blobs"], clock, older_than_s, tenant_id, bytes.fromhex(digest), limit
    )
    place = None
    if row["seen"] == limit:
        place = f"{row['digest'].hex()}:{row['tenant_id']}"
    return SweptContent(deleted=row["deleted"], after=place)
