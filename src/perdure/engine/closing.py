"""Bringing a run to its end when it is not its own planner that finishes it.

One result for each open call, every interrupt closed, the open step closed, the terminal state:
one commit, by the holder or, when nobody holds the run, by whoever ends it (decision 3).
"""

import math
from collections.abc import Callable, Mapping

import anyio
from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.origin import retried
from perdure.engine.ports import LocalStep, Place, ToolInvocation, ToolOutcome, ToolRunner
from perdure.engine.results import Known, add_result, runtime_result
from perdure.engine.snapshot import OpenCall, is_side_effect
from perdure.engine.undone import LEFT, calls_of, has_left
from perdure.engine.view import RunView
from perdure.protocol.events import ErrorEvent, ResumeEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.records import ToolCallRow
from perdure.protocol.states import (
    AttemptEnd,
    CancelOption,
    InterruptStatus,
    ParkedOn,
    RunState,
    ToolCallStatus,
    Transition,
)
from perdure.protocol.tools import ToolSpec
from perdure.store.commits import InterruptClose
from perdure.store.requests import TimerKind

EFFECTS_TOLD_MAX = 1000
_ENDS = frozenset({TimerKind.CLOSE, TimerKind.DEADLINE})

CANCELLED = Failure(
    code=FailureCode.RUN_CANCELLED, reason="the run was cancelled", stage=Stage.RUNTIME
)
ORPHANED = Failure(
    code=FailureCode.ORPHANED,
    reason="the run did not end in time after its parent was ended",
    stage=Stage.RUNTIME,
)
TIMED_OUT = Failure(
    code=FailureCode.RUN_TIMEOUT, reason="the run's total time is over", stage=Stage.RUNTIME
)


def close_run(
    draft: Draft,
    why: Transition,
    failure: Failure,
    *,
    known: Mapping[str, Known] | None = None,
    effects: list[dict[str, JsonValue]] | None = None,
) -> None:
    """Draft the end of the run: `failed` with that failure.

    `known` are results of open calls that came in time or by lookup. What was begun and cannot
    be known is `unknown`; what never began, or leaves nothing, is `cancelled`.

    While children are open the run does not end: what ran gets its result, the failure is kept,
    and the run is left to its closing, which ends the children first. So it is when a holder ends
    a run whose cancel asks that what it did is undone, or what it made discarded.
    """
    snapshot = draft.view.snapshot
    draft.is_closing = True
    undoes = CancelOption.COMPENSATE in snapshot.cancel_options
    asks = snapshot.cancel_options is not CancelOption.NONE
    if snapshot.open_children or (asks and draft.token is not None):
        _begin_ending(draft, failure, known or {})
        return
    cancelled = failure.code is FailureCode.RUN_CANCELLED
    if cancelled and snapshot.cancelled_by is not None:
        failure = _told_by(failure, snapshot.cancelled_by, snapshot.cancel_reason)
    for interrupt_id, question in list(snapshot.open_interrupts.items()):
        _close_question(draft, interrupt_id, question.tool_call_id, failure)
    reported = list(effects or [])
    for call in list(snapshot.open_calls.values()):
        end = _end_of(draft.view, call, failure, known or {})
        add_result(draft, call, end.outcome, by=end.by)
        if is_side_effect(call.side_effect):
            reported.append(_effect(call, end.outcome, undoes=undoes))
    if snapshot.step_open:
        draft.end_step("cancelled" if cancelled else "failed")
    draft.move(why, failure=failure, effects=reported or None)
    if draft.token is not None:
        draft.release(AttemptEnd.CANCELLED if cancelled else AttemptEnd.FINISHED)
    if cancelled or snapshot.cancel_epoch > 0:
        draft.with_checkpoint = False


def _told_by(failure: Failure, by: str, reason: str | None) -> Failure:
    """Return the failure with who cancelled and why: the end outlives the `cancel` event."""
    told: dict[str, JsonValue] = {"by": by}
    if reason is not None:
        told["reason"] = reason
    return failure.model_copy(update={"details": told})


def _end_of(view: RunView, call: OpenCall, failure: Failure, known: Mapping[str, Known]) -> Known:
    """Return what an open call ends with: a callback that was promised does not come any more."""
    found = known.get(call.tool_call_id)
    if found is None or found.outcome.result.status is ToolCallStatus.PENDING:
        return Known(outcome=_unfinished(view, call, failure), by="runtime")
    return found


