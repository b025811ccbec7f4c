"""The rules every store obeys, as pure functions: who may write, and what a write makes of a row.

A store reads a run's row under its lock, asks `judge`, and writes what `advance` (or one of the
other moves) returns. It decides nothing by itself, so that all stores answer alike.

Two kinds of time: `now` is the store's clock and decides what is compared with that clock later
(leases, timers, `ready`); `event_time` never runs backwards within a run and is what rows and
events show.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from perdure.protocol.events import (
    AttemptEvent,
    CancelEvent,
    LateEvent,
    RepairEvent,
    StateEvent,
)
from perdure.protocol.ids import THREAD
from perdure.protocol.plain import value
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.runs import RunHot
from perdure.protocol.states import (
    FAULT_ENDS,
    LEGAL_PAIRS,
    TERMINAL,
    AttemptEnd,
    CancelAction,
    CancelOption,
    IllegalTransition,
    ParkedOn,
    RunState,
)
from perdure.store.commits import (
    Behind,
    CancelRequested,
    Commit,
    CommitResult,
    Committed,
    LeaseLost,
    Refused,
)
from perdure.store.requests import (
    CancelWish,
    ClaimWant,
    LateResult,
    TimerKind,
)


@value
class Kept:
    """A run's hot row with what only stores see: the total time left while a person is waited for.

    `deadline_left` is set exactly while `hot.state` is waiting_human and the run has a limit.
    """

    hot: RunHot
    deadline_left: timedelta | None = None


def event_time(now: datetime, hot: RunHot) -> datetime:
    """Return the time a write carries: the clock's, but never before the row's last write."""
    return max(now, hot.updated_at)


def after(now: datetime, seconds: float) -> datetime:
    """Return the instant some seconds from now; never one before now."""
    return now + timedelta(seconds=max(0.0, seconds))


def seconds_left(hot: RunHot, now: datetime) -> float | None:
    """Return what is left of the run's total time; None without a limit or while it stands."""
    if hot.deadline_at is None:
        return None
    return max(0.0, (hot.deadline_at - now).total_seconds())


# ---------------------------------------------------------------- who may write


def judge(commit: Commit, hot: RunHot) -> CommitResult | None:
    """Return why a commit is not written, or None when it is to be written.

    The order is the contract: already written, lease, epoch, state and seq, legality.
    A commit that is sent again gets the answer of the first time; only its `at` may be later,
    when somebody else wrote to the run since.
    """
    guard = commit.guard
    if hot.last_commit_id == commit.commit_id:
        return Committed(seq=guard.expected_seq + len(commit.events), at=hot.updated_at)
    if not _may_write(commit, hot):
        return LeaseLost()
    if guard.epoch != hot.cancel_epoch:
        return CancelRequested(epoch=hot.cancel_epoch)
    if guard.from_state is not hot.state or guard.expected_seq != hot.last_seq:
        return Behind(seq=hot.last_seq)
    if guard.any_holder and hot.lease_owner is None:
        return Behind(seq=hot.last_seq)  # handed back meanwhile, which writes no event
    try:
        check_path(commit)
        check_end(commit, hot)
    except IllegalTransition as error:
        return Refused(reason=str(error))
    return None


def _may_write(commit: Commit, hot: RunHot) -> bool:
    held = hot.lease_owner is not None
    if commit.guard.token is None:
        return not held or commit.guard.any_holder
    return held and commit.guard.token == hot.lease_token


def check_path(commit: Commit) -> None:
    """Raise IllegalTransition unless the state events lead legally from guard to new state.

    No end while a child that is not detached is unfinished; no child after a cancel, and none but
    detached ones with an end.
    """
    state = commit.guard.from_state
    if state in TERMINAL:
        raise IllegalTransition(f"the run has ended as {state}")
    for event in commit.events:
        if not isinstance(event.data, StateEvent):
            continue
        if event.data.from_state not in {None, state}:
            raise IllegalTransition(f"the event leaves {event.data.from_state}, not {state}")
        if (state, event.data.state) not in LEGAL_PAIRS:
            raise IllegalTransition(f"no transition leads from {state} to {event.data.state}")
        state = event.data.state
    if state is not commit.hot.state:
        raise IllegalTransition(f"the events end in {state}, the row in {commit.hot.state}")
    if state in TERMINAL and commit.hot.open_children > 0:
        raise IllegalTransition(f"{commit.hot.open_children} children are unfinished")
    if not commit.new_children:
        return
    attached = any(not new.detached for new in commit.new_children)
    if commit.guard.epoch > 0 or (attached and state in TERMINAL):
        raise IllegalTransition("a run that ends or is cancelled has no new children")


