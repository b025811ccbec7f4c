"""Rules of declared state fields, and the order in which writes merge (R-1.5)."""

from itertools import permutations

import pytest
from pydantic import JsonValue, ValidationError

from perdure.protocol.fields import (
    Rule,
    StateField,
    conflict,
    empty,
    held,
    is_before,
    merged,
    named,
    side_by_side,
)


def write(value: JsonValue, rule: str = "append", field: str = "f") -> dict[str, JsonValue]:
    return {"field": field, "rule": rule, "value": value}


@pytest.mark.parametrize(
    ("rule", "values", "after"),
    [
        ("replace", [1, "x"], "x"),
        ("append", [1, 1, [2]], [1, 1, [2]]),
        ("union", [1, {"a": 1}, 1, {"a": 1}], [1, {"a": 1}]),
        ("union", [1, True, 1.0, [0], [False], True], [1, True, 1.0, [0], [False]]),
        ("merge", [{"a": 1, "b": 1}, {"b": 2}], {"a": 1, "b": 2}),
        ("add", [1, 2.5, -1], 2.5),
        ("min", [3, 1, 2], 1),
        ("max", [3, 1, 5], 5),
    ],
)
def test_each_rule_takes_writes_one_by_one(
    rule: Rule, values: list[JsonValue], after: JsonValue
) -> None:
    held_now = empty(rule)
    for value in values:
        held_now = merged(rule, held_now, value)
    assert held_now == after


@pytest.mark.parametrize("values", [[2**53 - 1, 1], [1e308, 1e308], [10**400, 0.5]])
def test_a_sum_stays_what_json_can_hold(values: list[float]) -> None:
    held_now = merged("add", None, values[0])
    with pytest.raises(ValueError, match="the sum is"):
        merged("add", held_now, values[1])


@pytest.mark.parametrize(
    ("rule", "value"), [("add", "1"), ("add", True), ("max", None), ("min", []), ("merge", 1)]
)
def test_a_value_that_a_rule_does_not_take_is_refused(rule: Rule, value: JsonValue) -> None:
    with pytest.raises(ValueError, match="a field"):
        merged(rule, empty(rule), value)


@pytest.mark.parametrize("rule", ["append", "union", "merge", "add", "min", "max"])
def test_what_another_rule_left_is_not_merged_over(rule: Rule) -> None:
    value: JsonValue = {"a": 1} if rule == "merge" else 1
    with pytest.raises(ValueError, match="field"):
        merged(rule, "text", value)


def test_writes_merge_by_position_in_whatever_order_they_came() -> None:
    writes = {
        "0": write(0),
        "2.0.1": write(1),
        "2.1.0": write(2),
        "2.10.0": write(3),
        "3": write(4),
    }
    for order in permutations(writes):
        assert held({position: writes[position] for position in order}) == {"f": [0, 1, 2, 3, 4]}
    with pytest.raises(ValueError, match="no write"):
        held({"0": "nonsense"})


def test_only_branches_of_one_gather_are_side_by_side() -> None:
    assert side_by_side("2.0.1", "2.1.0")
    assert side_by_side("2.0.1.0.0", "2.0.1.1.4")
    assert not side_by_side("2.0.1", "3")
    assert not side_by_side("2.0.1", "2.0.2")
    assert not side_by_side("2.0.1.0.0", "2.0.3.1.0")
    assert is_before("2.1.0", "3")
    assert not is_before("2.0.0", "2.1.5")
    assert not is_before("3", "2.1.0")


def test_two_branches_that_replace_one_field_are_a_conflict() -> None:
    plain = {"2.0.0": write(1, "replace"), "2.0.1": write(2, "replace"), "3": write(3, "replace")}
    assert conflict(plain) is None
    assert conflict(plain | {"2.1.0": write(4, "replace", "g")}) is None
    assert conflict(plain | {"2.1.0": write(4, "replace")}) == ("f", "2.0.0", "2.1.0")
    assert conflict({"2.0.0": write(1), "2.1.0": write(2)}) is None
    nested = {"2.0.1.0.0": write(1, "replace"), "2.0.1.0.1": write(2, "replace")}
    assert conflict(nested | {"2.0.3": write(3, "replace")}) is None
    clash = nested | {"2.0.1.1.0": write(3, "replace"), "2.1.0": write(4, "replace")}
    assert conflict(clash) == ("f", "2.0.1.0.0", "2.0.1.1.0")


def test_a_field_is_declared_once_and_by_a_name() -> None:
    with pytest.raises(ValueError, match="twice"):
        named([StateField(name="a"), StateField(name="a", rule="add")])
    with pytest.raises(ValidationError):
        StateField(name="no name")
