"""Calls that other runs make under the same effect keys as a run that is about to take them over.

A call that a run takes over keeps its effect key. When several runs go on from one, each comes by
the same call: the first one makes it, and every other asks a person before it does (R-5.6, R-5.7).
"""

from collections.abc import Collection

from perdure.engine.kin import Kin
from perdure.engine.origin import ORIGINS_MAX
from perdure.engine.snapshot import OpenCall
from perdure.engine.undone import MAY_HAVE_ACTED, has_left
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import TERMINAL, RunState, ToolCallStatus

_TO_BE_MADE = frozenset({ToolCallStatus.PROPOSED, ToolCallStatus.AWAITING_APPROVAL})


async def made_elsewhere(
    kin: Kin, facts: RunFacts, inherited: Collection[OpenCall]
) -> frozenset[str]:
    """Return the keys of calls, not to be repeated, that another run has made, or is to make.

    The runs that this one goes on from do not count: what became of their calls is known from what
    is taken over. Nor does a younger run that has not begun: it will find this one. So of two that
    take a call over at the same time one or both ask, and no two make it unasked. What another has
    made and had undone itself is not there any more.
    """
    wanted = {call.effect_key for call in inherited if not call.repeatable}
    if not wanted:
        return frozenset()
    line = {facts.run_id, *(shared.facts.run_id for shared in await kin.history_of(facts))}
    found: set[str] = set()
    for other in await kin.family_of(facts):
        run_id, state = other.facts.run_id, other.hot.state
        if run_id in line:
            continue
        goes_on = state not in TERMINAL
        calls = await kin.calls_of(run_id)
        begins_later = state is RunState.PENDING and run_id > facts.run_id
        if goes_on and not calls.has_any and not begins_later:
            for call in await kin.to_be_taken_over(other.facts):
                if not await is_forked_off(kin, other.facts, call.run_id):
                    found.add(call.effect_key)
        for call in (*calls.effects, *calls.once):
            if call.effect_key not in wanted:
                continue
            may_have = call.status in MAY_HAVE_ACTED or await has_left(kin.core, call)
            may_come = goes_on and call.status in _TO_BE_MADE
            if may_come or (may_have and not await kin.has_undone(other, call)):
                found.add(call.effect_key)
    return frozenset(found & wanted)


async def is_forked_off(kin: Kin, facts: RunFacts, run_id: str) -> bool:
    """Tell whether a fork lies between a run and one that it goes on from, or it is one itself.

    That one may go on beside it, and make its calls itself.
    """
    for _ in range(ORIGINS_MAX):
        if facts.run_id == run_id or facts.forked_from is not None:
            return facts.run_id != run_id
        row = await kin.find(facts.retry_of, facts.tenant_id) if facts.retry_of else None
        if row is None:
            return False
        facts = row.facts
    return False
