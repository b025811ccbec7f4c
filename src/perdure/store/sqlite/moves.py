"""The moves of a run that are no commits: claim, renewal, cancel, late results, release, repair.

Each reads the hot row under the file's write lock, asks the shared rules and writes what they
return.
"""

import heapq
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from perdure.protocol.base import to_micros
from perdure.protocol.errors import NotFound, Unreadable
from perdure.protocol.runs import RunFacts, RunHot, RunRow
from perdure.protocol.states import AttemptEnd
from perdure.store import keeping, rules
from perdure.store.requests import (
    CancelWish,
    Claimed,
    ClaimWant,
    LateKept,
    LateResult,
    LeaseKey,
    Renewal,
    Requeued,
    TimerKind,
)
from perdure.store.rules import Kept
from perdure.store.sqlite.connection import read_row
from perdure.store.sqlite.rows import (
    FACTS_WIDTH,
    INPUT_POSITION,
    Row,
    maybe,
    pack_digest,
    pack_id,
    read_facts,
    read_kept,
    unpack_digest,
)
from perdure.store.sqlite.transaction import NO_REF, Transaction, pack_own_event
from perdure.store.sqlite.wide import Values, ask_rows, write_rows

log = logging.getLogger(__name__)


def claim_runs(tx: Transaction, want: ClaimWant) -> list[Claimed]:
    """Take runs: larger priority first, then by the time they became claimable, then by id."""
    serves = json.dumps([list(pair) for pair in want.serves])
    found: list[Row] = []
    for suspected, limit in ((False, want.limit), (True, min(want.limit, want.suspects_max))):
        group: list[Row] = []
        for queue in want.queues if limit else ():
            values = (queue, tx.now_micros, want.runtime_version, serves, limit, suspected)
            group += tx.all("claim_candidates", *values)
        found += heapq.nsmallest(limit, group, key=_in_order)
    first = heapq.nsmallest(want.limit, found, key=_in_order)
    taken: list[_Taken] = []
    for row in first:
        try:
            taken.append(_take(tx, row[0], want))
        except Unreadable as error:
            _leave_aside(tx, row[0], error.message)
    write_rows(tx.db, "delete_ready", [(row[0],) for row in first])
    write_rows(tx.db, "insert_attempt", [one.attempt for one in taken])
    write_rows(tx.db, "insert_event", [one.event for one in taken])
    return [one.claimed for one in taken]


def _in_order(row: Row) -> tuple[int, int, bytes]:
    return (-row[1], row[2], row[0])


@dataclass(slots=True)
class _Taken:
    """A run that was taken, and the rows that tell of it."""

    claimed: Claimed
    attempt: Values
    event: Values


def _take(tx: Transaction, run: bytes, want: ClaimWant) -> _Taken:
    row = tx.one("find_run", run, None)
    assert row is not None, "an entry in ready has its run"
    facts, before = read_row(_read_whole, row)
    ended = tx.one("find_attempt_end", run, before.hot.attempt) if before.hot.attempt else None
    previous = None if ended is None else read_row(_read_end, ended)
    hot = rules.take(before.hot, want, tx.now)
    _save(tx, run, before, hot)
    event = rules.claim_event(hot, want.worker_id, previous)
    claimed = Claimed(
        row=RunRow(facts=facts, hot=hot),
        token=hot.lease_token,
        input_position=row[INPUT_POSITION],
        deadline_in_s=rules.seconds_left(hot, tx.now),
    )
    at = to_micros(hot.updated_at)
    return _Taken(
        claimed=claimed,
        attempt=(run, hot.attempt, hot.lease_token, want.worker_id, at),
        event=pack_own_event(run, hot, event, hot.step_index),
    )


def _read_whole(row: Row) -> tuple[RunFacts, Kept]:
    return read_facts(row), read_kept(row[FACTS_WIDTH:])


def _read_end(row: Row) -> AttemptEnd | None:
    return maybe(AttemptEnd, row[0])


