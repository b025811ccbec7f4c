"""Questions to people and their answers."""

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import ApprovalRequestEvent, InterruptEvent, ResumeEvent
from perdure.protocol.records import ExecutionRow, InterruptRow
from perdure.protocol.states import Answer, InterruptKind, InterruptStatus, RunState


@rule(
    "I31",
    "A run that waits for people has a pending interrupt, of the kind its row names; a run that "
    "is over has none.",
)
def somebody_is_asked(record: RunRecord) -> Found:
    waiting = record.hot.state is RunState.WAITING_HUMAN
    if waiting and not record.pending:
        yield "run", "it waits for people, and nobody is asked"
    kinds = {row.kind for row in record.pending}
    kind = record.hot.waiting_kind
    if (kind is not None) != waiting or (waiting and record.pending and kind not in kinds):
        yield "run", f"it is {record.hot.state}, waiting for {kind}"
    if (record.hot.waiting_since is not None) != waiting:
        yield "run", f"it is {record.hot.state}, waiting since {record.hot.waiting_since}"
    if record.is_over:
        for row in record.pending:
            yield row.interrupt_id, "it is pending, the run is over"


@rule(
    "I32",
    "Every interrupt has one opening event and, unless it is pending, exactly one later closing "
    "event of its outcome, at the seqs its row names; every opening event has its interrupt.",
)
def opened_and_closed(record: RunRecord) -> Found:
    opened, closed = _openings(record), _closings(record)
    for row in record.interrupts:
        opens = opened.pop(row.interrupt_id, [])
        closes = closed.get(row.interrupt_id, [])
        if opens != [row.opened_seq]:
            yield row.interrupt_id, f"its row names opening {row.opened_seq}, the log has {opens}"
        wanted = [] if row.status is InterruptStatus.PENDING else [(row.closed_seq, row.status)]
        if closes != wanted:
            yield row.interrupt_id, f"its row says {wanted}, the log closes it by {closes}"
        if closes and opens and closes[0][0] <= opens[0]:
            yield row.interrupt_id, f"it is closed at {closes[0][0]}, opened at {opens[0]}"
    for interrupt_id, seqs in opened.items():
        yield interrupt_id, f"event {seqs[0]} opens it, and it has no row"


def _openings(record: RunRecord) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for line, data in record.of(ApprovalRequestEvent):
        found.setdefault(data.approval_id, []).append(line.seq)
    for line, data in record.of(InterruptEvent):
        found.setdefault(data.interrupt_id, []).append(line.seq)
    return found


def _closings(record: RunRecord) -> dict[str, list[tuple[int, str]]]:
    found: dict[str, list[tuple[int, str]]] = {}
    for line, data in record.of(ResumeEvent):
        found.setdefault(data.interrupt_id, []).append((line.seq, data.outcome))
    return found


@rule(
    "I33",
    "An answered interrupt tells the answer, who gave it and when, as its closing event does; any "
    "other has no answer.",
)
def answer_is_told(record: RunRecord) -> Found:
    told = {data.interrupt_id: data for _, data in record.of(ResumeEvent)}
    for row in record.interrupts:
        parts = (row.answer, row.answered_by, row.answered_at)
        if row.status is not InterruptStatus.ANSWERED:
            if any(part is not None for part in parts):
                yield row.interrupt_id, f"it is {row.status} and has an answer"
            continue
        if any(part is None for part in parts):
            yield row.interrupt_id, "it is answered; the answer, its author or time is missing"
        event = told.get(row.interrupt_id)
        if event is not None and (event.answer, event.by) != (row.answer, row.answered_by):
            yield row.interrupt_id, f"its row says {row.answer}, its event {event.answer}"


@rule(
    "I62",
    "A breakpoint is about no call, is spent by no execution, and is only ever continued; nothing "
    "else is.",
)
def pauses_allow_nothing(record: RunRecord) -> Found:
    for row in record.interrupts:
        is_pause = row.kind is InterruptKind.BREAKPOINT
        if is_pause and (row.tool_call_id is not None or row.consumed_by is not None):
            yield row.interrupt_id, f"it belongs to {row.tool_call_id}, spent by {row.consumed_by}"
        if row.answer is not None and (row.answer in {Answer.CONTINUE, Answer.STEP}) != is_pause:
            yield row.interrupt_id, f"it is of kind {row.kind}, answered {row.answer}"


@rule(
    "I34",
    "The first execution of a call that needs approval has an approval of exactly its arguments, "
    "given before it began and spent by it.",
)
def approved_before(record: RunRecord) -> Found:
    for row in record.executions:
        call = record.calls_by_id.get(row.tool_call_id)
        if call is None or not call.needs_approval or row.number != 1:
            continue
        questions = record.interrupts_by_call.get(row.tool_call_id, [])
        if not any(_approves(question, row) for question in questions):
            yield row.tool_call_id, "it ran, and nobody approved these arguments before"


def _approves(question: InterruptRow, execution: ExecutionRow) -> bool:
    return (
        question.kind is InterruptKind.APPROVAL
        and question.status is InterruptStatus.ANSWERED
        and question.answer in {Answer.APPROVE, Answer.EDIT}
        and question.args_digest == execution.args_digest
        and question.consumed_by == execution.number
        and question.answered_at is not None
        and question.answered_at <= execution.started_at
    )


RULES = (
    somebody_is_asked,
    opened_and_closed,
    answer_is_told,
    pauses_allow_nothing,
    approved_before,
)
