"""Who held the run, and that nobody else wrote to it."""

from itertools import pairwise

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.events import (
    AttemptEvent,
    ErrorEvent,
    InterruptEvent,
    LateEvent,
    ResultEvent,
    StepEvent,
)
from perdure.protocol.records import ExecutionRow
from perdure.protocol.states import (
    FAULT_ENDS,
    TERMINAL,
    AttemptEnd,
    InterruptKind,
    RunState,
    ToolCallStatus,
)

_GIVEN_UP = frozenset({ToolCallStatus.TIMED_OUT, ToolCallStatus.UNKNOWN, ToolCallStatus.CANCELLED})


@rule("I12", "A run has at most one active attempt.")
def one_active(record: RunRecord) -> Found:
    active = [row.attempt for row in record.attempts if row.ended_at is None]
    if len(active) > 1:
        yield "run", f"its attempts {active} are all active"


@rule("I13", "The attempts of a run do not overlap.")
def no_overlap(record: RunRecord) -> Found:
    for before, after in pairwise(record.attempts):
        if before.ended_at is None or before.ended_at > after.started_at:
            yield f"attempt {after.attempt}", f"it began before attempt {before.attempt} was over"


@rule("I14", "Attempts are numbered 1 to n without gap, and n stands in the run's row.")
def attempts_gapless(record: RunRecord) -> Found:
    numbers = [row.attempt for row in record.attempts]
    if numbers != list(range(1, len(numbers) + 1)):
        yield "run", f"its attempts are numbered {numbers[:20]}"
    if record.hot.attempt != len(numbers):
        yield "run", f"its row is at attempt {record.hot.attempt} of {len(numbers)}"


@rule("I15", "Lease tokens are unique within a run and grow with the attempts.")
def tokens_grow(record: RunRecord) -> Found:
    highest = 0
    for row in record.attempts:
        if row.token <= highest:
            yield f"attempt {row.attempt}", f"its token {row.token} follows {highest}"
        highest = max(highest, row.token)
    if record.hot.lease_token < highest:
        yield "run", f"its token is {record.hot.lease_token}, {highest} was given out"


@rule("I16", "Along the log the attempt never goes down, but in `late` events.")
def no_stale_writer(record: RunRecord) -> Found:
    highest = 0
    for line in record.log:
        if line.type == "late":
            continue
        if line.attempt < highest:
            yield line.name, f"attempt {line.attempt} wrote it after attempt {highest}"
        highest = max(highest, line.attempt)


@rule("I17", "Every event's attempt exists; before the first claim it is 0.")
def attempt_exists(record: RunRecord) -> Found:
    known = {row.attempt for row in record.attempts}
    claimed = {data.attempt for _, data in record.of(AttemptEvent) if data.phase != "lost"}
    for line in record.log:
        if line.attempt and line.attempt not in known:
            yield line.name, f"there is no attempt {line.attempt}"
    for number in sorted(known - claimed):
        if record.hot.retained_from_seq == 1:
            yield f"attempt {number}", "no event tells of its claim"


@rule("I18", "A run with an active attempt is pending, planning or executing.")
def active_works(record: RunRecord) -> Found:
    working = {RunState.PENDING, RunState.PLANNING, RunState.EXECUTING}
    for row in record.attempts:
        if row.ended_at is None and record.hot.state not in working:
            yield f"attempt {row.attempt}", f"it is active, the run {record.hot.state}"


@rule(
    "I19",
    "Since the last finished step no more attempts ended by a fault than the run's options allow.",
)
def bounded_faults(record: RunRecord) -> Found:
    bound = record.facts.options.faults_max
    if record.hot.faults > bound:
        yield "run", f"its row counts {record.hot.faults} faults, {bound} may be"
    if record.hot.retained_from_seq > 1:
        return  # when the last step was finished is gone with the history
    steps = [line for line, data in record.of(StepEvent) if data.status == "succeeded"]
    since = steps[-1].attempt if steps else 0
    faults = [
        row.attempt
        for row in record.attempts
        if row.attempt >= since and row.end_reason in FAULT_ENDS
    ]
    if len(faults) > bound:
        yield "run", f"attempts {faults[:20]} ended by a fault, {bound} may"


