"""Where a run goes when there is nothing to run at the moment: on, aside, or to its end."""

from collections.abc import Mapping

from perdure.engine.breakpoints import open_due
from perdure.engine.closing import close_run, end_transition
from perdure.engine.draft import Draft
from perdure.engine.results import Known
from perdure.engine.snapshot import RunSnapshot
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.states import (
    AttemptEnd,
    ParkedOn,
    StepStatus,
    ToolCallStatus,
    Transition,
)


def settle(draft: Draft, *, retry_in_s: float | None) -> None:
    """Draft what follows once no call runs or can run at once.

    A rejected action: the run fails. Calls to be tried later: it waits out the first back-off,
    also while questions or children are open. Open interrupts: the run waits for a person.
    Children that are awaited: it waits for them; callbacks likewise. All are held by nobody. Else the step is done and
    planning goes on. The questions of a code agent's branches hold nobody up but their branch.
    """
    snapshot = draft.view.snapshot
    if snapshot.rejected is not None:
        fail(draft, rejection(snapshot))
        return
    if retry_in_s is not None:
        draft.release(AttemptEnd.PARKED, ParkedOn.RETRY)
        draft.ready_in_s = retry_in_s
        return
    open_due(draft)
    questions = snapshot.open_interrupts.values()
    if questions and any(question.position is None for question in questions):
        wait_for_person(draft)
    elif waits_for_children(snapshot):
        draft.note_step(StepStatus.WAITING)
        draft.release(AttemptEnd.PARKED, ParkedOn.CHILD)
    elif waits_for_callbacks(snapshot):
        draft.note_step(StepStatus.WAITING)
        draft.release(AttemptEnd.PARKED, ParkedOn.CALLBACK)
    elif snapshot.open_calls:
        draft.release(AttemptEnd.PARKED, ParkedOn.RETRY)
        draft.ready_in_s = 0
    else:
        finish_step(draft)


def wait_for_person(draft: Draft) -> None:
    """Draft that the run waits for the answers to its open interrupts, held by nobody."""
    draft.note_step(StepStatus.WAITING)
    draft.move(Transition.NEED_APPROVAL)
    draft.release(AttemptEnd.PARKED)


def waits_for_children(snapshot: RunSnapshot) -> bool:
    """Tell whether nothing but children keeps the step open."""
    if not any(child.awaited for child in snapshot.open_children.values()):
        return False
    return all(call.status is ToolCallStatus.PENDING for call in snapshot.open_calls.values())


def waits_for_callbacks(snapshot: RunSnapshot) -> bool:
    """Tell whether nothing but callbacks keeps the step open."""
    calls = snapshot.open_calls.values()
    return bool(calls) and all(call.by_callback for call in calls)


def finish_step(draft: Draft) -> None:
    """Draft the end of a step and the way back to planning, or the end of a run that only errs."""
    snapshot = draft.view.snapshot
    draft.end_step("succeeded")
    draft.view.faults = 0
    limit = draft.view.facts.options.corrections_max
    if snapshot.corrections > limit:
        last = draft.view.last_correctable()
        code = last.code if last is not None else FailureCode.TOOL_ARGUMENT_INVALID
        reason = last.reason if last is not None else "the planner's calls stayed invalid"
        fail(draft, Failure(code=code, reason=f"after {limit} corrections: {reason}"))
    else:
        draft.move(Transition.NEXT_STEP)


def fail(draft: Draft, failure: Failure, *, known: Mapping[str, Known] | None = None) -> None:
    """Draft the failure of a held run in planning or executing."""
    why = end_transition(draft.view.snapshot.state, failure)
    close_run(draft, why, failure, known=known)


def rejection(snapshot: RunSnapshot) -> Failure:
    """Return the failure of a run whose action a person rejected: the first who did."""
    return Failure(
        code=FailureCode.APPROVAL_REJECTED,
        reason=snapshot.rejected_reason or "a person rejected the action",
        stage=Stage.WAITING,
        details={"interrupt_id": snapshot.rejected, "by": snapshot.rejected_by},
    )
