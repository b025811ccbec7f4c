"""What fields that outlive their runs hold, in the memory store."""

from dataclasses import replace
from datetime import datetime
from typing import Literal

from perdure.protocol.records import StateValueRow, ThreadBase
from perdure.protocol.runs import RunFacts
from perdure.store.commits import Commit
from perdure.store.lasting import has_moved, in_lock_order
from perdure.store.memory.tables import Tables


def have_moved(tables: Tables, commit: Commit, tenant_id: str) -> bool:
    """Tell whether a row is not at the version that the commit expects."""
    for new in commit.state_values:
        row = tables.state_values.get((tenant_id, new.scope, new.scope_id, new.name))
        if has_moved(new, None if row is None else row.version):
            return True
    return False


def keep(tables: Tables, facts: RunFacts, commit: Commit, at: datetime) -> None:
    """Write the values of a commit that was let through."""
    for new in in_lock_order(commit.state_values):
        place = tables.threads[facts.thread_id].last_position if new.scope == "thread" else 0
        tables.state_values[facts.tenant_id, new.scope, new.scope_id, new.name] = StateValueRow(
            tenant_id=facts.tenant_id,
            scope=new.scope,
            scope_id=new.scope_id,
            name=new.name,
            rule=new.rule,
            version=new.version,
            value=new.value,
            position=place,
            run_id=facts.run_id,
            seq=new.seq,
            updated_at=at,
        )


def listed(
    tables: Tables,
    tenant_id: str,
    scope: Literal["thread", "agent"],
    scope_id: str,
    after: str | None = None,
) -> list[StateValueRow]:
    """Return the fields of a thread or an agent by name."""
    rows = [
        row
        for row in tables.state_values.values()
        if (row.tenant_id, row.scope, row.scope_id) == (tenant_id, scope, scope_id)
        and (after is None or row.name > after)
    ]
    return sorted(rows, key=lambda row: row.name)


def copy(tables: Tables, base: ThreadBase) -> None:
    """Let the fields of a fork hold what was written last up to its place."""
    tenant_id = tables.threads[base.base_thread_id].tenant_id
    for row in listed(tables, tenant_id, "thread", base.base_thread_id):
        if row.position <= base.base_position:
            put(tables, replace(row, scope_id=base.thread_id))


def drop(tables: Tables, tenant_id: str, thread_id: str) -> None:
    """Drop what a deleted thread's fields hold."""
    for row in listed(tables, tenant_id, "thread", thread_id):
        del tables.state_values[tenant_id, row.scope, row.scope_id, row.name]


def put(tables: Tables, row: StateValueRow) -> None:
    """Write a row as it is."""
    tables.state_values[row.tenant_id, row.scope, row.scope_id, row.name] = row