def check_end(commit: Commit, hot: RunHot) -> None:
    """Raise IllegalTransition when the lease and the end of the attempt or run do not agree."""
    if commit.attempt_end is not None and commit.guard.token is None:
        raise IllegalTransition("only a holder can end an attempt")
    held_after = hot.lease_owner is not None and commit.attempt_end is None
    if commit.hot.state in TERMINAL and held_after:
        raise IllegalTransition("a terminal state needs the end of the attempt")


def check_batch(commits: Sequence[Commit]) -> None:
    """Raise ValueError when a batch names a run twice: a fault of the committer."""
    if len({commit.run_id for commit in commits}) != len(commits):
        raise ValueError("a batch holds at most one commit a run")


# ---------------------------------------------------------------- what a commit makes of a row


def advance(kept: Kept, commit: Commit, now: datetime) -> Kept:
    """Return the row after a commit that `judge` let through."""
    hot, new, at = kept.hot, commit.hot, event_time(now, kept.hot)
    holder = commit.guard.token is not None
    deadline_at, deadline_left = _deadline(kept, new.state, now)
    moved = replace(
        hot,
        state=new.state,
        step_index=new.step_index,
        last_seq=hot.last_seq + len(commit.events),
        faults=new.faults,
        parked_on=None if new.state in TERMINAL else new.parked_on,
        waiting_kind=new.waiting_kind,
        waiting_since=_waiting_since(hot, new.state, at),
        deadline_at=deadline_at,
        code=new.code,
        open_calls=new.open_calls,
        open_interrupts=new.open_interrupts,
        open_children=new.open_children,
        counters=new.counters,
        checkpoint_seq=new.checkpoint_seq,
        started_at=hot.started_at or (at if starts(commit) else None),
        updated_at=at,
        last_commit_id=commit.commit_id if holder else hot.last_commit_id,
    )
    if commit.attempt_end is not None:
        moved = replace(moved, lease_owner=None, lease_expires_at=None)
    if new.state in TERMINAL:
        moved = replace(moved, finished_at=at, terminal_seq=terminal_seq(commit))
    moved = replace(moved, wake_at=_wake_at(moved, commit, now))
    return Kept(hot=moved, deadline_left=deadline_left)


def starts(commit: Commit) -> bool:
    """Tell whether the run leaves pending to work: one that ends in the queue never started."""
    return commit.guard.from_state is RunState.PENDING and any(
        isinstance(event.data, StateEvent) and event.data.state not in TERMINAL
        for event in commit.events
    )


def terminal_seq(commit: Commit) -> int | None:
    """Return the seq of the event that ends the run; None when a commit has none."""
    seq, found = commit.guard.expected_seq, None
    for event in commit.events:
        seq += 1
        if isinstance(event.data, StateEvent) and event.data.state in TERMINAL:
            found = seq
    return found


def _waiting_since(hot: RunHot, state: RunState, at: datetime) -> datetime | None:
    if state is not RunState.WAITING_HUMAN:
        return None
    return hot.waiting_since if hot.state is RunState.WAITING_HUMAN else at


def _deadline(
    kept: Kept, state: RunState, now: datetime
) -> tuple[datetime | None, timedelta | None]:
    """Return (deadline_at, deadline_left): waiting for a person does not count (decision 36)."""
    was, deadline = kept.hot.state is RunState.WAITING_HUMAN, kept.hot.deadline_at
    if state in TERMINAL:
        return deadline, None
    if state is RunState.WAITING_HUMAN:
        if was:
            return deadline, kept.deadline_left
        return None, None if deadline is None else deadline - now
    if was and kept.deadline_left is not None:
        return now + kept.deadline_left, None
    return deadline, None


def _wake_at(moved: RunHot, commit: Commit, now: datetime) -> datetime | None:
    at = ready_at(moved, commit, now)
    return at if at is not None and at > now else None


def ready_at(moved: RunHot, commit: Commit, now: datetime) -> datetime | None:
    """Return when the run may be claimed after a commit; None: it has no entry in `ready`.

    `moved` is the row as the commit leaves it. A held or ended run never has an entry; for all
    others the commit says it, so an entry that stood before is replaced or goes.
    """
    if commit.ready_in_s is None or moved.state in TERMINAL or moved.lease_owner is not None:
        return None
    return after(now, commit.ready_in_s)


