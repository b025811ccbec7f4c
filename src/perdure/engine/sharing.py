"""What runs that share a history have done to each other's effects.

A call that a run takes over keeps its effect key, and so does what undoes it (R-5.6, R-9.4). So
nobody goes on from a call that was undone as if it had been done, acts again under a key whose
effect was undone, or undoes what another run still stands on.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from perdure.engine.core import Core
from perdure.engine.origin import ORIGINS_MAX, OriginGone, Shared, origins_of
from perdure.engine.snapshot import is_side_effect
from perdure.engine.undone import asks_to_compensate, calls_of, children_of, strongest, undone_by
from perdure.protocol.errors import Conflict
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL, RunState, ToolCallStatus
from perdure.store.reader import RunFilter

PAGE = 100
TOLD_MAX = 20
_HAS_BEGUN = frozenset(
    {
        ToolCallStatus.RUNNING,
        ToolCallStatus.PENDING,
        ToolCallStatus.SUCCEEDED,
        ToolCallStatus.PARTIAL,
    }
)
_STANDS = _HAS_BEGUN | {ToolCallStatus.PROPOSED, ToolCallStatus.AWAITING_APPROVAL}
"""Where a call under a key that others had acted under stands, or may come to stand, on its effect."""

_GONE = frozenset({"succeeded", "unknown"})
"""What became of undoing an effect that is not in the world any more, or may not be."""


async def check_not_undone(core: Core, history: Sequence[Shared]) -> None:
    """Raise Conflict when a call of a history, or of a child that it has, began or is to be undone."""
    undone = [call async for call in _to_be_undone(core, history)]
    undone += [call async for call in _undone_in(core, history)]
    if undone:
        raise Conflict(
            "what the run did has been undone, or is to be: go on from a checkpoint before that, or"
            " start a new run",
            details={"undone": undone[:TOLD_MAX]},
        )


async def undone_meanwhile(core: Core, facts: RunFacts) -> Failure | None:
    """Return why a run cannot begin: what it goes on from was undone while it was made."""
    try:
        history = await origins_of(core.reader, facts)
    except OriginGone:
        return None  # told where it is read
    undone = [call async for call in _undone_in(core, history)]
    if not undone:
        return None
    return Failure(
        code=FailureCode.CONFLICT,
        reason="what the run was to go on from was undone while it was made",
        stage=Stage.RECOVERY,
        details={"undone": [*undone[:TOLD_MAX]]},
    )


async def _to_be_undone(core: Core, history: Sequence[Shared]) -> AsyncIterator[str]:
    """Yield the effects in a history that a cancel may undo which has not come to its end."""
    for shared in history:
        async for one in _with_those_above(core, shared.facts):
            if one.hot.state not in TERMINAL:
                async for effect in _effects_in(core, shared):
                    yield effect
                break


async def _undone_in(core: Core, history: Sequence[Shared]) -> AsyncIterator[str]:
    for shared in history:
        undoing = [one async for one in _with_those_above(core, shared.facts)]
        keys, below = await _undone(core, shared.facts, undoing)
        if _GONE.intersection(keys.values()):
            async for call in calls_of(core, shared.facts.run_id):
                is_finished = call.result_seq is not None and call.result_seq <= shared.until
                if is_finished and keys.get(call.effect_key) in _GONE:
                    yield call.tool_call_id
        for call in below:
            if await _is_below(core, call, shared):
                yield call.tool_call_id


async def _undone(
    core: Core, facts: RunFacts, undoing: Sequence[RunRow]
) -> tuple[dict[str, str], list[ToolCallRow]]:
    """Return what became of undoing effects that a run may share, by their keys; and the calls of
    other runs, of those below it too, that were undone by its family or by `undoing`.
    """
    keys: dict[str, str] = {}
    others: list[ToolCallRow] = []
    family = [one async for one in family_of(core, facts)]
    for run in {one.facts.run_id: one for one in (*undoing, *family)}.values():
        for tool_call_id, word in (await undone_by(core, run)).items():
            call = await core.reader.find_tool_call(facts.tenant_id, tool_call_id)
            if call is None:
                continue
            keys = strongest(keys, {call.effect_key: word})
            if word in _GONE and call.run_id != facts.run_id:
                others.append(call)
    return keys, others


async def _effects_in(core: Core, shared: Shared) -> AsyncIterator[str]:
    async for call in calls_of(core, shared.facts.run_id):
        if call.action_seq <= shared.until and _may_have_acted(call):
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


async def _is_below(core: Core, call: ToolCallRow, shared: Shared) -> bool:
    """Tell whether a call is one of a run below that was begun in a shared history."""
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
            if after < call.action_seq <= shared.until and _may_have_acted(call)
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


def _may_have_acted(call: ToolCallRow) -> bool:
    has_begun = call.status in _HAS_BEGUN or call.status is ToolCallStatus.UNKNOWN
    return has_begun and is_side_effect(call.side_effect)


async def undone_elsewhere(core: Core, facts: RunFacts) -> dict[str, str]:
    """Return what became of undoing effects by other runs that may have taken the same calls over."""
    return (await _undone(core, facts, ()))[0]


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

    A run that failed does not stand on an effect: who goes on from it is told when that is gone. Nor
    does one that is to undo it and has not begun, unless it is the older one: else both would.
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
        goes_on = other.hot.state not in TERMINAL
        stands = other.hot.state is not RunState.FAILED and not undoes
        goes_first = undoes and goes_on and other.facts.run_id < facts.run_id
        calls = [call async for call in calls_of(core, other.facts.run_id)]
        found.keys |= {
            call.effect_key
            for call in calls
            if undone.get(call.tool_call_id) in _GONE
            or (call.status in _STANDS and (stands or goes_first))
        }
        if not (calls or undoes) and goes_on:
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
    known, line = {facts.run_id}, [facts.run_id]
    origin = facts.origin_run_id
    while origin is not None and len(line) < ORIGINS_MAX:
        row = await core.reader.find_run(None, origin)
        if row is None:
            break
        yield row
        known.add(origin)
        line.append(origin)
        origin = row.facts.origin_run_id
    while line:
        after: str | None = None
        where = RunFilter(origin_run_id=line.pop())
        while page := await core.reader.list_runs(None, where, after=after, limit=PAGE):
            after = page[-1].facts.run_id
            for row in page:
                if row.facts.run_id not in known:
                    known.add(row.facts.run_id)
                    line.append(row.facts.run_id)
                    yield row
