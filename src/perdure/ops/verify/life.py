"""The life of a run: its log, its states and its end."""

from itertools import pairwise

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import CancelEvent, ErrorEvent, RepairEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import (
    LEGAL_PAIRS,
    TERMINAL,
    TRANSITIONS,
    ParkedOn,
    RunState,
    StepStatus,
    is_open,
)

_AFTER_THE_END = frozenset({"late", "repair"})
_ENDED_STEPS = frozenset({StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED})


@rule("I01", "After a terminal `state` event only `late` and `repair` events follow.")
def nothing_after_the_end(record: RunRecord) -> Found:
    end = record.end
    for line in record.log:
        if end is not None and line.seq > end.seq and line.type not in _AFTER_THE_END:
            yield line.name, f"a {line.type} event follows the end at {end.seq}"


@rule(
    "I02",
    "An ended run has exactly one terminal `state` event, at its `terminal_seq`; others none.",
)
def one_end(record: RunRecord) -> Found:
    ends = [line.seq for line, data in record.of(StateEvent) if data.state in TERMINAL]
    wanted = 1 if record.is_over else 0
    if len(ends) != wanted:
        yield "run", f"{record.hot.state} with {len(ends)} terminal events: {ends[:10]}"
    seq = record.hot.terminal_seq
    if ([] if seq is None else [seq]) != ends[:1]:
        yield "run", f"terminal_seq is {seq}, the terminal events are {ends[:10]}"


@rule(
    "I03",
    "Each `state` event leaves the state that the one before it entered, by a legal transition.",
)
def legal_path(record: RunRecord) -> Found:
    previous: RunState | None = None
    for place, (line, data) in enumerate(record.of(StateEvent)):
        if place == 0 and record.hot.retained_from_seq > 1:
            previous = data.from_state
        if data.from_state is not previous:
            yield line.name, f"it leaves {data.from_state}, the run was in {previous}"
        if previous is None:
            if data.state is not RunState.PENDING:
                yield line.name, f"a run begins in {data.state}"
        elif (previous, data.state) not in LEGAL_PAIRS:
            yield line.name, f"no transition leads from {previous} to {data.state}"
        elif data.why is not None and TRANSITIONS.get((previous, data.why)) is not data.state:
            yield line.name, f"{data.why} does not lead from {previous} to {data.state}"
        previous = data.state


@rule(
    "I04",
    "The log is numbered without gap or repeat from `retained_from_seq` to the row's `last_seq`, but "
    "for what is missing of a run that was ended for that (`repair`).",
)
def gapless(record: RunRecord) -> Found:
    expected = record.hot.retained_from_seq
    for line in record.log:
        if line.seq != expected and line.seq > record.given_up_at:
            yield line.name, f"event {expected} was to come"
        expected = line.seq + 1
    if expected != record.hot.last_seq + 1:
        yield "run", f"the log ends at {expected - 1}, the row at {record.hot.last_seq}"


@rule("I05", "The row's state is the one that the last `state` event entered.")
def state_of_the_row(record: RunRecord) -> Found:
    states = record.of(StateEvent)
    if states and states[-1][1].state is not record.hot.state:
        yield "run", f"the row is {record.hot.state}, the log {states[-1][1].state}"
    if not states and record.hot.retained_from_seq == 1:
        yield "run", "the log holds no state"


@rule(
    "I30",
    "A succeeded run has no open call, no pending interrupt, no open step and no open child.",
)
def success_is_complete(record: RunRecord) -> Found:
    if record.hot.state is not RunState.SUCCEEDED:
        return
    for call in record.calls:
        if is_open(call.status):
            yield call.tool_call_id, f"the run succeeded while the call is {call.status}"
    for question in record.pending:
        yield question.interrupt_id, "the run succeeded while the interrupt is pending"
    for step in record.steps:
        if step.status not in _ENDED_STEPS:
            yield f"step {step.index}", f"the run succeeded while the step is {step.status}"
    if record.hot.open_children:
        yield "run", f"it succeeded with {record.hot.open_children} open children"


