"""Declared state: writes, and what runs leave in fields of scope thread and agent (R-1.5)."""

from typing import cast

from pydantic import JsonValue

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.codec import canonical
from perdure.protocol.events import CustomEvent
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    KEPT_EVENT_NAME,
    READ_EVENT_NAME,
    Slot,
    slot_of,
    values_after,
)
from perdure.protocol.folding import FoldedField
from perdure.protocol.states import RunState

Told = dict[str, JsonValue]


@rule(
    "I65",
    "Each write of a declared state field names the field and its rule, the same for all writes of "
    "the field, and a value that the rule takes.",
)
def writes_merge(record: RunRecord) -> Found:
    rules: dict[Slot, JsonValue] = {}
    folds: dict[Slot, FoldedField] = {}
    for line, data in record.of(CustomEvent):
        write = data.value
        if data.name != FIELD_EVENT_NAME:
            continue
        if not isinstance(write, dict):
            yield line.name, "it is no write"
            continue
        try:
            slot, rule_now = slot_of(write), write.get("rule")
            if rules.setdefault(slot, rule_now) != rule_now:
                yield line.name, f"{slot.name} is written by {rule_now}, before by {rules[slot]}"
                continue
            yield from _takes(line, folds.setdefault(slot, FoldedField()), data, write)
        except ValueError as error:
            yield line.name, str(error)


def _takes(line: LogLine, folded: FoldedField, data: CustomEvent, write: Told) -> Found:
    """Add a write, and leave it out again when its rule does not take it; reducers are not here."""
    place = str(data.position or write.get("at"))
    folded.add(place, write)
    if write.get("rule") == "reducer":
        return
    try:
        folded.value()
    except ValueError as error:
        folded.leave_out({place})
        yield line.name, str(error)


@rule(
    "I66",
    "What a run sees of a field of scope thread or agent is recorded once, with the version that "
    "holds it; there is no value without a version.",
)
def fields_are_read_once(record: RunRecord) -> Found:
    seen: dict[Slot, str] = {}
    for line, slot, told in _of(record, READ_EVENT_NAME):
        if slot is None:
            yield line.name, "it names no field that outlives the run"
            continue
        if slot in seen:
            yield line.name, f"{slot.name} was read by {seen[slot]}"
        seen[slot] = line.name
        version = _number(told.get("version"))
        if version < 0 or (version == 0 and "value" in told):
            yield line.name, f"{slot.name} holds a value at version {told.get('version')}"


@rule(
    "I67",
    "A run that succeeds, and no other, leaves what it wrote to fields of scope thread and agent: "
    "each field once, at the next version, its writes merged over what it saw or what others left "
    "since. The field's row is at that version, or a later one.",
)
def fields_are_kept(record: RunRecord) -> Found:
    kept: dict[Slot, tuple[LogLine, Told]] = {}
    for line, slot, told in _of(record, KEPT_EVENT_NAME):
        if slot is None:
            yield line.name, "it names no field that outlives the run"
            continue
        if slot in kept:
            yield line.name, f"{slot.name} was left by {kept[slot][0].name}"
        kept[slot] = line, told
        if record.end is None or record.hot.state is not RunState.SUCCEEDED:
            yield line.name, f"it leaves {slot.name}, and the run did not succeed"
        elif line.seq > record.end.seq:
            yield line.name, f"it leaves {slot.name} after the end"
        yield from _row_says(record, line, slot, told)
    if record.hot.retained_from_seq == 1 and record.replay.whole:
        yield from _fits_the_writes(record, kept)


def _fits_the_writes(record: RunRecord, kept: dict[Slot, tuple[LogLine, Told]]) -> Found:
    lasting = _lasting(record)
    for slot, (line, _) in kept.items():
        if slot not in lasting:
            yield line.name, f"it leaves {slot.name}, and wrote nothing there"
    for slot, writes in lasting.items():
        if slot in kept:
            yield from _is_merge(record, *kept[slot], slot, writes)
        elif record.hot.state is RunState.SUCCEEDED:
            yield "run", f"it wrote {slot.name} and left nothing there"


def _of(record: RunRecord, name: str) -> list[tuple[LogLine, Slot | None, Told]]:
    found: list[tuple[LogLine, Slot | None, Told]] = []
    for line, data in record.of(CustomEvent):
        if data.name != name:
            continue
        told = data.value if isinstance(data.value, dict) else {}
        try:
            slot = slot_of(told)
        except ValueError:
            slot = None
        if slot is not None and slot.scope == "run":
            slot = None
        found.append((line, slot, told))
    return found


def _differ(one: JsonValue, other: JsonValue) -> bool:
    """Tell two JSON values apart, also 1 from true, which Python takes for the same."""
    return canonical(one) != canonical(other)


def _number(value: JsonValue) -> int:
    return value if isinstance(value, int) else -1


def _row_says(record: RunRecord, line: LogLine, slot: Slot, told: Told) -> Found:
    row, version = record.state_values.get(slot), _number(told.get("version"))
    if row is None:
        is_deleted = record.thread is None or record.thread.deleted_at is not None
        if slot.scope == "agent" or not is_deleted:
            yield line.name, f"there is no row of {slot.name}"
        return
    if row.version < version:
        yield line.name, f"the row of {slot.name} is at version {row.version}, not {version}"
    if row.version != version:
        return
    if (row.run_id, row.seq) != (record.facts.run_id, line.seq):
        yield line.name, f"the row of {slot.name} is of event {row.seq} of {row.run_id}"
    if row.empty or row.rule != told.get("rule") or _differ(row.value, told.get("value")):
        yield line.name, f"the row of {slot.name} holds something else"


def _lasting(record: RunRecord) -> dict[Slot, Told]:
    """Return the writes that the run is to leave, by field."""
    snapshot = record.replay.snapshot
    found: dict[Slot, Told] = {}
    for place, write in snapshot.writes.items():
        if place in snapshot.settled or not isinstance(write, dict):
            continue
        slot = slot_of(write)
        if slot.scope != "run":
            found.setdefault(slot, {})[place] = write
    return found


def _is_merge(record: RunRecord, line: LogLine, told: Told, slot: Slot, writes: Told) -> Found:
    seen = cast("Told", record.replay.snapshot.fields_read.get(slot, {}))
    over = told.get("over", seen)
    base = over if isinstance(over, dict) else {}
    before = max(_number(base.get("version", 0)), _number(seen.get("version", 0)))
    if _number(told.get("version")) != before + 1:
        yield line.name, f"{slot.name} is at version {told.get('version')} behind {before}"
    rules = {str(cast("Told", write)["rule"]) for write in writes.values()}
    if rules != {str(told.get("rule"))}:
        yield line.name, f"{slot.name} was written by {', '.join(sorted(rules))}"
        return
    if told.get("rule") == "reducer":
        return
    try:
        merged = values_after(writes, {}, {slot: base["value"]} if "value" in base else {})
    except ValueError as error:
        yield line.name, str(error)
        return
    if _differ(merged.get(slot), told.get("value")):
        yield line.name, f"{slot.name} is not what its writes come to"


RULES = (writes_merge, fields_are_read_once, fields_are_kept)
