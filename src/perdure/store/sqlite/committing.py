"""Writes a batch of commits inside one transaction: the fences first, then the rows by table.

A holder's step that keeps its lease passes its fence in one conditional UPDATE. All other commits
(starts, ends, people's answers, stale writers) read the row, ask the shared rules and write what
these return. The rows of all commits that passed are written together, one table after the other.

Rows that the database refuses raise: the writer then rolls the whole transaction back and repeats
it commit by commit, so that the culprit alone is refused (decision 7).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from perdure.protocol.base import SCHEMA_VERSION, to_micros
from perdure.protocol.codec import encode
from perdure.protocol.events import TYPE_NUMBER
from perdure.protocol.states import TERMINAL, IllegalTransition, RunState, StepStatus
from perdure.store import rules
from perdure.store.commits import (
    CallUpdate,
    Commit,
    CommitResult,
    Committed,
    LeaseLost,
    NewCheckpoint,
    TimerKind,
)
from perdure.store.rules import Kept
from perdure.store.sqlite.connection import SQL
from perdure.store.sqlite.products import write_products
from perdure.store.sqlite.rows import pack_call, pack_digest, pack_id, plain
from perdure.store.sqlite.transaction import NO_REF, Transaction

_WORKING: Final = frozenset({RunState.PLANNING, RunState.EXECUTING})
_STEP_ENDS: Final = frozenset({StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED})
ATTEMPTS_MAX: Final = 4096

Attempts = dict[tuple[bytes, int | None], int]
"""The attempt of each (run, token), which never changes; forgotten when it grows too large."""


class NoSuchRow(ValueError):
    """A commit changes a row that is not there, or not as it must be; it is refused."""


@dataclass(slots=True)
class Prepared:
    """A commit with what was encoded before it reached the writer thread."""

    commit: Commit
    run: bytes
    commit_id: bytes
    is_plain: bool
    values: tuple[Any, ...]
    events: list[tuple[int, int, bytes]]
    calls: list[tuple[Any, ...]]
    updates: list[tuple[Any, ...]]
    agent_state: bytes


def prepare(commit: Commit) -> Prepared:
    """Encode a commit; raises ValueError or TypeError for what cannot be encoded."""
    run = pack_id(commit.run_id)
    return Prepared(
        commit=commit,
        run=run,
        commit_id=pack_id(commit.commit_id),
        is_plain=_is_plain(commit),
        values=_hot_values(commit),
        events=[
            (TYPE_NUMBER[event.data.type], event.step_index, event.encoded())
            for event in commit.events
        ],
        calls=[pack_call(run, call) for call in commit.new_calls],
        updates=[_pack_update(run, update) for update in commit.call_updates],
        agent_state=encode(commit.checkpoint.agent_state) if commit.checkpoint else b"",
    )


def _hot_values(commit: Commit) -> tuple[Any, ...]:
    """Return the columns of the hot row that a plain step sets, in the order of `advance_run`."""
    hot, used = commit.hot, commit.hot.counters
    return (
        hot.state.value,
        hot.step_index,
        len(commit.events),
        hot.faults,
        plain(hot.parked_on),
        plain(hot.waiting_kind),
        plain(hot.code),
        hot.open_calls,
        hot.open_interrupts,
        hot.open_children,
        used.model_calls,
        used.tool_calls,
        used.input_tokens,
        used.output_tokens,
        used.cost,
        used.waiting_ms,
        used.retries,
        hot.checkpoint_seq,
    )


def _pack_update(run: bytes, update: CallUpdate) -> tuple[Any, ...]:
    digest = update.effective_digest
    return (
        update.status.value,
        pack_digest(digest) if digest else None,
        update.external_ref,
        update.result_seq,
        pack_id(update.tool_call_id),
        run,
    )


def _is_plain(commit: Commit) -> bool:
    """Tell whether a commit is a holder's step that keeps its lease, and legal."""
    if (
        commit.guard.token is None
        or commit.attempt_end is not None
        or commit.close_in_s is not None
        or commit.guard.from_state not in _WORKING
        or commit.hot.state not in _WORKING
    ):
        return False
    try:
        rules.check_path(commit)
    except IllegalTransition:
        return False
    return True


@dataclass(slots=True)
class _Rows:
    """Rows of several commits, by table."""

    events: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    steps: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    calls: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    updates: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    firsts: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    executions: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    ends: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    checkpoints: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    def flush(self, tx: Transaction) -> None:
        """Write everything; raise NoSuchRow when a change found nothing to change."""
        _write_all(tx, "insert_event", self.events)
        _write_all(tx, "upsert_step", self.steps)
        _write_all(tx, "insert_tool_call", self.calls)
        _write_all(tx, "update_tool_call", self.updates)
        _write_all(tx, "insert_first_execution", self.firsts)
        _write_all(tx, "insert_execution", self.executions)
        _write_all(tx, "end_execution", self.ends)
        _write_all(tx, "insert_checkpoint", self.checkpoints)