def _begin_ending(draft: Draft, failure: Failure, known: Mapping[str, Known]) -> None:
    """Draft that the run is to end once its children have."""
    snapshot = draft.view.snapshot
    for call in list(snapshot.open_calls.values()):
        running = draft.view.executions_of(call.tool_call_id).running or call.by_callback
        if running or call.tool_call_id in known:
            end = _end_of(draft.view, call, failure, known)
            add_result(draft, call, end.outcome, by=end.by)
    if snapshot.state is RunState.WAITING_HUMAN and not snapshot.open_interrupts:
        draft.move(Transition.APPROVED)  # nobody is asked any more
    if snapshot.cancel_epoch == 0 and snapshot.ending is None:
        draft.add(ErrorEvent(failure=failure, final=True))
    if draft.token is not None:
        cancelled = snapshot.cancel_epoch > 0
        draft.release(AttemptEnd.CANCELLED if cancelled else AttemptEnd.PARKED)
    draft.parked_on = ParkedOn.CLOSING
    draft.ready_in_s = None
    draft.close_in_s = 0
    draft.with_checkpoint = snapshot.cancel_epoch == 0


def settle_known(draft: Draft, failure: Failure, known: Mapping[str, Known]) -> None:
    """Draft the results of open calls that are known, before the run is brought to its end."""
    snapshot = draft.view.snapshot
    for tool_call_id, found in known.items():
        for interrupt_id, question in list(snapshot.open_interrupts.items()):
            if question.tool_call_id == tool_call_id:
                _close_question(draft, interrupt_id, tool_call_id, failure)
        add_result(draft, snapshot.open_calls[tool_call_id], found.outcome, by=found.by)
    if snapshot.state is RunState.WAITING_HUMAN and not snapshot.open_interrupts:
        draft.move(Transition.APPROVED)  # nobody is asked any more


def _close_question(
    draft: Draft, interrupt_id: str, tool_call_id: str | None, failure: Failure
) -> None:
    seq = draft.add(
        ResumeEvent(
            interrupt_id=interrupt_id,
            outcome="cancelled",
            tool_call_id=tool_call_id,
            reason=failure.reason,
        )
    )
    draft.interrupt_closes.append(
        InterruptClose(interrupt_id=interrupt_id, status=InterruptStatus.CANCELLED, closed_seq=seq)
    )


def end_transition(state: RunState, failure: Failure) -> Transition:
    """Return the transition by which a failure ends a run that stands in `state`."""
    match failure.code:
        case FailureCode.RUN_CANCELLED:
            return Transition.CANCELLED
        case FailureCode.RUN_TIMEOUT | FailureCode.APPROVAL_TIMEOUT:
            return Transition.EXPIRED
        case _:
            pass
    match state:
        case RunState.PLANNING:
            return Transition.PLAN_ERROR
        case RunState.EXECUTING:
            return Transition.EXEC_ERROR
        case RunState.WAITING_HUMAN if failure.code is FailureCode.APPROVAL_REJECTED:
            return Transition.REJECTED
        case _:
            return Transition.EXPIRED


def _unfinished(view: RunView, call: OpenCall, failure: Failure) -> ToolOutcome:
    begun = _was_begun(view, call)
    if begun and leaves_doubt(call):
        return runtime_result(
            ToolCallStatus.UNKNOWN,
            FailureCode.TOOL_OUTCOME_UNKNOWN,
            f"the run ended ({failure.code}) before it was known what became of the call",
        )
    begun_text = "while it ran" if begun else "before it started"
    return runtime_result(
        ToolCallStatus.CANCELLED, failure.code, f"the run ended {begun_text}: {failure.reason}"
    )


def _effect(call: OpenCall, outcome: ToolOutcome, *, undoes: bool) -> dict[str, JsonValue]:
    told: dict[str, JsonValue] = {
        "tool_call_id": call.tool_call_id,
        "tool": call.tool,
        "status": outcome.result.status,
        "external_ref": outcome.result.external_ref or call.external_ref,
    }
    if undoes:
        told["compensation"] = "none" if outcome.result.status in LEFT else "not_needed"
    return told


