"""Declared state in a run: reading what outlives it, taking writes, and keeping it at the end.

What a run sees of a field of scope thread or agent is an event of its own, written before its
planner is asked. Its writes are events as well; nobody else sees them while it goes on. The commit
that ends it in success merges them over what the row holds by then, and writes the row if it is
still at the version it was read at; else the end is drafted anew. So a run that fails, is cancelled
or loses its worker leaves nothing, and one that ends leaves everything once. A field that is
replaced as a whole is not merged: when another run has written it since it was read, the run ends
with CONFLICT.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft, KeptField
from perdure.engine.fold import begin_own, fold
from perdure.engine.origin import origins_of, shared_events
from perdure.engine.ports import AuthorError, FieldWrite, HostedAgent
from perdure.engine.schema import problem_with_value
from perdure.engine.snapshot import RunSnapshot
from perdure.engine.view import RunView
from perdure.protocol.codec import clean, encode
from perdure.protocol.decisions import DecisionBase, Finish, Note, WriteField
from perdure.protocol.errors import Invalid
from perdure.protocol.events import CustomEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    KEPT_EVENT_NAME,
    LOOP_MARK,
    READ_EVENT_NAME,
    SETTLED_EVENT_NAME,
    WRITES_MAX,
    Slot,
    StateField,
    called_place,
    conflict,
    decided_place,
    place_of,
    read_values,
    slot_of,
    values_after,
    write_of,
)
from perdure.protocol.ids import event_id
from perdure.protocol.records import StateValueRow
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import RunState
from perdure.protocol.values import INLINE_BYTES_MAX
from perdure.store.commits import NewStateValue

PAGE = 200

READ_ANEW = (
    "start a new run, which reads what the field holds now; a retry or a fork of this run goes on "
    "from what this one read"
)
WRITE_ONCE = (
    "let one call of a step replace the field, or give it a rule that merges, and start a new run; "
    "a retry of this one shares both writes"
)

Writes = Mapping[str, JsonValue]


# ---------------------------------------------------------------- when the run begins


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
    rows = await _rows(core, view, {one.slot(view.agent_id) for one in unread})
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
    for write in view.snapshot.writes.values():
        before = _write(write)
        one = declared.get(slot_of(before))
        if one is None:
            continue
        mine = write_of(one, view.agent_id, None)
        if (before["rule"], before.get("reducer")) != (mine["rule"], mine.get("reducer")):
            return _other_rule(slot_of(before), _rule_in(before), _rule_in(mine))
    return None


def _rule_in(write: dict[str, JsonValue]) -> str:
    return str(write.get("reducer") or write["rule"])


def _other_rule(slot: Slot, written: str, declared: str) -> Failure:
    reason = f"the {slot.scope}'s field {slot.name} is written by {written}, not by {declared}"
    return _failed(FailureCode.INTERNAL, reason, slot)


def _told(slot: Slot, row: StateValueRow | None) -> dict[str, JsonValue]:
    told: dict[str, JsonValue] = _named(slot)
    told["version"] = row.version if row is not None else 0
    if row is not None:
        told["event"] = event_id(row.run_id, row.seq)
        if not row.empty:
            told["value"] = row.value
    return told


def _named(slot: Slot) -> dict[str, JsonValue]:
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
        kept |= {at: one for at, one in found if is_same or slot_of(_write(one)).scope == "agent"}
    return kept


def _outlasting(writes: Writes) -> dict[str, JsonValue]:
    return {at: one for at, one in writes.items() if slot_of(_write(one)).scope != "run"}


async def _rows(core: Core, view: RunView, slots: set[Slot]) -> dict[Slot, StateValueRow]:
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


def clash_of_calls(view: RunView) -> Failure | None:
    """Return why a run without a function of code cannot go on: two calls of a step replaced one
    field. Code is told of it where its branches join.
    """
    decided = {
        place: write for place, write in view.snapshot.writes.items() if place.startswith(LOOP_MARK)
    }
    clash = conflict(decided)
    if clash is None:
        return None
    name, first, second = clash
    return Failure(
        code=FailureCode.CONFLICT,
        reason=f"two calls of one step replaced the field {name}",
        stage=Stage.TOOL,
        details={"field": name, "first": first, "second": second, "advice": WRITE_ONCE},
    )


# ---------------------------------------------------------------- values and writes


async def current_values(view: RunView, agent: HostedAgent) -> dict[str, JsonValue]:
    """Return what the agent's fields hold for its planner, by name, as copies: its code may change
    what it is shown. Raises AuthorError.
    """
    mine = {one.slot(view.agent_id) for one in agent.fields.values()}
    writes = {
        place: write
        for place, write in view.snapshot.writes.items()
        if slot_of(_write(write)) in mine
    }
    read = read_values(view.snapshot.fields_read)
    over = {slot: value for slot, value in read.items() if slot in mine}
    try:
        values = await _merged(agent, writes, over)
    except ValueError as error:
        raise AuthorError(f"a field of the state cannot be merged: {error}") from error
    return {slot.name: deepcopy(value) for slot, value in values.items()}


async def _merged(
    agent: HostedAgent, writes: Writes, over: Mapping[Slot, JsonValue]
) -> dict[Slot, JsonValue]:
    if agent.merger is None or not writes:
        return values_after(writes, {}, over)
    return await agent.merger(writes, over)


def _write(write: JsonValue) -> dict[str, JsonValue]:
    return cast("dict[str, JsonValue]", write)


def _problem(view: RunView, declared: StateField, place: str, writes: Writes) -> str | None:
    """Return what is wrong with the write at a place, seen with the others, or None.

    A reducer is asked when the writes are merged.
    """
    told = _write(writes[place])
    if len(encode(told["value"])) > INLINE_BYTES_MAX:
        return f"a value of a field has at most {INLINE_BYTES_MAX} bytes"
    if declared.reducer is not None:
        return None
    slot = slot_of(told)
    mine = {at: one for at, one in writes.items() if slot_of(_write(one)) == slot}
    try:
        after = values_after(mine, {}, read_values(view.snapshot.fields_read))
    except ValueError as error:
        return str(error)
    if declared.outlasts and len(encode(after[slot])) > INLINE_BYTES_MAX:
        return f"the field {declared.name} holds at most {INLINE_BYTES_MAX} bytes"
    if declared.json_schema is None:
        return None
    problem = problem_with_value(declared.json_schema, after[slot])
    return None if problem is None else f"the field {declared.name} does not fit at {problem}"


def draft_field_writes(draft: Draft, decision: DecisionBase) -> None:
    """Draft the writes that a decision carries. Raises AuthorError for one that does not fit, and
    for too many.
    """
    if sum(isinstance(record, WriteField) for record in decision.records) > WRITES_MAX:
        raise AuthorError(f"a decision makes at most {WRITES_MAX} writes")
    for record in decision.records:
        if isinstance(record, WriteField):
            place = _next_place(draft.view)
            try:
                told = _checked(draft, record.field, clean(record.value), place)
            except Invalid as error:
                raise AuthorError(error.message) from error
            draft.add(CustomEvent(name=FIELD_EVENT_NAME, value={**told, "at": place}))


def _next_place(view: RunView, more: int = 0) -> str:
    """Return the place of the next write of this step's decisions, or of one behind it."""
    step = view.snapshot.step_index
    prefix = decided_place(step, 0)[:-1]
    used = sum(place.startswith(prefix) for place in view.snapshot.writes)
    return decided_place(step, used + more)


