"""What became of undoing calls: read from a run's `compensation` events and its calls' rows."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from perdure.engine.core import Core
from perdure.engine.snapshot import is_side_effect
from perdure.protocol.events import (
    CancelEvent,
    ChildEvent,
    CompensationEvent,
    ResultEvent,
    StateEvent,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import DamagedEvent
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, CancelOption, ToolCallStatus
from perdure.store.reader import RunFilter
from perdure.store.reading import OnUnreadable, log_unreadable

PAGE = 500
TOOK_EFFECT = frozenset({ToolCallStatus.SUCCEEDED, ToolCallStatus.PARTIAL})
LEFT = TOOK_EFFECT | {ToolCallStatus.TIMED_OUT, ToolCallStatus.UNKNOWN}
"""Outcomes of calls whose effect is, or may be, in the world."""
MAY_HAVE_ACTED = LEFT | {ToolCallStatus.RUNNING, ToolCallStatus.PENDING}
"""Where a call stands whose effect is, may be, or may come to be in the world."""
WORDS = ("not_started", "failed", "unknown", "succeeded")
"""What can have become of undoing a call, by how much may have been done."""


def asks_to_compensate(options: CancelOption) -> bool:
    """Tell whether a cancel asks that what was done is undone."""
    return CancelOption.COMPENSATE in options


def has_undone(row: RunRow) -> bool:
    """Tell whether a run was cancelled and has seen to the undoing of what it did itself."""
    is_cancelled = row.hot.code is FailureCode.RUN_CANCELLED
    return is_cancelled and asks_to_compensate(row.hot.cancel_options)


@dataclass(slots=True)
class Tail:
    """What the log of a cancelled run tells of undoing: when it was asked for, or could begin as the
    last child had ended, and the tries so far, by calls. `is_part`: there may have been others, which
    cannot be read.
    """

    asked_at: datetime | None = None
    tries: dict[str, list[tuple[datetime, CompensationEvent]]] = field(
        default_factory=dict[str, list[tuple[datetime, CompensationEvent]]]
    )
    is_part: bool = False


async def tail_of(core: Core, row: RunRow) -> Tail:
    """Return what the log tells of undoing: no checkpoint follows a cancel."""
    tail = Tail()
    seq = row.hot.checkpoint_seq or 0
    while page := await core.reader.events_after(row.facts.run_id, seq, limit=PAGE):
        for event in page:
            tail.is_part |= event.seq != seq + 1
            seq = event.seq
            try:
                data = event.data
            except DamagedEvent:
                tail.is_part |= event.type == "compensation"
                continue
            match data:
                case CancelEvent() as cancel if cancel.compensate and tail.asked_at is None:
                    tail.asked_at = event.at
                case ChildEvent(phase="result") if tail.asked_at is not None:
                    tail.asked_at = event.at
                case CompensationEvent() as one:
                    tail.tries.setdefault(one.tool_call_id, []).append((event.at, one))
                case _:
                    pass
    tail.is_part |= seq < row.hot.last_seq
    return tail


async def undone_by(core: Core, row: RunRow) -> dict[str, str]:
    """Return what became of the calls, its own and those of runs below it, that a run began to undo.

    What it did is `unknown` where neither its end nor the whole of its log can be read: it may be
    undone.
    """
    if not asks_to_compensate(row.hot.cancel_options):
        return {}
    at_the_end = await _told_at_the_end(core, row) if row.hot.state in TERMINAL else None
    told, is_whole = at_the_end or {}, at_the_end is not None
    if row.hot.retained_from_seq == 1:
        tail = await tail_of(core, row)
        log = {call: became_of_undoing([one for _, one in of]) for call, of in tail.tries.items()}
        told, is_whole = strongest(told, log), is_whole or not tail.is_part
    if not is_whole:
        async for run_id in at_and_below(core, row.facts.run_id):
            async for call in calls_of(core, run_id):
                if call.status in TOOK_EFFECT:
                    told.setdefault(call.tool_call_id, "unknown")
    return told


async def under_way_of(core: Core, row: RunRow) -> set[str]:
    """Return the calls that a run is undoing right now: a try was begun, and has not ended."""
    if row.hot.state in TERMINAL or not asks_to_compensate(row.hot.cancel_options):
        return set()
    tail = await tail_of(core, row)
    return {call for call, tries in tail.tries.items() if tries[-1][1].status == "started"}


async def at_and_below(core: Core, run_id: str) -> AsyncIterator[str]:
    """Yield a run and those below it that it did not detach, or may not have: they cannot be read."""
    yield run_id
    lost: list[str] = []
    children = children_of(core, run_id, keep_unreadable(lost))
    own = [child.facts.run_id async for child in children if not child.facts.detached]
    for child_id in (*own, *lost):
        async for below in at_and_below(core, child_id):
            yield below


async def _told_at_the_end(core: Core, row: RunRow) -> dict[str, str] | None:
    """Return what the end of a run tells of undoing, which is kept when the history goes; None when
    it cannot be read.
    """
    seq = row.hot.terminal_seq or row.hot.last_seq
    for event in await core.reader.events_after(row.facts.run_id, seq - 1, limit=1):
        try:
            data = event.data
        except DamagedEvent:
            return None
        effects = (data.effects or ()) if isinstance(data, StateEvent) else ()
        return {
            str(effect.get("tool_call_id")): str(effect["compensation"])
            for effect in effects
            if effect.get("compensation") in WORDS
        }
    return None


def became_of_undoing(tries: Sequence[CompensationEvent]) -> str:
    """Return what the end of a run tells of undoing a call, by its `compensation` events in order.

    A try whose end is not known may have been the one that undid it, also when later ones failed.
    """
    not_begun = {one.number for one in tries if not one.begun}
    ends = {one.number: one.status for one in tries if one.number not in not_begun}
    told = set(ends.values())
    if "succeeded" in told:
        return "succeeded"
    if told & {"started", "unknown"}:
        return "unknown"
    return "failed" if told else "not_started"


def strongest(some: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """Return what became of undoing each call that two runs told of: undone by one is undone."""
    told = dict(some)
    for call, word in others.items():
        told[call] = max(word, told.get(call, word), key=WORDS.index)
    return told


async def children_of(
    core: Core,
    run_id: str,
    on_unreadable: OnUnreadable | None = None,
    *,
    unfinished: bool = False,
) -> AsyncIterator[RunRow]:
    """Yield the children of a run; `on_unreadable` is told once of each that cannot be read."""
    after: str | None = None
    where = RunFilter(parent_run_id=run_id, unfinished=unfinished)
    while page := await core.reader.list_runs(
        None, where, after=after, limit=PAGE, on_unreadable=on_unreadable
    ):
        for row in page:
            yield row
        if len(page) < PAGE:
            break  # what is left out behind the last one was told with this page
        after = page[-1].facts.run_id


def keep_unreadable(ids: list[str]) -> OnUnreadable:
    """Return what keeps the ids of rows that a list leaves out, and tells an operator of them."""

    def keep(run_id: str, reason: str) -> None:
        log_unreadable(run_id, reason)
        ids.append(run_id)

    return keep


async def calls_of(core: Core, run_id: str) -> AsyncIterator[ToolCallRow]:
    after: tuple[int, int] | None = None
    while page := await core.reader.list_tool_calls(run_id, after=after, limit=PAGE):
        for call in page:
            yield call
        if len(page) < PAGE:
            break
        after = (page[-1].step_index, page[-1].ordinal)


async def has_left(core: Core, row: ToolCallRow) -> bool:
    """Tell whether a call's effect is, or may be, in the world: also when its result was refused."""
    if not is_side_effect(row.side_effect) or row.status is not ToolCallStatus.FAILED:
        return is_side_effect(row.side_effect) and row.status in LEFT
    found = await core.reader.events_after(row.run_id, (row.result_seq or 1) - 1, limit=1)
    for event in found:
        try:
            data = event.data
        except DamagedEvent:
            return True
        if isinstance(data, ResultEvent) and data.error is not None:
            return data.error.code is FailureCode.TOOL_RESULT_INVALID
    return False
