"""Declared state: fields with a scope, and the rule by which writes to them are merged (R-1.5).

A write stands in the log at the place of the operation that made it. What a field holds is the
merge of its writes in the order of their places, whatever order they were recorded in: so
parallel branches merge the same way in every run and at every replay. Two branches that replace
one field are a conflict.

A field of scope `thread` or `agent` outlives the run. What the run sees of it is recorded when
the run begins (`perdure.field_read`), and what it leaves when it succeeds (`perdure.field_kept`).
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self, assert_never, cast

from pydantic import Field, JsonValue, model_validator

from perdure.protocol.base import Model
from perdure.protocol.codec import INTEGER_MAX, canonical, clean

FIELD_EVENT_NAME = "perdure.field"
"""Name of the custom event of a write: `field`, `rule`, `value`, and what `write_of` adds."""

READ_EVENT_NAME = "perdure.field_read"
"""Name of the custom event of what a run sees of a field that outlives it."""

KEPT_EVENT_NAME = "perdure.field_kept"
"""Name of the custom event of what a run that succeeds leaves in a field that outlives it."""

SETTLED_EVENT_NAME = "perdure.fields_settled"
"""Name of the custom event that says of a shared history whose writes its own run has kept."""

FIELD_EVENTS = frozenset({FIELD_EVENT_NAME, READ_EVENT_NAME, SETTLED_EVENT_NAME})
"""Events of which the state of a run is made."""

FIELD_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
"""What fields may be called."""

WRITES_MAX = 50
"""How many writes a decision carries, and how many a call makes: each is checked behind the others."""

FIELDS_MAX = 50
"""How many fields an agent declares, and so how much a run reads and keeps at once."""

Scope = Literal["run", "thread", "agent"]
Rule = Literal["replace", "append", "union", "merge", "add", "min", "max", "reducer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reducer:
    """A rule of one's own: a pure function of what the field holds (None: nothing) and the write.

    Name and version stand with every write: another function gets another version. It raises
    ValueError for a value that it does not take.
    """

    name: str
    version: str
    function: Callable[[Any, Any], Any]

    @property
    def key(self) -> str:
        """Return how writes name it."""
        return f"{self.name}@{self.version}"


Reducers = Mapping[str, Reducer]
"""Reducers by key."""


class Slot(NamedTuple):
    """Where a field's value stands: of the run, of its thread, or of an agent."""

    scope: Scope
    agent: str
    """The agent whose field it is; empty for other scopes."""
    name: str


class StateField(Model):
    """A declared field: who shares it, and how a write changes it.

    `replace` takes the value, `append` adds it at the end of a list, `union` does so unless it is
    there, `merge` sets the keys of an object, `add` adds a number, `min` and `max` keep the smaller
    or the larger one, `reducer` is a function of one's own. What the field holds must fit
    `json_schema`; a reducer checks that itself. A field of scope `run` ends with its run; later
    runs see those of scope `thread` in the same thread, and those of scope `agent` of the same
    agent in the same tenant.
    """

    name: str = Field(pattern=FIELD_NAME.pattern)
    scope: Scope = "run"
    rule: Rule = "replace"
    reducer: Reducer | None = None
    json_schema: dict[str, JsonValue] | None = None
    description: str = Field(default="", max_length=1000)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.rule == "reducer") != (self.reducer is not None):
            raise ValueError("a reducer goes with the rule `reducer`, and that rule with one")
        if self.reducer is not None and self.json_schema is not None:
            raise ValueError("a reducer says itself what it takes: no json_schema beside it")
        return self

    @property
    def outlasts(self) -> bool:
        """Tell whether the field outlives the run."""
        return self.scope != "run"

    def slot(self, agent_id: str) -> Slot:
        """Return where its value stands when an agent declares it."""
        return Slot(self.scope, agent_id if self.scope == "agent" else "", self.name)


def empty(rule: Rule) -> JsonValue:
    """Return what a field of this rule holds before it was written."""
    match rule:
        case "append" | "union":
            return []
        case "merge":
            return {}
        case "add":
            return 0
        case "replace" | "min" | "max" | "reducer":
            return None
        case _:
            assert_never(rule)


