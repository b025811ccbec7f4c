"""Runs that were put aside, and what was done about them."""

from perdure.engine.continuing import goes_on_from
from perdure.engine.snapshot import is_side_effect
from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.events import ENDING_REPAIRS, RepairEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import RunState

_ENDS = frozenset({FailureCode.CHECKPOINT_INCOMPATIBLE, FailureCode.RUN_CANCELLED})


@rule(
    "I82",
    "A run that a repair ended is over, with CHECKPOINT_INCOMPATIBLE or as cancelled. One that was "
    "returned to a checkpoint names the run that goes on, and no call with a side effect was run or "
    "ended behind that checkpoint. A run that was to go on so, or in the version that replaces its "
    "origin's, began only if its origin ended so.",
)
def returned_where_nothing_was_done(record: RunRecord) -> Found:
    for line, data in record.of(RepairEvent):
        if data.action in ENDING_REPAIRS and record.hot.code not in _ENDS:
            yield line.name, f"it ends the run, which is {record.hot.state} with {record.hot.code}"
        if data.action == "return":
            yield from _returned(record, line, data)
    origin = record.sharing.origin
    if origin is None or origin.hot.code is FailureCode.CHECKPOINT_INCOMPATIBLE:
        return
    goes_on = goes_on_from(record.row.facts) is not None
    for line, data in record.of(StateEvent):
        goes_on = goes_on or (data.origin is not None and data.origin.mode == "return")
        if goes_on and data.state is RunState.PLANNING:
            yield line.name, f"it began, and its origin is {origin.hot.state} with no word of it"
            return


def _returned(record: RunRecord, line: LogLine, data: RepairEvent) -> Found:
    said = data.after if isinstance(data.after, dict) else {}
    seq, goes_on = said.get("seq"), said.get("run_id")
    end = record.end.data if record.end is not None else None
    failure = end.failure if isinstance(end, StateEvent) else None
    if failure is None or failure.details.get("continued_by") != goes_on:
        yield line.name, f"it goes on as {goes_on}, its end does not say so"
    if not isinstance(seq, int):
        yield line.name, "it names no checkpoint"
        return
    for call in record.calls:
        run = record.executions_by_call.get(call.tool_call_id)
        if run and is_side_effect(call.side_effect) and (call.result_seq or seq + 1) > seq:
            yield call.tool_call_id, f"it was run, and ended behind the checkpoint at {seq}"


RULES = (returned_where_nothing_was_done,)
