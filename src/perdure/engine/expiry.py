"""What happens when nobody answers an interrupt in time (R-8.3)."""

from datetime import timedelta

from perdure.engine.closing import begun_calls, close_run, leaves_doubt, look_up_open
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.load import load_view
from perdure.engine.ports import ToolRunner
from perdure.engine.results import Known, add_result, runtime_result
from perdure.engine.resuming import go_on
from perdure.engine.unheld import intervene
from perdure.protocol.events import ResumeEvent, TimeoutEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.runs import RunRow
from perdure.protocol.states import (
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    ToolCallStatus,
    Transition,
)
from perdure.store.commits import InterruptClose

LOOKUP_TIMEOUT_S = 10.0


async def expire_interrupt(
    core: Core, run_id: str, interrupt_id: str, tools: ToolRunner | None
) -> bool:
    """Close an interrupt as expired; its run fails, or goes on without, as it was opened.

    True when this call closed it. Before a run fails, tools are asked what became of calls that
    were begun; without `tools` such a run is left to a process that has them.
    """
    asked = await core.reader.find_interrupt(None, interrupt_id)
    if asked is None:
        return False
    known = await _known_at_the_end(core, run_id, tools) if asked.on_expiry is OnExpiry.FAIL else {}
    if known is None:
        return False
    limit = asked.expires_at - asked.created_at if asked.expires_at is not None else timedelta()

    def change(row: RunRow, draft: Draft) -> bool:
        if row.hot.lease_owner is not None or row.hot.cancel_epoch > 0:
            return False
        question = draft.view.snapshot.open_interrupts.get(interrupt_id)
        if question is None or draft.view.snapshot.ending is not None:
            return False
        approval = question.kind is InterruptKind.APPROVAL
        draft.add(
            TimeoutEvent(
                subject="approval" if approval else "interrupt",
                limit_ms=round(limit.total_seconds() * 1000),
                interrupt_id=interrupt_id,
            )
        )
        seq = draft.add(
            ResumeEvent(
                interrupt_id=interrupt_id,
                outcome="expired",
                tool_call_id=question.tool_call_id,
            )
        )
        draft.interrupt_closes.append(
            InterruptClose(
                interrupt_id=interrupt_id, status=InterruptStatus.EXPIRED, closed_seq=seq
            )
        )
        if question.on_expiry is OnExpiry.FAIL:
            failure = Failure(
                code=FailureCode.APPROVAL_TIMEOUT,
                reason="nobody answered in time",
                stage=Stage.WAITING,
                details={"interrupt_id": interrupt_id},
            )
            close_run(draft, Transition.EXPIRED, failure, known=known)
            return True
        call = draft.view.snapshot.open_calls.get(question.tool_call_id or "")
        if call is not None:
            outcome = runtime_result(
                ToolCallStatus.DENIED, FailureCode.APPROVAL_TIMEOUT, "nobody answered in time"
            )
            add_result(draft, call, outcome, by="runtime")
        go_on(row, draft)
        return True

    return await intervene(core, run_id, change) is not None


async def _known_at_the_end(
    core: Core, run_id: str, tools: ToolRunner | None
) -> dict[str, Known] | None:
    """Return what tools know of calls that were begun; None: only another process can ask them."""
    row = await core.reader.find_run(None, run_id)
    if row is None or row.hot.lease_owner is not None:
        return {}
    view = await load_view(core, row, with_messages=False)
    if tools is None:
        return None if any(leaves_doubt(call) for call in begun_calls(view)) else {}
    return await look_up_open(view, tools, LOOKUP_TIMEOUT_S)
