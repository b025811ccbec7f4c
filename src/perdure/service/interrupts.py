"""Interrupts: the inbox, what is asked with the canonical arguments, and answering."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, JsonValue

from perdure.engine.answers import Reply, answer_interrupt
from perdure.engine.approvals import delegate
from perdure.engine.snapshot import APPROVAL_EVENT_NAME
from perdure.protocol.base import Model
from perdure.protocol.errors import Conflict, NotFound
from perdure.protocol.events import (
    ActionEvent,
    ApprovalRequestEvent,
    CustomEvent,
    InterruptEvent,
    ResumeEvent,
)
from perdure.protocol.ids import INTERRUPT
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import InterruptRow, ToolCallRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import ANSWERS, Answer, InterruptStatus
from perdure.service.base import Service, Slice, check_storable, cut, known, own_run
from perdure.service.principal import Principal
from perdure.service.tool_calls import data_of
from perdure.service.trees import interrupts_in_tree
from perdure.service.values import events_at, full
from perdure.service.views import AskedAction, HandlingView, InterruptView
from perdure.store.reader import InterruptFilter

_OPEN_MAX = 200
_PAGE = 500


class AnswerRequest(Model):
    """An answer to an interrupt. Which fields matter depends on `answer`."""

    answer: Answer
    value: JsonValue = Field(default=None, description="the value of `respond`")
    args: JsonValue = Field(default=None, description="the edited arguments of `edit`")
    reason: str | None = Field(default=None, max_length=5000)
    external_ref: str | None = Field(
        default=None, max_length=1000, description="of `happened`: the effect's id outside"
    )


@dataclass(frozen=True, slots=True)
class Answered:
    """The interrupt after the answer; `replayed` when the same answer was given before."""

    interrupt: InterruptView
    replayed: bool


async def list_interrupts(
    service: Service,
    principal: Principal,
    *,
    status: InterruptStatus | None,
    run_id: str | None,
    after: str | None,
    limit: int,
    descendants: bool = False,
) -> Slice[InterruptView]:
    """Return interrupts, oldest first; with `descendants` also those of all runs below.

    Raises NotFound for a run that is not the caller's.
    """
    row = await own_run(service, principal, run_id) if run_id is not None else None
    if row is not None and descendants:
        found = await interrupts_in_tree(service, row, status=status, after=after, limit=limit + 1)
    else:
        where = InterruptFilter(status=status, run_id=run_id)
        found = await service.reader.list_interrupts(
            principal.tenant_id, where, after=after, limit=limit + 1
        )
    rows, more = cut(found, limit)
    views = [await _view(service, principal, row, whole=False) for row in rows]
    return Slice(views, rows[-1].interrupt_id if more else None)


async def get_interrupt(service: Service, principal: Principal, identifier: str) -> InterruptView:
    """Return one interrupt with all that is asked. Raises NotFound."""
    known(INTERRUPT, identifier, "interrupt")
    row = await service.reader.find_interrupt(principal.tenant_id, identifier)
    if row is None:
        raise NotFound("there is no such interrupt")
    return await _view(service, principal, row, whole=True)


async def resolve(
    service: Service, principal: Principal, identifier: str, request: AnswerRequest
) -> Answered:
    """Answer an interrupt; the same answer again is accepted and changes nothing.

    Raises NotFound, AlreadyAnswered (with the first answer), Gone, Invalid.
    """
    known(INTERRUPT, identifier, "interrupt")
    reply = Reply(
        answer=request.answer,
        by=principal.name,
        value=request.value,
        args=request.args,
        reason=request.reason,
        external_ref=request.external_ref,
    )
    answered = await answer_interrupt(service.core, principal.tenant_id, identifier, reply)
    view = await _view(service, principal, answered.row, whole=True)
    return Answered(view, answered.replayed)


class DelegateRequest(Model):
    """Who is to decide an approval in the place of the caller."""

    to: tuple[Annotated[str, Field(min_length=1, max_length=200)], ...] = Field(
        min_length=1, max_length=50, description="names of approvers"
    )
    reason: str | None = Field(default=None, max_length=2000, description="why, for people")


async def delegate_approval(
    service: Service, principal: Principal, identifier: str, request: DelegateRequest
) -> Answered:
    """Hand an approval on; the same again changes nothing.

    Raises NotFound, Conflict (no approval), Gone, Forbidden, Invalid (nobody of them can answer).
    """
    known(INTERRUPT, identifier, "interrupt")
    for index, name in enumerate(request.to):
        check_storable(name, f"/to/{index}")
    check_storable(request.reason, "/reason")
    done = await delegate(
        service.core,
        principal.tenant_id,
        identifier,
        by=principal.name,
        to=request.to,
        reason=request.reason,
    )
    return Answered(await _view(service, principal, done.row, whole=True), done.replayed)


async def resolve_only(
    service: Service, principal: Principal, run_id: str, request: AnswerRequest
) -> Answered:
    """Answer the one open interrupt of a run and of all below it.

    Raises NotFound for the run, Conflict when none or several are open (details list their ids),
    and what `resolve` raises.
    """
    row = await own_run(service, principal, run_id)
    found = await interrupts_in_tree(
        service, row, status=InterruptStatus.PENDING, after=None, limit=_OPEN_MAX
    )
    ids: list[JsonValue] = [row.interrupt_id for row in found]
    if len(found) != 1:
        what = "several interrupts are open; name one" if found else "no interrupt is open"
        raise Conflict(what, details={"open_interrupts": ids})
    return await resolve(service, principal, found[0].interrupt_id, request)


async def _view(
    service: Service, principal: Principal, row: InterruptRow, *, whole: bool
) -> InterruptView:
    run = await own_run(service, principal, row.run_id)
    call = None
    if row.tool_call_id is not None:
        call = await service.reader.find_tool_call(principal.tenant_id, row.tool_call_id)
    seqs = {row.opened_seq, row.closed_seq or row.opened_seq}
    if call is not None:
        seqs.add(call.action_seq)
    events = await events_at(service.reader, row.run_id, seqs)
    asked = _asked(events.get(row.opened_seq))
    resume = data_of(events.get(row.closed_seq or 0), ResumeEvent)
    action = None if call is None else _action(call, events.get(call.action_seq))
    view = _made(run, row, asked, resume, action)
    if isinstance(asked, ApprovalRequestEvent):
        lines = await _handling(service, row)
        named = [line.approvers for line in lines if line.phase in {"delegated", "escalated"}]
        update: dict[str, object] = {"handling": lines}
        if named:
            update["approvers"] = named[-1]
        view = view.model_copy(update=update)
    return await _whole(service, view) if whole else view


async def _handling(service: Service, row: InterruptRow) -> list[HandlingView]:
    """Return what happened to an approval between its question and its answer."""
    found: list[HandlingView] = []
    seq, last = row.opened_seq, row.closed_seq
    while last is None or seq + 1 < last:
        limit = _PAGE if last is None else min(_PAGE, last - seq - 1)
        page = await service.reader.events_after(row.run_id, seq, limit=limit)
        if not page:
            break
        for event in page:
            data = data_of(event, CustomEvent)
            value = data.value if data is not None and data.name == APPROVAL_EVENT_NAME else None
            if isinstance(value, dict) and value.get("approval_id") == row.interrupt_id:
                found.append(HandlingView.model_validate({**value, "at": event.at}))
        seq = page[-1].seq
    return found


def _asked(event: RecordedEvent | None) -> ApprovalRequestEvent | InterruptEvent | None:
    return data_of(event, ApprovalRequestEvent) or data_of(event, InterruptEvent)


def _action(call: ToolCallRow, event: RecordedEvent | None) -> AskedAction:
    data = data_of(event, ActionEvent)
    return AskedAction.model_construct(
        tool_call_id=call.tool_call_id,
        tool=call.tool,
        version=call.version,
        args=None if data is None else data.args,
        args_ref=None if data is None else data.args_ref,
        args_digest=call.args_digest,
        side_effect=call.side_effect,
    )


def _made(
    run: RunRow,
    row: InterruptRow,
    asked: ApprovalRequestEvent | InterruptEvent | None,
    resume: ResumeEvent | None,
    action: AskedAction | None,
) -> InterruptView:
    approval = asked if isinstance(asked, ApprovalRequestEvent) else None
    question = asked if isinstance(asked, InterruptEvent) else None
    return InterruptView.model_construct(
        interrupt_id=row.interrupt_id,
        run_id=row.run_id,
        thread_id=run.facts.thread_id,
        agent_id=run.facts.agent_id,
        tenant_id=row.tenant_id,
        kind=row.kind,
        status=row.status,
        key=row.key,
        title="" if asked is None else asked.title,
        reason="" if approval is None else approval.reason,
        risk=None if approval is None else approval.risk,
        payload=None if question is None else question.payload,
        payload_ref=None if question is None else question.payload_ref,
        answer_schema=None if question is None else question.answer_schema,
        artifact_ref=None if approval is None else approval.artifact_ref,
        requested_actions=[] if approval is None else list(approval.requested_actions),
        approvers=[] if approval is None else list(approval.approvers),
        handling=[],
        action=action,
        definition_digest=row.definition_digest,
        answers=list(ANSWERS[row.kind]),
        expires_at=row.expires_at,
        on_expiry=row.on_expiry,
        answer=row.answer,
        value=None if resume is None else resume.value,
        effective_args=None if resume is None else resume.effective_args,
        answer_reason=None if resume is None else resume.reason,
        answered_by=row.answered_by,
        answered_at=row.answered_at,
        created_at=row.created_at,
    )


async def _whole(service: Service, view: InterruptView) -> InterruptView:
    """Return the view with a payload and arguments that are held by reference fetched."""
    reader, tenant = service.reader, view.tenant_id
    update: dict[str, object] = {}
    if view.payload_ref is not None:
        update["payload"] = await full(reader, tenant, view.payload, view.payload_ref)
    action = view.action
    if action is not None and action.args_ref is not None:
        args = await full(reader, tenant, action.args, action.args_ref)
        update["action"] = action.model_copy(update={"args": args})
    return view.model_copy(update=update) if update else view
