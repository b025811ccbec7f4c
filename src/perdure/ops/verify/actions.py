"""Tool calls: one action, one result, no second execution that nobody decided."""

from itertools import pairwise

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.events import (
    ActionEvent,
    ModelEvent,
    ResultEvent,
    RetryEvent,
    StateEvent,
    StepEvent,
)
from perdure.protocol.records import ExecutionRow, InterruptRow, ToolCallRow
from perdure.protocol.states import (
    OUTCOMES,
    Answer,
    InterruptKind,
    InterruptStatus,
    RunState,
    ToolCallStatus,
    Transition,
    is_open,
)


@rule(
    "I06",
    "Every tool call has exactly one `action` event, which says the same as its row; every "
    "`action` event has its tool call.",
)
def one_action(record: RunRecord) -> Found:
    for call in record.calls:
        lines = record.actions.get(call.tool_call_id, [])
        seqs = [line.seq for line in lines]
        if seqs != [call.action_seq]:
            yield call.tool_call_id, f"its row names action {call.action_seq}, the log has {seqs}"
        elif _differs(call, lines[0]):
            yield call.tool_call_id, f"its row and event {seqs[0]} differ"
    for call_id, lines in record.actions.items():
        if call_id not in record.calls_by_id:
            yield call_id, f"event {lines[0].seq} requests it, and it has no row"


def _differs(call: ToolCallRow, line: LogLine) -> bool:
    data = line.data
    return isinstance(data, ActionEvent) and (
        (call.tool, call.version, call.ordinal, call.side_effect, call.repeatable)
        != (data.tool, data.version, data.ordinal, data.side_effect, data.repeatable)
        or (call.args_digest, call.effect_key) != (line.args_digest, data.effect_key)
    )


@rule(
    "I07",
    "A tool call has at most one `result`, and exactly one once its run is over; its row names "
    "that event and has its status, which is an outcome.",
)
def one_result(record: RunRecord) -> Found:
    for call in record.calls:
        lines = record.results.get(call.tool_call_id, [])
        seqs = [line.seq for line in lines]
        if len(seqs) > 1 or (record.is_over and not seqs):
            yield call.tool_call_id, f"it has {len(seqs)} results, the run is {record.hot.state}"
        if (seqs[0] if seqs else None) != call.result_seq:
            yield call.tool_call_id, f"its row names result {call.result_seq}, the log has {seqs}"
        for line in lines:
            if isinstance(line.data, ResultEvent):
                yield from _outcome_agrees(call, line, line.data)
        if not lines and not is_open(call.status):
            yield call.tool_call_id, f"it is {call.status} without a result"


def _outcome_agrees(call: ToolCallRow, line: LogLine, data: ResultEvent) -> Found:
    if data.status not in OUTCOMES:
        yield call.tool_call_id, f"event {line.seq} gives it the status {data.status}, no outcome"
    if data.status is not call.status:
        yield call.tool_call_id, f"it is {call.status}, its result {data.status}"


@rule("I08", "No `result` comes without an earlier `action` of its run.")
def action_before_result(record: RunRecord) -> Found:
    for call_id, results in record.results.items():
        first = min((line.seq for line in record.actions.get(call_id, [])), default=None)
        for line in results:
            if first is None or first > line.seq:
                yield line.name, f"{call_id} has a result and no earlier action"


@rule(
    "I28",
    "A call that must not be repeated has a second execution only by a person's `retry`, answered "
    "between the two starts and spent by exactly that execution, or after its tool was looked up "
    "and said that the one before did not happen.",
)
def no_silent_repeat(record: RunRecord) -> Found:
    for call_id, executions in record.executions_by_call.items():
        call = record.calls_by_id.get(call_id)
        if call is None or call.repeatable:
            continue
        questions = record.interrupts_by_call.get(call_id, [])
        for before, after in pairwise(executions):
            if any(_allows(question, before, after) for question in questions):
                continue
            if not _did_not_happen(record, before, after):
                yield call_id, f"execution {after.number} was decided by nobody"


def _did_not_happen(record: RunRecord, before: ExecutionRow, after: ExecutionRow) -> bool:
    ended = {ToolCallStatus.FAILED, ToolCallStatus.PENDING}
    return before.outcome in ended and any(
        data.tool_call_id == before.tool_call_id
        and data.failure.details.get("happened") is False
        and before.started_at <= line.at <= after.started_at
        for line, data in record.of(RetryEvent)
    )


