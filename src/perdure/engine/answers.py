"""Answering an interrupt: once, exactly at the point that asked (R-8.2)."""

from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.closing import close_run
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.edits import check_edit
from perdure.engine.ports import ToolOutcome
from perdure.engine.results import add_result, runtime_result
from perdure.engine.resuming import go_on
from perdure.engine.schema import problem_with_value
from perdure.engine.snapshot import OpenCall, OpenInterrupt
from perdure.engine.steps import rejection
from perdure.engine.unheld import intervene
from perdure.protocol.base import format_time
from perdure.protocol.codec import digest
from perdure.protocol.errors import AlreadyAnswered, Forbidden, Gone, Invalid, NotFound
from perdure.protocol.events import ResumeEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import (
    ANSWERS,
    Answer,
    InterruptKind,
    InterruptStatus,
    RunState,
    ToolCallStatus,
    Transition,
)
from perdure.protocol.tools import ToolResult, ToolSpec, read_spec
from perdure.store.commits import CallUpdate, InterruptClose


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer as it is given. `args` are the edited arguments of an approval."""

    answer: Answer
    by: str
    value: JsonValue = None
    args: JsonValue = None
    reason: str | None = None
    external_ref: str | None = None

    def digest(self) -> str:
        """Return what makes two answers the same: all but who gave them and why."""
        return digest([self.answer, self.value, self.args, self.external_ref])


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The interrupt after the answer; `replayed` when the identical answer was given before."""

    row: InterruptRow
    replayed: bool


async def answer_interrupt(core: Core, tenant_id: str, interrupt_id: str, reply: Reply) -> Answered:
    """Close a pending interrupt and let its run go on.

    Raises NotFound; AlreadyAnswered (details show the first answer) when it has another answer;
    Gone when it expired or was cancelled; Conflict when arguments are edited that the call was begun
    with; Forbidden when somebody else must decide; Invalid when
    the answer does not fit its kind, its schema, or (edited arguments) the tool's schema. An answer
    that comes before the expiry was acted upon is taken: no clock but the store's decides.
    """
    before = await core.reader.find_interrupt(tenant_id, interrupt_id)
    if before is None:
        raise NotFound("no such interrupt", field="interrupt_id")
    if before.status is not InterruptStatus.PENDING:
        return _replay(before, reply)
    _check_kind(before.kind, reply)
    specs = await _specs(core, reply)
    if reply.answer is Answer.EDIT:
        await check_edit(core, before, reply.args)

    def change(row: RunRow, draft: Draft) -> bool:
        question = draft.view.snapshot.open_interrupts.get(interrupt_id)
        ending = draft.view.snapshot.ending is not None
        if question is None or row.hot.cancel_epoch > 0 or ending:
            return False
        _check(question, draft.view.snapshot.open_calls, reply, specs)
        _draft_answer(row, draft, question, reply)
        return True

    written = await intervene(core, before.run_id, change)
    after = await core.reader.find_interrupt(tenant_id, interrupt_id)
    if after is None:
        raise NotFound("no such interrupt", field="interrupt_id")
    if written is not None:
        return Answered(row=after, replayed=False)
    if after.status is InterruptStatus.PENDING:
        raise Gone("the run is being ended")
    return _replay(after, reply)


def _replay(row: InterruptRow, reply: Reply) -> Answered:
    if row.status is not InterruptStatus.ANSWERED:
        raise Gone(f"the interrupt was {row.status}", details={"status": row.status})
    if row.answer_digest == reply.digest():
        return Answered(row=row, replayed=True)
    answered_at = format_time(row.answered_at) if row.answered_at is not None else None
    raise AlreadyAnswered(
        f"the interrupt was answered before, with {row.answer} by {row.answered_by}",
        details={
            "answer": row.answer,
            "answered_by": row.answered_by,
            "answered_at": answered_at,
            "interrupt_id": row.interrupt_id,
        },
    )


def _check_kind(kind: InterruptKind, reply: Reply) -> None:
    allowed = ANSWERS[kind]
    if kind is InterruptKind.BREAKPOINT:
        raise Invalid("a breakpoint takes no answer: continue its run", field="/answer")
    if reply.answer not in allowed:
        raise Invalid(f"an interrupt of kind {kind} takes {', '.join(allowed)}", field="/answer")
    if reply.answer is Answer.EDIT and reply.args is None:
        raise Invalid("an edit needs the whole new arguments", field="/args")
    if reply.answer is not Answer.EDIT and reply.args is not None:
        raise Invalid("only an edit takes arguments", field="/args")
    if reply.answer in {Answer.APPROVE, Answer.EDIT} and reply.value is not None:
        raise Invalid("an approval takes no value: the call runs", field="/value")
    wordless = reply.answer is Answer.RESPOND and reply.value is None
    if wordless and kind is InterruptKind.APPROVAL:
        raise Invalid("a response to an approval needs what to tell the planner", field="/value")


