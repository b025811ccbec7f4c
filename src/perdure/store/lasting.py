"""The rules of state that outlives its run: whose rows move, in which order, and what is adopted."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from perdure.protocol.records import StateValueRow, ThreadBase
from perdure.store.commits import NewStateValue


def in_lock_order(values: Iterable[NewStateValue]) -> list[NewStateValue]:
    """Return values in the order in which all writers lock their rows."""
    return sorted(values, key=lambda new: (new.scope, new.scope_id, new.name))


def has_moved(new: NewStateValue, version: int | None) -> bool:
    """Tell whether a row is not at the version that a commit was drafted upon (None: no row)."""
    return (version or 0) != new.expected


def adopted_values(
    base: ThreadBase,
    of_branch: Sequence[ThreadBase],
    mine: Sequence[StateValueRow],
    theirs: Sequence[StateValueRow],
) -> list[StateValueRow]:
    """Return the rows that a thread's fields get when it adopts a branch.

    They hold what the branch's hold; those that the branch has none of and that were written since
    the fork are emptied. Versions go on, so that no run takes one value for another.
    """
    left_at = max(
        (one.base_position for one in of_branch if one.base_thread_id == base.thread_id), default=0
    )
    known = {row.name: row.version for row in mine}
    taken = [
        replace(
            row,
            scope_id=base.thread_id,
            version=max(row.version, known.get(row.name, 0)) + 1,
            position=base.from_position,
        )
        for row in theirs
    ]
    names = {row.name for row in theirs}
    return taken + [
        replace(row, version=row.version + 1, value=None, empty=True, position=base.from_position)
        for row in mine
        if row.name not in names and row.position > left_at
    ]
