"""The result of a call that its tool answers later, by callback (R-5.10).

Such a call stands open without a worker until somebody posts its result, or its time is over: then
it is found out what became of it, as of any call whose worker was lost (R-5.7). A callback that is
faster than the commit which says that it is waited for is taken all the same: the execution is
known, and the holder of the run finds the result in the log.
"""

from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.journal import STEP_TOOLS
from perdure.engine.ports import ToolOutcome
from perdure.engine.results import add_result
from perdure.engine.resuming import time_left_s
from perdure.engine.schema import problem_with_value
from perdure.engine.snapshot import OpenCall
from perdure.engine.steps import waits_for_callbacks, waits_for_children
from perdure.engine.unheld import intervene
from perdure.engine.values import keep
from perdure.protocol.errors import AlreadyAnswered, Conflict, Gone, Invalid, NotFound
from perdure.protocol.events import ResultEvent, TimeoutEvent
from perdure.protocol.log import DamagedEvent
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import (
    TERMINAL,
    ParkedOn,
    RunState,
    ToolCallStatus,
    is_open,
)
from perdure.protocol.tools import ToolResult, read_spec
from perdure.store.commits import CallUpdate
from perdure.store.requests import LateKept, LateResult


@dataclass(frozen=True, slots=True)
class CalledBack:
    """The call after the callback; `replayed` when the same callback came before."""

    row: ToolCallRow
    replayed: bool


async def call_back(
    core: Core, tenant_id: str, tool_call_id: str, result: ToolResult
) -> CalledBack:
    """Give a call its result and let its run go on.

    Raises NotFound; Conflict when no callback is waited for; AlreadyAnswered when the call has
    another result, and Gone when its time is over or its run is: then the callback is recorded as
    `late`, unless so many contradict each other that no more is kept; Invalid or TooLarge when the output does not fit its tool's schema or the limit.
    """
    call = await _find(core, tenant_id, tool_call_id)
    keep(result.output)
    await _check_output(core, call, result)

    def change(row: RunRow, draft: Draft) -> bool:
        snapshot = draft.view.snapshot
        waiting = snapshot.open_calls.get(tool_call_id)
        if waiting is None or _is_ending(row, draft):
            return False
        if not _takes(draft, waiting):
            return False
        add_result(draft, waiting, ToolOutcome(result=result), by="callback")
        _wake(row, draft)
        return True

    if is_open(call.status):
        written = await intervene(core, call.run_id, change)
        call = await _find(core, tenant_id, tool_call_id)
        if written is not None:
            return CalledBack(call, replayed=False)
    if await _is_same(core, call, result):
        return CalledBack(call, replayed=True)
    raise await _too_late(core, call, result)


async def _find(core: Core, tenant_id: str, tool_call_id: str) -> ToolCallRow:
    row = await core.reader.find_tool_call(tenant_id, tool_call_id)
    if row is None:
        raise NotFound("there is no such tool call")
    return row


async def _check_output(core: Core, call: ToolCallRow, result: ToolResult) -> None:
    """Raise Invalid when a success does not fit what the tool promised, as far as it is known."""
    if result.status is not ToolCallStatus.SUCCEEDED:
        return
    for tool in await core.reader.list_tools():
        if (tool.name, tool.version) == (call.tool, call.version):
            spec = read_spec(tool.spec)
            schema = spec.output_schema if spec is not None else None
            problem = problem_with_value(schema, result.output) if schema is not None else None
            if problem is not None:
                raise Invalid(f"the output does not fit {call.tool} at {problem}", field="/output")


def _is_ending(row: RunRow, draft: Draft) -> bool:
    """Tell whether the run is being ended. While nobody holds it and what it did is undone, it
    still takes what is told of a call: that one is then undone too.
    """
    if row.hot.lease_owner is None and row.hot.parked_on is ParkedOn.CLOSING:
        return False
    return row.hot.cancel_epoch > 0 or draft.view.snapshot.ending is not None