def _checked(
    draft: Draft, name: str, value: JsonValue, place: str, beside: Writes | None = None
) -> dict[str, JsonValue]:
    """Return a write that fits, also behind those `beside` it that are not drafted yet.

    Raises Invalid.
    """
    declared = draft.fields.get(name)
    if declared is None:
        raise Invalid(f"the state has no field {name!r}")
    told = write_of(declared, draft.view.agent_id, value)
    writes = {**draft.view.snapshot.writes, **(beside or {}), place: told}
    problem = _problem(draft.view, declared, place, writes)
    if problem is not None:
        raise Invalid(problem)
    return told


def draft_tool_writes(
    draft: Draft, tool_call_id: str, writes: tuple[FieldWrite, ...]
) -> str | None:
    """Draft what a call wrote to the state, all of it or nothing; return what is wrong with it."""
    if not writes:
        return None
    call = draft.view.snapshot.open_calls[tool_call_id]
    ordinal = _shared_calls(draft.view, call.step_index) + call.ordinal
    told: dict[str, JsonValue] = {}
    for number, write in enumerate(writes):
        place = called_place(call.position, call.step_index, ordinal, number)
        try:
            told[place] = _checked(draft, write.field, write.value, place, told)
        except Invalid as error:
            return error.message
    for place, value in told.items():
        written = {**_write(value), "at": place, "call": tool_call_id}
        draft.add(CustomEvent(name=FIELD_EVENT_NAME, value=written))
    return None


