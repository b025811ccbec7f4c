"""A view made from rows alone, for ending a run whose log this release cannot fold (R-20.1).

It knows what is owed: open calls, open questions, the open step, unfinished children, and why the
run is to end when that was decided. It knows nothing of what was said, so no planner may be asked
upon it and no checkpoint written.
"""

from contextlib import suppress

from perdure.engine.core import Core
from perdure.engine.snapshot import OpenCall, OpenChild, OpenInterrupt
from perdure.engine.undone import children_of, keep_unreadable
from perdure.engine.view import Executions, RunView, view_of
from perdure.protocol.errors import Unreadable
from perdure.protocol.events import CancelEvent, ChildUse, ErrorEvent
from perdure.protocol.log import DamagedEvent
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import InterruptStatus, RunState, ToolCallStatus, is_open
from perdure.store.reader import InterruptFilter
from perdure.store.requests import TimerKind

PAGE = 1000
END_WITHIN = 200
"""So many events before the last one it is looked for what the run is to end by."""


async def view_from_rows(core: Core, row: RunRow) -> RunView:
    """Return what a run owes, as its rows tell it."""
    view = view_of(row, None)
    snapshot, hot = view.snapshot, row.hot
    snapshot.state = hot.state
    snapshot.step_index = hot.step_index
    snapshot.last_seq = hot.last_seq
    snapshot.attempt = hot.attempt
    snapshot.cancel_epoch = hot.cancel_epoch
    snapshot.cancel_action = hot.cancel_action
    snapshot.cancel_options = hot.cancel_options
    snapshot.model_calls = hot.counters.model_calls
    snapshot.tool_calls = hot.counters.tool_calls
    snapshot.input_tokens = hot.counters.input_tokens
    snapshot.output_tokens = hot.counters.output_tokens
    snapshot.cost = hot.counters.cost
    snapshot.retries = hot.counters.retries
    steps = await core.reader.list_steps(row.facts.run_id, after=hot.step_index - 1, limit=1)
    snapshot.step_open = hot.state in {RunState.EXECUTING, RunState.WAITING_HUMAN}
    snapshot.step_first_seq = steps[0].first_seq if steps else None
    await _add_calls(core, view)
    await _add_questions(core, view)
    await _add_children(core, view, hot.open_children)
    await _add_what_ends_it(core, view)
    return view


async def _add_what_ends_it(core: Core, view: RunView) -> None:
    """Add who cancelled the run and why, or what it began to end by, which its end is to tell:
    hardly anything follows that.
    """
    snapshot = view.snapshot
    start = max(0, snapshot.last_seq - END_WITHIN)
    for event in await core.reader.events_after(view.facts.run_id, start, limit=END_WITHIN):
        with suppress(Unreadable, DamagedEvent):
            match event.data:
                case CancelEvent() as cancel:
                    snapshot.cancelled_by, snapshot.cancel_reason = cancel.by, cancel.reason
                case ErrorEvent(final=True) as error:
                    snapshot.ending = snapshot.ending or error.failure
                case _:
                    pass


async def _add_calls(core: Core, view: RunView) -> None:
    after: tuple[int, int] | None = None
    while page := await core.reader.list_tool_calls(view.facts.run_id, after=after, limit=PAGE):
        for call in page:
            if is_open(call.status):
                view.snapshot.open_calls[call.tool_call_id] = _open_call(call)
        after = (page[-1].step_index, page[-1].ordinal)
    for run in await core.reader.open_executions(view.facts.run_id):
        view.executions[run.tool_call_id] = Executions(
            count=run.number, running=run.ended_at is None
        )
        call = view.snapshot.open_calls.get(run.tool_call_id)
        if call is not None and call.status is ToolCallStatus.PENDING:
            call.by_callback = True  # a child's call has no execution


def _open_call(row: ToolCallRow) -> OpenCall:
    return OpenCall(
        tool_call_id=row.tool_call_id,
        planner_call_id=None,
        step_index=row.step_index,
        ordinal=row.ordinal,
        tool=row.tool,
        version=row.version,
        args=None,
        args_ref=None,
        args_digest=row.effective_digest,
        effect_key=row.effect_key,
        side_effect=row.side_effect,
        repeatable=row.repeatable,
        status=row.status,
        external_ref=row.external_ref,
    )


async def _add_questions(core: Core, view: RunView) -> None:
    where = InterruptFilter(run_id=view.facts.run_id, status=InterruptStatus.PENDING)
    after: str | None = None
    tenant_id = view.facts.tenant_id
    while page := await core.reader.list_interrupts(tenant_id, where, after=after, limit=PAGE):
        for row in page:
            view.snapshot.open_interrupts[row.interrupt_id] = OpenInterrupt(
                interrupt_id=row.interrupt_id,
                kind=row.kind,
                tool_call_id=row.tool_call_id,
                key=row.key,
                on_expiry=row.on_expiry,
            )
        after = page[-1].interrupt_id


async def _add_children(core: Core, view: RunView, open_children: int) -> None:
    """Add children that are unfinished, or whose report has not been taken.

    So are those that cannot be read, while fewer are known than the run has: they may be detached.
    """
    run_id, lost = view.facts.run_id, list[str]()
    unfinished = children_of(core, run_id, keep_unreadable(lost), unfinished=True)
    open_ids = [child.facts.run_id async for child in unfinished if not child.facts.detached]
    timers = await core.reader.timers_of(run_id)
    open_ids += [timer.ref for timer in timers if timer.kind is TimerKind.CHILD and timer.ref]
    if len(set(open_ids)) < open_children:  # one that has just ended stands there twice
        open_ids += lost
    for child in open_ids:
        view.snapshot.open_children[child] = OpenChild(
            child_run_id=child, awaited=True, tool_call_id=None, use=ChildUse()
        )
