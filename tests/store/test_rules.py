"""The rules that every store shares."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from perdure.protocol import ids
from perdure.protocol.events import StateEvent
from perdure.protocol.runs import RunHot, RunRow
from perdure.protocol.states import (
    LEGAL_PAIRS,
    TERMINAL,
    AttemptEnd,
    CancelAction,
    ParkedOn,
    RunState,
)
from perdure.store import beginning, keeping, rules
from perdure.store.commits import (
    Behind,
    CancelRequested,
    Commit,
    CommitResult,
    Committed,
    LeaseLost,
    Refused,
)
from perdure.store.requests import RetentionRule
from perdure.testing.builders import (
    EXECUTING,
    FAILED,
    PLANNING,
    SUCCEEDED,
    TO_EXECUTING,
    TO_SUCCEEDED,
    TO_WAITING,
    WORKER,
    cancel_wish,
    commit_of,
    event,
    new_id,
    new_run,
    note,
    want,
)
from perdure.testing.clock import START

LATER = START + timedelta(seconds=10)
HOUR = timedelta(hours=1)


def row_of(*, run_s: float | None = None) -> RunRow:
    """Return a run that was just inserted."""
    new = new_run(run_s=run_s)
    hot = beginning.first_hot(new, START, queued=False)
    return RunRow(facts=beginning.first_facts(new, START), hot=hot)


def held_row(*, run_s: float | None = None) -> RunRow:
    """Return a run that was just claimed."""
    row = row_of(run_s=run_s)
    return replace(row, hot=rules.take(row.hot, want(), START))


def moved(row: RunRow, now: datetime, commit: Commit) -> RunRow:
    """Return the run after a commit that is let through."""
    assert rules.judge(commit, row.hot) is None
    return replace(row, hot=rules.advance(rules.Kept(hot=row.hot), commit, now).hot)


def parked_commit(row: RunRow, *path: RunState, ready_in_s: float | None = None) -> Commit:
    """Return a commit that parks a run."""
    commit = commit_of(row, path=path)
    return replace(commit, attempt_end=AttemptEnd.PARKED, ready_in_s=ready_in_s)


# ---------------------------------------------------------------- judge


def test_a_commit_that_fits_is_let_through() -> None:
    row = held_row()
    assert rules.judge(commit_of(row, note(), path=TO_EXECUTING), row.hot) is None


WRONG: list[tuple[str, Callable[[RunHot], RunHot], CommitResult]] = [
    ("nobody", lambda hot: replace(hot, lease_owner=None), LeaseLost()),
    ("another token", lambda hot: replace(hot, lease_token=9), LeaseLost()),
    ("a cancel", lambda hot: replace(hot, cancel_epoch=3), CancelRequested(epoch=3)),
    ("a state", lambda hot: replace(hot, state=EXECUTING), Behind(seq=2)),
    ("a seq", lambda hot: replace(hot, last_seq=7), Behind(seq=7)),
    ("a lower seq", lambda hot: replace(hot, last_seq=1), Behind(seq=1)),
]


@pytest.mark.parametrize(("name", "change", "expected"), WRONG, ids=[name for name, *_ in WRONG])
def test_what_changed_in_the_meantime_is_told(
    name: str, change: Callable[[RunHot], RunHot], expected: CommitResult
) -> None:
    row = held_row()
    assert rules.judge(commit_of(row, note()), change(row.hot)) == expected


def test_each_check_comes_before_the_next() -> None:
    row = held_row()
    commit = commit_of(row, note(), path=(SUCCEEDED,))
    found: list[CommitResult | None] = []
    hot = replace(row.hot, lease_token=9, cancel_epoch=3, last_seq=7)
    found.append(rules.judge(commit, replace(hot, last_commit_id=commit.commit_id)))
    found.append(rules.judge(commit, hot))
    found.append(rules.judge(commit, replace(hot, lease_token=1)))
    found.append(rules.judge(commit, replace(hot, lease_token=1, cancel_epoch=0)))
    found.append(rules.judge(commit, row.hot))
    kinds = [Committed, LeaseLost, CancelRequested, Behind, Refused]
    assert [type(result) for result in found] == kinds


def test_a_commit_sent_again_is_told_its_own_seq() -> None:
    row = held_row()
    commit = commit_of(row, note(), note())
    after = moved(row, LATER, commit)
    assert rules.judge(commit, after.hot) == Committed(seq=4, at=LATER)
    later = rules.cancel(after.hot, cancel_wish(), LATER)
    assert rules.judge(commit, later) == Committed(seq=4, at=LATER)


def test_a_writer_without_a_token_needs_a_run_that_nobody_holds() -> None:
    free, held = row_of(), held_row()
    assert rules.judge(commit_of(free, note()), free.hot) is None
    beside = commit_of(held, note(), any_holder=True)
    assert rules.judge(beside, held.hot) is None
    alone = replace(beside, guard=replace(beside.guard, any_holder=False))
    assert rules.judge(alone, held.hot) == LeaseLost()


@pytest.mark.parametrize("source", sorted(RunState))
@pytest.mark.parametrize("target", sorted(RunState))
def test_exactly_the_legal_pairs_are_let_through(source: RunState, target: RunState) -> None:
    """R-2.1: the store refuses an illegal transition by itself."""
    row = row_of()
    row = replace(row, hot=replace(row.hot, state=source))
    found = rules.judge(commit_of(row, path=(target,)), row.hot)
    if (source, target) in LEGAL_PAIRS:
        assert found is None
    else:
        assert isinstance(found, Refused)


def test_a_path_must_chain_through_its_events() -> None:
    row = row_of()
    events = tuple(event(StateEvent(state=state)) for state in TO_EXECUTING)
    commit = commit_of(row, path=TO_EXECUTING)
    assert rules.judge(replace(commit, events=events), row.hot) is None
    assert isinstance(rules.judge(replace(commit, events=events[1:]), row.hot), Refused)
    assert isinstance(rules.judge(replace(commit, events=events[:1]), row.hot), Refused)
    assert isinstance(rules.judge(replace(commit, events=()), row.hot), Refused)


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_an_ended_run_takes_nothing_more(state: RunState) -> None:
    """R-2.2."""
    row = row_of()
    row = replace(row, hot=replace(row.hot, state=state))
    assert isinstance(rules.judge(commit_of(row, note()), row.hot), Refused)


def test_the_end_of_a_held_run_needs_the_end_of_its_attempt() -> None:
    row = held_row()
    ending = commit_of(row, path=(FAILED,))
    assert rules.judge(ending, row.hot) is None
    assert isinstance(rules.judge(replace(ending, attempt_end=None), row.hot), Refused)
    beside = commit_of(row, note(), any_holder=True)
    assert isinstance(rules.judge(replace(beside, attempt_end=AttemptEnd.PARKED), row.hot), Refused)


def test_a_batch_names_a_run_once() -> None:
    one, two = row_of(), row_of()
    rules.check_batch([commit_of(one), commit_of(two)])
    with pytest.raises(ValueError, match="one commit a run"):
        rules.check_batch([commit_of(one), commit_of(two), commit_of(one)])


# ---------------------------------------------------------------- advance


def test_time_never_runs_backwards() -> None:
    row = held_row()
    assert rules.event_time(LATER, row.hot) == LATER
    assert rules.event_time(START - HOUR, row.hot) == START
    after = moved(row, START - HOUR, commit_of(row, path=TO_WAITING))
    assert (after.hot.updated_at, after.hot.started_at) == (START, START)
    assert after.hot.waiting_since == START


def test_the_seq_moves_by_the_events() -> None:
    row = held_row()
    assert moved(row, LATER, commit_of(row)).hot.last_seq == row.hot.last_seq
    after = moved(row, LATER, commit_of(row, note(), path=TO_EXECUTING))
    assert after.hot.last_seq == row.hot.last_seq + 3


def test_a_run_that_goes_straight_to_its_end_has_started_only_when_it_planned() -> None:
    row = held_row()
    assert moved(row, LATER, commit_of(row, path=(FAILED,))).hot.started_at is None
    after = moved(row, LATER, commit_of(row, path=(PLANNING, FAILED)))
    assert (after.hot.started_at, after.hot.finished_at) == (LATER, LATER)
    assert after.hot.terminal_seq == after.hot.last_seq == 4


def test_the_terminal_event_is_found_where_it_stands_and_none_is_none() -> None:
    """One rule for all stores, also for a commit that is refused later."""
    row = held_row()
    ends = commit_of(row, path=(FAILED,))
    later = replace(ends, events=(*ends.events, note()))
    assert rules.terminal_seq(later) == row.hot.last_seq + 1
    assert rules.terminal_seq(replace(ends, events=(note(),))) is None


def test_the_lease_is_kept_or_cleared_with_its_token() -> None:
    row = held_row()
    kept = moved(row, LATER, commit_of(row)).hot
    assert (kept.lease_owner, kept.lease_expires_at) == (WORKER, row.hot.lease_expires_at)
    gone = moved(row, LATER, parked_commit(row)).hot
    assert (gone.lease_owner, gone.lease_expires_at, gone.lease_token) == (None, None, 1)


@pytest.mark.parametrize(
    ("ready_in_s", "at", "wake_at"),
    [
        (None, None, None),
        (0.0, LATER, None),
        (-5.0, LATER, None),
        (2.5, LATER + timedelta(seconds=2.5), LATER + timedelta(seconds=2.5)),
    ],
)
def test_a_parked_run_is_ready_when_the_commit_says_so(
    ready_in_s: float | None, at: datetime | None, wake_at: datetime | None
) -> None:
    row = held_row()
    commit = parked_commit(row, ready_in_s=ready_in_s)
    after = moved(row, LATER, commit)
    assert rules.ready_at(after.hot, commit, LATER) == at
    assert after.hot.wake_at == wake_at


def test_held_and_ended_runs_are_never_ready() -> None:
    row = held_row()
    for commit in (commit_of(row), commit_of(row, path=TO_SUCCEEDED)):
        ready = replace(commit, ready_in_s=5.0)
        after = moved(row, LATER, ready)
        assert rules.ready_at(after.hot, ready, LATER) is None
        assert after.hot.wake_at is None


def test_the_deadline_stands_while_a_person_is_waited_for() -> None:
    row = held_row(run_s=60.0)
    kept = rules.advance(rules.Kept(hot=row.hot), parked_commit(row, *TO_WAITING), LATER)
    assert (kept.hot.deadline_at, kept.deadline_left) == (None, timedelta(seconds=50))
    row = replace(row, hot=kept.hot)
    kept = rules.advance(kept, commit_of(row, note()), LATER + HOUR)
    assert (kept.hot.deadline_at, kept.deadline_left) == (None, timedelta(seconds=50))
    row = replace(row, hot=kept.hot)
    kept = rules.advance(kept, commit_of(row, path=(EXECUTING,)), LATER + HOUR)
    assert kept.hot.deadline_at == LATER + HOUR + timedelta(seconds=50)
    assert kept.deadline_left is None


def test_a_run_without_a_limit_gets_none_by_waiting() -> None:
    row = held_row()
    kept = rules.advance(rules.Kept(hot=row.hot), parked_commit(row, *TO_WAITING), LATER)
    row = replace(row, hot=kept.hot)
    kept = rules.advance(kept, commit_of(row, path=(EXECUTING,)), LATER)
    assert kept == rules.Kept(hot=kept.hot)
    assert kept.hot.deadline_at is None


def test_the_end_forgets_what_was_left() -> None:
    row = held_row(run_s=60.0)
    kept = rules.advance(rules.Kept(hot=row.hot), parked_commit(row, *TO_WAITING), LATER)
    row = replace(row, hot=kept.hot)
    kept = rules.advance(kept, commit_of(row, path=(FAILED,)), LATER)
    assert (kept.hot.deadline_at, kept.deadline_left) == (None, None)
    assert (kept.hot.waiting_since, kept.hot.parked_on) == (None, None)


def test_an_end_clears_what_the_run_was_parked_on() -> None:
    row = row_of()
    row = replace(row, hot=replace(row.hot, parked_on=ParkedOn.CLOSING))
    assert moved(row, LATER, commit_of(row, path=(FAILED,))).hot.parked_on is None


# ---------------------------------------------------------------- the other moves


def test_a_claim_takes_attempt_and_token_and_wakes_the_run() -> None:
    row = row_of()
    asleep = replace(row.hot, parked_on=ParkedOn.TIMER, wake_at=START)
    hot = rules.take(asleep, want(ttl_s=30.0), LATER)
    assert (hot.attempt, hot.lease_token, hot.last_seq) == (1, 1, 2)
    assert (hot.parked_on, hot.wake_at) == (None, None)
    assert hot.lease_expires_at == LATER + timedelta(seconds=30)


@pytest.mark.parametrize(
    ("previous", "phase"),
    [
        (None, "claimed"),
        (AttemptEnd.PARKED, "claimed"),
        (AttemptEnd.DRAINED, "claimed"),
        (AttemptEnd.LEASE_LOST, "recovered"),
        (AttemptEnd.ERROR, "recovered"),
    ],
)
def test_a_claim_after_a_fault_is_a_recovery(previous: AttemptEnd | None, phase: str) -> None:
    assert rules.claim_phase(previous) == phase


def test_a_lease_expires_at_its_time() -> None:
    hot = held_row().hot
    assert hot.lease_expires_at is not None
    assert not rules.is_expired(hot, hot.lease_expires_at - timedelta(microseconds=1))
    assert rules.is_expired(hot, hot.lease_expires_at)
    assert not rules.is_expired(row_of().hot, LATER + HOUR)


@pytest.mark.parametrize(("faults", "expected"), [(0, False), (1, False), (2, True), (3, True)])
def test_the_last_allowed_fault_exhausts_a_run(faults: int, expected: bool) -> None:
    hot = replace(held_row().hot, faults=faults)
    assert rules.is_exhausted(hot, 3) is expected


_NO, _STOP, _BACK = None, CancelAction.INTERRUPT, CancelAction.ROLLBACK


@pytest.mark.parametrize(
    ("accepted", "wished", "expected"),
    [
        (_NO, _STOP, True),
        (_NO, _BACK, True),
        (_STOP, _STOP, False),
        (_STOP, _BACK, True),
        (_BACK, _STOP, False),
        (_BACK, _BACK, False),
    ],
)
def test_only_a_stronger_cancel_is_accepted(
    accepted: CancelAction | None, wished: CancelAction, expected: bool
) -> None:
    hot = replace(held_row().hot, cancel_action=accepted)
    assert rules.accepts_cancel(hot, cancel_wish(wished)) is expected
    for state in TERMINAL:
        assert not rules.accepts_cancel(replace(hot, state=state), cancel_wish(wished))


def test_a_cancel_parks_a_run_only_when_nobody_holds_it() -> None:
    free, held = row_of().hot, held_row().hot
    assert rules.cancel(free, cancel_wish(), LATER).parked_on is ParkedOn.CLOSING
    assert rules.cancel(held, cancel_wish(), LATER).parked_on is None


def test_a_run_given_back_goes_to_its_closing_when_it_was_cancelled() -> None:
    hot = held_row().hot
    assert rules.give_back(hot, LATER).parked_on is None
    cancelled = rules.cancel(hot, cancel_wish(), LATER)
    assert rules.give_back(cancelled, LATER).parked_on is ParkedOn.CLOSING


def test_what_is_left_is_never_negative_and_none_without_a_limit() -> None:
    hot = row_of(run_s=60.0).hot
    assert rules.seconds_left(hot, LATER) == 50.0
    assert rules.seconds_left(hot, LATER + HOUR) == 0.0
    assert rules.seconds_left(row_of().hot, LATER) is None


def test_a_lease_is_held_by_one_worker_with_one_token() -> None:
    hot = held_row().hot
    assert rules.holds(hot, WORKER, 1)
    assert not rules.holds(hot, WORKER, 2)
    assert not rules.holds(hot, new_id(ids.WORKER), 1)
    assert not rules.holds(rules.give_back(hot, LATER), WORKER, 1)


def test_one_history_goes_at_least_and_no_more_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """R-6.8."""
    monkeypatch.setattr(keeping, "EVENTS_AT_ONCE", 10)
    sizes = [[], [99], [99, 1], [4, 6, 1], [4, 6]]
    assert [keeping.histories_at_once(each) for each in sizes] == [0, 1, 1, 2, 2]
    assert keeping.shortest_keep_s([]) is None
    kept = RetentionRule(state=FAILED, older_than_s=None)
    assert keeping.shortest_keep_s([kept, replace(kept, older_than_s=9), kept]) == 9