@rule(
    "I47",
    "A failed run has a code, the one of its last event; others have none. A cancelled run tells "
    "who cancelled it. A run is over exactly when `finished_at` is set.",
)
def end_is_told(record: RunRecord) -> Found:
    hot = record.hot
    if (hot.code is not None) != (hot.state is RunState.FAILED):
        yield "run", f"it is {hot.state} with the code {hot.code}"
    if (hot.finished_at is not None) != record.is_over:
        yield "run", f"it is {hot.state}, finished at {hot.finished_at}"
    end = record.end.data if record.end is not None else None
    if isinstance(end, StateEvent):
        told = end.failure.code if end.failure is not None else None
        if told is not hot.code:
            yield "run", f"its end tells {told}, the row {hot.code}"
    if hot.code is FailureCode.RUN_CANCELLED:
        authors = [data.by for _, data in record.of(CancelEvent)]
        if hot.retained_from_seq > 1:  # the cancel is gone with the history, its author is not
            failure = end.failure if isinstance(end, StateEvent) else None
            authors = [] if failure is None else [str((failure.details or {}).get("by", ""))]
        if not authors or not all(authors):
            yield "run", "it was cancelled, and nobody is named"


_ANY_RELEASE = frozenset({"attempt", "cancel", "late", "repair"})
_OF_A_CLOSING = frozenset(
    {"child", "compensation", "error", "result", "resume", "step", "state", "timeout"}
)
_CLOSED_BLINDLY = frozenset(
    {
        FailureCode.CHECKPOINT_INCOMPATIBLE,
        FailureCode.ORPHANED,
        FailureCode.RETRIES_EXHAUSTED,
        FailureCode.RUN_CANCELLED,
        FailureCode.RUN_TIMEOUT,
    }
)
"""What also a run ends by, or begins to end, that no release which is there can carry on."""
_CARRIES_ON = frozenset({"action", "model", "plan"})


@rule(
    "I52",
    "The schema version of the events never goes down within a run, but for what an older release "
    "writes that does not carry the run on: it takes it, cancels it, or ends it.",
)
def versions_grow(record: RunRecord) -> Found:
    highest = 0
    ends_by = {error.failure.code for _, error in record.of(ErrorEvent) if error.final}
    is_closed = record.hot.cancel_epoch > 0 or _CLOSED_BLINDLY & (ends_by | {record.hot.code})
    went_on_until = max((line.seq for line in record.log if line.type in _CARRIES_ON), default=0)
    for line in record.log:
        closes = is_closed and line.type in _OF_A_CLOSING and line.seq > went_on_until
        if line.schema_version < highest and line.type not in _ANY_RELEASE and not closes:
            yield line.name, f"version {line.schema_version} follows version {highest}"
        highest = max(highest, line.schema_version)


@rule(
    "I49",
    "Every `repair` event names its author and reason; a run that is put aside has such an event.",
)
def repairs_are_told(record: RunRecord) -> Found:
    repairs = record.of(RepairEvent)
    for line, data in repairs:
        if not data.by or not data.reason:
            yield line.name, "a repair without author or reason"
    if record.hot.parked_on is ParkedOn.REPAIR and not repairs:
        yield "run", "it is put aside for repair, and no event tells why"


@rule(
    "H5",
    "Times never run backwards along the log, and the row is not older than its last event.",
)
def time_goes_on(record: RunRecord) -> Found:
    for before, line in pairwise(record.log):
        if line.at < before.at:
            yield line.name, f"it happened at {line.at}, after an event of {before.at}"
    if record.log and record.hot.updated_at < record.log[-1].at:
        yield "run", f"its row is of {record.hot.updated_at}, its log of {record.log[-1].at}"


RULES = (
    nothing_after_the_end,
    one_end,
    legal_path,
    gapless,
    state_of_the_row,
    success_is_complete,
    end_is_told,
    versions_grow,
    repairs_are_told,
    time_goes_on,
)
