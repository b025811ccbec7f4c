"""Ends in a tree of runs: what a child came to reaches its parent, and a parent ends after all
that it did not detach (R-13.1, R-9.5).

The commit that ends a child leaves a report with its parent in the same transaction. Whoever
wrote it delivers at once; a sweep of any process does it otherwise. Delivering is one commit of
the parent's log that takes the report away, so that it is delivered once. A parent that is to end
waits, held by nobody, until the last report is in; a child that does not end in time is ended as
ORPHANED.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress

from pydantic import JsonValue

from perdure.engine.closing import (
    CANCELLED,
    ORPHANED,
    TIMED_OUT,
    begun_calls,
    close_run,
    end_transition,
    finished_effects,
    is_for_others,
    look_up_open,
)
from perdure.engine.committer import announce
from perdure.engine.core import Core
from perdure.engine.counting import count_draft
from perdure.engine.discarding import content_to_discard
from perdure.engine.draft import Draft
from perdure.engine.effects_told import cut_off_tries, left_behind
from perdure.engine.load import Damaged, load_view
from perdure.engine.ports import ToolRunner
from perdure.engine.reports import draft_report, read_reports, take_reports
from perdure.engine.resuming import time_left_s
from perdure.engine.rowview import view_from_rows
from perdure.engine.snapshot import RunSnapshot
from perdure.engine.steps import waits_for_children
from perdure.engine.undoing import Undoing, read_undoing
from perdure.engine.undone import asks_to_compensate
from perdure.engine.unheld import intervene, unheld_draft
from perdure.engine.view import RunView
from perdure.protocol.errors import Conflict, PerdureError, Unreadable
from perdure.protocol.events import CompensationEvent, TimeoutEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.schema import Incompatible
from perdure.protocol.states import (
    TERMINAL,
    CancelAction,
    CancelOption,
    ParkedOn,
    RunState,
)
from perdure.signals.ports import CANCEL_TOPIC
from perdure.store.commits import Committed
from perdure.store.reader import RunFilter
from perdure.store.reading import log_unreadable
from perdure.store.requests import CancelWish, TimerKind

log = logging.getLogger(__name__)

LOOKUP_TIMEOUT_S = 10.0
UNFOLDED = Failure(
    code=FailureCode.CHECKPOINT_INCOMPATIBLE,
    reason="this release cannot carry the run on",
    stage=Stage.RECOVERY,
)
REPORTS_MAX = 64
CHILDREN_PAGE = 500


# ---------------------------------------------------------------- a child's result


async def tell_parent(core: Core, facts: RunFacts, tools: ToolRunner | None) -> None:
    """Deliver the report that the end of a run has left; a sweep does it when this fails."""
    if facts.parent_run_id is None or facts.detached:
        return
    try:
        await deliver_reports(core, facts.parent_run_id, tools)
    except (PerdureError, Damaged) as error:
        log.info("the report of %s waits for a sweep: %s", facts.run_id, error)


async def deliver_reports(core: Core, run_id: str, tools: ToolRunner | None) -> bool:
    """Write the results of ended children into their parent's log; True when this call did.

    A parent that waited for them alone goes on; one that is to end is ended with the last. The result
    of a child that cannot be read is waited for until that is repaired.
    """
    timers = await core.reader.timers_of(run_id)
    ended = [timer.ref for timer in timers if timer.kind is TimerKind.CHILD and timer.ref]
    if not ended:
        return False
    reports = await read_reports(core, ended, REPORTS_MAX)
    if not reports:
        return False

    def change(row: RunRow, draft: Draft) -> bool:
        if row.hot.state in TERMINAL:
            return False
        for report in reports:
            draft_report(draft, report)
        if not draft.reported:
            return False
        _wake(row, draft)
        return True

    written = await intervene(core, run_id, change)
    row = await core.reader.find_run(None, run_id)
    if row is not None and row.hot.lease_owner is None and row.hot.parked_on is ParkedOn.CLOSING:
        await close_unheld(core, run_id, TimerKind.CLOSE, tools)
    return written is not None


def _wake(row: RunRow, draft: Draft) -> None:
    """Draft what moves the parent from here: as before, or on, or to its end.

    A write beside no holder says anew whether the run may be claimed (see `resuming`).
    """
    hot, snapshot = row.hot, draft.view.snapshot
    draft.with_checkpoint = snapshot.cancel_epoch == 0
    if hot.lease_owner is not None:
        return
    draft.parked_on = hot.parked_on
    match hot.parked_on:
        case ParkedOn.CHILD if is_ending(snapshot):
            if not snapshot.open_children:
                draft.parked_on = ParkedOn.CLOSING
                draft.close_in_s = 0
        case ParkedOn.CHILD:
            if not waits_for_children(snapshot):
                draft.parked_on = None
                draft.ready_in_s = 0
        case ParkedOn.CLOSING | ParkedOn.REPAIR:
            pass
        case _:
            if snapshot.state is not RunState.WAITING_HUMAN:
                draft.ready_in_s = time_left_s(row, draft)


def is_ending(snapshot: RunSnapshot) -> bool:
    """Tell whether the run only waits for its children to end with them."""
    return snapshot.cancel_epoch > 0 or snapshot.ending is not None


# ---------------------------------------------------------------- ends of runs nobody holds


async def close_unheld(
    core: Core,
    run_id: str,
    due: TimerKind,
    tools: ToolRunner | None,
    *,
    undone: bool = False,
    overdue: bool = False,
) -> bool:
    """End a run that nobody holds and whose end is due; True when this call moved it on.

    While children are open they are cancelled and waited for, and ended as ORPHANED when that
    takes too long by the run's own timer (`overdue`: its time is over, and they were seen to). False
    when the run is held, ended already, has a call that only a worker, or another one, can look up,
    or one that is to be undone first (`undone`: that was seen to).
    """
    row = await core.reader.find_run(None, run_id)
    if row is None or row.hot.lease_owner is not None or row.hot.state in TERMINAL:
        return False
    view, whole = await _view(core, row)
    failure = _due_failure(row, view.snapshot, due, whole=whole)
    if failure is None:
        return False
    if view.snapshot.open_children and _waits_for_end(row, view.snapshot):
        if not overdue and not await _see_to_those_below(core, view, tools):
            return False
        if whole:
            return await deliver_reports(core, run_id, tools)
    if await is_for_others(core, view, tools):
        return False
    effects = await _effects(core, row, view, undone=undone or not whole)
    if effects is None:
        return False
    known = await look_up_open(view, tools, LOOKUP_TIMEOUT_S) if tools is not None else {}
    await _cancel_children(core, view, failure)
    draft = unheld_draft(core, view, row)
    if not whole:
        draft.with_checkpoint = False
        await take_reports(core, draft)
        _add_cut_off(draft, await cut_off_tries(core, row))
    _note_timeout(draft, failure)
    why = end_transition(row.hot.state, failure)
    close_run(draft, why, failure, known=known, effects=effects)
    if view.snapshot.open_children:
        draft.parked_on = ParkedOn.CHILD
        draft.close_in_s = core.settings.cancel_deadline_s
    return await _write(core, draft, tools)


async def _effects(
    core: Core, row: RunRow, view: RunView, *, undone: bool
) -> list[dict[str, JsonValue]] | None:
    """Return what a run's calls have left, for its end; None: something is to be undone first."""
    effects = await finished_effects(core, view)
    waits = bool(view.snapshot.open_children) and not undone
    if not asks_to_compensate(row.hot.cancel_options) or waits:
        return effects
    undoing = await read_undoing(core, row)
    if not undone and await _is_owed(core, view, undoing):
        return None
    return undoing.report(row.facts.run_id, effects)