def merged(
    rule: Rule, old: JsonValue, value: JsonValue, reducer: Reducer | None = None
) -> JsonValue:
    """Return what a field holds after a write. Raises ValueError for a value the rule cannot take."""
    match rule:
        case "replace":
            return value
        case "append":
            return [*_as_list(old), value]
        case "union":
            held = _as_list(old)
            return held if any(_same(one, value) for one in held) else [*held, value]
        case "merge":
            if not isinstance(value, dict) or not isinstance(old, dict):
                raise ValueError("a field that merges takes objects")
            return {**old, **value}
        case "reducer":
            if reducer is None:
                raise ValueError("the field's reducer is not registered here")
            return clean(reducer.function(clean(old), clean(value)))
        case "add" | "min" | "max":
            return _of_numbers(rule, old, value)
        case _:
            assert_never(rule)


def _same(one: JsonValue, other: JsonValue) -> bool:
    """Tell whether two values are one: Python takes 1, 1.0 and true for the same, JSON does not."""
    return one == other and canonical(one) == canonical(other)


def _as_list(old: JsonValue) -> list[JsonValue]:
    if not isinstance(old, list):
        raise ValueError("the field holds no list")
    return old


def _of_numbers(rule: Literal["add", "min", "max"], old: JsonValue, value: JsonValue) -> JsonValue:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a field with the rule {rule} takes numbers")
    if old is None:
        return value
    if isinstance(old, bool) or not isinstance(old, int | float):
        raise ValueError("the field holds no number")
    if rule == "add":
        return _sum(old, value)
    return min(old, value) if rule == "min" else max(old, value)


def _sum(old: float, value: float) -> int | float:
    """Return a sum that JSON can hold: finite, and within 2^53 when it is of integers. Raises
    ValueError.
    """
    try:
        total = old + value
    except OverflowError:  # an integer too large for a float
        total = math.inf
    if isinstance(total, int) and not -INTEGER_MAX <= total <= INTEGER_MAX:
        raise ValueError("the sum is beyond 2^53 - 1")
    if not math.isfinite(total):
        raise ValueError("the sum is out of range")
    return total


def write_of(field: StateField, agent_id: str, value: JsonValue) -> dict[str, JsonValue]:
    """Return the record of a write: what says where it goes, by which rule, and the value."""
    told: dict[str, JsonValue] = {"field": field.name, "rule": field.rule, "value": value}
    if field.outlasts:
        told["scope"] = field.scope
    if field.scope == "agent":
        told["agent"] = agent_id
    if field.reducer is not None:
        told["reducer"] = field.reducer.key
    return told


def slot_of(write: Mapping[str, JsonValue]) -> Slot:
    """Return where a write, a read or a kept value belongs. Raises ValueError for a damaged one."""
    scope = write.get("scope", "run")
    if scope not in SCOPES or not isinstance(write.get("field"), str):
        raise ValueError("it names no field")
    return Slot(cast("Scope", scope), str(write.get("agent") or ""), str(write["field"]))


LOOP_MARK = "~"
"""Begins the place of a write that no code agent's function made, which stand before those."""


def decided_place(step_index: int, number: int) -> str:
    """Return the place of a write that the decision of a step carries."""
    return f"{LOOP_MARK}{2 * step_index}.0.{number}"


def called_place(position: str | None, step_index: int, ordinal: int, number: int) -> str:
    """Return the place of a write of a tool call, which is a branch of its own.

    `position` is that of the call in a code agent's function; other calls stand behind the decision
    of their step, side by side.
    """
    if position is not None:
        return f"{position}.0.{number}"
    return f"{LOOP_MARK}{2 * step_index + 1}.{ordinal}.{number}"


def place_of(position: str) -> tuple[int, ...]:
    """Return the key by which places stand in order."""
    of_code = not position.startswith(LOOP_MARK)
    parts = position if of_code else position[1:]
    return (int(of_code), *(int(part) for part in parts.split(".")))


def side_by_side(first: str, second: str) -> bool:
    """Tell whether two places are in different branches of one gather, or calls of one step."""
    one, other = place_of(first), place_of(second)
    return are_keys_side_by_side(one, other)