async def finished_effects(core: Core, view: RunView) -> list[dict[str, JsonValue]]:
    """Return the side effects of finished calls: what cannot be undone by cancelling (R-9.4).

    Those that a retry shares with the runs it goes on from have their `run_id`. The first ones, when
    there are very many.
    """
    effects: list[dict[str, JsonValue]] = []
    known = set(view.snapshot.open_calls)
    async for row in calls_of(core, view.facts.run_id):
        known.add(row.tool_call_id)
        if await has_left(core, row):
            effects.append(effect_of(row))
        if len(effects) == EFFECTS_TOLD_MAX:
            return effects
    for shared in await retried(core.reader, view.facts):
        async for row in calls_of(core, shared.facts.run_id):
            is_shared = row.result_seq is not None and row.result_seq <= shared.until
            if is_shared and row.tool_call_id not in known and await has_left(core, row):
                effects.append({"run_id": row.run_id, **effect_of(row)})
            if len(effects) == EFFECTS_TOLD_MAX:
                return effects
    return effects


def effect_of(row: ToolCallRow) -> dict[str, JsonValue]:
    """Return what is told of the effect of a finished call."""
    return {
        "tool_call_id": row.tool_call_id,
        "tool": row.tool,
        "status": row.status,
        "external_ref": row.external_ref,
    }


def leaves_doubt(call: OpenCall) -> bool:
    """Tell whether it matters what became of a call that was begun: it may have left something."""
    return is_side_effect(call.side_effect) or not call.repeatable


def begun_calls(view: RunView) -> list[OpenCall]:
    """Return open calls whose tool may have acted: running, waiting for their callback, or a person
    was asked about it.
    """
    return [call for call in view.snapshot.open_calls.values() if _was_begun(view, call)]


def _was_begun(view: RunView, call: OpenCall) -> bool:
    running = view.executions_of(call.tool_call_id).running
    return running or call.by_callback or call.status is ToolCallStatus.RUNNING


async def look_up_open(view: RunView, tools: ToolRunner, timeout_s: float) -> dict[str, Known]:
    """Ask tools that can tell what became of calls that were begun and not ended, all at once.

    What is not known after `timeout_s` stays unknown: a closing is not kept from being written.
    """
    known: dict[str, Known] = {}

    async def ask(call: OpenCall, spec: ToolSpec) -> None:
        outcome = await tools.lookup(invocation_of(view, call, spec, timeout_s=timeout_s))
        if outcome is not None:
            known[call.tool_call_id] = Known(outcome=outcome, by="lookup")

    with anyio.move_on_after(timeout_s):
        async with anyio.create_task_group() as group:
            for call in begun_calls(view):
                spec = tools.find(call.tool, call.version)
                if spec is not None and spec.has_lookup:
                    group.start_soon(ask, call, spec)
    return known


async def is_for_others(core: Core, view: RunView, tools: ToolRunner | None) -> bool:
    """Tell whether an end is left to a worker, or to one that can look up what became of a call.

    To another worker while a call was begun whose tool is not here and is registered with a lookup;
    no longer than `cancel_deadline_s` after the end was due: there may be no such worker any more.
    """
    if tools is None:
        return any(leaves_doubt(call) for call in view.running_calls())
    begun = {(call.tool, call.version) for call in begun_calls(view)}
    missing = {key for key in begun if tools.find(*key) is None}
    if not missing or not await _has_lookup(core, missing):
        return False
    timers = await core.reader.timers_of(view.facts.run_id)
    due = [timer.due_at for timer in timers if timer.kind in _ENDS]
    late_s = (await core.reader.now() - min(due)).total_seconds() if due else math.inf
    return late_s < core.settings.cancel_deadline_s


async def _has_lookup(core: Core, missing: set[tuple[str, str | None]]) -> bool:
    return any(
        not missing.isdisjoint({(tool.name, tool.version), (tool.name, None)})
        and isinstance(tool.spec, dict)
        and tool.spec.get("has_lookup") is True
        for tool in await core.reader.list_tools()
    )


def invocation_of(
    view: RunView,
    call: OpenCall,
    spec: ToolSpec,
    *,
    timeout_s: float,
    on_late: Callable[[ToolOutcome], None] = lambda _: None,
    body: LocalStep | None = None,
    place: Place | None = None,
) -> ToolInvocation:
    """Return how a call is handed to its tool."""
    return ToolInvocation(
        spec=spec,
        args=call.args,
        effect_key=call.effect_key,
        tool_call_id=call.tool_call_id,
        run_id=view.facts.run_id,
        thread_id=view.facts.thread_id,
        step_index=call.step_index,
        execution=view.executions_of(call.tool_call_id).count,
        context=view.facts.context,
        caller=view.facts.caller,
        timeout_s=timeout_s,
        on_late=on_late,
        body=body,
        place=place,
    )