def _shared_calls(view: RunView, step: int) -> int:
    """Return behind how many calls those of this step write: a run that goes on in a step of its
    origin makes some calls of it anew, counted from 0, beside the writes of others.
    """
    own = view.snapshot.step_calls
    mark = called_place(None, step, 0, 0).partition(".")[0] + "."
    ordinals = [
        place_of(place)[2]
        for place, write in view.snapshot.writes.items()
        if place.startswith(mark) and _write(write).get("call") not in own
    ]
    return max(ordinals, default=-1) + 1


# ---------------------------------------------------------------- when the run succeeds


@dataclass(frozen=True, slots=True)
class _Base:
    """What a field's writes are merged over: its row, or what the run saw when nobody moved it."""

    row: StateValueRow | None
    read: dict[str, JsonValue]

    @property
    def has_moved(self) -> bool:
        """Tell whether the row holds something else than was read: versions of two threads, of
        which one is a fork of the other, say nothing of each other.
        """
        if self.row is None:
            return False
        event = event_id(self.row.run_id, self.row.seq)
        return (self.row.version, event) != (self.seen, self.read.get("event"))

    @property
    def rule(self) -> str | None:
        """Return the rule by which the row holds a value; None: it holds none."""
        return None if self.row is None or self.row.empty else self.row.rule

    @property
    def seen(self) -> int:
        return int(cast("int", self.read.get("version", 0)))

    def value(self) -> dict[str, JsonValue]:
        """Return {"value": what is there}, or {} when nothing is."""
        if self.row is not None and self.has_moved:
            return {} if self.row.empty else {"value": self.row.value}
        return {"value": self.read["value"]} if "value" in self.read else {}


async def fields_to_keep(
    core: Core, view: RunView, agent: HostedAgent, decision: Finish
) -> list[KeptField] | Failure:
    """Return what the run leaves in the fields that outlive it when it ends as decided, in success.

    A failure when a field that it replaced was written by others since, or any field by another
    rule (CONFLICT), when what others wrote since and its own writes do not fit together (CONFLICT), or its own writes alone cannot be
    merged or kept (INTERNAL).
    """
    writes = _lasting(view, agent, decision)
    if not writes:
        return []
    slots = {slot_of(_write(write)) for write in writes.values()}
    rows = await _rows(core, view, slots)
    bases = {
        slot: _Base(rows.get(slot), _write(view.snapshot.fields_read.get(slot, {})))
        for slot in slots
    }
    rules = {slot_of(_write(write)): str(_write(write)["rule"]) for write in writes.values()}
    for slot in sorted(slots):
        base = bases[slot]
        if base.has_moved and base.row is not None and base.rule not in {None, rules[slot]}:
            reason = (
                f"the {slot.scope}'s field {slot.name} was written by another run, "
                f"by {base.rule}, not by {rules[slot]}"
            )
            return _failed(
                FailureCode.CONFLICT, reason, slot, read=base.seen, version=base.row.version
            )
        if rules[slot] == "replace" and base.has_moved and base.row is not None:
            reason = f"the {slot.scope}'s field {slot.name} was written by another run"
            return _failed(
                FailureCode.CONFLICT,
                reason,
                slot,
                read=base.seen,
                version=base.row.version,
                advice=READ_ANEW,
            )
    over = {slot: base.value()["value"] for slot, base in bases.items() if base.value()}
    try:
        values = await _merged(agent, writes, over)
    except (ValueError, AuthorError) as error:
        return Failure(
            code=FailureCode.INTERNAL,
            reason=f"the fields of the state cannot be merged: {error}",
            stage=Stage.OUTPUT,
        )
    found: list[KeptField] = []
    for slot in sorted(slots):
        failure = _unfit(view, agent, slot, values[slot], bases[slot])
        if failure is not None:
            return failure
        found.append(_kept(view, slot, rules[slot], bases[slot], values[slot]))
    return found


