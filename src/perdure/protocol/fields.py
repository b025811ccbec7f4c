"""Declared state: fields of a run's state, each with the rule by which writes are merged (R-1.5).

A write stands in the log at the position of the operation that made it. What a field holds is the
merge of its writes in the order of their positions, whatever order they were recorded in: so
parallel branches merge the same way in every run and at every replay. Two branches that replace
one field are a conflict.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, assert_never, cast

from pydantic import Field, JsonValue

from perdure.protocol.base import Model

FIELD_EVENT_NAME = "perdure.field"
"""Name of the custom event of a write: `field`, `rule`, `value`."""

Rule = Literal["replace", "append", "union", "merge", "add", "min", "max"]


class StateField(Model):
    """A field of a run's state, and how a write changes it.

    `replace` takes the value, `append` adds it at the end of a list, `union` does so unless it is
    there, `merge` sets the keys of an object, `add` adds a number, `min` and `max` keep the smaller
    or the larger one. What the field holds must fit `json_schema`.
    """

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    rule: Rule = "replace"
    json_schema: dict[str, JsonValue] | None = None
    description: str = Field(default="", max_length=1000)


def empty(rule: Rule) -> JsonValue:
    """Return what a field of this rule holds before it was written."""
    match rule:
        case "append" | "union":
            return []
        case "merge":
            return {}
        case "add":
            return 0
        case "replace" | "min" | "max":
            return None
        case _:
            assert_never(rule)


def merged(rule: Rule, old: JsonValue, value: JsonValue) -> JsonValue:
    """Return what a field holds after a write. Raises ValueError for a value the rule cannot take."""
    match rule:
        case "replace":
            return value
        case "append":
            return [*cast("list[JsonValue]", old), value]
        case "union":
            held = cast("list[JsonValue]", old)
            return held if value in held else [*held, value]
        case "merge":
            if not isinstance(value, dict):
                raise ValueError("a field that merges takes objects")
            return {**cast("dict[str, JsonValue]", old), **value}
        case "add" | "min" | "max":
            return _of_numbers(rule, old, value)
        case _:
            assert_never(rule)


def _of_numbers(rule: Literal["add", "min", "max"], old: JsonValue, value: JsonValue) -> JsonValue:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"a field with the rule {rule} takes numbers")
    if not isinstance(old, int | float):
        return value
    if rule == "add":
        return old + value
    return min(old, value) if rule == "min" else max(old, value)


def place_of(position: str) -> tuple[int, ...]:
    """Return the key by which positions stand in order."""
    return tuple(int(part) for part in position.split("."))


def side_by_side(first: str, second: str) -> bool:
    """Tell whether two positions are in different branches of one gather."""
    for level, (one, other) in enumerate(zip(place_of(first), place_of(second), strict=False)):
        if one != other:
            return level % 2 == 1
    return False


def is_before(first: str, second: str) -> bool:
    """Tell whether what stands at a position is past, seen from another."""
    return place_of(first) < place_of(second) and not side_by_side(first, second)


def held(writes: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return what fields hold after writes, by position. Raises ValueError for a damaged one."""
    values: dict[str, JsonValue] = {}
    for position in sorted(writes, key=place_of):
        write = writes[position]
        if not isinstance(write, dict) or write.get("rule") not in RULES:
            raise ValueError(f"no write stands at {position}")
        name, rule = str(write.get("field")), cast("Rule", write["rule"])
        values[name] = merged(rule, values.get(name, empty(rule)), write.get("value"))
    return values


def conflict(writes: Mapping[str, JsonValue]) -> tuple[str, str, str] | None:
    """Return a field that two branches replaced, with both positions; None: there is none."""
    replaced: dict[str, list[str]] = {}
    for position in sorted(writes, key=place_of):
        write = cast("dict[str, JsonValue]", writes[position])
        if write["rule"] != "replace":
            continue
        name = str(write["field"])
        for other in replaced.setdefault(name, []):
            if side_by_side(other, position):
                return name, other, position
        replaced[name].append(position)
    return None


def named(fields: Iterable[StateField]) -> dict[str, StateField]:
    """Return fields by name. Raises ValueError when a name is declared twice."""
    found: dict[str, StateField] = {}
    for one in fields:
        if one.name in found:
            raise ValueError(f"the field {one.name!r} is declared twice")
        found[one.name] = one
    return found


RULES = frozenset({"replace", "append", "union", "merge", "add", "min", "max"})