def _leave_aside(tx: Transaction, run: bytes, reason: str) -> None:
    """Put a run aside that cannot be claimed; one whose hot row is damaged only leaves `ready`."""
    log.error("run_%s is put aside: %s", run.hex(), reason)
    try:
        quarantine(tx, f"run_{run.hex()}", None, reason, None, None)
    except Unreadable:
        tx.run("delete_ready", run)


def _save(tx: Transaction, run: bytes, before: Kept, hot: RunHot) -> None:
    tx.save(run, Kept(hot=hot, deadline_left=before.deadline_left))


def renew_leases(
    tx: Transaction, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
) -> list[Renewal]:
    """Prolong what the worker holds, an expired lease that nobody took away too."""
    expires_at = to_micros(rules.after(tx.now, ttl_s))
    runs = [pack_id(lease.run_id) for lease in leases]
    wanted = [
        (place, run, lease.token, worker_id)
        for place, (run, lease) in enumerate(zip(runs, leases, strict=True))
    ]
    found: dict[int, tuple[int, int]] = {
        place: (epoch, held)
        for answer in ask_rows(tx.db, "find_epoch", wanted)
        for place, epoch, held in json.loads(answer)
    }
    renewed = [(runs[place], expires_at) for place, (_, held) in found.items() if held]
    write_rows(tx.db, "renew_lease", renewed)
    answers: list[Renewal] = []
    for place, lease in enumerate(leases):
        epoch, held = found.get(place, (0, 0))
        answers.append(Renewal(run_id=lease.run_id, held=bool(held), cancel_epoch=epoch))
    return answers


def request_cancel(tx: Transaction, run_id: str, wish: CancelWish) -> RunHot | None:
    """Accept a cancel, or leave the row as it is."""
    run = pack_id(run_id)
    before = tx.load(run)
    if before is None:
        return None
    if not rules.accepts_cancel(before.hot, wish):
        return before.hot
    hot = _cancel(tx, run, before, wish)
    _cancel_below(tx, run, rules.cascaded(wish))
    return hot


def supersede(tx: Transaction, run: bytes, wish: CancelWish) -> bool:
    """Cancel a thread's active run for another; False when it ends anyway."""
    before = tx.load(run)
    if before is None or not rules.accepts_cancel(before.hot, wish):
        return False
    _cancel(tx, run, before, wish)
    _cancel_below(tx, run, rules.cascaded(wish))
    return True


def _cancel(tx: Transaction, run: bytes, before: Kept, wish: CancelWish) -> RunHot:
    hot = rules.cancel(before.hot, wish, tx.now)
    _save(tx, run, before, hot)
    tx.append(run, hot, rules.cancel_event(hot, wish), hot.step_index)
    if hot.lease_owner is None:
        tx.begin_closing(run)
    return hot


def _cancel_below(tx: Transaction, run: bytes, wish: CancelWish) -> None:
    """Cancel all unfinished runs below that are not detached."""
    for (child,) in tx.all("unfinished_children", run):
        before = tx.load_one_of_many(child)
        if before is not None and rules.accepts_cancel(before.hot, wish):
            _cancel(tx, child, before, wish)
        _cancel_below(tx, child, wish)


def take_away(tx: Transaction, run_id: str, reason: str) -> bool:
    """Take a held run from its holder; False when nobody holds it."""
    run = pack_id(run_id)
    before = tx.load(run)
    if before is None or before.hot.lease_owner is None:
        return False
    hot = rules.lose(run_id, before.hot, tx.now, closing=True)
    _save(tx, run, before, hot)
    tx.append(run, hot, rules.lost_event(before.hot, reason), hot.step_index)
    tx.end_attempt(run, hot, AttemptEnd.LEASE_LOST)
    tx.begin_closing(run)
    return True


