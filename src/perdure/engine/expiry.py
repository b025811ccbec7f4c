"""What happens when nobody answers an interrupt in time (R-8.3)."""

from perdure.engine.closing import close_run
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.results import add_result, runtime_result
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


async def expire_interrupt(core: Core, run_id: str, interrupt_id: str) -> bool:
    """Close an interrupt as expired; its run fails, or goes on without, as it was opened.

    True when this call closed it.
    """

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
                limit_ms=0,
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
            close_run(draft, Transition.EXPIRED, failure)
            return True
        call = draft.view.snapshot.open_calls.get(question.tool_call_id or "")
        if call is not None:
            outcome = runtime_result(
                ToolCallStatus.DENIED, FailureCode.APPROVAL_TIMEOUT, "nobody answered in time"
            )
            add_result(draft, call, outcome, by="runtime")
        go_on(core, row, draft)
        return True

    return await intervene(core, run_id, change) is not None
