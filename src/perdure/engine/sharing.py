"""What runs that share a history have done to each other's effects.

A call that a run takes over keeps its effect key, and so does what undoes it (R-5.6, R-9.4). So
nobody goes on from a call that was undone as if it had been done, or acts again under a key whose
effect was undone. What another run stands on is undone by nobody (`standing`).
"""

from collections.abc import AsyncIterator, Sequence

from perdure.engine.core import Core
from perdure.engine.kin import Kin
from perdure.engine.origin import OriginGone, Shared, origins_of
from perdure.engine.snapshot import is_side_effect
from perdure.engine.standing import GONE
from perdure.engine.undone import (
    MAY_HAVE_ACTED,
    asks_to_compensate,
    calls_of,
    children_of,
    strongest,
)
from perdure.protocol.errors import Conflict
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL

TOLD_MAX = 20


async def check_not_undone(core: Core, history: Sequence[Shared]) -> None:
    """Raise Conflict when a call of a history, or of a child that it has, began or is to be undone, or
    may be: where the child, or a relative, cannot be read.
    """
    kin = Kin(core)
    undone = [call async for call in _to_be_undone(kin, history)]
    undone += [call async for call in _undone_in(kin, history)]
    if undone:
        raise Conflict(
            "what the run did has been undone, or is to be: go on from a checkpoint before that, or"
            " start a new run",
            details={"undone": undone[:TOLD_MAX]},
        )
    if kin.is_part and await _has_done(kin, history):
        raise Conflict(
            "a run that shares this history, or is below it, cannot be read, and what was done there may"
            " have been undone: repair that one first, go on from a checkpoint before, or start a new"
            " run"
        )


async def undone_meanwhile(core: Core, facts: RunFacts) -> Failure | None:
    """Return why a run cannot begin: what it goes on from was undone while it was made.

    A relative that cannot be read since then stops nobody here.
    """
    try:
        history = await origins_of(core.reader, facts)
    except OriginGone:
        return None  # told where it is read
    undone = [call async for call in _undone_in(Kin(core), history)]
    if not undone:
        return None
    return Failure(
        code=FailureCode.CONFLICT,
        reason="what the run was to go on from was undone while it was made",
        stage=Stage.RECOVERY,
        details={"undone": [*undone[:TOLD_MAX]]},
    )


async def undone_elsewhere(
    kin: Kin, facts: RunFacts, below: frozenset[str] = frozenset()
) -> dict[str, str]:
    """Return what became of undoing effects that a run may have taken over, by their keys: by its
    family, and by the runs above that.

    What the runs `below` a shared history have undone themselves their results tell there.
    """
    keys: dict[str, str] = {}
    for member in await kin.family_of(facts):
        for one in (member, *await kin.above(member)):
            if asks_to_compensate(one.hot.cancel_options) and one.facts.run_id not in below:
                keys = strongest(keys, await kin.undone_by(one))
    return keys


async def _to_be_undone(kin: Kin, history: Sequence[Shared]) -> AsyncIterator[str]:
    """Yield the effects in a history that a cancel may undo which has not come to its end."""
    for shared in history:
        row = await kin.find(shared.facts.run_id, shared.facts.tenant_id)
        if row is not None and await _is_to_be_undone(kin, row):
            async for effect in _effects_in(kin, shared):
                yield effect


async def _is_to_be_undone(kin: Kin, row: RunRow) -> bool:
    return any(
        asks_to_compensate(one.hot.cancel_options) and one.hot.state not in TERMINAL
        for one in (row, *await kin.above(row))
    )


async def _undone_in(kin: Kin, history: Sequence[Shared]) -> AsyncIterator[str]:
    """Yield the finished calls of a history, and of the runs below it, whose effects are gone."""
    undone = await undone_elsewhere(kin, history[-1].facts) if history else {}
    for shared in history:
        async for call in _gone_in(kin, shared, undone, frozenset()):
            yield call


async def _gone_in(
    kin: Kin, shared: Shared, undone: dict[str, str], line: frozenset[str]
) -> AsyncIterator[str]:
    if GONE.intersection(undone.values()):
        for call in await kin.done_in(shared):
            if undone.get(call.effect_key) in GONE:
                yield call.tool_call_id
    for child in (await kin.children_in(shared)).rows:
        whole = _whole(child)
        below = line | {child.facts.run_id}
        around = await undone_elsewhere(kin, child.facts, below)
        async for call_id in _gone_in(kin, whole, around, below):
            yield call_id


async def _has_done(kin: Kin, history: Sequence[Shared]) -> bool:
    """Tell whether a call of a history, or of a run below it, took effect, or may have."""
    for shared in history:
        children = await kin.children_in(shared)
        if children.lost or await kin.done_in(shared):
            return True
        for child in children.rows:
            if await _has_done(kin, [_whole(child)]):
                return True
    return False


def _whole(row: RunRow) -> Shared:
    return Shared(facts=row.facts, until=row.hot.last_seq)


async def _effects_in(kin: Kin, shared: Shared) -> AsyncIterator[str]:
    for call in (await kin.calls_of(shared.facts.run_id)).effects:
        if call.action_seq <= shared.until and call.status in MAY_HAVE_ACTED:
            yield call.tool_call_id
    children = await kin.children_in(shared)
    for run_id in (*(child.facts.run_id for child in children.rows), *children.lost):
        yield run_id


async def _children_behind(core: Core, place: Shared, shared: Shared) -> list[str]:
    """Return the children of a run of a history that began behind a place in it, or may have."""
    lost = list[str]()
    known = children_of(core, shared.facts.run_id, lambda run_id, _: lost.append(run_id))
    children = [child.facts async for child in known]
    if shared.facts.run_id != place.facts.run_id:
        return [*(child.run_id for child in children), *lost]
    behind = [child.run_id for child in children if not await _began_by(core, child, place)]
    told = (await Kin(core).children_told_in(place) or ()) if lost else ()
    return [*behind, *(run_id for run_id in lost if run_id not in told)]


async def _began_by(core: Core, child: RunFacts, shared: Shared) -> bool:
    last = await core.reader.events_after(shared.facts.run_id, shared.until - 1, limit=1)
    return not last or child.created_at <= last[0].at


async def check_nothing_behind(core: Core, place: Shared, history: Sequence[Shared]) -> None:
    """Raise Conflict when effects or children of a history lie behind a place in it.

    A run that began there would have them anew, under new keys: detached children too.
    """
    behind: list[str] = []
    for shared in history[[one.facts.run_id for one in history].index(place.facts.run_id) :]:
        is_own = shared.facts.run_id == place.facts.run_id
        after = place.until if is_own else 0
        behind += [
            call.tool_call_id
            async for call in calls_of(core, shared.facts.run_id)
            if after < call.action_seq <= shared.until and _may_have_acted(call)
        ]
        behind += await _children_behind(core, place, shared)
    if behind:
        raise Conflict(
            "calls after the failed ones have had effects, which a redrive would have again: retry"
            " without it, or name a checkpoint",
            details={"behind": behind[:TOLD_MAX]},
        )


def _may_have_acted(call: ToolCallRow) -> bool:
    return call.status in MAY_HAVE_ACTED and is_side_effect(call.side_effect)
