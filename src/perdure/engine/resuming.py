"""Letting a waiting run go on once its last open interrupt is closed (decision 21)."""

from perdure.engine.draft import Draft
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState, StepStatus, Transition


def time_left_s(row: RunRow, draft: Draft) -> float:
    """Return how long the run still waits before it may be claimed, by the store's time."""
    if row.hot.wake_at is None or draft.now is None:
        return 0
    return max(0, (row.hot.wake_at - draft.now).total_seconds())


def go_on(row: RunRow, draft: Draft) -> None:
    """Draft the way back to executing, if nothing else is open; the wait is counted apart.

    A run that stands in `executing` without a holder (drained, lost, in back-off) stays
    claimable: a write beside no holder says anew whether the run may be claimed.
    """
    snapshot = draft.view.snapshot
    if snapshot.state is not RunState.WAITING_HUMAN:
        if row.hot.lease_owner is None:
            draft.ready_in_s = 0
        return
    if snapshot.open_interrupts:
        return
    since = row.hot.waiting_since
    if since is not None and draft.now is not None:
        waited_ms = round((draft.now - since).total_seconds() * 1000)
        draft.view.waiting_ms += max(0, waited_ms)
    draft.move(Transition.APPROVED)
    draft.note_step(StepStatus.RUNNING)
    draft.ready_in_s = 0