async def _is_owed(core: Core, view: RunView, undoing: Undoing) -> bool:
    """Tell whether a worker has something to undo first, or to look up before that is known."""
    now, deadline_s = await core.reader.now(), core.settings.compensation_deadline_s
    in_time = not undoing.is_late(now, deadline_s)
    return bool(undoing.owed(now, deadline_s)) or (in_time and bool(begun_calls(view)))


async def _view(core: Core, row: RunRow) -> tuple[RunView, bool]:
    """Return the run's view, and whether its log could be folded: what is owed can always be told."""
    try:
        return await load_view(core, row, with_messages=False), True
    except Incompatible:
        return await view_from_rows(core, row), False


async def _write(core: Core, draft: Draft, tools: ToolRunner | None) -> bool:
    if draft.ends_run and CancelOption.DISCARD_ARTIFACTS in draft.view.snapshot.cancel_options:
        draft.discards = await content_to_discard(core, draft)
    commit = draft.build()
    (result,) = await core.store.commit([commit])
    if not isinstance(result, Committed):
        return False
    announce(core, commit)
    count_draft(core, draft)
    if draft.ends_run:
        await tell_parent(core, draft.view.facts, tools)
    return True


def _waits_for_end(row: RunRow, snapshot: RunSnapshot) -> bool:
    return row.hot.parked_on is ParkedOn.CHILD and is_ending(snapshot)


async def _see_to_those_below(core: Core, view: RunView, tools: ToolRunner | None) -> bool:
    """End what is below a run that waits for its end, as far as that can be; False in its time."""
    if await _has_time_to_end(core, view):
        return False
    await _orphan_below(core, view.facts.run_id, tools)
    return True


async def _has_time_to_end(core: Core, view: RunView) -> bool:
    """Tell whether children of a run that waits for their end are unfinished, and may be so still:
    also when a cancel has come since, which gives them their time anew.
    """
    timers = await core.reader.timers_of(view.facts.run_id)
    row = await core.reader.find_run(None, view.facts.run_id)
    if row is None or row.hot.last_seq != view.snapshot.last_seq:
        return True
    reported = {timer.ref for timer in timers if timer.kind is TimerKind.CHILD}
    if not view.snapshot.open_children.keys() - reported:
        return False
    now = await core.reader.now()
    return any(timer.kind is TimerKind.CLOSE and timer.due_at > now for timer in timers)