def _allows(question: InterruptRow, before: ExecutionRow, after: ExecutionRow) -> bool:
    return (
        question.kind is InterruptKind.OUTCOME
        and question.status is InterruptStatus.ANSWERED
        and question.answer == Answer.RETRY
        and question.consumed_by == after.number
        and question.answered_at is not None
        and before.started_at <= question.answered_at <= after.started_at
    )


@rule(
    "I29",
    "A call of unknown outcome was seen by a person or told to the planner, unless its run "
    "failed; a run that is over has no open call.",
)
def nothing_unknown(record: RunRecord) -> Found:
    for call in record.calls:
        if record.is_over and is_open(call.status):
            yield call.tool_call_id, f"it is {call.status}, the run is over"
        lost = call.status is ToolCallStatus.UNKNOWN and record.hot.state is not RunState.FAILED
        if lost and not _was_seen(record, call):
            yield call.tool_call_id, "its outcome is unknown, and nobody was told"


def _was_seen(record: RunRecord, call: ToolCallRow) -> bool:
    """Tell whether the unknown outcome stands in the log, where the planner reads it."""
    results = [line.data for line in record.results.get(call.tool_call_id, [])]
    return any(
        isinstance(data, ResultEvent) and data.status is ToolCallStatus.UNKNOWN for data in results
    )


@rule("I35", "An execution ran with the effective arguments of its call.")
def same_arguments(record: RunRecord) -> Found:
    for row in record.executions:
        call = record.calls_by_id.get(row.tool_call_id)
        if call is None:
            yield row.tool_call_id, f"execution {row.number} belongs to no call of the run"
        elif row.args_digest != call.effective_digest:
            yield row.tool_call_id, f"execution {row.number} ran with other arguments"


@rule(
    "I48",
    "The external reference of a call that must not be repeated stands in its row and its "
    "`result` alike; none in both says that there is none.",
)
def external_reference(record: RunRecord) -> Found:
    for call in record.calls:
        for line in record.results.get(call.tool_call_id, []):
            data = line.data
            if call.repeatable or not isinstance(data, ResultEvent):
                continue
            if data.external_ref != call.external_ref:
                told = f"its row has {call.external_ref!r}, its result {data.external_ref!r}"
                yield call.tool_call_id, told


@rule(
    "H6",
    "The executions of a call are numbered from 1 without gap, each over before the next begins, "
    "and all over when the call has its result.",
)
def executions_in_turn(record: RunRecord) -> Found:
    for call_id, executions in record.executions_by_call.items():
        numbers = [row.number for row in executions]
        if numbers != list(range(1, len(numbers) + 1)):
            yield call_id, f"its executions are numbered {numbers[:20]}"
        for before, after in pairwise(executions):
            if before.ended_at is None or before.ended_at > after.started_at:
                yield call_id, f"execution {after.number} began before {before.number} was over"
        for row in executions:
            if (row.ended_at is None) != (row.outcome is None):
                yield call_id, f"execution {row.number} has an end or an outcome, not both"
            if row.ended_at is None and record.results.get(call_id):
                yield call_id, f"execution {row.number} runs, and the call has its result"


@rule(
    "C4",
    "What a planner reads is legal: every action has its result before the next decision, and "
    "the calls of a step come in the order of their ordinals.",
)
def legal_conversation(record: RunRecord) -> Found:
    unanswered: set[str] = set()
    step, ordinal = -1, -1
    for line in record.log:
        match line.data:
            case ModelEvent() | StateEvent(why=Transition.PLAN_READY):
                for call_id in sorted(unanswered):
                    yield call_id, f"event {line.seq} decides while the call has no result"
                unanswered.clear()
            case ActionEvent() as action:
                if line.step_index != step:
                    step, ordinal = line.step_index, -1
                if action.ordinal != ordinal + 1:
                    yield line.name, f"call {action.ordinal} of step {step} follows {ordinal}"
                ordinal = action.ordinal
                unanswered.add(action.tool_call_id)
            case ResultEvent() as result:
                unanswered.discard(result.tool_call_id)
            case StepEvent(status="succeeded") if unanswered:
                yield line.name, f"the step is over, {len(unanswered)} of its calls are not"
            case _:
                pass


RULES = (
    one_action,
    one_result,
    action_before_result,
    no_silent_repeat,
    nothing_unknown,
    same_arguments,
    external_reference,
    executions_in_turn,
    legal_conversation,
)
