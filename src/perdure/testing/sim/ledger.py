"""A run's own page in the books: what its log, and what it shares, say that it wrote and left."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import JsonValue

from perdure.protocol.events import ActionEvent
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState
from perdure.testing.sim.lasting import RANKED_MAX

Told = dict[str, Any]
MISSING = object()


class Place(NamedTuple):
    """A field of an agent, of a thread or (scope_id: its run) of a run."""

    tenant_id: str
    scope: str
    scope_id: str
    name: str


@dataclass(slots=True)
class Write:
    """A write as it stands in a log. `settled`: the run that made it has left it already."""

    event: RecordedEvent
    told: Told
    at: str
    settled: bool = False


@dataclass(frozen=True, slots=True)
class Kept:
    """What a run has left in a field."""

    run_id: str
    seq: int
    version: int
    told: Told

    @property
    def value(self) -> Any:
        return self.told.get("value")


@dataclass(slots=True)
class Book:
    """A run: its own events, with those that it shares before them; `whole` when all are kept."""

    row: RunRow
    own: Sequence[RecordedEvent]
    whole: bool = True
    shared: list[tuple[RunRow, list[RecordedEvent]]] = field(
        default_factory=list[tuple[RunRow, list[RecordedEvent]]]
    )
    writes: dict[str, Write] = field(default_factory=dict[str, Write])
    reads: dict[Place, Told] = field(default_factory=dict[Place, Told])
    kept: dict[Place, Kept] = field(default_factory=dict[Place, Kept])
    agent: str = ""

    @property
    def run_id(self) -> str:
        return self.row.facts.run_id

    @property
    def succeeded(self) -> bool:
        return self.row.hot.state is RunState.SUCCEEDED

    def place(self, told: Told) -> Place:
        facts, scope = self.row.facts, str(told.get("scope", "run"))
        of = {"agent": str(told.get("agent")), "thread": facts.thread_id}.get(scope, facts.run_id)
        return Place(facts.tenant_id, scope, of, str(told["field"]))

    def lasting(self) -> dict[Place, list[Write]]:
        """Return what the run is to leave if it succeeds, by field and in order."""
        found: dict[Place, list[Write]] = {}
        for write in sorted(self.writes.values(), key=lambda one: order(one.at)):
            place = self.place(write.told)
            if place.scope != "run" and not write.settled:
                found.setdefault(place, []).append(write)
        return found


def decide_anew(book: Book, part: Sequence[RecordedEvent], calls: set[int]) -> None:
    """Forget what the decision of a step wrote with which a run begins anew: it had no calls yet.

    `calls` are the steps that have some, of the runs before.
    """
    first = part[0].step_index if part else 0
    if first not in calls:
        mark = f"~{2 * first}."
        book.writes = {key: one for key, one in book.writes.items() if not key.startswith(mark)}
    calls.update(event.step_index for event in part if isinstance(event.data, ActionEvent))


def order(at: str) -> tuple[int, ...]:
    decided = at.startswith("~")
    return (0 if decided else 1, *(int(part) for part in at.removeprefix("~").split(".")))


# ---------------------------------------------------------------- the rules, written anew

EMPTY: dict[str, JsonValue] = {"append": [], "union": [], "merge": {}, "add": 0}


def merged(rule: str, value: Any, writes: Sequence[Told]) -> Any:
    """Return what a field of a rule holds after writes; MISSING: nothing before, or after."""
    values: list[Any] = [one["value"] for one in writes]
    if not values:
        return value
    before: list[Any] = [] if value is MISSING or value is None else [value]
    items: list[Any] = [*(value if isinstance(value, list) else [])]
    match rule:
        case "add":
            return sum([*before, *values])
        case "append":
            return [*items, *values]
        case "union":
            return list(dict.fromkeys([*items, *values]))
        case "merge":
            return dict(item for one in [*before, *values] for item in one.items())
        case "min":
            return min([*before, *values])
        case "max":
            return max([*before, *values])
        case "reducer":
            return sorted({*items, *values}, reverse=True)[:RANKED_MAX]
        case _:
            return values[-1]