def _lasting(view: RunView, agent: HostedAgent, decision: Finish) -> dict[str, JsonValue]:
    """Return the writes to keep: the run's, those that it shares and nobody kept, the decision's."""
    snapshot = view.snapshot
    writes = {
        place: write for place, write in snapshot.writes.items() if place not in snapshot.settled
    }
    number = 0
    for record in decision.records:
        if isinstance(record, Note) and record.name == FIELD_EVENT_NAME:
            writes[record.position] = record.value
        elif isinstance(record, WriteField) and record.field in agent.fields:
            told = write_of(agent.fields[record.field], view.agent_id, clean(record.value))
            writes[_next_place(view, number)] = told
            number += 1
    return _outlasting(writes)


def _kept(view: RunView, slot: Slot, rule: str, base: _Base, value: JsonValue) -> KeptField:
    expected = base.row.version if base.row is not None else 0
    version = max(expected, base.seen) + 1
    told: dict[str, JsonValue] = {**_named(slot), "rule": rule, "version": version}
    if base.has_moved:
        told["over"] = {"version": expected, **base.value()}
    told["value"] = value
    return KeptField(
        told=told,
        value=NewStateValue(
            scope="agent" if slot.scope == "agent" else "thread",
            scope_id=slot.agent or view.facts.thread_id,
            name=slot.name,
            rule=rule,
            expected=expected,
            version=version,
            value=value,
            seq=0,
        ),
    )


def _unfit(
    view: RunView, agent: HostedAgent, slot: Slot, value: JsonValue, base: _Base
) -> Failure | None:
    """Return why a value cannot be kept: the run's own fault, unless others wrote what it is over."""
    reason = f"the {slot.scope}'s field {slot.name}"
    code = FailureCode.CONFLICT if base.has_moved else FailureCode.INTERNAL
    if len(encode(value)) > INLINE_BYTES_MAX:
        return _failed(code, f"{reason} holds at most {INLINE_BYTES_MAX} bytes", slot)
    declared = agent.fields.get(slot.name)
    if declared is None or declared.json_schema is None or declared.slot(view.agent_id) != slot:
        return None  # another agent's field of this name: its own schema was asked at each write
    problem = problem_with_value(declared.json_schema, value)
    if problem is None:
        return None
    return _failed(code, f"{reason} does not fit at {problem}", slot)


def _failed(code: FailureCode, reason: str, slot: Slot, **details: JsonValue) -> Failure:
    return Failure(
        code=code,
        reason=reason,
        stage=Stage.OUTPUT,
        details={"field": slot.name, "scope": slot.scope, **details},
    )


def draft_kept_fields(draft: Draft) -> None:
    """Draft what the run leaves, in the commit of its success."""
    for one in draft.keeps:
        draft.keep_field(one, draft.add(CustomEvent(name=KEPT_EVENT_NAME, value=one.told)))
