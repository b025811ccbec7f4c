"""Rebuilding a run's view from its log, with the proof that the log is whole (R-7.3, R-7.7)."""

from datetime import datetime

from perdure.engine.core import Core
from perdure.engine.fold import OutOfOrder, begin_own
from perdure.engine.history import load_history, load_value
from perdure.engine.origin import OriginGone, Shared, origins_of, shared_events
from perdure.engine.snapshot import snapshot_digest
from perdure.engine.view import Executions, RunView, view_of
from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.errors import Unreadable
from perdure.protocol.events import AttemptEvent, RetryEvent, StateEvent
from perdure.protocol.log import DamagedEvent, RecordedEvent, Unknown
from perdure.protocol.runs import RunHot, RunRow
from perdure.protocol.schema import check_version
from perdure.protocol.states import RunState
from perdure.store.requests import Claimed

PAGE = 1000


class Damaged(Exception):
    """The run's log, checkpoint and row do not agree; the run must be put aside for repair."""


async def load_claimed(core: Core, claimed: Claimed, worker_id: str) -> RunView:
    """Return the view of a run that was just claimed. Raises Damaged, Incompatible.

    A run that nobody has worked on holds two events that are known without reading them.
    """
    row = claimed.row
    check_version(row.facts.schema_version)
    first_time = row.hot.attempt == 1 and row.hot.last_seq == 2
    if first_time and row.facts.input.ref is None and row.facts.origin_run_id is None:
        view = view_of(row, row.facts.input.inline)
        view.apply(1, StateEvent(state=RunState.PENDING))
        view.apply(2, AttemptEvent(phase="claimed", attempt=1, worker=worker_id))
        return view
    return await load_view(core, row)


async def load_view(core: Core, row: RunRow, *, with_messages: bool = True) -> RunView:
    """Return the view of a run as of its last event. Raises Damaged, Incompatible.

    Only a planner needs the messages of its thread; they cost a few reads each.
    """
    check_version(row.facts.schema_version)
    try:
        return await _load(core, row, with_messages=with_messages)
    except Unreadable as error:
        raise Damaged(error.message) from error


async def _load(core: Core, row: RunRow, *, with_messages: bool) -> RunView:
    try:
        run_input = await load_value(core, row.facts.tenant_id, row.facts.input)
    except LookupError as error:
        raise Damaged(str(error)) from error
    view = view_of(row, run_input)
    thread_id, own = await _apply_origins(core, view)
    await catch_up(core, view, row.hot)
    if view.snapshot.last_seq < row.hot.last_seq:
        raise Damaged(f"the log ends at {view.snapshot.last_seq}, the row at {row.hot.last_seq}")
    await _load_executions(core, view)
    position = view.snapshot.history_position
    if with_messages and position is not None and position > 1:
        view.messages = await load_history(core, thread_id, position, own)
    return view


async def load_past(core: Core, row: RunRow, seq: int) -> RunView:
    """Return the view of a run as it was at a seq, without messages. Raises Damaged."""
    view = view_of(row, row.facts.input.inline)
    await _apply_origins(core, view)
    try:
        async for event in shared_events(core.reader, Shared(facts=row.facts, until=seq)):
            _apply(core, view, event)
    except OriginGone as error:
        raise Damaged(str(error)) from error
    return view


async def _apply_origins(core: Core, view: RunView) -> tuple[str, frozenset[str]]:
    """Apply what the run shares; return whose thread its planner sees, and which runs it is."""
    facts = view.facts
    try:
        origins = await origins_of(core.reader, facts)
        for shared in origins:
            async for event in shared_events(core.reader, shared):
                _apply(core, view, event)
            begin_own(view.snapshot)
    except OriginGone as error:
        raise Damaged(str(error)) from error
    runs = {facts.run_id, *(shared.facts.run_id for shared in origins)}
    if facts.retry_of is not None:
        runs.add(facts.retry_of)
    shares_place = view.snapshot.history_position is not None
    thread_id = origins[0].facts.thread_id if shares_place else facts.thread_id
    return thread_id, frozenset(runs)


def _apply(
    core: Core, view: RunView, event: RecordedEvent, written_at: datetime | None = None
) -> None:
    if event.schema_version != SCHEMA_VERSION:
        check_version(event.schema_version)
    try:
        data = event.data
        if isinstance(data, Unknown):
            raise Damaged(f"event {event.seq} is of the unknown type {event.type}")
        view.apply(event.seq, data)
        if isinstance(data, RetryEvent) and data.tool_call_id is not None:
            view.retry_at[data.tool_call_id] = _due_at(core, event, data.delay_ms, written_at)
    except (DamagedEvent, OutOfOrder) as error:
        raise Damaged(str(error)) from error


async def catch_up(core: Core, view: RunView, hot: RunHot) -> None:
    """Apply the events after the view's last one, up to those of a row, checking its checkpoint.

    Not what came after the row was read: seq and checkpoint of a view are of one moment. A digest
    is compared when this schema version made it: another may have covered other things.
    """
    expected = await _last_checkpoint(core, view, hot)
    run_id = view.facts.run_id
    while (left := hot.last_seq - view.snapshot.last_seq) > 0:
        events = await core.reader.events_after(
            run_id, view.snapshot.last_seq, limit=min(left, PAGE)
        )
        for event in events:
            _apply(core, view, event, hot.updated_at)
            digest = expected.get(event.seq)
            if digest is not None and digest != snapshot_digest(view.snapshot):
                raise Damaged(f"the log does not fold to the checkpoint at {event.seq}")
        if not events:
            return


def _due_at(core: Core, retry: RecordedEvent, delay_ms: int, written_at: datetime | None) -> float:
    """Return when a call is tried again; clocks that differ make the wait no longer than it is.

    What has passed is also told by the run's last write, by the clock that wrote the retry: a
    worker whose clock is behind would else begin the wait anew with each claim.
    """
    delay_s = delay_ms / 1000
    now = max(core.clock.now(), written_at or retry.at)
    left_s = delay_s - (now - retry.at).total_seconds()
    return core.clock.monotonic() + max(0.0, min(delay_s, left_s))


async def _last_checkpoint(core: Core, view: RunView, hot: RunHot) -> dict[int, str]:
    view.checkpoint_seq = hot.checkpoint_seq
    if hot.checkpoint_seq is None:
        return {}
    rows = await core.reader.list_checkpoints(
        view.facts.run_id, before=hot.checkpoint_seq + 1, limit=1
    )
    return {row.seq: row.digest for row in rows if row.schema_version == SCHEMA_VERSION}


async def _load_executions(core: Core, view: RunView) -> None:
    if not view.snapshot.open_calls:
        return
    for row in await core.reader.open_executions(view.facts.run_id):
        if row.tool_call_id in view.snapshot.open_calls:
            view.executions[row.tool_call_id] = Executions(
                count=row.number, running=row.ended_at is None
            )