async def _specs(core: Core, reply: Reply) -> dict[tuple[str, str], ToolSpec]:
    """Return the registered tools, which edited arguments are checked against."""
    if reply.answer is not Answer.EDIT:
        return {}
    read = [(tool, read_spec(tool.spec)) for tool in await core.reader.list_tools()]
    return {(tool.name, tool.version): spec for tool, spec in read if spec is not None}


def _check(
    question: OpenInterrupt,
    calls: dict[str, OpenCall],
    reply: Reply,
    specs: dict[tuple[str, str], ToolSpec],
) -> None:
    if question.approvers and reply.by not in question.approvers:
        raise Forbidden("this approval is for others to decide")
    if question.answer_schema is not None and reply.answer is Answer.RESPOND:
        problem = problem_with_value(question.answer_schema, reply.value)
        if problem is not None:
            raise Invalid(f"the answer does not fit its schema at {problem}", field="/value")
    if reply.answer is Answer.EDIT:
        call = calls.get(question.tool_call_id or "")
        if call is None:
            raise Invalid(
                "this approval has no call whose arguments could be edited", field="/answer"
            )
        spec = specs.get((call.tool, call.version or ""))
        problem = problem_with_value(spec.input_schema, reply.args) if spec is not None else None
        if problem is not None:
            raise Invalid(f"the arguments do not fit {call.tool} at {problem}", field="/args")


def _draft_answer(row: RunRow, draft: Draft, question: OpenInterrupt, reply: Reply) -> None:
    edited = digest(reply.args) if reply.answer is Answer.EDIT else None
    value = draft.keep(reply.value)
    if value.ref is not None:
        raise Invalid("the answer is larger than an inline value", field="/value")
    call = draft.view.snapshot.open_calls.get(question.tool_call_id or "")
    seq = draft.add(
        ResumeEvent(
            interrupt_id=question.interrupt_id,
            outcome="answered",
            answer=reply.answer,
            value=reply.value,
            by=reply.by,
            reason=reply.reason,
            tool_call_id=question.tool_call_id,
            effective_args=reply.args,
            effective_digest=edited,
        )
    )
    draft.interrupt_closes.append(
        InterruptClose(
            interrupt_id=question.interrupt_id,
            status=InterruptStatus.ANSWERED,
            closed_seq=seq,
            answer=reply.answer,
            answer_digest=reply.digest(),
            answered_by=reply.by,
            effective_digest=edited,
        )
    )
    if call is not None:
        _draft_call_answer(draft, call, question, reply, edited)
    snapshot = draft.view.snapshot
    if snapshot.rejected is not None and snapshot.state is RunState.WAITING_HUMAN:
        close_run(draft, Transition.REJECTED, rejection(snapshot))
    else:
        go_on(row, draft)


def _draft_call_answer(
    draft: Draft, call: OpenCall, question: OpenInterrupt, reply: Reply, edited: str | None
) -> None:
    match question.kind, reply.answer:
        case InterruptKind.APPROVAL, Answer.APPROVE | Answer.EDIT:
            draft.call_updates.append(
                CallUpdate(
                    tool_call_id=call.tool_call_id,
                    status=ToolCallStatus.PROPOSED,
                    effective_digest=edited,
                )
            )
        case InterruptKind.OUTCOME, Answer.RETRY:
            draft.call_updates.append(
                CallUpdate(tool_call_id=call.tool_call_id, status=ToolCallStatus.PROPOSED)
            )
        case _:
            add_result(draft, call, _outcome_of(reply), by="person")


def _outcome_of(reply: Reply) -> ToolOutcome:
    """Return the result that an answer gives to a call by itself."""
    match reply.answer:
        case Answer.HAPPENED:
            return ToolOutcome(
                result=ToolResult(
                    status=ToolCallStatus.SUCCEEDED,
                    output=reply.value,
                    external_ref=reply.external_ref,
                )
            )
        case Answer.SKIP:
            return runtime_result(
                ToolCallStatus.FAILED,
                FailureCode.TOOL_OUTCOME_UNKNOWN,
                reply.reason or "a person skipped the call; whether it took effect is not known",
            )
        case Answer.RESPOND:
            told = runtime_result(
                ToolCallStatus.DENIED,
                FailureCode.POLICY_DENIED,
                reply.reason or "a person answered instead of letting the call run",
            )
            return ToolOutcome(result=told.result.model_copy(update={"output": reply.value}))
        case _:
            return runtime_result(
                ToolCallStatus.DENIED,
                FailureCode.APPROVAL_REJECTED,
                reply.reason or "a person rejected the call",
            )
