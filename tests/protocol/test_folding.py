"""What a field holds is kept up as its writes come (R-1.5)."""

from itertools import permutations

import pytest
from pydantic import JsonValue

from perdure.protocol.fields import Reducer, Rule, Slot, values_after
from perdure.protocol.folding import FoldedField
from tests.protocol.test_fields import write

SLOT = Slot("run", "", "f")


def test_it_holds_what_the_writes_come_to_in_whatever_order_they_came() -> None:
    """R-1.5: asked in between or not, over what the field held before."""
    writes: dict[str, JsonValue] = {
        place: write(number)
        for number, place in enumerate(("~0.0.0", "~1.0.0", "~1.1.0", "~1.1.1", "0.1.0"))
    }
    for order in permutations(writes):
        for asks in (True, False):
            folded, come = FoldedField(base=(["old"],)), dict[str, JsonValue]()
            for place in order:
                come[place] = writes[place]
                folded.add(place, writes[place])
                if asks:
                    assert folded.value() == (values_after(come, {}, {SLOT: ["old"]})[SLOT],)
            other = folded.copy()
            other.leave_out({"~1.0.0"})
            assert folded.value() == (["old", 0, 1, 2, 3, 4],)
            assert other.value() == (["old", 0, 2, 3, 4],)
            other.begin(())
            assert other.value() == ([0, 2, 3, 4],)
            assert folded.has_parallel
            assert not other.has_parallel


def test_a_write_costs_one_merge_and_few_when_it_comes_between_others() -> None:
    """R-1.5: a hundred writes of a call before those of one that ended sooner."""
    merges = 0

    def counted(old: int | None, value: int) -> int:
        nonlocal merges
        merges += 1
        return (old or 0) + value

    reducers = {"sum@1": Reducer(name="sum", version="1", function=counted)}
    told: dict[str, JsonValue] = {**write(1, "reducer"), "reducer": "sum@1"}
    folded = FoldedField()
    places = [f"~{step}.0.0" for step in range(1000)]
    places += ["~1001.1.0", *(f"~1001.0.{number}" for number in range(100))]
    for count, place in enumerate(places, start=1):
        folded.add(place, told)
        assert folded.value(reducers) == (count,)
    assert merges <= 2500


@pytest.mark.parametrize(("rule", "value"), [("add", "x"), ("nonsense", 1)])
def test_a_write_that_does_not_fit_is_refused_each_time(rule: Rule, value: JsonValue) -> None:
    """R-1.5: until it is left out."""
    folded = FoldedField()
    folded.add("~0.0.0", write(1, "add"))
    folded.add("~2.0.0", write(value, rule))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"numbers|no write"):
            folded.value()
    folded.leave_out({"~2.0.0"})
    assert folded.value() == (1,)
    with pytest.raises(ValueError, match="invalid literal"):
        folded.add("nowhere", write(1))
