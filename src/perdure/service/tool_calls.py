"""Tool calls with arguments and results joined from the events that hold them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeVar

from pydantic import Field, JsonValue, model_validator

from perdure.engine.callbacks import call_back
from perdure.protocol.base import Model
from perdure.protocol.codec import clean, encode
from perdure.protocol.errors import NotFound
from perdure.protocol.events import ActionEvent, LateEvent, ResultEvent, ResumeEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.ids import TOOL_CALL, step_id
from perdure.protocol.log import DamagedEvent, RecordedEvent
from perdure.protocol.records import ExecutionRow, InterruptRow, LateRow, ToolCallRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import ToolCallStatus
from perdure.protocol.tools import ToolResult
from perdure.service.base import (
    Service,
    Slice,
    cut,
    interrupts_of,
    known,
    of_one_version,
    own_run,
)
from perdure.service.principal import Principal
from perdure.service.values import events_at, full
from perdure.service.views import ExecutionView, LateView, ToolCallView

ERROR_DETAILS_BYTES_MAX = 8 * 1024

DataT = TypeVar("DataT")


async def list_tool_calls(
    service: Service,
    principal: Principal,
    run_id: str,
    *,
    after: tuple[int, int] | None,
    limit: int,
) -> Slice[ToolCallView]:
    """Return a run's calls in order; large values as references. Raises NotFound."""
    run = await own_run(service, principal, run_id)

    async def read(_: RunRow) -> Slice[ToolCallView]:
        found = await service.reader.list_tool_calls(run_id, after=after, limit=limit + 1)
        rows, more = cut(found, limit)
        views = await _views(service, principal, run_id, rows, whole=False)
        last = rows[-1] if rows else None
        return Slice(views, f"{last.step_index}.{last.ordinal}" if more and last else None)

    return await of_one_version(service, run, read)


async def get_tool_call(service: Service, principal: Principal, identifier: str) -> ToolCallView:
    """Return one call with whole values. Raises NotFound."""
    row = await _find(service, principal, identifier)
    run = await own_run(service, principal, row.run_id)

    async def read(_: RunRow) -> ToolCallView:
        now = await _find(service, principal, identifier)
        return (await _views(service, principal, now.run_id, [now], whole=True))[0]

    return await of_one_version(service, run, read)


async def _find(service: Service, principal: Principal, identifier: str) -> ToolCallRow:
    known(TOOL_CALL, identifier, "tool call")
    row = await service.reader.find_tool_call(principal.tenant_id, identifier)
    if row is None:
        raise NotFound("there is no such tool call")
    return row


class CallbackError(Model):
    """Why a call failed, for its planner."""

    reason: str = Field(min_length=1, max_length=2000)
    details: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _is_small(self) -> Self:
        if len(encode(self.details)) > ERROR_DETAILS_BYTES_MAX:
            raise ValueError(f"details have at most {ERROR_DETAILS_BYTES_MAX} bytes")
        return self


class CallbackRequest(Model):
    """The result of a call whose tool answered `pending`."""

    status: Literal["succeeded", "failed", "partial"]
    output: JsonValue = None
    error: CallbackError | None = Field(default=None, description="of `failed`, which needs it")
    external_ref: str | None = Field(
        default=None, max_length=1000, description="the effect's id outside"
    )
    done: str | None = Field(default=None, max_length=2000, description="of `partial`")
    not_done: str | None = Field(default=None, max_length=2000, description="of `partial`")

    @model_validator(mode="after")
    def _fits_its_status(self) -> Self:
        if (self.status == "failed") != (self.error is not None):
            raise ValueError("error belongs to the status failed, which needs it")
        if self.status != "partial" and (self.done is not None or self.not_done is not None):
            raise ValueError("done and not_done are for the status partial")
        return self

    def result(self) -> ToolResult:
        """Return what the call came to."""
        error = self.error
        return ToolResult(
            status=ToolCallStatus(self.status),
            output=clean(self.output),
            error=None
            if error is None
            else Failure(
                code=FailureCode.TOOL_ERROR,
                reason=error.reason,
                stage=Stage.TOOL,
                details=error.details,
            ),
            external_ref=self.external_ref,
            done=self.done,
            not_done=self.not_done,
        )


@dataclass(frozen=True, slots=True)
class GivenResult:
    """The call with its result; `replayed` when the same result was given before."""

    call: ToolCallView
    replayed: bool


async def give_result(
    service: Service, principal: Principal, identifier: str, request: CallbackRequest
) -> GivenResult:
    """Take the callback of a call; the same one again is accepted and changes nothing.

    Raises NotFound, Conflict, AlreadyAnswered, Gone, Invalid, TooLarge.
    """
    known(TOOL_CALL, identifier, "tool call")
    given = await call_back(service.core, principal.tenant_id, identifier, request.result())
    views = await _views(service, principal, given.row.run_id, [given.row], whole=True)
    return GivenResult(views[0], given.replayed)


async def list_late(service: Service, principal: Principal, run_id: str) -> list[LateView]:
    """Return results that came after their worker had lost the run. Raises NotFound."""
    await own_run(service, principal, run_id)
    rows = await service.reader.list_late(run_id)
    events = await events_at(service.reader, run_id, (row.seq for row in rows))
    return [_late(principal, row, events.get(row.seq)) for row in rows]