# ---------------------------------------------------------------- the other moves of a row


def is_suspected(hot: RunHot) -> bool:
    """Tell whether a run may have killed its worker: one or more faults since its last step."""
    return hot.faults > 0


def take(hot: RunHot, want: ClaimWant, now: datetime) -> RunHot:
    """Return the row as claimed; its last event is the `attempt` event."""
    return replace(
        hot,
        last_seq=hot.last_seq + 1,
        attempt=hot.attempt + 1,
        lease_owner=want.worker_id,
        lease_token=hot.lease_token + 1,
        lease_expires_at=now + timedelta(seconds=want.lease_ttl_s),
        parked_on=None,
        wake_at=None,
        updated_at=event_time(now, hot),
    )


def claim_phase(previous: AttemptEnd | None) -> Literal["claimed", "recovered"]:
    """Return the phase of a claim by how the attempt before it ended (None: there was none)."""
    return "recovered" if previous in FAULT_ENDS else "claimed"


def claim_event(hot: RunHot, worker_id: str, previous: AttemptEnd | None) -> AttemptEvent:
    """Return the event of a claim; `hot` is the row as claimed."""
    return AttemptEvent(phase=claim_phase(previous), attempt=hot.attempt, worker=worker_id)


def holds(hot: RunHot, worker_id: str, token: int) -> bool:
    """Tell whether a worker holds the run; an expired lease is held until it is taken away."""
    return hot.lease_owner == worker_id and hot.lease_token == token


def is_expired(hot: RunHot, now: datetime) -> bool:
    """Tell whether a held lease may be taken away."""
    return hot.lease_expires_at is not None and hot.lease_expires_at <= now


EXPIRED_PAGES_MAX = 20
"""So many pages of expired leases are looked at in one transaction: the first ones may hold only
rows that cannot be read, which keep nobody from the others."""


def is_exhausted(hot: RunHot, max_attempts: int) -> bool:
    """Tell whether one more fault reaches the bound on attempts (decision 11)."""
    return hot.faults + 1 >= max_attempts


LOST_RETRY = RetryPolicy(attempts_max=20, backoff_s=0.5, backoff_max_s=60.0)
"""How long a run that lost its worker waits before it may be claimed again."""


def lose(run_id: str, hot: RunHot, now: datetime, *, closing: bool) -> RunHot:
    """Return the row of a run whose expired lease is taken away; its last event tells it.

    Unless it is to be closed it may be claimed at its `wake_at`. The jitter of that wait is the
    random end of the run's id, so that runs that one worker took down come back apart.
    """
    chance = int(run_id[-8:], 16) / 2**32
    delay_s = LOST_RETRY.delay_s(hot.faults + 1, chance)
    return replace(
        _unheld(hot, now, closing=closing),
        last_seq=hot.last_seq + 1,
        faults=hot.faults + 1,
        lease_token=hot.lease_token + 1,
        wake_at=None if closing else after(now, delay_s),
    )


def lost_event(hot: RunHot, reason: str = "lease_expired") -> AttemptEvent:
    """Return the event of a lost lease; `hot` is the row before."""
    return AttemptEvent(
        phase="lost", attempt=hot.attempt, worker=hot.lease_owner or "", reason=reason
    )


def give_back(hot: RunHot, now: datetime) -> RunHot:
    """Return the row of a run that its worker hands back; a cancelled one goes to its closing."""
    return _unheld(hot, now, closing=hot.cancel_epoch > 0)


def _unheld(hot: RunHot, now: datetime, *, closing: bool) -> RunHot:
    return replace(
        hot,
        lease_owner=None,
        lease_expires_at=None,
        parked_on=ParkedOn.CLOSING if closing else None,
        wake_at=None,
        updated_at=event_time(now, hot),
    )


def is_unmoved(
    hot: RunHot, *, is_ready: bool, timers: Iterable[TimerKind], is_behind: bool
) -> bool:
    """Tell whether nothing moves an unfinished run any more (`Reader.unmoved_runs`).

    `is_behind`: another run is its thread's active one.
    """
    if hot.lease_owner is not None or hot.parked_on is ParkedOn.REPAIR:
        return False
    if is_ready or hot.open_interrupts or any(kind is not TimerKind.DEADLINE for kind in timers):
        return False
    if hot.parked_on is ParkedOn.CHILD:
        return hot.open_children == 0
    return not (hot.parked_on is ParkedOn.THREAD and is_behind)


