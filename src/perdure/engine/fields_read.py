"""Declared state in a run: what it sees of fields that outlive it, and what its fields hold.

What a run sees of a field of scope thread or agent is an event of its own, written before its
planner is asked. A run that goes on from another one's history also records which of the shared
writes that one has left: it leaves the others with its own.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import cast

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.fold import begin_own, fold
from perdure.engine.origin import origins_of, shared_events
from perdure.engine.ports import AuthorError, HostedAgent
from perdure.engine.snapshot import RunSnapshot
from perdure.engine.view import RunView
from perdure.protocol.events import CustomEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.fields import (
    READ_EVENT_NAME,
    SETTLED_EVENT_NAME,
    Slot,
    slot_of,
    write_of,
)
from perdure.protocol.folding import FoldedField, Held
from perdure.protocol.ids import event_id
from perdure.protocol.records import StateValueRow
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import RunState

PAGE = 200

Writes = Mapping[str, JsonValue]


def as_told(value: JsonValue) -> dict[str, JsonValue]:
    """Return what an event says of a field: its value is an object."""
    return cast("dict[str, JsonValue]", value)


async def news_of_fields(
    core: Core, view: RunView, agent: HostedAgent
) -> list[CustomEvent] | Failure:
    """Return what is to be recorded before the agent's planner is asked: what it sees of fields
    that outlive the run, and which writes of a shared history their own run has kept.

    A failure when a field was written by another rule than the agent declares.
    """
    found = await _settled(core, view)
    has_others = view.snapshot.agent is not None or view.facts.origin_run_id is not None
    if has_others and (other := _by_other_rules(view, agent)) is not None:
        return other
    unread = [
        one
        for one in agent.fields.values()
        if one.outlasts and one.slot(view.agent_id) not in view.snapshot.fields_read
    ]
    if not unread:
        return found
    rows = await rows_of_fields(core, view, {one.slot(view.agent_id) for one in unread})
    for declared in unread:
        slot = declared.slot(view.agent_id)
        row = rows.get(slot)
        if row is not None and not row.empty and row.rule != declared.rule:
            return _other_rule(slot, row.rule, declared.rule)
        found.append(CustomEvent(name=READ_EVENT_NAME, value=_told(slot, row)))
    return found


def _by_other_rules(view: RunView, agent: HostedAgent) -> Failure | None:
    """Return why an agent cannot go on where another, or another version, wrote before it: by
    another rule than it declares for a field that they share.
    """
    declared = {one.slot(view.agent_id): one for one in agent.fields.values()}
    for slot, folded in view.snapshot.folded.items():
        one, before = declared.get(slot), folded.first
        if one is None or before is None:
            continue
        mine = write_of(one, view.agent_id, None)
        if (before["rule"], before.get("reducer")) != (mine["rule"], mine.get("reducer")):
            return _other_rule(slot, _rule_in(before), _rule_in(mine))
    return None


def _rule_in(write: dict[str, JsonValue]) -> str:
    return str(write.get("reducer") or write["rule"])


def _other_rule(slot: Slot, written: str, declared: str) -> Failure:
    reason = f"the {slot.scope}'s field {slot.name} is written by {written}, not by {declared}"
    return failed_field(FailureCode.INTERNAL, reason, slot)


def _told(slot: Slot, row: StateValueRow | None) -> dict[str, JsonValue]:
    told: dict[str, JsonValue] = named_slot(slot)
    told["version"] = row.version if row is not None else 0
    if row is not None:
        told["event"] = event_id(row.run_id, row.seq)
        if not row.empty:
            told["value"] = row.value
    return told


def named_slot(slot: Slot) -> dict[str, JsonValue]:
    """Return how events name a field."""
    told: dict[str, JsonValue] = {"field": slot.name, "scope": slot.scope}
    if slot.agent:
        told["agent"] = slot.agent
    return told


async def _settled(core: Core, view: RunView) -> list[CustomEvent]:
    """Tell which shared writes are in the rows already: those of runs that have succeeded."""
    snapshot, facts = view.snapshot, view.facts
    if facts.origin_run_id is None or snapshot.knows_settled or not _outlasting(snapshot.writes):
        return []
    kept = (await _kept_by_origins(core, facts)).keys() & snapshot.writes.keys()
    places: list[JsonValue] = [*sorted(kept)]
    return [CustomEvent(name=SETTLED_EVENT_NAME, value={"places": places})]


async def _kept_by_origins(core: Core, facts: RunFacts) -> dict[str, JsonValue]:
    """Return the writes, by place, that a run before kept: in its own agent's fields, or also those
    of the thread when that is the same. A decision made anew is another write.
    """
    snapshot = RunSnapshot()
    kept: dict[str, JsonValue] = {}
    for shared in await origins_of(core.reader, facts):
        async for event in shared_events(core.reader, shared):
            fold(snapshot, event.seq, event.data)
        begin_own(snapshot)
        kept = {place: one for place, one in kept.items() if snapshot.writes.get(place) is one}
        row = await core.reader.find_run(facts.tenant_id, shared.facts.run_id)
        if row is None or row.hot.state is not RunState.SUCCEEDED:
            continue
        is_same = shared.facts.thread_id == facts.thread_id
        found = _outlasting(snapshot.writes).items()
        kept |= {at: one for at, one in found if is_same or slot_of(as_told(one)).scope == "agent"}
    return kept


def _outlasting(writes: Writes) -> dict[str, JsonValue]:
    return {at: one for at, one in writes.items() if slot_of(as_told(one)).scope != "run"}


async def rows_of_fields(core: Core, view: RunView, slots: set[Slot]) -> dict[Slot, StateValueRow]:
    """Return the rows of fields, of those that have one."""
    found: dict[Slot, StateValueRow] = {}
    for place in sorted({slot._replace(name="") for slot in slots}):
        scope, agent = place.scope, place.agent
        if scope == "run":
            continue
        scope_id = agent or view.facts.thread_id
        after: str | None = None
        while True:
            page = await core.reader.list_state_values(
                view.facts.tenant_id, scope, scope_id, after=after, limit=PAGE
            )
            found |= {Slot(scope, agent, row.name): row for row in page}
            if len(page) < PAGE:
                break
            after = page[-1].name
    return {slot: row for slot, row in found.items() if slot in slots}


def failed_field(code: FailureCode, reason: str, slot: Slot, **details: JsonValue) -> Failure:
    """Return why a run ends that cannot go on with a field, or cannot leave it."""
    return Failure(
        code=code,
        reason=reason,
        stage=Stage.OUTPUT,
        details={"field": slot.name, "scope": slot.scope, **details},
    )


async def current_values(view: RunView, agent: HostedAgent) -> dict[str, JsonValue]:
    """Return what the agent's fields hold for its planner, by name, as copies: its code may change
    what it is shown. Raises AuthorError.
    """
    values: dict[str, JsonValue] = {}
    for name, declared in agent.fields.items():
        slot = declared.slot(view.agent_id)
        folded = view.snapshot.folded.get(slot)
        if folded is None:
            continue
        try:
            held = await value_of(agent, slot, folded)
        except ValueError as error:
            raise AuthorError(f"the field {name} cannot be merged: {error}") from error
        if held:
            values[name] = deepcopy(held[0])
    return values


async def value_of(agent: HostedAgent, slot: Slot, folded: FoldedField) -> Held:
    """Return what a field holds; a reducer merges only what it has not merged before, off the loop.

    Raises ValueError for a write that does not fit, AuthorError and PlannerFailure as `FieldMerger`.
    """
    if folded.rule != "reducer" or agent.merger is None:
        return folded.value()
    rest = folded.unmerged()
    if not rest.writes:
        return rest.over
    merged = await agent.merger(rest.writes, {slot: rest.over[0]} if rest.over else {})
    held = (merged[slot],)
    folded.keep(rest, held)
    return held
