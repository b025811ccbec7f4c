"""What children came to, as it is written into their parents' logs (R-13.1)."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.fold import add_use
from perdure.engine.load import Damaged, load_view
from perdure.engine.ports import ToolOutcome
from perdure.engine.results import add_result
from perdure.protocol.errors import Unreadable
from perdure.protocol.events import ChildEvent, ChildUse, StateEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.log import DamagedEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.schema import Incompatible
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.protocol.tools import ToolResult
from perdure.protocol.values import BlobRef
from perdure.store.reader import RunFilter
from perdure.store.reading import log_unreadable
from perdure.store.requests import NewBlob, TimerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a child came to."""

    child_run_id: str
    state: RunState
    answer: JsonValue
    answer_ref: BlobRef | None
    failure: Failure | None
    use: ChildUse
    blob: NewBlob | None
    """The content of a large answer: the parent uses it too, also once the child's history went."""


async def read_reports(core: Core, ended: Sequence[str], limit: int) -> list[Report]:
    """Return what ended children came to, the first ones; without those that cannot be read."""
    found: list[Report] = []
    for child in ended:
        if len(found) == limit:
            break
        try:
            found.append(await _report(core, child))
        except Unreadable as error:
            log_unreadable(child, error.message)
    return found


async def take_reports(core: Core, draft: Draft) -> None:
    """Draft the reports of a run that takes none in between: its log cannot be folded."""
    timers = await core.reader.timers_of(draft.view.facts.run_id)
    ended = [timer.ref for timer in timers if timer.kind is TimerKind.CHILD and timer.ref]
    for report in await read_reports(core, ended, len(ended)):
        draft_report(draft, report)


async def _report(core: Core, child_run_id: str) -> Report:
    row = await core.reader.find_run(None, child_run_id)
    assert row is not None, "a report names a run"
    end = await _end(core, row)
    return Report(
        child_run_id=child_run_id,
        state=row.hot.state,
        answer=end.answer,
        answer_ref=end.answer_ref,
        failure=end.failure,
        use=await _use(core, row),
        blob=await _blob(core, row, end.answer_ref),
    )


async def _end(core: Core, row: RunRow) -> StateEvent:
    """Return the event that ended a run; what the row says when that cannot be read."""
    seq = row.hot.terminal_seq or 1
    found = await core.reader.events_after(row.facts.run_id, seq - 1, limit=1)
    with suppress(DamagedEvent):
        if found and isinstance(found[0].data, StateEvent):
            return found[0].data
    failure = Failure(code=row.hot.code or FailureCode.INTERNAL, reason="its end cannot be read")
    return StateEvent(state=RunState.FAILED, failure=failure)


async def _blob(core: Core, row: RunRow, ref: BlobRef | None) -> NewBlob | None:
    data = await core.reader.read_blob(row.facts.tenant_id, ref.digest) if ref else None
    if ref is None or data is None:
        return None
    return NewBlob(digest=ref.digest, media_type=ref.media_type, data=data)


async def _use(core: Core, row: RunRow) -> ChildUse:
    """Return what a run and all below it used."""
    own = row.hot.counters
    use = ChildUse(
        model_calls=own.model_calls,
        tool_calls=own.tool_calls,
        tokens=own.input_tokens + own.output_tokens,
        output_tokens=own.output_tokens,
        cost=own.cost,
    )
    where = RunFilter(parent_run_id=row.facts.run_id)
    if await core.reader.list_runs(None, where, after=None, limit=1):
        with suppress(Damaged, Incompatible, Unreadable):
            view = await load_view(core, row, with_messages=False)
            use = add_use(use, view.snapshot.children_use)
    return use


def draft_report(draft: Draft, report: Report) -> None:
    """Draft one result, and that of the tool call which started the child."""
    snapshot = draft.view.snapshot
    child = snapshot.open_children.get(report.child_run_id)
    if child is None:  # somebody else delivered it meanwhile
        return
    call = snapshot.open_calls.get(child.tool_call_id or "")
    draft.reported.append(report.child_run_id)
    if report.blob is not None:
        draft.blobs.append(report.blob)
    draft.add(
        ChildEvent(
            phase="result",
            child_run_id=report.child_run_id,
            tool_call_id=child.tool_call_id,
            state=report.state,
            result=report.answer if call is None else None,
            result_ref=report.answer_ref if call is None else None,
            failure=report.failure,
            use=_counted(report.use, child.use),
        )
    )
    if call is not None:
        add_result(draft, call, _outcome(report), by="child")


def _counted(used: ChildUse, kept: ChildUse) -> ChildUse:
    """Return a use without the calls that a child was denied: they were not made."""
    if kept.tool_calls is None:
        return used
    return used.model_copy(update={"tool_calls": min(used.tool_calls or 0, kept.tool_calls)})


def _outcome(report: Report) -> ToolOutcome:
    status = ToolCallStatus.SUCCEEDED
    if report.failure is not None:
        cancelled = report.failure.code is FailureCode.RUN_CANCELLED
        status = ToolCallStatus.CANCELLED if cancelled else ToolCallStatus.FAILED
    return ToolOutcome(
        result=ToolResult(
            status=status,
            output=report.answer,
            error=report.failure,
            external_ref=report.child_run_id,
        ),
        output_ref=report.answer_ref,
    )
