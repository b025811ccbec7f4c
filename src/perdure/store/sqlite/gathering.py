"""The rows of the commits that passed their fences, gathered by table and written together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.states import StepStatus
from perdure.store.commits import NewCheckpoint
from perdure.store.sqlite.prepared import Prepared
from perdure.store.sqlite.products import write_products
from perdure.store.sqlite.rows import pack_digest, pack_id
from perdure.store.sqlite.transaction import Transaction
from perdure.store.sqlite.wide import Values, write_rows

_STEP_ENDS: Final = frozenset({StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED})


class NoSuchRow(ValueError):
    """A commit changes a row that is not there, or not as it must be; it is refused."""


def _no_rows() -> list[Values]:
    return []


@dataclass(slots=True)
class Rows:
    """Rows of several commits, by table."""

    events: list[Values] = field(default_factory=_no_rows)
    steps: list[Values] = field(default_factory=_no_rows)
    calls: list[Values] = field(default_factory=_no_rows)
    updates: list[Values] = field(default_factory=_no_rows)
    firsts: list[Values] = field(default_factory=_no_rows)
    executions: list[Values] = field(default_factory=_no_rows)
    ends: list[Values] = field(default_factory=_no_rows)
    checkpoints: list[Values] = field(default_factory=_no_rows)

    def flush(self, tx: Transaction) -> None:
        """Write everything; raise NoSuchRow when a change found nothing to change."""
        _write_all(tx, "insert_event", self.events)
        _write_all(tx, "upsert_step", self.steps)
        _write_all(tx, "insert_tool_call", self.calls)
        _change_all(tx, "update_tool_call", self.updates, keys=1)
        _write_all(tx, "insert_first_execution", self.firsts)
        _write_all(tx, "insert_execution", self.executions)
        _change_all(tx, "end_execution", self.ends, keys=3)
        _write_all(tx, "insert_checkpoint", self.checkpoints)

    def add(self, tx: Transaction, prepared: Prepared, at: int, attempt: int) -> None:
        """Gather the rows of a commit that passed its fence; write the rare ones at once."""
        commit, run = prepared.commit, prepared.run
        epoch, seq = commit.guard.epoch, commit.guard.expected_seq
        for number, step_index, data in prepared.events:
            seq += 1
            self.events.append(
                (run, seq, number, step_index, at, attempt, epoch, SCHEMA_VERSION, data)
            )
        for step in commit.steps:
            ended = at if step.status in _STEP_ENDS else None
            self.steps.append(
                (run, step.index, str(step.status), step.first_seq, step.last_seq, at, ended)
            )
        self.calls += prepared.calls
        self.updates += prepared.updates
        if commit.new_executions:
            self._add_executions(prepared, at, attempt)
        for end in commit.execution_ends:
            self.ends.append((run, pack_id(end.tool_call_id), end.number, at, str(end.outcome)))
        if commit.checkpoint is not None:
            self.checkpoints.append(_pack_checkpoint(prepared, commit.checkpoint, at, attempt))
        write_products(tx, commit, run, at)

    def _add_executions(self, prepared: Prepared, at: int, attempt: int) -> None:
        decided = {call.tool_call_id: call.args_digest for call in prepared.commit.new_calls}
        for begun in prepared.commit.new_executions:
            known = decided.get(begun.tool_call_id)
            # the same arguments as decided: they stand in the call's row
            digest = None if begun.args_digest == known else pack_digest(begun.args_digest)
            row = (prepared.run, pack_id(begun.tool_call_id), begun.number, attempt, digest, at)
            (self.executions if known is None else self.firsts).append(row)


def _write_all(tx: Transaction, name: str, rows: list[Values]) -> None:
    if rows and write_rows(tx.db, name, rows) != len(rows):
        raise NoSuchRow(f"{name}: no such row")
    rows.clear()


def _change_all(tx: Transaction, name: str, rows: list[Values], *, keys: int) -> None:
    """Write changes of rows named by their first `keys` values.

    A statement changes each row once: changes of one row go one after the other.
    """
    if len(_distinct(rows, keys)) == len(rows):
        _write_all(tx, name, rows)
        return
    for row in rows:
        _write_all(tx, name, [row])
    rows.clear()


def _distinct(rows: Sequence[Values], keys: int) -> set[Hashable]:
    return {tuple(row[:keys]) for row in rows}


def _pack_checkpoint(
    prepared: Prepared, new: NewCheckpoint, at: int, attempt: int
) -> tuple[Any, ...]:
    return (
        prepared.run,
        new.seq,
        new.parent_seq,
        new.step_index,
        attempt,
        prepared.commit.guard.epoch,
        SCHEMA_VERSION,
        pack_digest(new.digest),
        at,
        prepared.agent_state,
    )
