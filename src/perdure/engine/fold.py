"""The reducer: a run's log folded into a snapshot (R-7.7).

The live attempt, recovery and `perdure verify` use this one function, so a snapshot that differs
from its recorded digest means that the log or the checkpoint was damaged. The snapshot covers
what decision 25 lists; leases, times and metadata are outside. Folding one event costs the same
at the thousandth step as at the first: finished calls enter as a running hash.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from pydantic import JsonValue

from perdure.engine.fold_custom import fold_custom
from perdure.engine.snapshot import (
    CORRECTABLE,
    FAILED_CALLS,
    OpenCall,
    OpenChild,
    OpenInterrupt,
    RunSnapshot,
    chain,
)
from perdure.protocol.codec import digest
from perdure.protocol.events import (
    ActionEvent,
    ApprovalRequestEvent,
    ArtifactEvent,
    AttemptEvent,
    CancelEvent,
    ChildEvent,
    ChildUse,
    CustomEvent,
    ErrorEvent,
    HandoffEvent,
    InterruptEvent,
    ModelEvent,
    Origin,
    PlanEvent,
    ResultEvent,
    ResumeEvent,
    RetryEvent,
    StateEvent,
    StepEvent,
    TimeoutEvent,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.fields import (
    decided_place,
)
from perdure.protocol.log import EventData, Unknown
from perdure.protocol.states import (
    Answer,
    InterruptKind,
    ToolCallStatus,
    Transition,
)


def fold(snapshot: RunSnapshot, seq: int, data: EventData | Unknown) -> None:
    """Apply the event at `seq`. Raises OutOfOrder when it is not the next one."""
    if seq != snapshot.last_seq + 1:
        raise OutOfOrder(f"event {seq} follows event {snapshot.last_seq}")
    snapshot.last_seq = seq
    folder = _FOLDERS.get(type(data))
    if folder is not None:
        folder(snapshot, data)


class OutOfOrder(ValueError):
    """An event is missing or doubled: the log is damaged."""


def begin_own(snapshot: RunSnapshot) -> None:
    """Make the fold of an origin's events ready for the first event of the run that shares them."""
    snapshot.last_seq = 0


def _adopt(snapshot: RunSnapshot, origin: Origin) -> None:
    """Turn what the origin's log says into where a run begins that shares it.

    Kept: finished calls, plan, agent state, artifact versions, steps, the place in the thread.
    Not kept: attempt, cancel, code, open questions, what was used (a run counts its own use), and
    what was counted against the origin: repeated and invalid calls, failures in a row, rejections.
    Calls that were cut off or whose outcome is unknown are made anew, in the step that was cut
    off; a redrive also makes those anew that had failed; and what the origin was to make anew itself
    and had not begun with stays to be made. A step of which nothing is left but the
    planner's wish is decided anew, and what that wish wrote to the state is forgotten. Where no
    write is shared that outlives the run, nothing of it is settled: the run's own may stand at the
    places of what was forgotten.
    """
    wanted = _CUT_OFF | FAILED_CALLS if origin.mode == "redrive" else _CUT_OFF
    calls = snapshot.step_calls.values() if snapshot.step_open else ()
    inherited = {call.tool_call_id: call for call in calls if call.status in wanted}
    inherited |= snapshot.inherited  # else forgotten, and decided anew as if nothing had happened
    finished = len(snapshot.step_calls) > len(inherited) or snapshot.answered_in_step
    if snapshot.step_open and not inherited and finished:
        snapshot.step_index += 1
    if not inherited:
        _forget_writes(snapshot)
    fresh = RunSnapshot(inherited=inherited, first_step=snapshot.step_index)
    for item in fields(RunSnapshot):
        if item.name not in _KEPT:
            setattr(snapshot, item.name, getattr(fresh, item.name))
    snapshot.knows_settled = not any(_outlasts(write) for write in snapshot.writes.values())
    if origin.edits_state:
        snapshot.agent_state = origin.state
        snapshot.agent_state_digest = digest(origin.state)
    chain(snapshot, "origin", origin.run_id, str(origin.seq), origin.mode)


def _outlasts(write: JsonValue) -> bool:
    return isinstance(write, dict) and write.get("scope", "run") != "run"