@rule(
    "H2",
    "A run is held exactly while its last attempt is active, by that worker and token; an attempt "
    "that is over tells why.",
)
def holder_agrees(record: RunRecord) -> Found:
    hot = record.hot
    active = [row for row in record.attempts if row.ended_at is None]
    if (hot.lease_owner is not None) != bool(active):
        yield "run", f"its holder is {hot.lease_owner}, {len(active)} attempts are active"
    for row in active:
        held = (hot.attempt, hot.lease_token, hot.lease_owner)
        if (row.attempt, row.token, row.worker_id) != held:
            yield f"attempt {row.attempt}", f"it is active, the row names {held}"
    for row in record.attempts:
        if (row.ended_at is None) != (row.end_reason is None):
            yield f"attempt {row.attempt}", "it has an end or a reason, not both"


@rule(
    "I50",
    "Each `late` event was truly late: of an older epoch or attempt, after the end, or of an "
    "execution that was given up, a call that had its result or is to be clarified, a worker that "
    "let go before its lease was taken, or a callback to a run that is ending. Each has one row.",
)
def truly_late(record: RunRecord) -> Found:
    rows = {row.seq: row for row in record.late}
    for line, data in record.of(LateEvent):
        if not _was_late(record, line, data):
            yield line.name, f"execution {data.execution} of {data.tool_call_id} was not late"
        row = rows.pop(line.seq, None)
        told = (data.tool_call_id, data.execution, data.attempt, data.epoch, data.status)
        if row is None or told != (
            row.tool_call_id,
            row.execution,
            row.attempt,
            row.epoch,
            row.status,
        ):
            yield line.name, "no row of a late result says the same"
    for seq, row in rows.items():
        if seq >= record.hot.retained_from_seq:
            yield row.tool_call_id, f"its late result names event {seq}, which is none"


def _was_late(record: RunRecord, line: LogLine, data: LateEvent) -> bool:
    if data.epoch < line.epoch or data.attempt < line.attempt:
        return True
    if record.end is not None and record.end.seq < line.seq:
        return True
    attempts = [row for row in record.attempts if row.attempt == data.attempt]
    if any(row.ended_at is not None and row.ended_at <= line.at for row in attempts):
        return True
    # without an answer to its heartbeats a worker lets go in time: its lease is lost afterwards
    if any(row.end_reason in {None, AttemptEnd.LEASE_LOST} for row in attempts):
        return True
    if _was_ending(record, line):
        return True
    return _had_result(record, line, data) or _was_given_up(record, line, data)


def _was_ending(record: RunRecord, line: LogLine) -> bool:
    """Tell whether the run was being ended: then it takes no callback any more."""
    ends = any(opened.seq < line.seq and error.final for opened, error in record.of(ErrorEvent))
    return line.epoch > 0 or ends


def _had_result(record: RunRecord, line: LogLine, data: LateEvent) -> bool:
    asked = any(
        question.tool_call_id == data.tool_call_id
        and question.kind is InterruptKind.OUTCOME
        and opened.seq < line.seq
        for opened, question in record.of(InterruptEvent)
    )
    results = record.results.get(data.tool_call_id, [])
    return asked or any(result.seq < line.seq for result in results)


def _was_given_up(record: RunRecord, line: LogLine, data: LateEvent) -> bool:
    """Tell whether the execution ended without its tool; the end may be written after the fact.

    It did when the call's result is known by a lookup: its tool had not answered in time.
    """
    results = record.results.get(data.tool_call_id, [])
    if any(isinstance(r.data, ResultEvent) and r.data.by == "lookup" for r in results):
        return True
    for row in record.executions_by_call.get(data.tool_call_id, []):
        if row.number == data.execution:
            return row.outcome in _GIVEN_UP or _ended_before(row, line)
    return False


def _ended_before(row: ExecutionRow, line: LogLine) -> bool:
    return row.ended_at is not None and row.ended_at < line.at


@rule(
    "H3",
    "A run that is over has left everything: lease, queue, timers, and its thread's turn.",
)
def leaves_nothing(record: RunRecord) -> Found:
    if record.hot.state not in TERMINAL:
        return
    left = {
        "a lease": record.hot.lease_owner is not None,
        "an entry in ready": record.is_ready,
        "timers": bool(record.timers),
        "a reason to be parked": record.hot.parked_on is not None,
        "the turn of its thread": record.thread is not None
        and record.thread.active_run_id == record.facts.run_id,
    }
    for what, is_left in left.items():
        if is_left:
            yield "run", f"it is over and has {what}"


RULES = (
    one_active,
    no_overlap,
    attempts_gapless,
    tokens_grow,
    no_stale_writer,
    attempt_exists,
    active_works,
    bounded_faults,
    holder_agrees,
    truly_late,
    leaves_nothing,
)