def may_put_aside(hot: RunHot, token: int | None, seq: int | None = None) -> bool:
    """Tell whether a run may be put aside: by its holder, or by anybody when nobody holds it.

    With a `seq` only as long as nobody has written to it since.
    """
    if seq is not None and hot.last_seq != seq:
        return False
    if token is not None:
        return hot.lease_owner is not None and hot.lease_token == token
    aside = hot.parked_on is ParkedOn.REPAIR
    return hot.lease_owner is None and hot.state not in TERMINAL and not aside


def put_aside(hot: RunHot, now: datetime) -> RunHot:
    """Return the row of a run that is quarantined; its last event is the `repair` event."""
    bare = _unheld(hot, now, closing=False)
    return replace(bare, last_seq=hot.last_seq + 1, parked_on=ParkedOn.REPAIR)


def repair_event(reason: str) -> RepairEvent:
    """Return the event of a quarantine."""
    return RepairEvent(action="quarantine", by="runtime", reason=reason)


_STRENGTH = {None: 0, CancelAction.INTERRUPT: 1, CancelAction.ROLLBACK: 2}


def accepts_cancel(hot: RunHot, wish: CancelWish) -> bool:
    """Tell whether a cancel changes anything: the run goes on, and the cancel is stronger than one
    that was accepted, or asks for more.
    """
    stronger = _STRENGTH[wish.action] > _STRENGTH[hot.cancel_action]
    return hot.state not in TERMINAL and (stronger or bool(wish.options & ~hot.cancel_options))


def cancel(hot: RunHot, wish: CancelWish, now: datetime) -> RunHot:
    """Return the row after an accepted cancel; its last event is the `cancel` event.

    Nobody holds the run: it is parked for its closing, in the state it was in.
    """
    held = hot.lease_owner is not None
    weaker = _STRENGTH[wish.action] < _STRENGTH[hot.cancel_action]
    return replace(
        hot,
        last_seq=hot.last_seq + 1,
        cancel_epoch=hot.cancel_epoch + 1,
        cancel_action=hot.cancel_action if weaker else wish.action,
        cancel_options=hot.cancel_options | wish.options,
        parked_on=hot.parked_on if held else ParkedOn.CLOSING,
        wake_at=hot.wake_at if held else None,
        updated_at=event_time(now, hot),
    )


def cascaded(wish: CancelWish) -> CancelWish:
    """Return a cancel as it reaches the children of the run that it was asked for."""
    return replace(wish, source="parent")


def cancel_event(hot: RunHot, wish: CancelWish) -> CancelEvent:
    """Return the event of an accepted cancel; `hot` is the row after it."""
    return CancelEvent(
        action=hot.cancel_action or wish.action,
        epoch=hot.cancel_epoch,
        by=wish.by,
        source=wish.source,
        reason=wish.reason,
        compensate=CancelOption.COMPENSATE in hot.cancel_options,
        discard_artifacts=CancelOption.DISCARD_ARTIFACTS in hot.cancel_options,
    )


def note_late(hot: RunHot, now: datetime) -> RunHot:
    """Return the row after a late result: only its seq and time move."""
    return replace(hot, last_seq=hot.last_seq + 1, updated_at=event_time(now, hot))


def late_event(late: LateResult) -> LateEvent:
    """Return the event of a late result."""
    return LateEvent(
        tool_call_id=late.tool_call_id,
        execution=late.execution,
        attempt=late.attempt,
        epoch=late.epoch,
        status=late.status,
        output=late.output,
        output_ref=late.output_ref,
        external_ref=late.external_ref,
    )


def next_in_thread(hot: RunHot, now: datetime) -> RunHot:
    """Return the row of a queued run whose turn in its thread has come.

    It can be claimed from its `wake_at` on: at once, unless it is delayed and its time to come.
    """
    delayed = hot.wake_at is not None and hot.wake_at > now
    return replace(
        hot,
        parked_on=ParkedOn.TIMER if delayed else None,
        wake_at=hot.wake_at if delayed else None,
        updated_at=event_time(now, hot),
    )


# ---------------------------------------------------------------- retention


BEFORE_ALL_THREADS = f"{THREAD}_{'0' * 32}"


def place_after(page: Sequence[str], after: str | None, dropped: int, limit: int) -> str | None:
    """Return where a sweep of deleted threads goes on; None at their end.

    A call that dropped all it may comes again to its page, which may have more: to the first page
    by the place before all.
    """
    if dropped >= limit:
        return after or BEFORE_ALL_THREADS
    return page[-1] if len(page) == limit else None
