"""What fields that outlive their runs hold, in PostgreSQL.

A row is written by the version that it must have: a commit that waited for another one's finds
that it has moved.
"""

from collections.abc import Sequence
from datetime import datetime

from perdure.protocol.codec import decode, encode
from perdure.protocol.ids import RUN, hex_of
from perdure.protocol.records import StateValueRow, ThreadBase
from perdure.store.commits import Commit, NewStateValue
from perdure.store.lasting import adopted_values, in_lock_order
from perdure.store.postgres.driver import Connection, Row
from perdure.store.postgres.rows import readable
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import id_in, time_in

_ALL = 1_000_000


async def have_moved(connection: Connection, commit: Commit) -> bool:
    """Tell whether a row is not at the version that the commit expects; nothing is locked."""
    values = commit.state_values
    columns = (
        [new.scope for new in values],
        [new.scope_id for new in values],
        [new.name for new in values],
        [new.expected for new in values],
    )
    return bool(await connection.fetch(SQL["moved_state_values"], hex_of(commit.run_id), *columns))


async def keep(connection: Connection, commit: Commit, at: datetime) -> bool:
    """Write the values of a commit that was accepted; False: a row has moved, so roll back.

    First the rows that are new, then the others, each in one order for all writers.
    """
    values = in_lock_order(commit.state_values)
    begun = [new for new in values if new.expected == 0]
    moved = [new for new in values if new.expected > 0]
    run = hex_of(commit.run_id)
    if begun:
        rows = await connection.fetch(SQL["insert_state_values"], run, at, *_columns(begun))
        if len(rows) < len(begun):
            return False
    if not moved:
        return True
    expected = [new.expected for new in moved]
    rows = await connection.fetch(SQL["update_state_values"], run, at, *_columns(moved), expected)
    return len(rows) == len(moved)


def _columns(values: Sequence[NewStateValue]) -> tuple[Sequence[object], ...]:
    return (
        [new.scope for new in values],
        [new.scope_id for new in values],
        [new.name for new in values],
        [new.version for new in values],
        [new.seq for new in values],
        [new.rule for new in values],
        [encode(new.value) for new in values],
    )


async def adopt(
    connection: Connection, base: ThreadBase, of_branch: Sequence[ThreadBase], tenant_id: str
) -> None:
    """Let a thread's fields hold what those of the branch hold that it adopts."""
    mine = await _listed(connection, tenant_id, base.thread_id)
    theirs = await _listed(connection, tenant_id, base.base_thread_id)
    for row in adopted_values(base, of_branch, mine, theirs):
        await connection.execute(
            SQL["put_state_value"],
            row.tenant_id,
            row.scope,
            row.scope_id,
            row.name,
            row.version,
            row.position,
            hex_of(row.run_id),
            row.seq,
            row.updated_at,
            row.rule,
            None if row.empty else encode(row.value),
        )


async def _listed(connection: Connection, tenant_id: str, thread_id: str) -> list[StateValueRow]:
    where = (tenant_id, "thread", thread_id, "", _ALL)
    return [state_value_of(row) for row in await connection.fetch(SQL["list_state_values"], *where)]


@readable
def state_value_of(row: Row) -> StateValueRow:
    """Return a field's row."""
    value = row["value"]
    return StateValueRow(
        tenant_id=row["tenant_id"],
        scope=row["scope"],
        scope_id=row["scope_id"],
        name=row["name"],
        version=row["version"],
        position=row["position"],
        run_id=id_in(RUN, row["run_id"]),
        seq=row["seq"],
        updated_at=time_in(row["updated_at"]),
        rule=row["rule"],
        value=None if value is None else decode(value),
        empty=value is None,
    )
