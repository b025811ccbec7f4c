"""Pausing a run at a breakpoint, and letting it go on (R-8.4).

A pause is an open interrupt of kind `breakpoint`: the run waits, held by nobody, through restarts.
It names its point by its key, belongs to no call, takes no value, and is not an approval: a call
that needs one still has to get it. What was passed is read from the log, so each point pauses once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.resuming import go_on
from perdure.engine.snapshot import OpenCall
from perdure.engine.unheld import intervene
from perdure.engine.view import RunView
from perdure.protocol.breakpoints import BREAKPOINTS_EVENT_NAME, Breakpoint, Point
from perdure.protocol.codec import digest
from perdure.protocol.errors import AlreadyAnswered, Conflict, Gone, NotFound
from perdure.protocol.events import CustomEvent, InterruptEvent, ResumeEvent
from perdure.protocol.ids import INTERRUPT
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import Answer, InterruptKind, InterruptStatus, ToolCallStatus
from perdure.store.commits import InterruptClose, NewInterrupt

Mode = Literal["next", "step"]


@dataclass(frozen=True, slots=True)
class _Pause:
    at: Point
    key: str
    call: OpenCall | None


def _points(view: RunView) -> tuple[Breakpoint, ...]:
    changed = view.snapshot.breakpoints
    return view.facts.options.breakpoints if changed is None else changed


def _is_set(view: RunView, at: Point, call: OpenCall | None = None) -> bool:
    for point in _points(view):
        known = call is None or call.args_ref is None or call.args is not None
        if point.at == at and (call is None or point.holds_for(call.tool, call.args, known=known)):
            return True
    return False


def is_held(view: RunView, call: OpenCall) -> bool:
    """Tell whether a call must not begin, because a pause is due before it."""
    if not _points(view):
        return False
    return any(pause.at != "before_tool" or pause.call is call for pause in _due(view))


def _due(view: RunView) -> Iterator[_Pause]:
    """Yield the pauses that are due before anything else of the step begins."""
    snapshot = view.snapshot
    step, passed = snapshot.step_index, snapshot.passed
    ready = [
        call
        for call in snapshot.open_calls.values()
        if call.status is ToolCallStatus.PROPOSED
        and not view.executions_of(call.tool_call_id).count
    ]
    ended = [
        call
        for call in snapshot.step_calls.values()
        if call.tool_call_id not in snapshot.open_calls
    ]
    begun = bool(ended) or any(
        view.executions_of(tool_call_id).count for tool_call_id in snapshot.open_calls
    )
    key = f"before_step:{step}"
    if ready and not begun and key not in passed and _is_set(view, "before_step"):
        yield _Pause("before_step", key, None)
    for call in ended:
        key = f"after_tool:{call.tool_call_id}"
        if key not in passed and _is_set(view, "after_tool", call):
            yield _Pause("after_tool", key, call)
    for call in ready:
        key = f"before_tool:{call.tool_call_id}"
        if key not in passed and _is_set(view, "before_tool", call):
            yield _Pause("before_tool", key, call)


def _next_pause(view: RunView) -> _Pause | None:
    snapshot = view.snapshot
    if any(item.kind is InterruptKind.BREAKPOINT for item in snapshot.open_interrupts.values()):
        return None
    due = next(_due(view), None) if _points(view) else None
    if due is not None or snapshot.open_calls or snapshot.open_interrupts:
        return due
    key = f"after_step:{snapshot.step_index}"
    wanted = snapshot.single_step or _is_set(view, "after_step")
    return _Pause("after_step", key, None) if wanted and key not in snapshot.passed else None


def open_due(draft: Draft) -> None:
    """Draft the pause that is due now that nothing runs, if there is one."""
    pause = _next_pause(draft.view)
    if pause is None:
        return
    payload: dict[str, JsonValue] = {"at": pause.at, "step_index": draft.view.snapshot.step_index}
    if pause.call is not None:
        payload |= {"tool": pause.call.tool, "tool_call_id": pause.call.tool_call_id}
    interrupt_id = draft.ids.new(INTERRUPT)
    seq = draft.add(
        InterruptEvent(
            interrupt_id=interrupt_id,
            kind=InterruptKind.BREAKPOINT,
            key=pause.key,
            title=f"Paused {pause.at.replace('_', ' ')}",
            payload=payload,
        )
    )
    draft.new_interrupts.append(
        NewInterrupt(
            interrupt_id=interrupt_id,
            kind=InterruptKind.BREAKPOINT,
            opened_seq=seq,
            key=pause.key,
        )
    )


async def continue_run(
    core: Core,
    tenant_id: str,
    run_id: str,
    interrupt_id: str,
    *,
    mode: Mode,
    by: str,
    breakpoints: tuple[Breakpoint, ...] | None = None,
) -> None:
    """Let a paused run go on: to its next breakpoint, or to the end of one step.

    `breakpoints` replace those of the run. The same call again changes nothing. Raises NotFound,
    Conflict (an interrupt of another kind), AlreadyAnswered (continued otherwise), Gone (cancelled).
    """
    answer = Answer.STEP if mode == "step" else Answer.CONTINUE
    wanted: list[JsonValue] | None = None
    if breakpoints is not None:
        wanted = [point.model_dump(mode="json") for point in breakpoints]
    said = digest([answer, wanted])
    before = await _paused(core, tenant_id, run_id, interrupt_id)

    def change(row: RunRow, draft: Draft) -> bool:
        if interrupt_id not in draft.view.snapshot.open_interrupts or row.hot.cancel_epoch > 0:
            return False
        seq = draft.add(
            ResumeEvent(interrupt_id=interrupt_id, outcome="answered", answer=answer, by=by)
        )
        draft.interrupt_closes.append(
            InterruptClose(
                interrupt_id=interrupt_id,
                status=InterruptStatus.ANSWERED,
                closed_seq=seq,
                answer=answer,
                answer_digest=said,
                answered_by=by,
            )
        )
        if wanted is not None:
            draft.add(CustomEvent(name=BREAKPOINTS_EVENT_NAME, value=wanted))
        go_on(row, draft)
        return True

    if before.status is InterruptStatus.PENDING:
        if await intervene(core, run_id, change) is not None:
            return
        before = await _paused(core, tenant_id, run_id, interrupt_id)
    if before.status is not InterruptStatus.ANSWERED:
        raise Gone("the run is cancelled", details={"status": before.status})
    if before.answer_digest != said:
        raise AlreadyAnswered("the run was continued otherwise", details={"answer": before.answer})


async def _paused(core: Core, tenant_id: str, run_id: str, interrupt_id: str) -> InterruptRow:
    row = await core.reader.find_interrupt(tenant_id, interrupt_id)
    if row is None or row.run_id != run_id:
        raise NotFound("the run has no such interrupt", field="/interrupt_id")
    if row.kind is not InterruptKind.BREAKPOINT:
        raise Conflict(f"an interrupt of kind {row.kind} wants an answer, not to be continued")
    return row
