"""Calls that other runs make under the same effect keys as a run that is about to take them over.

A call that a run takes over keeps its effect key. When several runs go on from one, each comes by
the same call: the first one makes it, and every other asks a person before it does (R-5.6, R-5.7).
"""

from collections.abc import Collection, Mapping

from perdure.engine.core import Core
from perdure.engine.origin import ORIGINS_MAX, OriginGone, origins_of
from perdure.engine.sharing import family_of
from perdure.engine.snapshot import OpenCall
from perdure.engine.undone import calls_of
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL, RunState, ToolCallStatus

MAY_HAVE_HAPPENED = frozenset(
    {
        ToolCallStatus.RUNNING,
        ToolCallStatus.PENDING,
        ToolCallStatus.SUCCEEDED,
        ToolCallStatus.PARTIAL,
        ToolCallStatus.TIMED_OUT,
        ToolCallStatus.UNKNOWN,
    }
)
_TO_BE_MADE = frozenset({ToolCallStatus.PROPOSED, ToolCallStatus.AWAITING_APPROVAL})

_Calls = Mapping[str, Collection[ToolCallRow]]


async def made_elsewhere(
    core: Core, facts: RunFacts, inherited: Collection[OpenCall]
) -> frozenset[str]:
    """Return the keys of calls, not to be repeated, that another run has made, or is to make.

    The runs that this one goes on from do not count: what became of their calls is known from what
    is taken over. Nor does a younger run that has not begun: it will find this one. So of two that
    take a call over at the same time one or both ask, and no two make it unasked.
    """
    wanted = {call.effect_key for call in inherited if not call.repeatable}
    if not wanted:
        return frozenset()
    family = {one.facts.run_id: one async for one in family_of(core, facts)}
    calls = {run_id: [call async for call in calls_of(core, run_id)] for run_id in family}
    line = _line_of(facts, family)
    found: set[str] = set()
    for run_id, other in family.items():
        if run_id in line:
            continue
        goes_on = other.hot.state not in TERMINAL
        begins_later = other.hot.state is RunState.PENDING and run_id > facts.run_id
        if goes_on and not calls[run_id] and not begins_later:
            found |= await _to_be_taken_over(core, other.facts, calls)
        found |= {
            call.effect_key
            for call in calls[run_id]
            if call.status in MAY_HAVE_HAPPENED or (goes_on and call.status in _TO_BE_MADE)
        }
    return frozenset(found & wanted)


def _line_of(facts: RunFacts, family: Mapping[str, RunRow]) -> set[str]:
    line: set[str] = set()
    origin = facts.origin_run_id
    while origin is not None and origin in family and origin not in line:
        line.add(origin)
        origin = family[origin].facts.origin_run_id
    return line


async def _to_be_taken_over(core: Core, facts: RunFacts, calls: _Calls) -> set[str]:
    """Return the keys that a run which has made no call yet comes by with its history."""
    found: set[str] = set()
    try:
        history = await origins_of(core.reader, facts)
    except OriginGone:
        return found  # it cannot begin
    for shared in history:
        keys = {
            call.effect_key
            for call in calls.get(shared.facts.run_id, ())
            if call.action_seq <= shared.until
        }
        if keys and not await is_forked_off(core, facts, shared.facts.run_id):
            found |= keys
    return found


async def is_forked_off(core: Core, facts: RunFacts, run_id: str) -> bool:
    """Tell whether a fork lies between a run and one that it goes on from, or it is one itself.

    That one may go on beside it, and make its calls itself.
    """
    for _ in range(ORIGINS_MAX):
        if facts.run_id == run_id or facts.forked_from is not None:
            return facts.run_id != run_id
        row = await core.reader.find_run(None, facts.retry_of) if facts.retry_of else None
        if row is None:
            return False
        facts = row.facts
    return False