def record_late(tx: Transaction, late: LateResult) -> LateKept:
    """Append a late result, once for each that says something else of its execution."""
    run, call = pack_id(late.run_id), pack_id(late.tool_call_id)
    before = tx.load(run)
    if before is None:
        raise NotFound("no such run")
    given = keeping.late_digest(late)
    known = [unpack_digest(row[0]) for row in tx.all("find_late", run, call, late.execution)]
    kept = keeping.what_of_late(known, given)
    if kept is not LateKept.RECORDED:
        return kept
    hot = rules.note_late(before.hot, tx.now)
    _save(tx, run, before, hot)
    tx.append(run, hot, rules.late_event(late), late.step_index)
    if late.blobs:
        keys = tx.one("find_run_keys", run)
        assert keys is not None, "the hot row was there"
        tx.keep_blobs(run, keys[0], late.blobs, {blob.digest for blob in late.blobs})
    tx.run(
        "insert_late",
        run,
        call,
        late.execution,
        late.attempt,
        late.epoch,
        hot.last_seq,
        late.status.value,
        late.external_ref,
        to_micros(hot.updated_at),
        pack_digest(given),
    )
    return kept


def requeue_expired(tx: Transaction, limit: int) -> list[Requeued]:
    """Take expired leases away, the longest expired first. Rows that cannot be read stay."""
    taken: list[Requeued] = []
    place: tuple[int, bytes] = (0, b"")
    for _ in range(rules.EXPIRED_PAGES_MAX):
        rows = tx.all("expired_leases", tx.now_micros, *place, limit - len(taken))
        read = [(run, tx.load_one_of_many(run)) for run, _ in rows]
        taken += [_take_away(tx, run, before) for run, before in read if before is not None]
        if len(taken) >= limit or not rows:
            break
        place = rows[-1][1], rows[-1][0]
    return taken


def _take_away(tx: Transaction, run: bytes, before: Kept) -> Requeued:
    bound = tx.one("find_attempts_max", run)
    assert bound is not None, "a hot row has its cold one"
    exhausted = rules.is_exhausted(before.hot, bound[0])
    cancelled = before.hot.cancel_epoch > 0
    run_id = f"run_{run.hex()}"
    hot = rules.lose(run_id, before.hot, tx.now, closing=exhausted or cancelled)
    _save(tx, run, before, hot)
    tx.append(run, hot, rules.lost_event(before.hot), hot.step_index)
    tx.end_attempt(run, hot, AttemptEnd.LEASE_LOST)
    if exhausted or cancelled:
        tx.begin_closing(run)
    else:
        tx.set_ready(run, hot, to_micros(hot.wake_at or tx.now))
    return Requeued(run_id=run_id, exhausted=exhausted, cancel_requested=cancelled)


def release_runs(tx: Transaction, worker_id: str, leases: Sequence[LeaseKey]) -> int:
    """Hand back runs; one with an accepted cancel goes to its closing instead.

    A row that cannot be read is left: its lease expires.
    """
    count = 0
    for lease in leases:
        run = pack_id(lease.run_id)
        before = tx.load_one_of_many(run)
        if before is None or not rules.holds(before.hot, worker_id, lease.token):
            continue
        hot = rules.give_back(before.hot, tx.now)
        _save(tx, run, before, hot)
        tx.end_attempt(run, hot, AttemptEnd.DRAINED)
        if hot.cancel_epoch > 0:
            tx.begin_closing(run)
        else:
            tx.set_ready(run, hot, tx.now_micros)
        count += 1
    return count


def quarantine(
    tx: Transaction,
    run_id: str,
    token: int | None,
    reason: str,
    step_index: int | None,
    seq: int | None,
) -> bool:
    """Put a run aside: a held one by its token, one that nobody holds without."""
    run = pack_id(run_id)
    before = tx.load(run)
    if before is None or not rules.may_put_aside(before.hot, token, seq):
        return False
    hot = rules.put_aside(before.hot, tx.now)
    _save(tx, run, before, hot)
    step_index = hot.step_index if step_index is None else step_index
    tx.append(run, hot, rules.repair_event(reason), step_index)
    if token is not None:
        tx.end_attempt(run, hot, AttemptEnd.ERROR)
    tx.run("delete_ready", run)
    tx.run("delete_timer", run, TimerKind.CLOSE.value, NO_REF)
    return True
