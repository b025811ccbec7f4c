"""Who may decide an approval: as it was asked, handed on, or passed to others in time (R-8.3).

What happens to an approval between its question and its answer stands in the log, in custom
events of the runtime: `delegated`, `escalated`, `undecidable`, `notified`, `not_notified`. The
fold keeps who may decide by now.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.resuming import time_left_s
from perdure.engine.snapshot import APPROVAL_EVENT_NAME, OpenInterrupt
from perdure.engine.unheld import intervene
from perdure.protocol.errors import Conflict, Forbidden, Gone, Invalid, NotFound
from perdure.protocol.events import CustomEvent
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import InterruptKind, InterruptStatus, RunState
from perdure.store.commits import NoticeDue


@dataclass(frozen=True, slots=True, kw_only=True)
class Delegated:
    """The approval after it was handed on; `replayed` when it had been before."""

    row: InterruptRow
    replayed: bool


def note_opened(draft: Draft, interrupt_id: str, principals: frozenset[str] | None) -> None:
    """Draft what an approval that was just asked for needs: a notice, or a flag at once."""
    question = draft.view.snapshot.open_interrupts[interrupt_id]
    if question.notifies:
        draft.notices.append(NoticeDue(interrupt_id=interrupt_id, due_in_s=0))
    elif question.escalate_after_s is not None:
        due = NoticeDue(interrupt_id=interrupt_id, due_in_s=question.escalate_after_s)
        draft.notices.append(due)
    flag_undecidable(draft, question, principals)


def flag_undecidable(
    draft: Draft, question: OpenInterrupt, principals: frozenset[str] | None
) -> None:
    """Draft the flag of an approval that nobody may decide, as far as it is known who there is."""
    if principals is None or not question.approvers or principals & set(question.approvers):
        return
    note(
        draft,
        question.interrupt_id,
        "undecidable",
        approvers=list(question.approvers),
        reason="none of the approvers can answer here",
    )


def note(draft: Draft, interrupt_id: str, phase: str, **said: JsonValue) -> None:
    """Draft a line of an approval's history."""
    value: dict[str, JsonValue] = {"approval_id": interrupt_id, "phase": phase, **said}
    draft.add(CustomEvent(name=APPROVAL_EVENT_NAME, value=value))


def leave_as_it_is(row: RunRow, draft: Draft) -> None:
    """Draft that the run waits as before: a write beside no holder says anew what it waits for."""
    draft.with_checkpoint = False
    if row.hot.lease_owner is not None:
        return
    draft.parked_on = row.hot.parked_on
    if draft.view.snapshot.state is not RunState.WAITING_HUMAN:
        draft.ready_in_s = time_left_s(row, draft)


async def _open_approval(core: Core, tenant_id: str, interrupt_id: str) -> InterruptRow:
    row = await core.reader.find_interrupt(tenant_id, interrupt_id)
    if row is None:
        raise NotFound("no such interrupt", field="interrupt_id")
    if row.kind is not InterruptKind.APPROVAL:
        raise Conflict(f"an interrupt of kind {row.kind} is for whoever may answer")
    if row.status is not InterruptStatus.PENDING:
        raise Gone(f"the approval was {row.status}", details={"status": row.status})
    return row


async def delegate(
    core: Core, tenant_id: str, interrupt_id: str, *, by: str, to: Sequence[str], reason: str | None
) -> Delegated:
    """Hand an open approval on: `to` may decide it in the place of `by`.

    The same again changes nothing. Raises NotFound; Conflict for what is no approval; Gone when it
    is closed or its run is being ended; Forbidden for who may not decide it; Invalid when nobody
    of `to` can answer here.
    """
    row = await _open_approval(core, tenant_id, interrupt_id)
    known = core.settings.principals
    if known is not None and not known & set(to):
        raise Invalid("nobody of these can answer here", field="/to")
    replayed = False
    closed = Gone("the approval is closed, or its run is being ended")

    def change(run: RunRow, draft: Draft) -> bool:
        nonlocal replayed
        question = draft.view.snapshot.open_interrupts.get(interrupt_id)
        if question is None or run.hot.cancel_epoch > 0 or draft.view.snapshot.ending is not None:
            raise closed
        others = [name for name in question.approvers if name != by]
        approvers = [*others, *(name for name in dict.fromkeys(to) if name not in others)]
        replayed = set(question.approvers) == set(approvers)
        if replayed:
            return False
        if question.approvers and by not in question.approvers:
            raise Forbidden("this approval is for others to decide")
        note(draft, interrupt_id, "delegated", by=by, approvers=list(approvers), reason=reason)
        if question.notifies:
            draft.notices.append(NoticeDue(interrupt_id=interrupt_id, due_in_s=0))
        leave_as_it_is(run, draft)
        return True

    if await intervene(core, row.run_id, change) is None and not replayed:
        raise closed
    after = await core.reader.find_interrupt(tenant_id, interrupt_id)
    return Delegated(row=after or row, replayed=replayed)
