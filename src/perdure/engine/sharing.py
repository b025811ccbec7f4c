"""What runs that share a history have done to each other's effects.

A call that a run takes over keeps its effect key, and so does what undoes it (R-5.6, R-9.4). So
nobody goes on from a call that was undone as if it had been done, acts again under a key whose
effect was undone, or undoes what another run still stands on.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from perdure.engine.core import Core
from perdure.engine.origin import OriginGone, Shared, origins_of
from perdure.engine.snapshot import is_side_effect
from perdure.engine.undone import asks_to_compensate, calls_of, children_of, strongest, undone_by
from perdure.protocol.errors import Conflict
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL, RunState, ToolCallStatus
from perdure.store.reader import RunFilter

PAGE = 100
TOLD_MAX = 20
_STANDS = frozenset(
    {
        ToolCallStatus.RUNNING,
        ToolCallStatus.PENDING,
        ToolCallStatus.SUCCEEDED,
        ToolCallStatus.PARTIAL,
    }
)
"""Where a run's call stands, or is about to stand, on an effect."""


async def check_not_undone(core: Core, history: Sequence[Shared]) -> None:
    """Raise Conflict when a call of a history, or of a child that it has, began or is to be undone."""
    undone = [call async for call in _undone_in(core, history)]
    if undone:
        raise Conflict(
            "what the run did has been undone, or is to be: go on from a checkpoint before that, or"
            " start a new run",
            details={"undone": undone[:TOLD_MAX]},
        )


async def _undone_in(core: Core, history: Sequence[Shared]) -> AsyncIterator[str]:
    for shared in history:
        async for canceller in _with_those_above(core, shared.facts):
            if canceller.hot.state not in TERMINAL:
                async for one in _effects_in(core, shared):
                    yield one
            for tool_call_id, word in (await undone_by(core, canceller)).items():
                if word == "not_started":
                    continue
                call = await core.reader.find_tool_call(shared.facts.tenant_id, tool_call_id)
                if call is not None and await _is_in(core, call, shared):
                    yield tool_call_id


async def _effects_in(core: Core, shared: Shared) -> AsyncIterator[str]:
    """Yield what a cancel that has not come to its end may undo of a shared history."""
    async for call in calls_of(core, shared.facts.run_id):
        if call.action_seq <= shared.until and _may_stand(call):
            yield call.tool_call_id
    async for child in children_of(core, shared.facts.run_id):
        if not child.facts.detached and await _began_by(core, child.facts, shared):
            yield child.facts.run_id


async def _with_those_above(core: Core, facts: RunFacts) -> AsyncIterator[RunRow]:
    """Yield those of a run and the runs above it whose cancel asked for compensation."""
    run_id: str | None = facts.run_id
    while run_id is not None:
        row = await core.reader.find_run(None, run_id)
        if row is None:
            return
        if asks_to_compensate(row.hot.cancel_options):
            yield row
        run_id = row.facts.parent_run_id


async def _is_in(core: Core, call: ToolCallRow, shared: Shared) -> bool:
    """Tell whether a call is one of a shared history, or of a run below that was begun in it."""
    if call.run_id == shared.facts.run_id:
        return call.action_seq <= shared.until
    below = await core.reader.find_run(None, call.run_id)
    while below is not None and below.facts.parent_run_id is not None:
        if below.facts.parent_run_id == shared.facts.run_id:
            return await _began_by(core, below.facts, shared)
        below = await core.reader.find_run(None, below.facts.parent_run_id)
    return False


async def _began_by(core: Core, child: RunFacts, shared: Shared) -> bool:
    last = await core.reader.events_after(shared.facts.run_id, shared.until - 1, limit=1)
    return not last or child.created_at <= last[0].at


async def check_nothing_behind(core: Core, place: Shared, history: Sequence[Shared]) -> None:
    """Raise Conflict when effects or children of a history lie behind a place in it.

    A run that began there would have them anew, under new keys.
    """
    behind: list[str] = []
    for shared in history[[one.facts.run_id for one in history].index(place.facts.run_id) :]:
        is_own = shared.facts.run_id == place.facts.run_id
        after = place.until if is_own else 0
        behind += [
            call.tool_call_id
            async for call in calls_of(core, shared.facts.run_id)
            if after < call.action_seq <= shared.until and _may_stand(call)
        ]
        behind += [
            child.facts.run_id
            async for child in children_of(core, shared.facts.run_id)
            if not is_own or not await _began_by(core, child.facts, place)
        ]
    if behind:
        raise Conflict(
            "calls after the failed ones have had effects, which a redrive would have again: retry"
            " without it, or name a checkpoint",
            details={"behind": behind[:TOLD_MAX]},
        )