def _due_failure(
    row: RunRow, snapshot: RunSnapshot, due: TimerKind, *, whole: bool
) -> Failure | None:
    hot, options = row.hot, row.facts.options
    if hot.cancel_epoch > 0:
        return CANCELLED
    if snapshot.ending is not None:
        return snapshot.ending
    if due is TimerKind.DEADLINE:
        return TIMED_OUT
    if hot.faults < options.faults_max:
        return None if whole else UNFOLDED
    return Failure(
        code=FailureCode.RETRIES_EXHAUSTED,
        reason=f"{hot.faults} attempts were lost since the last committed step",
        stage=Stage.RECOVERY,
    )


def _add_cut_off(draft: Draft, tries: Sequence[CompensationEvent]) -> None:
    """Draft the ends of tries to undo something, which nobody will record: the run ends without."""
    for one in tries:
        draft.add(one)


def _note_timeout(draft: Draft, failure: Failure) -> None:
    """Draft the time-out of a run that is ended by it, unless that was done when it began to end."""
    if failure.code is FailureCode.RUN_TIMEOUT and draft.view.snapshot.ending is None:
        limit_s = draft.view.facts.options.timeouts.run_s or 0
        draft.add(TimeoutEvent(subject="run", limit_ms=round(limit_s * 1000)))


async def _cancel_children(core: Core, view: RunView, failure: Failure) -> None:
    """Cancel what is open below a run that is to end. A cancel of the run itself did so."""
    wish = CancelWish(
        action=view.snapshot.cancel_action or CancelAction.INTERRUPT,
        by="runtime",
        source="parent",
        reason=failure.reason,
        options=view.snapshot.cancel_options,
    )
    for child in view.snapshot.open_children:
        try:
            await core.store.request_cancel(child, wish)
        except Unreadable as error:  # it is left as it is, as a cancel from above leaves it
            log_unreadable(child, error.message)
    if view.snapshot.open_children:
        core.signals.publish(CANCEL_TOPIC)


# ---------------------------------------------------------------- what does not end in time


async def _orphan_below(core: Core, run_id: str, tools: ToolRunner | None) -> None:
    """End every unfinished child, the deepest first."""
    where, after = RunFilter(parent_run_id=run_id, unfinished=True), None
    while page := await core.reader.list_runs(None, where, after=after, limit=CHILDREN_PAGE):
        for row in page:
            if row.facts.detached:
                continue
            try:
                await _orphan(core, row.facts.run_id, tools)
            except Unreadable as error:  # it keeps neither the others nor their parent
                log_unreadable(row.facts.run_id, error.message)
        after = page[-1].facts.run_id


async def _orphan(core: Core, run_id: str, tools: ToolRunner | None) -> None:
    """End a run whose time to end is over: in order if it only waits for that, else ORPHANED."""
    await _orphan_below(core, run_id, tools)
    with suppress(Conflict):  # one that is damaged, or of a later release, takes them with its end
        await deliver_reports(core, run_id, tools)
    row = await core.reader.find_run(None, run_id)
    if row is None or row.hot.state in TERMINAL:
        return
    if row.hot.lease_owner is not None:
        await core.store.take_away(run_id, "orphaned")
    elif row.hot.parked_on is not ParkedOn.REPAIR:
        with suppress(Damaged):
            if await close_unheld(core, run_id, TimerKind.CLOSE, tools, overdue=True):
                return
    row = await core.reader.find_run(None, run_id)
    if row is None or row.hot.state in TERMINAL or row.hot.lease_owner is not None:
        return
    draft = await _orphan_draft(core, row)
    if draft is not None and await _write(core, draft, tools):
        log.warning("run %s did not end in time and is ended as ORPHANED", run_id)


async def _orphan_draft(core: Core, row: RunRow) -> Draft | None:
    """Draft a run's end as ORPHANED; None while it, or a run below it, undoes what it did: that has
    its own deadline. One that is put aside undoes nothing, and takes its reports only with its end.
    """
    effects: list[dict[str, JsonValue]] | None = None
    cut_off: Sequence[CompensationEvent] = ()
    is_aside = row.hot.parked_on is ParkedOn.REPAIR
    try:
        view, whole = await _view(core, row)
        if not is_aside:
            effects = await _effects(core, row, view, undone=not whole)
            if effects is None:
                return None
            cut_off = await cut_off_tries(core, row)  # of one that a later release was to undo
    except Damaged:
        view, whole = await view_from_rows(core, row), False
    if effects is None:
        left = await left_behind(core, row, view)
        effects, cut_off = left.effects, left.cut_off
    draft = unheld_draft(core, view, row)
    draft.with_checkpoint = whole
    if is_aside or not whole:
        await take_reports(core, draft)
    if view.snapshot.open_children:
        return None
    _add_cut_off(draft, cut_off)
    close_run(draft, end_transition(row.hot.state, ORPHANED), ORPHANED, effects=effects)
    return draft
