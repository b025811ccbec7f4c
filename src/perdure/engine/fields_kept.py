"""Declared state in a run: what it leaves, when it succeeds, in fields that outlive it.

The commit that ends the run merges its writes over what the row holds by then, and writes the row
if it is still at the version it was read at; else the end is drafted anew. So a run that fails, is
cancelled or loses its worker leaves nothing, and one that ends leaves everything once. A field that
is replaced as a whole is not merged: when another run has written it since it was read, the run
ends with CONFLICT.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.draft import Draft, KeptField
from perdure.engine.fields_read import (
    as_told,
    failed_field,
    named_slot,
    rows_of_fields,
    value_of,
)
from perdure.engine.fields_written import checked_writes
from perdure.engine.ports import AuthorError, HostedAgent
from perdure.engine.schema import problem_with_value
from perdure.engine.view import RunView
from perdure.protocol.codec import encode
from perdure.protocol.decisions import Finish, Note, WriteField
from perdure.protocol.events import CustomEvent
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.fields import FIELD_EVENT_NAME, KEPT_EVENT_NAME, Slot, slot_of
from perdure.protocol.folding import FoldedField, Held
from perdure.protocol.ids import event_id
from perdure.protocol.records import StateValueRow
from perdure.protocol.values import INLINE_BYTES_MAX
from perdure.store.commits import NewStateValue

READ_ANEW = (
    "start a new run, which reads what the field holds now; a retry or a fork of this run goes on "
    "from what this one read"
)


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

    def held(self) -> Held:
        """Return what is there."""
        if self.row is not None and self.has_moved:
            return () if self.row.empty else (self.row.value,)
        return (self.read["value"],) if "value" in self.read else ()


def slots_at_end(view: RunView, agent: HostedAgent, decision: Finish) -> set[Slot]:
    """Return the fields that the run leaves when it ends as decided: those that outlive it, of which
    its own history or what it shares holds a write that nobody left, or the decision one.
    """
    settled = view.snapshot.settled
    slots = {slot for slot, one in view.snapshot.folded.items() if one.writes(but=settled)}
    for record in decision.records:
        if isinstance(record, WriteField) and record.field in agent.fields:
            slots.add(agent.fields[record.field].slot(view.agent_id))
        elif isinstance(record, Note) and record.name == FIELD_EVENT_NAME:
            slots.add(slot_of(as_told(record.value)))
    return {slot for slot in slots if slot.scope != "run"}


async def fields_to_keep(
    core: Core, view: RunView, agent: HostedAgent, decision: Finish
) -> list[KeptField] | Failure:
    """Return what the run leaves in the fields that outlive it when it ends as decided, in success.

    A failure when a field that it replaced was written by others since, or any field by another
    rule (CONFLICT), when what others wrote since and its own writes do not fit together (CONFLICT),
    or its own writes alone cannot be merged or kept (INTERNAL). Raises AuthorError for a write of
    the decision itself that does not fit.
    """
    last = _last_writes(view, agent, decision)
    slots = sorted(slots_at_end(view, agent, decision))
    if not slots:
        return []
    rows = await rows_of_fields(core, view, set(slots))
    ends: list[tuple[Slot, _Base, FoldedField]] = []
    for slot in slots:
        base = _Base(rows.get(slot), as_told(view.snapshot.fields_read.get(slot, {})))
        folded = _at_end(view, agent, slot, base, last.get(slot, {}))
        overtaken = _overtaken(slot, str(folded.rule), base)
        if overtaken is not None:
            return overtaken
        ends.append((slot, base, folded))
    found: list[KeptField] = []
    for slot, base, folded in ends:
        value = await _merged(agent, slot, base, folded)
        if isinstance(value, Failure):
            return value
        failure = _unfit(view, agent, slot, value[0], base)
        if failure is not None:
            return failure
        found.append(_kept(view, slot, str(folded.rule), base, value[0]))
    return found


def _last_writes(
    view: RunView, agent: HostedAgent, decision: Finish
) -> dict[Slot, dict[str, JsonValue]]:
    """Return the writes that the decision itself makes, checked as its draft will."""
    writes = checked_writes(view, agent.fields, decision)
    for record in decision.records:
        if isinstance(record, Note) and record.name == FIELD_EVENT_NAME:
            writes[record.position] = record.value
    found: dict[Slot, dict[str, JsonValue]] = {}
    for place, told in writes.items():
        found.setdefault(slot_of(as_told(told)), {})[place] = told
    return found


def _at_end(
    view: RunView, agent: HostedAgent, slot: Slot, base: _Base, last: Mapping[str, JsonValue]
) -> FoldedField:
    """Return the writes to leave in a field, over its base: what the run has merged by now serves
    when it is merged over the same.
    """
    snapshot = view.snapshot
    own = snapshot.folded.get(slot) or FoldedField()
    if base.has_moved or not snapshot.settled.isdisjoint(own.writes()):
        folded = FoldedField()
        folded.begin(base.held())
        for place, told in own.writes(but=snapshot.settled).items():
            folded.add(place, told)
    else:
        folded = own.copy()
    for place, told in last.items():
        folded.add(place, told)
    return folded


def _overtaken(slot: Slot, rule: str, base: _Base) -> Failure | None:
    """Return why the writes are not merged over what others left since."""
    if not base.has_moved or base.row is None:
        return None
    reason = f"the {slot.scope}'s field {slot.name} was written by another run"
    said: dict[str, JsonValue] = {"read": base.seen, "version": base.row.version}
    if base.rule not in {None, rule}:
        reason = f"{reason}, by {base.rule}, not by {rule}"
        return failed_field(FailureCode.CONFLICT, reason, slot, **said)
    if rule != "replace":
        return None
    return failed_field(FailureCode.CONFLICT, reason, slot, **said, advice=READ_ANEW)


async def _merged(
    agent: HostedAgent, slot: Slot, base: _Base, folded: FoldedField
) -> tuple[JsonValue] | Failure:
    """Return what the field comes to hold, or why it cannot be said."""
    code = FailureCode.CONFLICT if base.has_moved else FailureCode.INTERNAL
    try:
        held = await value_of(agent, slot, folded)
    except (ValueError, AuthorError) as error:
        if isinstance(error, AuthorError):  # the code of a reducer, whatever it was given
            code = FailureCode.INTERNAL
        reason = f"the {slot.scope}'s field {slot.name} cannot be merged: {error}"
        return failed_field(code, reason, slot)
    assert held, "a field that is left was written"
    return held


def _kept(view: RunView, slot: Slot, rule: str, base: _Base, value: JsonValue) -> KeptField:
    expected = base.row.version if base.row is not None else 0
    version = max(expected, base.seen) + 1
    told: dict[str, JsonValue] = {**named_slot(slot), "rule": rule, "version": version}
    if base.has_moved:
        told["over"] = {"version": expected, **_value_in(base.held())}
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


def _value_in(held: Held) -> dict[str, JsonValue]:
    return {"value": held[0]} if held else {}


def _unfit(
    view: RunView, agent: HostedAgent, slot: Slot, value: JsonValue, base: _Base
) -> Failure | None:
    """Return why a value cannot be kept: the run's own fault, unless others wrote what it is over."""
    reason = f"the {slot.scope}'s field {slot.name}"
    code = FailureCode.CONFLICT if base.has_moved else FailureCode.INTERNAL
    if len(encode(value)) > INLINE_BYTES_MAX:
        return failed_field(code, f"{reason} holds at most {INLINE_BYTES_MAX} bytes", slot)
    declared = agent.fields.get(slot.name)
    if declared is None or declared.json_schema is None or declared.slot(view.agent_id) != slot:
        return None  # another agent's field of this name: its own schema was asked at each write
    problem = problem_with_value(declared.json_schema, value)
    if problem is None:
        return None
    return failed_field(code, f"{reason} does not fit at {problem}", slot)


def draft_kept_fields(draft: Draft) -> None:
    """Draft what the run leaves, in the commit of its success."""
    for one in draft.keeps:
        draft.keep_field(one, draft.add(CustomEvent(name=KEPT_EVENT_NAME, value=one.told)))