def _forget_writes(snapshot: RunSnapshot) -> None:
    """Leave out what the decision of a step wrote that is decided anew."""
    mark = decided_place(snapshot.step_index, 0)[:-1]
    forgotten = {place for place in snapshot.writes if place.startswith(mark)}
    for place in forgotten:
        del snapshot.writes[place]
    for one in snapshot.folded.values():
        one.leave_out(forgotten)
    snapshot.settled -= forgotten


_CUT_OFF = frozenset(
    {
        ToolCallStatus.PROPOSED,
        ToolCallStatus.AWAITING_APPROVAL,
        ToolCallStatus.RUNNING,
        ToolCallStatus.PENDING,
        ToolCallStatus.CANCELLED,
        ToolCallStatus.UNKNOWN,
    }
)
_KEPT = frozenset(
    {
        "last_seq",
        "step_index",
        "finished_calls",
        "history",
        "plan",
        "plan_revision",
        "context_tokens",
        "artifacts",
        "agent_state",
        "agent_state_digest",
        "writes",
        "folded",
        "fields_read",
        "settled",
        "history_position",
    }
)
"""What of its origin's snapshot a run begins with; all else is as in a new run."""


def _fold_state(snapshot: RunSnapshot, data: StateEvent) -> None:
    if data.origin is not None:
        _adopt(snapshot, data.origin)
    snapshot.state = data.state
    if data.why is Transition.PLAN_READY:
        snapshot.step_open = True
        snapshot.inherited = {}
        snapshot.step_first_seq = snapshot.step_first_seq or snapshot.last_seq
    if data.failure is not None:
        snapshot.code = data.failure.code
    if data.history_position is not None:
        snapshot.history_position = data.history_position


def _fold_action(snapshot: RunSnapshot, data: ActionEvent) -> None:
    snapshot.tool_calls += 1
    args_digest = data.args_digest
    repeat = f"{data.tool}:{args_digest}"
    snapshot.repeats[repeat] = snapshot.repeats.get(repeat, 0) + 1
    call = OpenCall(
        tool_call_id=data.tool_call_id,
        planner_call_id=data.planner_call_id,
        step_index=snapshot.step_index,
        ordinal=data.ordinal,
        tool=data.tool,
        version=data.version,
        args=data.args,
        args_ref=data.args_ref,
        args_digest=args_digest,
        effect_key=data.effect_key,
        side_effect=data.side_effect,
        repeatable=data.repeatable,
        status=data.status,
        position=data.position,
    )
    snapshot.open_calls[data.tool_call_id] = snapshot.step_calls[data.tool_call_id] = call


def _fold_result(snapshot: RunSnapshot, data: ResultEvent) -> None:
    call = snapshot.open_calls.pop(data.tool_call_id, None)
    snapshot.finished_calls += 1
    if call is not None:
        call.status = data.status
        if data.error is not None and data.error.code is FailureCode.TOOL_OUTCOME_UNKNOWN:
            call.may_have_happened = True
    if data.error is not None and data.error.code in CORRECTABLE:
        snapshot.invalid_in_step = True
    else:
        snapshot.valid_in_step = True
    args_digest = call.args_digest if call is not None else None
    chain(snapshot, "result", data.tool_call_id, data.status, data.output_digest, args_digest)


def _fold_question(snapshot: RunSnapshot, data: ApprovalRequestEvent | InterruptEvent) -> None:
    if isinstance(data, ApprovalRequestEvent):
        opened = OpenInterrupt(
            interrupt_id=data.approval_id,
            kind=InterruptKind.APPROVAL,
            tool_call_id=data.tool_call_id,
            key=None,
            on_expiry=data.on_expiry,
            approvers=data.approvers,
            notifies=data.notifies,
            escalate_after_s=data.escalate_after_s,
            escalate_to=data.escalate_to,
        )
        call = snapshot.open_calls.get(data.tool_call_id)
        if call is not None:
            call.approval_id = data.approval_id
            call.approved_definition = data.definition_digest
            call.status = ToolCallStatus.AWAITING_APPROVAL
    else:
        opened = OpenInterrupt(
            interrupt_id=data.interrupt_id,
            kind=data.kind,
            tool_call_id=data.tool_call_id,
            key=data.key,
            on_expiry=data.on_expiry,
            answer_schema=data.answer_schema,
            position=data.position,
        )
        call = snapshot.open_calls.get(data.tool_call_id or "")
        if call is not None:
            call.status = ToolCallStatus.RUNNING
            call.overdue = False
    snapshot.open_interrupts[opened.interrupt_id] = opened


