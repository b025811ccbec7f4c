"""What a cancelled run undid: only what was asked for, each try begun before it ended."""

from collections import defaultdict

from perdure.engine.undone import became_of_undoing
from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.events import CancelEvent, CompensationEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ToolCallStatus

_TOOK_EFFECT = frozenset({ToolCallStatus.SUCCEEDED, ToolCallStatus.PARTIAL})

_Tries = dict[str, list[tuple[LogLine, CompensationEvent]]]


def _tries(record: RunRecord) -> _Tries:
    found: _Tries = defaultdict(list)
    for line, data in record.of(CompensationEvent):
        found[data.tool_call_id].append((line, data))
    return found


@rule(
    "I73",
    "A `compensation` event follows a cancel that asks for it, and names a call of the run that "
    "took effect before, or one of a run below it.",
)
def asked_for(record: RunRecord) -> Found:
    asked = [line.seq for line, data in record.of(CancelEvent) if data.compensate]
    for line, data in record.of(CompensationEvent):
        if not asked or line.seq < asked[0]:
            yield line.name, "no cancel before it asks to undo anything"
        call = record.calls_by_id.get(data.tool_call_id)
        if (call is None) != (data.run_id is not None):
            yield line.name, f"{data.tool_call_id} is no call of {data.run_id or 'the run'}"
        elif call is not None and (call.status not in _TOOK_EFFECT or not call.result_seq):
            yield line.name, f"it undoes {call.tool_call_id}, which is {call.status}"
        elif call is not None and line.seq < (call.result_seq or 0):
            yield line.name, f"it undoes {call.tool_call_id} before its result"


@rule(
    "I74",
    "The tries to undo a call have one key and gapless numbers; each is begun before it succeeds "
    "or is unknown, ends once, and none follows the last. One that did not begin is not the last.",
)
def begun_and_ended(record: RunRecord) -> Found:
    for tool_call_id, tries in _tries(record).items():
        keys = {data.key for _, data in tries}
        if len(keys) > 1:
            yield tool_call_id, f"it is undone under {len(keys)} keys"
        before: CompensationEvent | None = None
        for line, data in tries:
            problem = _problem(before, data)
            if problem is not None:
                yield line.name, f"{problem} ({tool_call_id})"
            before = data


def _problem(before: CompensationEvent | None, data: CompensationEvent) -> str | None:
    """Return what is wrong with one event behind the one before it, of the same call."""
    number = 0 if before is None else before.number
    is_open = before is not None and before.status == "started"
    if not data.begun and (data.status != "failed" or not data.again):
        return f"try {data.number} did not begin, and is {data.status} for good"
    if before is not None and not is_open and not before.again:
        return "a try follows the last one"
    if is_open and data.number == number and data.status != "started":
        return None
    if data.number != number + 1:
        return f"try {data.number} follows try {number}"
    if data.status in {"succeeded", "unknown"}:
        return f"try {data.number} is {data.status} and was not begun"
    return None


@rule(
    "I75",
    "At the end of a cancelled run no try to undo a call is open, and its terminal event tells of "
    "each call what became of undoing it.",
)
def told_at_the_end(record: RunRecord) -> Found:
    end = record.end
    if end is None or not isinstance(end.data, StateEvent):
        return
    failure = end.data.failure
    cancelled = failure is not None and failure.code is FailureCode.RUN_CANCELLED
    told = {
        str(effect.get("tool_call_id")): effect.get("compensation")
        for effect in end.data.effects or []
    }
    for tool_call_id, tries in _tries(record).items():
        last = tries[-1][1].status
        became = became_of_undoing([data for _, data in tries])
        if last == "started" and cancelled:
            yield tool_call_id, "the run ended while it was being undone"
        elif cancelled and end.data.effects is not None and told.get(tool_call_id) != became:
            yield tool_call_id, f"undoing it is {became}, the end tells {told.get(tool_call_id)}"


RULES = (asked_for, begun_and_ended, told_at_the_end)
