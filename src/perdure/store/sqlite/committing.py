"""Writes a batch of commits inside one transaction: the fences first, then the rows by table.

Holders' steps that keep their lease, and holders' ends of runs, pass their fences together and
are written together, with as few calls of the driver as there are tables. All other commits
(people's answers, waits, retries, stale writers) read the row, ask the shared rules and write
what these return. The rows of all commits that passed are written one table after the other.

Rows that the database refuses raise: the writer then rolls the whole transaction back and repeats
it commit by commit, so that the culprit alone is refused (decision 7).
"""

import json
from collections.abc import Iterator, Sequence

from perdure.protocol.base import to_micros
from perdure.protocol.errors import PerdureError, Unreadable
from perdure.protocol.states import TERMINAL
from perdure.store import rules
from perdure.store.commits import Behind, Commit, CommitResult, Committed, LeaseLost, Refused
from perdure.store.requests import TimerKind
from perdure.store.rules import Kept
from perdure.store.sqlite import state_values
from perdure.store.sqlite.admission import insert_run
from perdure.store.sqlite.gathering import NoSuchRow, Rows
from perdure.store.sqlite.prepared import Prepared
from perdure.store.sqlite.rows import pack_id
from perdure.store.sqlite.transaction import NO_REF, Transaction
from perdure.store.sqlite.wide import Values, ask_rows, write_rows

Passed = dict[int, tuple[int, bytes]]
"""The attempt of each commit that passed its fence, by place; and the thread of one that ends."""


def write_commits(tx: Transaction, batch: Sequence[Prepared]) -> list[CommitResult]:
    """Judge and write commits; one answer for each, in order."""
    results: list[CommitResult] = []
    for part in _once_each(batch):
        results += _write_part(tx, part)
    return results


def _once_each(batch: Sequence[Prepared]) -> Iterator[list[Prepared]]:
    """Cut a batch into parts that have no run twice."""
    part: list[Prepared] = []
    seen = set[bytes]()
    for prepared in batch:
        if prepared.run in seen:
            yield part
            part, seen = [], set[bytes]()
        part.append(prepared)
        seen.add(prepared.run)
    if part:
        yield part


def _write_part(tx: Transaction, part: Sequence[Prepared]) -> list[CommitResult]:
    rows, results = Rows(), list[CommitResult]()
    passed = _pass(tx, part)
    for place, prepared in enumerate(part):
        if place not in passed:
            results.append(_advance(tx, rows, prepared))
            continue
        rows.add(tx, prepared, tx.now_micros, passed[place][0])
        seq = prepared.commit.guard.expected_seq + len(prepared.events)
        results.append(Committed(seq=seq, at=tx.now))
    _end_passed(tx, part, passed)
    rows.flush(tx)
    return results


def _pass(tx: Transaction, part: Sequence[Prepared]) -> Passed:
    """Move the runs of the plain commits whose fences are open; the rules see to the others."""
    if len(part) == 1 and part[0].is_plain and not part[0].ends:
        return _pass_one(tx, part[0])
    passed = _find_passed(tx, part)
    _advance_passed(tx, part, passed)
    return passed


def _pass_one(tx: Transaction, prepared: Prepared) -> Passed:
    guard = prepared.commit.guard
    fence = (guard.token, guard.epoch, str(guard.from_state), guard.expected_seq)
    moved = tx.one("advance_run", *_move(tx, prepared), *fence)
    return {} if moved is None else {0: (moved[0], b"")}


def _find_passed(tx: Transaction, part: Sequence[Prepared]) -> Passed:
    """Return the plain commits whose fences are open; of the others the rules say why not."""
    fences: list[Values] = []
    for place, prepared in enumerate(part):
        if not prepared.is_plain:
            continue
        guard = prepared.commit.guard
        fences.append(
            (
                place,
                prepared.run,
                guard.token,
                guard.epoch,
                str(guard.from_state),
                guard.expected_seq,
                tx.now_micros,
                prepared.commit_id,
                prepared.ends,
            )
        )
    return {
        place: (attempt, bytes.fromhex(thread or ""))
        for answer in ask_rows(tx.db, "pass_fence", fences)
        for place, attempt, thread in json.loads(answer)
    }


def _advance_passed(tx: Transaction, part: Sequence[Prepared], passed: Passed) -> None:
    passing = [part[place] for place in passed]
    ends = [(prepared.run, tx.now_micros) for prepared in passing if prepared.ends]
    write_rows(tx.db, "finish_runs", ends)
    write_rows(tx.db, "advance_runs", [_move(tx, prepared) for prepared in passing])


def _move(tx: Transaction, prepared: Prepared) -> Values:
    """Return the new values of a run's hot row."""
    started_at = tx.now_micros if prepared.starts else None
    after = (tx.now_micros, prepared.commit_id, started_at, prepared.terminal_seq)
    return (prepared.run, *prepared.values, *after)