def _fold_resume(snapshot: RunSnapshot, data: ResumeEvent) -> None:
    question = snapshot.open_interrupts.pop(data.interrupt_id, None)
    value = digest(data.value) if data.value is not None else None
    chain(snapshot, "resume", data.interrupt_id, data.outcome, data.answer, value)
    if question is not None and question.kind is InterruptKind.BREAKPOINT:
        snapshot.passed.add(question.key or "")
        snapshot.single_step = data.answer == Answer.STEP
        return
    rejects = data.outcome == "answered" and data.answer == Answer.REJECT
    if data.outcome == "answered" and data.tool_call_id is None and not rejects:
        snapshot.answered_in_step = True
    if rejects and snapshot.rejected is None:
        snapshot.rejected = data.interrupt_id
        snapshot.rejected_by = data.by
        snapshot.rejected_reason = data.reason
    call = snapshot.open_calls.get(data.tool_call_id or "")
    if question is None or call is None or data.outcome != "answered":
        return
    if question.kind is InterruptKind.OUTCOME and data.answer == Answer.RETRY:
        call.outcome_retry_id = data.interrupt_id
        call.status = ToolCallStatus.PROPOSED
    if question.kind is InterruptKind.APPROVAL and data.answer in {Answer.APPROVE, Answer.EDIT}:
        call.status = ToolCallStatus.PROPOSED
    if data.answer == Answer.EDIT and data.effective_digest is not None:
        call.args = data.effective_args
        call.args_ref = None
        call.args_digest = data.effective_digest


def _fold_model(snapshot: RunSnapshot, data: ModelEvent) -> None:
    snapshot.step_first_seq = snapshot.step_first_seq or snapshot.last_seq
    chain(snapshot, "model", data.text if data.text_ref is None else data.text_ref.digest)
    snapshot.model_calls += 1
    snapshot.input_tokens += data.usage.input_tokens
    snapshot.context_tokens = data.usage.input_tokens
    snapshot.output_tokens += data.usage.output_tokens
    snapshot.cost += data.usage.cost


def _fold_step(snapshot: RunSnapshot, data: StepEvent) -> None:
    snapshot.step_open = False
    snapshot.step_calls = {}
    snapshot.passed.clear()
    snapshot.answered_in_step = False
    snapshot.step_first_seq = None
    snapshot.step_index = data.index + 1
    snapshot.model_failures = 0
    invalid = snapshot.invalid_in_step and not snapshot.valid_in_step
    snapshot.corrections = snapshot.corrections + 1 if invalid else 0
    snapshot.invalid_in_step = snapshot.valid_in_step = False


def _fold_retry(snapshot: RunSnapshot, data: RetryEvent) -> None:
    snapshot.retries += 1
    if data.subject == "model":
        snapshot.model_failures += 1
    call = snapshot.open_calls.get(data.tool_call_id or "")
    if call is not None:
        call.failed_executions = data.failed
        call.outcome_retry_id = None  # spent by the execution that failed
        if call.overdue:
            call.status, call.overdue = ToolCallStatus.PROPOSED, False


def _fold_timeout(snapshot: RunSnapshot, data: TimeoutEvent) -> None:
    call = snapshot.open_calls.get(data.tool_call_id or "")
    if data.subject == "callback" and call is not None:
        call.status = ToolCallStatus.RUNNING
        call.by_callback, call.overdue = False, True


def _fold_cancel(snapshot: RunSnapshot, data: CancelEvent) -> None:
    if snapshot.cancel_epoch == 0:
        snapshot.cancelled_by, snapshot.cancel_reason = data.by, data.reason
    snapshot.cancel_epoch = data.epoch
    snapshot.cancel_action = data.action
    snapshot.cancel_options = data.options


def _fold_attempt(snapshot: RunSnapshot, data: AttemptEvent) -> None:
    snapshot.attempt = data.attempt


