"""Status, waiting_on and next actions: total functions of the row that agree with each other."""

from datetime import UTC, datetime
from typing import get_type_hints

from hypothesis import given
from hypothesis import strategies as st

from perdure.ops.reference.states import EXAMPLES
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import Run, RunHot, next_actions, status_of, waiting_on
from perdure.protocol.states import (
    TERMINAL,
    CancelAction,
    InterruptKind,
    NextAction,
    ParkedOn,
    RunState,
    RunStatus,
    WaitingOn,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)


@st.composite
def rows(draw: st.DrawFn) -> RunHot:
    """Return any row that a store lets be (states and their fields go together as verify says)."""
    state = draw(st.sampled_from(RunState))
    over = state in TERMINAL
    waits = state is RunState.WAITING_HUMAN
    held = not over and not waits and draw(st.booleans())
    parked = not over and not held and draw(st.booleans())
    epoch = draw(st.integers(0, 2))
    return RunHot(
        state=state,
        step_index=draw(st.integers(0, 5)),
        last_seq=draw(st.integers(1, 99)),
        attempt=draw(st.integers(1 if held else 0, 3)),
        faults=draw(st.integers(0, 3)),
        lease_owner="wrk_1" if held else None,
        cancel_epoch=epoch,
        cancel_action=draw(st.sampled_from(CancelAction)) if epoch else None,
        parked_on=draw(st.sampled_from(ParkedOn)) if parked else None,
        waiting_kind=draw(st.sampled_from(InterruptKind)) if waits else None,
        open_interrupts=draw(st.integers(1 if waits else 0, 3)) if not over else 0,
        code=draw(st.sampled_from(FailureCode)) if state is RunState.FAILED else None,
        updated_at=AT,
    )


FINAL = {
    RunStatus.COMPLETED,
    RunStatus.FAILED,
    RunStatus.CANCELED,
    RunStatus.INTERRUPTED,
    RunStatus.TIMED_OUT,
}


@given(rows())
def test_every_row_has_one_status_that_agrees_with_its_state(hot: RunHot) -> None:
    """R-2.3: a pure function of the row, total and consistent."""
    status = status_of(hot)
    assert status_of(hot) is status
    assert (status in FINAL) is (hot.state in TERMINAL)
    assert (status is RunStatus.COMPLETED) is (hot.state is RunState.SUCCEEDED)
    cancelled = hot.cancel_epoch > 0 and hot.state not in TERMINAL
    assert (status is RunStatus.CANCEL_REQUESTED) is cancelled
    if hot.code is FailureCode.RUN_CANCELLED:
        rolled_back = hot.cancel_action is CancelAction.ROLLBACK
        assert status is (RunStatus.CANCELED if rolled_back else RunStatus.INTERRUPTED)
    assert (status is RunStatus.TIMED_OUT) is (hot.code is FailureCode.RUN_TIMEOUT)
    if status in {RunStatus.INPUT_REQUIRED, RunStatus.AUTH_REQUIRED}:
        assert hot.state is RunState.WAITING_HUMAN
        assert (status is RunStatus.AUTH_REQUIRED) is (hot.waiting_kind is InterruptKind.AUTH)


@given(rows())
def test_what_a_run_waits_for_agrees_with_its_row(hot: RunHot) -> None:
    """R-2.7: nothing only for an ended run; a person only while one is asked."""
    found = waiting_on(hot)
    assert (found is WaitingOn.NOTHING) is (hot.state in TERMINAL)
    if hot.parked_on is ParkedOn.REPAIR and hot.state not in TERMINAL:
        assert found is WaitingOn.REPAIR
    elif hot.state is RunState.WAITING_HUMAN and hot.parked_on is ParkedOn.CHILD:
        assert found is WaitingOn.CHILD, "it only waits for its children to end with them"
    elif hot.state is RunState.WAITING_HUMAN:
        assert found is WaitingOn.PERSON
    if found in {WaitingOn.MODEL, WaitingOn.TOOL}:
        assert hot.lease_owner is not None
    if hot.lease_owner is None and hot.parked_on is None and hot.state is RunState.PLANNING:
        assert found is (WaitingOn.RECOVERY if hot.faults else WaitingOn.QUEUE)


@given(rows())
def test_next_actions_are_those_that_the_status_allows(hot: RunHot) -> None:
    """R-2.3, R-10.3: a run that goes on allows at least one; a failed one a retry, if it can be
    gone on from."""
    actions = next_actions(hot)
    status = status_of(hot)
    kept = hot.cancel_action is not CancelAction.ROLLBACK and hot.retained_from_seq == 1
    if hot.state in TERMINAL:
        retry = [NextAction.RETRY] if hot.state is RunState.FAILED else []
        assert actions == ([*retry, NextAction.FORK] if kept else [])
    else:
        assert actions
    assert len(actions) == len(set(actions))
    aside = hot.parked_on is ParkedOn.REPAIR and hot.state not in TERMINAL
    authorises = status is RunStatus.AUTH_REQUIRED and not aside
    assert (NextAction.AUTHORISE in actions) is authorises
    assert (NextAction.REPAIR in actions) is aside
    if aside:
        assert (NextAction.CANCEL in actions) is (hot.cancel_epoch == 0)
    elif status is RunStatus.CANCEL_REQUESTED:
        assert actions == [NextAction.WAIT]
    elif hot.state not in TERMINAL:
        assert NextAction.CANCEL in actions


def test_the_examples_of_the_reference_reach_every_status_and_every_wait() -> None:
    """R-2.3, R-2.7: the published table leaves none out."""
    assert {status_of(hot) for _, hot in EXAMPLES} == set(RunStatus)
    assert {waiting_on(hot) for _, hot in EXAMPLES} == set(WaitingOn)
    assert {action for _, hot in EXAMPLES for action in next_actions(hot)} == set(NextAction)


def test_a_run_shows_what_it_waits_for_and_no_name_of_what_carries_it_out() -> None:
    """R-2.5, R-2.7: the wait and since when, waiting time apart; no worker in what callers see."""
    fields = get_type_hints(Run)
    assert {"state", "status", "waiting_on", "waiting_since", "usage"} <= set(fields)
    assert not any("worker" in name or "lease" in name for name in fields)