def _may_stand(call: ToolCallRow) -> bool:
    stands = call.status in _STANDS or call.status is ToolCallStatus.UNKNOWN
    return stands and is_side_effect(call.side_effect)


async def undone_elsewhere(core: Core, facts: RunFacts, effect_key: str) -> str:
    """Return what became of undoing a call's effect by other runs that took the call over."""
    told = {effect_key: "not_started"}
    async for other in family_of(core, facts):
        undone = await undone_by(core, other)
        if not undone:
            continue
        async for call in calls_of(core, other.facts.run_id):
            if call.effect_key == effect_key and call.tool_call_id in undone:
                told = strongest(told, {effect_key: undone[call.tool_call_id]})
    return told[effect_key]


@dataclass(slots=True)
class StoodOn:
    """The effects of a run's calls that other runs stand on: under keys that they took over, up to a
    seq of its log that they share, or as runs that go on and have made no call their own yet.
    """

    run_id: str
    keys: set[str]
    shared_until: int
    coming: list[RunFacts]

    def __contains__(self, call: ToolCallRow) -> bool:
        shared = call.run_id == self.run_id and (call.result_seq or 0) <= self.shared_until
        taken = call.effect_key in self.keys or any(_will_take(one, call) for one in self.coming)
        return shared or taken


async def stood_on(core: Core, facts: RunFacts) -> StoodOn:
    """Return what is not to be undone for a run alone.

    A run that undoes an effect itself, or was to and has not begun, does not stand on it; nor does
    one that failed on what it only shares.
    """
    found = StoodOn(facts.run_id, set(), 0, [])
    shares: dict[str, int] = {}
    async for other in family_of(core, facts):
        origin, undoes = other.facts.origin_run_id, asks_to_compensate(other.hot.cancel_options)
        until = other.facts.origin_seq if origin == facts.run_id else shares.get(origin or "")
        if until is not None:
            shares[other.facts.run_id] = until
            if not undoes and other.hot.state is not RunState.FAILED:
                found.shared_until = max(found.shared_until, until)
        undone = await undone_by(core, other)
        calls = [call async for call in calls_of(core, other.facts.run_id)]
        found.keys |= {
            call.effect_key
            for call in calls
            if call.status in _STANDS
            and (not undoes or undone.get(call.tool_call_id, "not_started") != "not_started")
        }
        if not (calls or undoes) and other.hot.state not in TERMINAL:
            found.coming.append(other.facts)
    return found


def _will_take(other: RunFacts, call: ToolCallRow) -> bool:
    """Tell whether a run that has not made the call its own yet begins where it is open."""
    if other.origin_run_id != call.run_id or other.origin_seq is None:
        return False
    ended = call.result_seq is not None and call.result_seq <= other.origin_seq
    return call.action_seq <= other.origin_seq and not ended


async def family_of(core: Core, facts: RunFacts) -> AsyncIterator[RunRow]:
    """Yield the other runs that may have a call of a run: those it goes on from, and the branches of
    all, each behind the run that it begins with.
    """
    line = [facts.run_id]
    try:
        line += [one.facts.run_id for one in await origins_of(core.reader, facts)]
    except OriginGone:
        line += [] if facts.origin_run_id is None else [facts.origin_run_id]
    known = set(line)
    while line:
        run_id = line.pop()
        row = await core.reader.find_run(None, run_id)
        if row is not None and run_id != facts.run_id:
            yield row
        after: str | None = None
        where = RunFilter(origin_run_id=run_id)
        while page := await core.reader.list_runs(None, where, after=after, limit=PAGE):
            after = page[-1].facts.run_id
            line += [one.facts.run_id for one in page if one.facts.run_id not in known]
            known |= {one.facts.run_id for one in page}