def _end_passed(tx: Transaction, part: Sequence[Prepared], passed: Passed) -> None:
    """End the attempts of runs that end, and clear what the runs leave."""
    now, attempts, runs, threads = tx.now_micros, list[Values](), list[Values](), list[Values]()
    for place, (attempt, thread) in passed.items():
        prepared = part[place]
        reason = prepared.commit.attempt_end
        if not prepared.ends or reason is None:
            continue
        attempts.append((prepared.run, attempt, now, reason.value, prepared.commit_id))
        runs.append((prepared.run,))
        threads.append((thread, prepared.run, None))
    write_rows(tx.db, "end_attempt", attempts)
    write_rows(tx.db, "delete_ready", runs)
    write_rows(tx.db, "delete_timers", runs)
    if write_rows(tx.db, "activate_thread", threads) == len(threads):
        return
    for thread, run, _ in threads:  # runs wait for some of them
        tx.end_run(run, thread)


def _advance(tx: Transaction, rows: Rows, prepared: Prepared) -> CommitResult:
    """Judge by the row and write what the rules make of it."""
    commit = prepared.commit
    try:
        kept = tx.load(prepared.run)
    except Unreadable as error:
        return Refused(reason=error.message)
    if kept is None:
        return LeaseLost()
    verdict = rules.judge(commit, kept.hot)
    if verdict is not None:
        return verdict
    if commit.unmoved_since is not None and _has_moved(tx, prepared.run, commit.unmoved_since):
        return Behind(seq=kept.hot.last_seq)
    if commit.state_values and state_values.have_moved(tx, prepared.run, commit):
        return Behind(seq=kept.hot.last_seq)
    moved = rules.advance(kept, commit, tx.now)
    tx.save(prepared.run, moved)
    rows.add(tx, prepared, to_micros(moved.hot.updated_at), moved.hot.attempt)
    if commit.attempt_end is not None:
        tx.end_attempt(prepared.run, moved.hot, commit.attempt_end)
    _write_relations(tx, prepared)
    if commit.state_values:
        state_values.keep(tx, prepared.run, commit, to_micros(moved.hot.updated_at))
    _schedule(tx, prepared, kept, moved)
    return Committed(seq=moved.hot.last_seq, at=moved.hot.updated_at)


def _has_moved(tx: Transaction, run: bytes, since: int) -> bool:
    """Tell whether the run's thread says something of others behind a position."""
    keys = tx.one("find_run_keys", run)
    assert keys is not None, "the hot row was there"
    place = tx.one("moved_at", keys[1], since, run)
    return place is not None and place[0] is not None


def _set_timers(tx: Transaction, run: bytes, commit: Commit) -> None:
    """Set, move and take away the timers of callbacks and notices."""
    for new in commit.new_callbacks:
        due = to_micros(rules.after(tx.now, new.expires_in_s))
        call = pack_id(new.tool_call_id)
        tx.run("insert_timer", run, TimerKind.CALLBACK.value, call, due)
    for call in commit.callbacks_over:
        tx.run("delete_timer", run, TimerKind.CALLBACK.value, pack_id(call))
    for notice in commit.notices:
        key = pack_id(notice.interrupt_id)
        if notice.due_in_s is None:
            tx.run("delete_timer", run, TimerKind.NOTICE.value, key)
        else:
            due = to_micros(rules.after(tx.now, notice.due_in_s))
            tx.run("insert_timer", run, TimerKind.NOTICE.value, key, due)


def _write_relations(tx: Transaction, prepared: Prepared) -> None:
    """Write what ties the run to its parent, its children and its agent."""
    run, commit = prepared.run, prepared.commit
    for new in commit.new_children:
        if tx.one("find_run", pack_id(new.run_id), None) is not None:
            raise NoSuchRow("the run exists")
        try:
            insert_run(tx, new)
        except PerdureError as error:
            raise NoSuchRow(error.message) from error
    for child in commit.reported:
        tx.run("delete_timer", run, TimerKind.CHILD.value, pack_id(child))
    if commit.reports_to is not None:
        parent = pack_id(commit.reports_to)
        if tx.one("is_unfinished", parent) is not None:
            tx.run("insert_timer", parent, TimerKind.CHILD.value, run, tx.now_micros)
    _set_timers(tx, run, commit)
    if commit.handed_to is not None:
        tx.run("hand_over_run", *commit.handed_to, run)


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
        tx.set_ready(run, hot, to_micros(at))
    if hot.deadline_at != before.hot.deadline_at:
        if hot.deadline_at is None:
            tx.run("delete_timer", run, TimerKind.DEADLINE.value, NO_REF)
        else:
            due = to_micros(hot.deadline_at)
            tx.run("insert_timer", run, TimerKind.DEADLINE.value, NO_REF, due)
    if commit.close_in_s is not None:
        due = to_micros(rules.after(tx.now, commit.close_in_s))
        tx.run("insert_timer", run, TimerKind.CLOSE.value, NO_REF, due)