def _takes(draft: Draft, call: OpenCall) -> bool:
    """Tell whether a call takes a callback now; False when it came too late for it."""
    executions = draft.view.executions_of(call.tool_call_id)
    if call.by_callback:
        return True
    if call.status is ToolCallStatus.PENDING:
        raise Conflict("the call is carried out by a child run, which answers it")
    if call.tool in STEP_TOOLS or executions.count == 0:
        raise Conflict("no callback is waited for: the call was not handed to its tool")
    return executions.running


async def _is_same(core: Core, call: ToolCallRow, result: ToolResult) -> bool:
    """Tell whether a call has exactly this result by a callback."""
    if call.result_seq is None:
        return False
    found = await core.reader.events_after(call.run_id, call.result_seq - 1, limit=1)
    try:
        data = found[0].data if found and found[0].seq == call.result_seq else None
    except DamagedEvent:
        return False
    if not isinstance(data, ResultEvent) or data.by != "callback":
        return False
    told = (data.status, data.output_digest, data.error, data.done, data.not_done)
    given = (result.status, keep(result.output).digest, result.error, result.done, result.not_done)
    return told == given and result.external_ref in {None, data.external_ref}


async def _too_late(core: Core, call: ToolCallRow, result: ToolResult) -> Conflict | Gone:
    """Record the callback as late; return why it changes nothing."""
    run = await core.reader.find_run(None, call.run_id)
    assert run is not None, "a call has its run"
    details: dict[str, JsonValue] = {"status": call.status, "late": False}
    executions = await core.reader.list_executions(call.run_id)
    numbers = [row for row in executions if row.tool_call_id == call.tool_call_id]
    if numbers:
        kept, last = keep(result.output), numbers[-1]
        recorded = await core.store.record_late(
            LateResult(
                run_id=call.run_id,
                tool_call_id=call.tool_call_id,
                execution=last.number,
                attempt=last.attempt,
                epoch=run.hot.cancel_epoch,
                status=result.status,
                output=kept.inline,
                output_ref=kept.ref,
                external_ref=result.external_ref,
                step_index=call.step_index,
                blobs=kept.blobs,
            )
        )
        details["late"] = recorded is not LateKept.LEFT_OUT
    if run.hot.state in TERMINAL or run.hot.cancel_epoch > 0:
        return Gone("the run has ended or is being ended", details=details)
    if is_open(call.status):
        return Gone("the time for the callback is over", details=details)
    return AlreadyAnswered("the call has another result", details=details)


async def expire_callback(core: Core, run_id: str, tool_call_id: str) -> bool:
    """Note that a callback did not come in time; a worker finds out what became of the call.

    True when this call did so.
    """

    def change(row: RunRow, draft: Draft) -> bool:
        snapshot = draft.view.snapshot
        call = snapshot.open_calls.get(tool_call_id)
        if row.hot.lease_owner is not None or row.hot.cancel_epoch > 0:
            return False
        if call is None or not call.by_callback or snapshot.ending is not None:
            return False
        draft.add(
            TimeoutEvent(
                subject="callback",
                limit_ms=round(call.wait_s * 1000),
                tool_call_id=tool_call_id,
            )
        )
        draft.callbacks_over.append(tool_call_id)
        draft.call_updates.append(
            CallUpdate(tool_call_id=tool_call_id, status=ToolCallStatus.RUNNING)
        )
        _wake(row, draft)
        return True

    return await intervene(core, run_id, change) is not None


def _wake(row: RunRow, draft: Draft) -> None:
    """Draft what moves the run from here: as before, or on when nothing else holds it up.

    A write beside no holder says anew whether the run may be claimed (see `resuming`).
    """
    hot, snapshot = row.hot, draft.view.snapshot
    if hot.lease_owner is not None:
        return
    draft.parked_on = hot.parked_on
    draft.with_checkpoint = snapshot.cancel_epoch == 0
    match hot.parked_on:
        case ParkedOn.CLOSING:
            pass
        case ParkedOn.CALLBACK | ParkedOn.CHILD:
            if not (waits_for_callbacks(snapshot) or waits_for_children(snapshot)):
                draft.parked_on = None
                draft.ready_in_s = 0
        case _:
            if snapshot.state is not RunState.WAITING_HUMAN:
                draft.ready_in_s = time_left_s(row, draft)
