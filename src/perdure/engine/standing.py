"""Which effects of a run are not to be undone, as other runs stand on them (R-9.4).

A call that a run takes over keeps its effect key, and so does what undoes it (R-5.6). A run that
goes on or has succeeded stands on what it has under a key: by a call of its own, by one that it
shares with a run it goes on from, or by one that was cut off there and that it is about to take over.

Two that are to undo one effect, or one that is to undo it and one that begins to stand on it, do
not see each other by reading alone. So each writes first that it will, and reads again before it
acts: `started` before undoing, the run's own row before it begins.
"""

from dataclasses import dataclass, field

from perdure.engine.kin import Kin
from perdure.engine.undone import TOOK_EFFECT
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, RunState, ToolCallStatus

STANDS = TOOK_EFFECT | {
    ToolCallStatus.PROPOSED,
    ToolCallStatus.AWAITING_APPROVAL,
    ToolCallStatus.RUNNING,
    ToolCallStatus.PENDING,
}
"""Where a call stands whose run stands, or may come to stand, on its effect."""
GONE = frozenset({"succeeded", "unknown"})
"""What became of undoing an effect that is not in the world any more, or may not be."""


@dataclass(slots=True)
class Standing:
    """Keys of a run's effects: `held` others stand on or have undone, `first` another is to undo
    with the smaller id, `under_way` another is undoing right now.
    """

    held: set[str] = field(default_factory=set[str])
    first: set[str] = field(default_factory=set[str])
    under_way: set[str] = field(default_factory=set[str])


async def standing_of(kin: Kin, run: RunRow, undoer: RunRow) -> Standing:
    """Return which effects of a run `undoer`, itself or a run above it, is not to undo.

    Where a relative cannot be read all are held: it may stand on them.
    """
    found = Standing()
    kin.is_part = False  # of others that were read before
    line = {run.facts.run_id, *(one.facts.run_id for one in await kin.above(run))}
    for other in await kin.family_of(run.facts):
        if other.facts.run_id == run.facts.run_id:
            continue
        first = await kin.undoer_of(other)
        if first is None:
            found.held |= await _held(kin, other)
        elif _rank(first, other) < _rank(undoer, run):
            mine = await kin.calls_of(other.facts.run_id)
            found.first |= {call.effect_key for call in mine.effects if call.status in TOOK_EFFECT}
        for one in (other, *await kin.above(other)):
            if one.facts.run_id not in line:
                now = await kin.under_way(one)
                found.under_way |= now
                told = await kin.undone_by(one)
                found.held |= {key for key, word in told.items() if word in GONE} - now
    if await _is_shared_whole(kin, run) or kin.is_part:
        found.held |= {call.effect_key for call in (await kin.calls_of(run.facts.run_id)).effects}
    return found


async def may_be_undone(kin: Kin, run: RunRow, undoer: RunRow, key: str) -> bool:
    """Tell whether an effect may be undone now that `started` is durable.

    Who has come to stand on it since has read that, or stands there now. Another that is to undo it
    too, and has not begun, will find it begun; of two that have begun both give way, and the one
    with the smaller id begins again.
    """
    standing = await standing_of(kin, run, undoer)
    return key not in standing.held | standing.under_way


def _rank(undoer: RunRow, run: RunRow) -> tuple[str, str]:
    return undoer.facts.run_id, run.facts.run_id


async def _held(kin: Kin, other: RunRow) -> set[str]:
    """Return the keys of the effects that a run which nobody is to undo stands on.

    One that failed stands on nothing: who goes on from it does.
    """
    if await _has_failed(kin, other):
        return set()
    own = await kin.calls_of(other.facts.run_id)
    keys = {call.effect_key for call in own.effects if call.status in STANDS}
    for shared in await kin.history_of(other.facts):
        keys |= {call.effect_key for call in await kin.done_in(shared)}
    if other.hot.state not in TERMINAL and not own.has_any:
        keys |= {call.effect_key for call in await kin.to_be_taken_over(other.facts)}
    return keys


async def _has_failed(kin: Kin, run: RunRow) -> bool:
    """Tell whether a run has failed, or is sure to: itself, or with a run above whose retries and
    forks have not its result.
    """
    if run.hot.state is RunState.FAILED or run.hot.cancel_epoch > 0:
        return True
    above = await kin.above(run)
    is_lost = any(one.hot.state is RunState.FAILED or one.hot.cancel_epoch > 0 for one in above)
    return is_lost and not await _is_shared_whole(kin, run)


async def _is_shared_whole(kin: Kin, run: RunRow) -> bool:
    """Tell whether a run stands on all that a run did: it shares its result with a run above."""
    child = run
    for parent in await kin.above(run):
        for other in await kin.family_of(parent.facts):
            if other.hot.state is RunState.FAILED or other.hot.cancel_epoch > 0:
                continue
            if await kin.undoer_of(other) is not None:
                continue
            for shared in await kin.history_of(other.facts):
                if shared.facts.run_id == parent.facts.run_id:
                    told = await kin.children_told_in(shared)
                    if told is None or child.facts.run_id in told:
                        return True
        child = parent
    return False
