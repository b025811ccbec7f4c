"""Opening a run that shares the history of another: a retry or a fork (R-10.3, R-7.4).

The new run names the place where its history begins; nothing is copied. It is a run of its own
in every other way: its log starts at seq 1, it has its own attempts, limits and use.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.fold import fold
from perdure.engine.origin import (
    OriginGone,
    Shared,
    end_of_work,
    fold_origins,
    last_failed_calls,
    origins_of,
    shared_log,
)
from perdure.engine.sharing import check_not_undone, check_nothing_behind
from perdure.engine.submit import RunOrder, Start, Submitted, accepted_before, submit_run
from perdure.engine.values import keep
from perdure.protocol.codec import clean
from perdure.protocol.errors import Conflict, Gone, Invalid, PerdureError
from perdure.protocol.events import Origin, StateEvent
from perdure.protocol.records import CheckpointRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import CancelAction, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchWish:
    """How a run is to go on from the history of another, and who wants it."""

    mode: Literal["retry", "redrive", "return", "fork"]
    by: str
    reason: str | None = None
    checkpoint: CheckpointRow | None = None
    edits_state: bool = False
    state: JsonValue = None


async def retry_run(core: Core, row: RunRow, order: RunOrder, wish: BranchWish) -> Submitted:
    """Open a run that goes on where a failed one ended, or from the checkpoint that is named.

    Raises Conflict for a run that has not failed, was rolled back, or did what has been undone, and
    for a redrive that would have effects again; Gone when its beginning is no longer kept, Invalid for a checkpoint that is not of its history; else as `submit_run`.
    """
    return await _open(core, row, order, wish, _retried_place)


async def fork_run(core: Core, row: RunRow, order: RunOrder, wish: BranchWish) -> Submitted:
    """Open a run of its own that goes on from a checkpoint of another, whatever became of that.

    Without a checkpoint: from where a failed run ended, from before a succeeded run's last
    decision, from the last checkpoint of a run that goes on. Raises Conflict for a run that was
    rolled back or has no checkpoint, Gone, Invalid; else as `submit_run`.
    """
    return await _open(core, row, order, wish, _fork_place)


async def continue_run(core: Core, row: RunRow, order: RunOrder, wish: BranchWish) -> Submitted:
    """Open a run that goes on from where one stands that its holder is about to end.

    Raises as `retry_run` does.
    """
    return await _open(core, row, order, wish, _end_place)


async def open_at_checkpoint(
    core: Core, row: RunRow, order: RunOrder, wish: BranchWish
) -> Submitted:
    """Open a run that goes on from a checkpoint of one that is about to be ended.

    Raises Gone, Conflict; else as `submit_run`.
    """
    return await _open(core, row, order, wish, _named_place)


Place = Callable[[Core, RunRow, BranchWish], Awaitable[Shared]]


async def _open(
    core: Core, row: RunRow, order: RunOrder, wish: BranchWish, find_place: Place
) -> Submitted:
    """Open the run that begins at a place of the history, or return the one under its key."""
    try:
        start = await _start(core, row, wish, find_place)
    except PerdureError as refused:
        return await accepted_before(core, order, refused)
    return await submit_run(core, order, start)


async def _start(core: Core, row: RunRow, wish: BranchWish, find_place: Place) -> Start:
    if wish.edits_state and keep(wish.state).ref is not None:
        raise Invalid("an agent's state is at most an inline value", field="/state")
    if row.hot.cancel_action is CancelAction.ROLLBACK:
        raise Conflict("the run was rolled back: its state is discarded")
    try:
        place = await find_place(core, row, wish)
        await check_not_undone(core, [*await origins_of(core.reader, place.facts), place])
        event = StateEvent(state=RunState.PENDING, origin=_origin(place, wish))
        is_fork = wish.mode == "fork"
        return Start(
            event=event,
            step_index=await _first_step(core, row, event),
            retry_of=None if is_fork else row.facts.run_id,
            forked_from=row.facts.run_id if is_fork else None,
        )
    except OriginGone as error:
        raise Gone(f"the history is no longer kept: {error}") from error
    except ValueError as error:
        raise Conflict(f"the history of the run is damaged: {error}") from error


def _origin(place: Shared, wish: BranchWish) -> Origin:
    return Origin(
        run_id=place.facts.run_id,
        seq=place.until,
        mode=wish.mode,
        by=wish.by,
        reason=wish.reason,
        edits_state=wish.edits_state,
        state=clean(wish.state),
    )


async def _fork_place(core: Core, row: RunRow, wish: BranchWish) -> Shared:
    """Return the place of the named checkpoint, or the one a fork begins at by itself."""
    own = Shared(facts=row.facts, until=row.hot.last_seq)
    if wish.checkpoint is not None:
        return place_of(wish.checkpoint, [*await origins_of(core.reader, row.facts), own])
    if row.hot.state is RunState.FAILED:
        return await _retry_place(core, row, wish)
    rows = await core.reader.list_checkpoints(
        row.facts.run_id, before=row.hot.terminal_seq, limit=1
    )
    if not rows:
        raise Conflict("the run has no checkpoint yet: start one like it instead")
    return replace(own, until=rows[0].seq)


async def _retried_place(core: Core, row: RunRow, wish: BranchWish) -> Shared:
    """Return where the retry of a run begins that has to have failed."""
    if row.hot.state is not RunState.FAILED:
        raise Conflict(f"only a failed run can be retried; this one is {row.hot.state}")
    return await _retry_place(core, row, wish)


async def _end_place(core: Core, row: RunRow, wish: BranchWish) -> Shared:
    """Return the whole of the log. What becomes of open calls is read from their rows."""
    del core, wish
    return Shared(facts=row.facts, until=row.hot.last_seq)


async def _named_place(core: Core, row: RunRow, wish: BranchWish) -> Shared:
    """Return the place of the checkpoint, which is the run's own. The rest of its log is not read."""
    del core
    assert wish.checkpoint is not None, "the wish names it"
    return place_of(wish.checkpoint, [Shared(facts=row.facts, until=row.hot.last_seq)])


async def _retry_place(core: Core, row: RunRow, wish: BranchWish) -> Shared:
    """Return where the retry begins: the end of the work, or of the checkpoint that is named."""
    end = end_of_work(
        await shared_log(core.reader, Shared(facts=row.facts, until=row.hot.last_seq))
    )
    history = [*await origins_of(core.reader, row.facts), Shared(facts=row.facts, until=end)]
    if wish.checkpoint is not None:
        return place_of(wish.checkpoint, history)
    if wish.mode == "redrive":
        place = await last_failed_calls(core.reader, history)
        await check_nothing_behind(core, place, history)
        return place
    return history[-1]


def place_of(checkpoint: CheckpointRow, history: list[Shared]) -> Shared:
    """Return the place of a checkpoint in a history. Raises Invalid when it is not in it."""
    for shared in history:
        if shared.facts.run_id == checkpoint.run_id and checkpoint.seq <= shared.until:
            return replace(shared, until=checkpoint.seq)
    raise Invalid(
        "the checkpoint is not in the history that the run can go on from", field="/checkpoint_id"
    )


async def _first_step(core: Core, row: RunRow, event: StateEvent) -> int:
    """Return the step that a run with this first event begins in."""
    assert event.origin is not None
    origin = event.origin
    facts = replace(row.facts, origin_run_id=origin.run_id, origin_seq=origin.seq)
    snapshot = await fold_origins(core.reader, facts)
    fold(snapshot, 1, event)
    return snapshot.step_index