def _write_all(tx: Transaction, name: str, rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    if tx.db.executemany(SQL[name], rows).rowcount != len(rows):
        raise NoSuchRow(f"{name}: no such row")
    rows.clear()


def write_commits(
    tx: Transaction, batch: Sequence[Prepared], attempts: Attempts
) -> list[CommitResult]:
    """Judge and write commits; one answer for each, in order."""
    if len(attempts) > ATTEMPTS_MAX:
        attempts.clear()
    rows, seen = _Rows(), set[bytes]()
    results: list[CommitResult] = []
    for prepared in batch:
        if prepared.run in seen:
            rows.flush(tx)
            seen.clear()
        seen.add(prepared.run)
        attempt = attempts.get((prepared.run, prepared.commit.guard.token))
        result = None
        if prepared.is_plain and attempt is not None:
            result = _advance_plain(tx, rows, prepared, attempt)
        results.append(result or _advance(tx, rows, prepared, attempts))
    rows.flush(tx)
    return results


def _advance_plain(
    tx: Transaction, rows: _Rows, prepared: Prepared, attempt: int
) -> CommitResult | None:
    """Pass the fence in one statement; None when it is closed (the rules then say why)."""
    guard, now, commit_id = prepared.commit.guard, tx.now_micros, prepared.commit_id
    written = tx.db.execute(
        SQL["advance_run"],
        (
            *prepared.values,
            now,
            commit_id,
            prepared.run,
            guard.token,
            guard.epoch,
            guard.from_state.value,
            guard.expected_seq,
            now,
            commit_id,
        ),
    ).rowcount
    if written == 0:
        return None
    _collect(tx, rows, prepared, now, attempt)
    return Committed(seq=guard.expected_seq + len(prepared.events), at=tx.now)


def _advance(tx: Transaction, rows: _Rows, prepared: Prepared, attempts: Attempts) -> CommitResult:
    """Judge by the row and write what the rules make of it."""
    commit = prepared.commit
    kept = tx.load(prepared.run)
    if kept is None:
        return LeaseLost()
    verdict = rules.judge(commit, kept.hot)
    if verdict is not None:
        return verdict
    if commit.guard.token is not None:
        attempts[prepared.run, commit.guard.token] = kept.hot.attempt
    moved = rules.advance(kept, commit, tx.now)
    tx.save(prepared.run, moved)
    _collect(tx, rows, prepared, to_micros(moved.hot.updated_at), moved.hot.attempt)
    if commit.attempt_end is not None:
        tx.end_attempt(prepared.run, moved.hot, commit.attempt_end)
    _schedule(tx, prepared, kept, moved)
    return Committed(seq=moved.hot.last_seq, at=moved.hot.updated_at)


def _schedule(tx: Transaction, prepared: Prepared, before: Kept, moved: Kept) -> None:
    """Set what wakes the run: its entry in `ready` and its timers."""
    run, commit, hot = prepared.run, prepared.commit, moved.hot
    if hot.state in TERMINAL:
        keys = tx.one("find_run_keys", run)
        if keys is not None:
            tx.end_run(run, keys[1])
        return
    tx.run("delete_ready", run)
    at = rules.ready_at(hot, commit, tx.now)
    if at is not None:
        tx.set_ready(run, to_micros(at))
    if hot.deadline_at != before.hot.deadline_at:
        if hot.deadline_at is None:
            tx.run("delete_timer", run, TimerKind.DEADLINE.value, NO_REF)
        else:
            due = to_micros(hot.deadline_at)
            tx.run("insert_timer", run, TimerKind.DEADLINE.value, NO_REF, due)
    if commit.close_in_s is not None:
        due = to_micros(rules.after(tx.now, commit.close_in_s))
        tx.run("insert_timer", run, TimerKind.CLOSE.value, NO_REF, due)


def _collect(tx: Transaction, rows: _Rows, prepared: Prepared, at: int, attempt: int) -> None:
    """Gather the rows of a commit that passed its fence; write the rare ones at once."""
    commit, run = prepared.commit, prepared.run
    epoch = commit.guard.epoch
    seq = commit.guard.expected_seq
    for number, step_index, data in prepared.events:
        seq += 1
        rows.events.append((run, seq, number, step_index, at, attempt, epoch, SCHEMA_VERSION, data))
    for step in commit.steps:
        ended = at if step.status in _STEP_ENDS else None
        rows.steps.append(
            (run, step.index, step.status.value, step.first_seq, step.last_seq, at, ended)
        )
    rows.calls += prepared.calls
    rows.updates += prepared.updates
    if commit.new_executions:
        _collect_executions(rows, prepared, at, attempt)
    for end in commit.execution_ends:
        rows.ends.append((at, end.outcome.value, run, pack_id(end.tool_call_id), end.number))
    if commit.checkpoint is not None:
        rows.checkpoints.append(_pack_checkpoint(prepared, commit.checkpoint, at, attempt))
    write_products(tx, commit, run, at)


def _collect_executions(rows: _Rows, prepared: Prepared, at: int, attempt: int) -> None:
    decided = {call.tool_call_id: call.args_digest for call in prepared.commit.new_calls}
    for begun in prepared.commit.new_executions:
        known = decided.get(begun.tool_call_id)
        # the same arguments as decided: they stand in the call's row
        digest = None if begun.args_digest == known else pack_digest(begun.args_digest)
        row = (prepared.run, pack_id(begun.tool_call_id), begun.number, attempt, digest, at)
        (rows.executions if known is None else rows.firsts).append(row)


def _pack_checkpoint(
    prepared: Prepared, new: NewCheckpoint, at: int, attempt: int
) -> tuple[Any, ...]:
    return (
        pack_id(new.checkpoint_id),
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