def _late(principal: Principal, row: LateRow, event: RecordedEvent | None) -> LateView:
    data = data_of(event, LateEvent)
    return LateView.model_construct(
        run_id=row.run_id,
        tenant_id=principal.tenant_id,
        tool_call_id=row.tool_call_id,
        execution=row.execution,
        attempt=row.attempt,
        cancel_epoch=row.epoch,
        seq=row.seq,
        status=row.status,
        output=None if data is None else data.output,
        output_ref=None if data is None else data.output_ref,
        external_ref=row.external_ref,
        recorded_at=row.recorded_at,
    )


def data_of(event: RecordedEvent | None, kind: type[DataT]) -> DataT | None:
    """Return an event's data when it is there, readable and of that type."""
    if event is None:
        return None
    try:
        data = event.data
    except DamagedEvent:
        return None
    return data if isinstance(data, kind) else None


async def _views(
    service: Service,
    principal: Principal,
    run_id: str,
    rows: list[ToolCallRow],
    *,
    whole: bool,
) -> list[ToolCallView]:
    if not rows:
        return []
    edits = await _edits(service, principal, run_id, rows)
    seqs = {row.action_seq for row in rows} | {row.result_seq for row in rows if row.result_seq}
    seqs |= {edit.closed_seq for edit in edits.values() if edit.closed_seq}
    events = await events_at(service.reader, run_id, seqs)
    runs: dict[str, list[ExecutionRow]] = {}
    for execution in await service.reader.list_executions(run_id):
        runs.setdefault(execution.tool_call_id, []).append(execution)
    views: list[ToolCallView] = []
    for row in rows:
        edit = edits.get(row.tool_call_id)
        resume = None if edit is None else data_of(events.get(edit.closed_seq or 0), ResumeEvent)
        view = _view(principal, row, events, runs.get(row.tool_call_id, []), resume)
        views.append(await _whole(service, view) if whole else view)
    return views


async def _edits(
    service: Service, principal: Principal, run_id: str, rows: list[ToolCallRow]
) -> dict[str, InterruptRow]:
    """Return the approvals that edited arguments, by tool call."""
    if all(row.effective_digest == row.args_digest for row in rows):
        return {}
    found = await interrupts_of(service, principal.tenant_id, run_id)
    return {row.tool_call_id: row for row in found if row.tool_call_id and row.answer == "edit"}


def _view(
    principal: Principal,
    row: ToolCallRow,
    events: Mapping[int, RecordedEvent],
    executions: list[ExecutionRow],
    resume: ResumeEvent | None,
) -> ToolCallView:
    action_event = events.get(row.action_seq)
    result_event = events.get(row.result_seq or 0)
    action = data_of(action_event, ActionEvent)
    result = data_of(result_event, ResultEvent)
    args: JsonValue = None if action is None else action.args
    return ToolCallView.model_construct(
        tool_call_id=row.tool_call_id,
        run_id=row.run_id,
        tenant_id=principal.tenant_id,
        step_id=step_id(row.run_id, row.step_index),
        step_index=row.step_index,
        ordinal=row.ordinal,
        tool=row.tool,
        version=row.version,
        planner_call_id=None if action is None else action.planner_call_id,
        side_effect=row.side_effect,
        repeatable=row.repeatable,
        needs_approval=row.needs_approval,
        status=row.status,
        args=args,
        args_ref=None if action is None else action.args_ref,
        args_digest=row.args_digest,
        effective_args=args if resume is None else resume.effective_args,
        effective_digest=row.effective_digest,
        effect_key=row.effect_key,
        external_ref=row.external_ref,
        output=None if result is None else result.output,
        output_ref=None if result is None else result.output_ref,
        error=None if result is None else result.error,
        done=None if result is None else result.done,
        not_done=None if result is None else result.not_done,
        resolved_by=None if result is None else result.by,
        policy_effect=None if action is None else action.policy_effect,
        policy_rule=None if action is None else action.policy_rule,
        policy_version=None if action is None else action.policy_version,
        action_seq=row.action_seq,
        result_seq=row.result_seq,
        executions=[_execution(execution) for execution in executions],
        created_at=None if action_event is None else action_event.at,
        finished_at=None if result_event is None else result_event.at,
    )


def _execution(row: ExecutionRow) -> ExecutionView:
    return ExecutionView.model_construct(
        number=row.number,
        attempt=row.attempt,
        started_at=row.started_at,
        ended_at=row.ended_at,
        outcome=row.outcome,
    )


async def _whole(service: Service, view: ToolCallView) -> ToolCallView:
    """Return the view with values that are held by reference fetched."""
    if view.args_ref is None and view.output_ref is None:
        return view
    reader, tenant = service.reader, view.tenant_id
    args = await full(reader, tenant, view.args, view.args_ref)
    was_edited = view.effective_digest != view.args_digest
    return view.model_copy(
        update={
            "args": args,
            "effective_args": view.effective_args if was_edited else args,
            "output": await full(reader, tenant, view.output, view.output_ref),
        }
    )
