"""What fields that outlive their runs hold, in SQLite."""

from perdure.protocol.base import from_micros, to_micros
from perdure.protocol.codec import decode, encode
from perdure.protocol.records import StateValueRow, ThreadBase
from perdure.store.commits import Commit
from perdure.store.lasting import adopted_values, has_moved, in_lock_order
from perdure.store.sqlite.connection import read_row
from perdure.store.sqlite.rows import Row, pack_id
from perdure.store.sqlite.transaction import Transaction

_ALL = 1_000_000


def have_moved(tx: Transaction, run: bytes, commit: Commit) -> bool:
    """Tell whether a row is not at the version that the commit expects."""
    for new in commit.state_values:
        row = tx.one("state_value_version", new.scope, new.scope_id, new.name, run)
        if has_moved(new, None if row is None else row[0]):
            return True
    return False


def keep(tx: Transaction, run: bytes, commit: Commit, at: int) -> None:
    """Write the values of a commit that was let through; its messages are there."""
    for new in in_lock_order(commit.state_values):
        field = (new.scope, new.scope_id, new.name, new.version)
        values = (run, *field, new.seq, at, new.rule, encode(new.value))
        if new.expected == 0:
            tx.run("insert_state_value", *values)
        else:
            tx.run("update_state_value", *values, new.expected)


def adopt(tx: Transaction, base: ThreadBase, of_branch: list[ThreadBase], tenant_id: str) -> None:
    """Let a thread's fields hold what those of the branch hold that it adopts."""
    mine, theirs = (
        _listed(tx, tenant_id, thread) for thread in (base.thread_id, base.base_thread_id)
    )
    for row in adopted_values(base, of_branch, mine, theirs):
        tx.run(
            "put_state_value",
            row.tenant_id,
            row.scope,
            row.scope_id,
            row.name,
            row.version,
            row.position,
            pack_id(row.run_id),
            row.seq,
            to_micros(row.updated_at),
            row.rule,
            None if row.empty else encode(row.value),
        )


def _listed(tx: Transaction, tenant_id: str, thread_id: str) -> list[StateValueRow]:
    rows = tx.all("list_state_values", tenant_id, "thread", thread_id, "", _ALL)
    return [read_row(read_state_value, row) for row in rows]


def read_state_value(row: Row) -> StateValueRow:
    """Return a field's row."""
    return StateValueRow(
        tenant_id=row[0],
        scope=row[1],
        scope_id=row[2],
        name=row[3],
        version=row[4],
        position=row[5],
        run_id=f"run_{row[6].hex()}",
        seq=row[7],
        updated_at=from_micros(row[8]),
        rule=row[9],
        value=None if row[10] is None else decode(row[10]),
        empty=row[10] is None,
    )