def _fold_plan(snapshot: RunSnapshot, data: PlanEvent) -> None:
    snapshot.plan = tuple(data.items)
    snapshot.plan_revision = data.revision


def _fold_artifact(snapshot: RunSnapshot, data: ArtifactEvent) -> None:
    snapshot.artifacts[data.name] = data.version


def _fold_child(snapshot: RunSnapshot, data: ChildEvent) -> None:
    """Keep what is open, and what finished and detached children used or may use."""
    if data.topic is not None:  # a subscriber's run: nothing of it comes back
        chain(snapshot, "delivered", data.child_run_id, data.topic, data.agent_id)
        snapshot.detached_children += data.phase == "spawned"
        return
    match data.phase:
        case "spawned":
            _fold_spawned(snapshot, data)
        case "awaited":
            child = snapshot.open_children.get(data.child_run_id or "")
            if child is not None:
                child.awaited = True
        case "refused":
            snapshot.invalid_in_step = True
        case "result":
            snapshot.open_children.pop(data.child_run_id or "", None)
            snapshot.children_use = add_use(snapshot.children_use, data.use)
            told = digest(data.result) if data.result_ref is None else data.result_ref.digest
            code = data.failure.code if data.failure is not None else None
            chain(snapshot, "child", data.child_run_id, data.state, told, code)


def _fold_spawned(snapshot: RunSnapshot, data: ChildEvent) -> None:
    snapshot.valid_in_step = True
    call = snapshot.open_calls.get(data.tool_call_id or "")
    if call is not None:
        call.status = ToolCallStatus.PENDING
    chain(snapshot, "spawned", data.child_run_id, data.key, data.agent_id)
    if data.participant is not None and data.thread_id is not None:
        snapshot.participants[data.participant] = data.thread_id
        chain(snapshot, "participant", data.participant, data.thread_id)
    if data.detached:
        snapshot.detached_children += 1
        snapshot.children_use = add_use(snapshot.children_use, data.use)
        return
    snapshot.open_children[data.child_run_id or ""] = OpenChild(
        child_run_id=data.child_run_id or "",
        awaited=data.awaited,
        tool_call_id=data.tool_call_id,
        use=data.use or ChildUse(),
    )


def add_use(first: ChildUse | None, second: ChildUse | None) -> ChildUse:
    """Return the sum of two uses; what is not said counts as nothing."""
    one, two = first or ChildUse(), second or ChildUse()
    return ChildUse(
        model_calls=(one.model_calls or 0) + (two.model_calls or 0),
        tool_calls=(one.tool_calls or 0) + (two.tool_calls or 0),
        tokens=(one.tokens or 0) + (two.tokens or 0),
        output_tokens=(one.output_tokens or 0) + (two.output_tokens or 0),
        cost=(one.cost or 0.0) + (two.cost or 0.0),
    )


def _fold_handoff(snapshot: RunSnapshot, data: HandoffEvent) -> None:
    snapshot.agent = (data.target, data.target_version)


def _fold_error(snapshot: RunSnapshot, data: ErrorEvent) -> None:
    if data.final:
        snapshot.ending = snapshot.ending or data.failure
    if data.failure.code in CORRECTABLE:
        snapshot.invalid_in_step = True


_FOLDERS: dict[type, Callable[[RunSnapshot, Any], None]] = {
    StateEvent: _fold_state,
    ActionEvent: _fold_action,
    ResultEvent: _fold_result,
    ApprovalRequestEvent: _fold_question,
    InterruptEvent: _fold_question,
    ResumeEvent: _fold_resume,
    ModelEvent: _fold_model,
    StepEvent: _fold_step,
    RetryEvent: _fold_retry,
    TimeoutEvent: _fold_timeout,
    CancelEvent: _fold_cancel,
    AttemptEvent: _fold_attempt,
    PlanEvent: _fold_plan,
    ArtifactEvent: _fold_artifact,
    ChildEvent: _fold_child,
    HandoffEvent: _fold_handoff,
    ErrorEvent: _fold_error,
    CustomEvent: fold_custom,
}
"""The event types a snapshot depends on; all others only move its `last_seq`."""