def are_keys_side_by_side(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Tell the same of the keys of two places."""
    if one[0] != other[0]:
        return False
    for level, (here, there) in enumerate(zip(one[1:], other[1:], strict=False)):
        if here != there:
            return level % 2 == 1
    return False


def is_before(first: str, second: str) -> bool:
    """Tell whether what stands at a place is past, seen from another."""
    return is_key_before(place_of(first), place_of(second))


def is_key_before(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Tell the same of the keys of two places."""
    return one < other and not are_keys_side_by_side(one, other)


def merge_write(
    place: str, write: JsonValue, held: tuple[()] | tuple[JsonValue], reducers: Reducers
) -> JsonValue:
    """Return what a field holds after the write at a place; before it `held` says it, (): nothing.

    Raises ValueError for a damaged write, or one that its rule does not take.
    """
    if not isinstance(write, dict) or write.get("rule") not in RULES:
        raise ValueError(f"no write stands at {place}")
    rule = cast("Rule", write["rule"])
    old = held[0] if held else empty(rule)
    return merged(rule, old, write.get("value"), reducers.get(str(write.get("reducer"))))


def values_after(
    writes: Mapping[str, JsonValue],
    reducers: Reducers,
    over: Mapping[Slot, JsonValue] | None = None,
) -> dict[Slot, JsonValue]:
    """Return what fields hold after writes, by place, over what they held before.

    Raises ValueError for a damaged write, or one that its rule does not take.
    """
    values: dict[Slot, JsonValue] = dict(over or {})
    for position in sorted(writes, key=place_of):
        write = writes[position]
        if not isinstance(write, dict):
            raise ValueError(f"no write stands at {position}")
        slot = slot_of(write)
        held_now = (values[slot],) if slot in values else ()
        values[slot] = merge_write(position, write, held_now, reducers)
    return values


def read_values(read: Mapping[Slot, JsonValue]) -> dict[Slot, JsonValue]:
    """Return what a run saw of fields that outlive it, of those that held anything."""
    return {
        slot: told["value"]
        for slot, told in read.items()
        if isinstance(told, dict) and "value" in told
    }


def held(
    writes: Mapping[str, JsonValue], over: Mapping[Slot, JsonValue] | None = None
) -> dict[str, JsonValue]:
    """Return what fields hold after writes, by name, where no reducer is at hand.

    A field with a reducer is shown by what it held before and the writes since, in order.
    """
    plain = {place: write for place, write in writes.items() if not _is_reduced(write)}
    found = {slot.name: value for slot, value in values_after(plain, {}, over).items()}
    for place in sorted(writes.keys() - plain.keys(), key=place_of):
        write = cast("dict[str, JsonValue]", writes[place])
        slot = slot_of(write)
        shown = found.get(slot.name)
        if not (isinstance(shown, dict) and shown.get("reducer") == write["reducer"]):
            shown = {"reducer": write["reducer"], "over": shown, "writes": []}
        since = cast("list[JsonValue]", shown["writes"])
        found[slot.name] = {**shown, "writes": [*since, write.get("value")]}
    return found


def _is_reduced(write: JsonValue) -> bool:
    return isinstance(write, dict) and write.get("rule") == "reducer"


def conflict(writes: Mapping[str, JsonValue]) -> tuple[str, str, str] | None:
    """Return a field that two branches replaced, with both places; None: there is none."""
    replaced: dict[Slot, list[str]] = {}
    for position in sorted(writes, key=place_of):
        write = cast("dict[str, JsonValue]", writes[position])
        if write["rule"] != "replace":
            continue
        slot = slot_of(write)
        before = replaced.setdefault(slot, [])
        if before and side_by_side(before[-1], position):  # if any is beside it, so is the nearest
            first = next(one for one in before if side_by_side(one, position))
            return slot.name, first, position
        before.append(position)
    return None


def named(fields: Iterable[StateField]) -> dict[str, StateField]:
    """Return fields by name. Raises ValueError for a name declared twice, and for too many."""
    found: dict[str, StateField] = {}
    for one in fields:
        if one.name in found:
            raise ValueError(f"the field {one.name!r} is declared twice")
        found[one.name] = one
    if len(found) > FIELDS_MAX:
        raise ValueError(f"an agent declares at most {FIELDS_MAX} fields")
    return found


def reducers_of(fields: Iterable[StateField]) -> dict[str, Reducer]:
    """Return the reducers of fields by key. Raises ValueError when two share a key."""
    found: dict[str, Reducer] = {}
    for one in fields:
        if one.reducer is None:
            continue
        if found.setdefault(one.reducer.key, one.reducer) != one.reducer:
            raise ValueError(f"two reducers are called {one.reducer.key}")
    return found


SCOPES = frozenset({"run", "thread", "agent"})
RULES = frozenset({"replace", "append", "union", "merge", "add", "min", "max", "reducer"})
