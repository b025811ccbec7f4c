"""What fields that outlive their runs must hold after a play, by books of their own.

Nothing here asks the engine: the writes of each run are read from its log and those that it shares,
merged by rules written anew, and followed from one version of a field to the next. So a write that
is lost, left twice, left by a run that did not succeed, or seen by somebody else is found.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from perdure.protocol.events import (
    ActionEvent,
    CustomEvent,
    HandoffEvent,
    ResultEvent,
    StateEvent,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import event_id
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import BaseKind, StateValueRow, ThreadBase
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.store.reader import Reader
from perdure.testing.sim.lasting import (
    FIELDS,
    JOTTING,
    KEEPER_CODE,
    KEEPERS,
    writes_of,
)
from perdure.testing.sim.ledger import (
    EMPTY,
    MISSING,
    Book,
    Kept,
    Place,
    Told,
    Write,
    decide_anew,
    merged,
    order,
)

Found = Callable[[str], None]

ROWS_MAX = 100
RULES = {one.name: one.rule for one in FIELDS}


@dataclass(slots=True)
class Books:
    """All runs of a play. `by_time`: the database's clock was never set back."""

    found: Found
    by_time: bool
    coverage: Counter[str]
    _runs: dict[str, Book] = field(default_factory=dict[str, Book])
    _left: dict[Place, list[Kept]] = field(default_factory=dict[Place, list[Kept]])
    _by_event: dict[str, tuple[Place, Kept]] = field(default_factory=dict[str, tuple[Place, Kept]])
    _bases: dict[str, list[ThreadBase]] = field(default_factory=dict[str, list[ThreadBase]])

    def add(self, row: RunRow, log: Sequence[RecordedEvent]) -> None:
        """Take a run with all events of its log that are still there."""
        self._runs[row.facts.run_id] = Book(row, log)

    async def check(self, reader: Reader) -> None:
        """Check all that was left."""
        if not any(_is_keeper(book) for book in self._runs.values()):
            return
        for book in self._runs.values():
            self._open(book)
        for book in self._runs.values():
            thread_id = book.row.facts.thread_id
            self._bases[thread_id] = await reader.thread_bases(thread_id)
            self._count(book)
        for book in self._runs.values():
            self._check_run(book)
        for place, left in self._left.items():
            self._check_field(place, sorted(left, key=lambda one: one.version))
        await self._check_rows(reader)

    # ---------------------------------------------------------------- reading the logs

    def _open(self, book: Book) -> None:
        """Gather what a run shares: the last run of its line first."""
        facts, whole = book.row.facts, book.row.hot.retained_from_seq == 1
        while whole and facts.origin_run_id is not None:
            origin = self._runs.get(facts.origin_run_id)
            until = facts.origin_seq or 0
            part = [] if origin is None else [one for one in origin.own if one.seq <= until]
            whole = origin is not None and len(part) == until
            if origin is not None:
                book.shared.insert(0, (origin.row, part))
                facts = origin.row.facts
        book.whole = whole

    def _count(self, book: Book) -> None:
        calls = set[int]()
        for _, part in book.shared:
            decide_anew(book, part, calls)
            for event in part:
                self._take(book, event)
        decide_anew(book, book.own, calls)
        book.agent = book.row.facts.agent_id
        for event in book.own:
            self._take(book, event)
            data = event.data
            if isinstance(data, CustomEvent) and data.name == "perdure.field_kept":
                told = cast("Told", data.value)
                kept = Kept(event.run_id, event.seq, int(told["version"]), told)
                place = book.place(told)
                if place in book.kept:
                    self.found(f"{book.run_id} has left {place.name} twice")
                book.kept[place] = kept
                self._left.setdefault(place, []).append(kept)
                self._by_event[event.event_id] = place, kept
                self.coverage[f"field left {told['rule']} {place.scope}"] += 1
                if "over" in told:
                    self.coverage[f"field left over others {told['rule']} {place.scope}"] += 1

    def _take(self, book: Book, event: RecordedEvent) -> None:
        data = event.data
        if isinstance(data, HandoffEvent):
            book.agent = data.target
        if not isinstance(data, CustomEvent) or not isinstance(data.value, dict):
            return
        told = cast("Told", data.value)
        match data.name:
            case "perdure.field":
                at = str(data.position or told["at"])
                call = told.get("call")
                key = at if call is None else f"{call} {at}"
                book.writes[key] = Write(event, told, at)
            case "perdure.field_read":
                book.reads[book.place(told)] = told
            case "perdure.fields_settled":
                for write in book.writes.values():
                    write.settled |= write.at in told["places"]
                self.coverage["writes settled"] += bool(told["places"])
            case _:
                pass

    # ---------------------------------------------------------------- run by run

    def _check_run(self, book: Book) -> None:
        if not book.succeeded and book.kept:
            self.found(f"{book.run_id} is {book.row.hot.state}, and has left something")
        if not book.whole:
            self.coverage["run without its whole history"] += 1
            return
        lasting = book.lasting()
        if book.succeeded and lasting.keys() != book.kept.keys():
            names = sorted({one.name for one in lasting.keys() ^ book.kept.keys()})
            self.found(f"{book.run_id} wrote {names} and did not leave them, or otherwise")
        if book.succeeded and book.shared and book.kept:
            self.coverage["field left by a run with an origin"] += 1
        self._check_settled(book)
        self._check_reads(book)
        self._check_seen(book)
        self._check_calls(book)
        self._check_script(book)
        self._check_conflict(book)

    def _check_settled(self, book: Book) -> None:
        """A shared write is settled if its run, or one between, has left it: no other is."""
        created = book.row.facts.created_at
        for write in book.writes.values():
            place = book.place(write.told)
            if write.event.run_id == book.run_id or place.scope == "run":
                continue
            leaving = [
                row
                for row in _from(book.shared, write.event.run_id)
                if row.hot.state is RunState.SUCCEEDED
                and (place.scope == "agent" or row.facts.thread_id == book.row.facts.thread_id)
            ]
            text = f"{book.run_id} shares the write {write.at} of {write.event.run_id}"
            if write.settled and not leaving:
                self.found(f"{text}: it is settled, and nobody has left it")
            before = [
                row.hot.finished_at is not None and row.hot.finished_at < created for row in leaving
            ]
            if not write.settled and any(before) and self.by_time:
                self.found(f"{text}: it was left, and is not settled")

    def _check_reads(self, book: Book) -> None:
        """A run sees what was left, and no less than what was left before it began."""
        for event in book.own:
            data = event.data
            if not isinstance(data, CustomEvent) or data.name != "perdure.field_read":
                continue
            told = cast("Told", data.value)
            place, version = book.place(told), int(told["version"])
            text = f"{book.run_id} reads {place.name} at {version}"
            self.coverage["field read" if version else "empty field read"] += 1
            source, kept = self._by_event.get(str(told.get("event")), (None, None))
            if kept is not None and source is not None:
                if "value" in told and told["value"] != kept.value:
                    self.found(f"{text}: {told['value']}, {kept.value} was left")
                if not self._is_akin(source, place):
                    self.found(f"{text}: it is of {source}")
                if place.scope == "agent" and version != kept.version:
                    self.found(f"{text}: it was left at {kept.version}")
            elif version > 0 and self._all_known(place):
                self.found(f"{text}: nobody left that")
            if self.by_time:
                self._check_new_enough(book, place, version, text)

    def _check_new_enough(self, book: Book, place: Place, version: int, text: str) -> None:
        began = book.row.hot.started_at
        for other in self._left.get(place, []):
            ended = self._runs[other.run_id].row.hot.finished_at
            if began is None or ended is None or ended >= began:
                continue
            if other.version > version:
                self.found(f"{text}: {other.run_id} had left {other.version} before it began")

    def _check_seen(self, book: Book) -> None:
        """The planner saw what was read, and the run's own writes; nobody else's."""
        ends = [one for one in book.own if one.seq == book.row.hot.terminal_seq]
        end = ends[0] if ends else None
        state = end.data if end is not None else None
        if not book.succeeded or not isinstance(state, StateEvent) or end is None:
            return
        if not isinstance(state.answer, dict) or "fields" not in state.answer:
            return
        seen = cast("Told", state.answer["fields"])
        is_code = book.agent == KEEPER_CODE
        last = "" if is_code else f"~{2 * (end.step_index - 1)}."
        expected: Told = {}
        for one in FIELDS:
            scope_id = book.agent if one.scope == "agent" else ""
            named: Told = {"field": one.name, "scope": one.scope, "agent": scope_id}
            place = book.place(named)
            read = book.reads.get(place, {})
            writes = [
                write.told
                for write in sorted(book.writes.values(), key=lambda write: order(write.at))
                if book.place(write.told) == place
                and not (last and write.at.startswith(last) and write.event.run_id == book.run_id)
            ]
            value = merged(one.rule, read.get("value", MISSING), writes)
            if value is not MISSING:
                expected[one.name] = value
            elif is_code:
                expected[one.name] = EMPTY.get(one.rule)
        if seen != expected:
            names = sorted(
                name
                for name in seen.keys() | expected.keys()
                if seen.get(name) != expected.get(name)
            )
            told = {name: (seen.get(name), expected.get(name)) for name in names}
            self.found(f"{book.run_id} saw (instead of) {told}")

    def _check_calls(self, book: Book) -> None:
        """A call that its tool said has worked has written all that it says; no other anything."""
        events = [event for _, part in book.shared for event in part] + [*book.own]
        amounts: dict[str, int] = {}
        for event in events:
            data = event.data
            if isinstance(data, ActionEvent) and data.tool in JOTTING:
                amounts[data.tool_call_id] = cast("Told", data.args)["amount"]
            elif isinstance(data, ResultEvent) and data.tool_call_id in amounts:
                call, wish = data.tool_call_id, writes_of(amounts[data.tool_call_id])
                worked = data.status is ToolCallStatus.SUCCEEDED and data.by == "tool"
                self.coverage["call that wrote" if worked else "call that wrote nothing"] += 1
                made = [one.told for one in book.writes.values() if one.told.get("call") == call]
                told = [(one["field"], one["value"]) for one in made]
                if told != (list(wish) if worked else []):
                    self.found(f"{book.run_id}: {call} ({data.status}) wrote {told}, not {wish}")

    def _check_script(self, book: Book) -> None:
        """A run of its own that succeeded has written what its steps say, beside its calls."""
        facts = book.row.facts
        steps = facts.input.inline
        if not book.succeeded or book.shared or not isinstance(steps, dict):
            return
        if facts.agent_id not in KEEPERS:
            return
        wish = Counter[str]()
        heir = False
        for index, step in enumerate(cast("Told", steps)["steps"]):
            for number in _numbers(step, index, facts.agent_id == KEEPER_CODE, heir):
                wish.update(f"{name} {value}" for name, value in writes_of(number))
            heir |= step[0] == "handoff"
        told = Counter(
            f"{write.told['field']} {write.told['value']}"
            for write in book.writes.values()
            if write.told.get("call") is None
        )
        if told != wish:
            self.found(f"{book.run_id} wrote {told - wish} too much, {wish - told} too little")

    def _check_conflict(self, book: Book) -> None:
        """A run that ends as one that replaced what others wrote has replaced it."""
        ends = [one for one in book.own if one.seq == book.row.hot.terminal_seq]
        state = ends[0].data if ends else None
        if book.row.hot.code is not FailureCode.CONFLICT or not isinstance(state, StateEvent):
            return
        details = {} if state.failure is None else state.failure.details
        name = details.get("field")
        if name is None:
            return
        self.coverage["end as conflict of a field"] += 1
        if RULES[str(name)] != "replace":
            self.found(f"{book.run_id} ended as CONFLICT about {name}, which merges")
        version = details.get("version")
        if version is None:
            return
        others = [
            one
            for place, left in self._left.items()
            for one in left
            if place.name == name and one.version == version and one.run_id != book.run_id
        ]
        if not others and self._known_everywhere():
            self.found(f"{book.run_id} met {name} at {version}, which nobody left")

    # ---------------------------------------------------------------- field by field

    def _check_field(self, place: Place, left: list[Kept]) -> None:
        """Every version is left by one run, over the one before it."""
        before: Kept | None = None
        name = f"{place.scope} {place.scope_id}'s {place.name}"
        is_plain = place.scope == "agent" or not self._bases.get(place.scope_id)
        adopts = any(one.kind is BaseKind.ADOPT for one in self._bases.get(place.scope_id, []))
        for kept in left:
            book = self._runs[kept.run_id]
            if before is not None and before.version == kept.version:
                self.found(f"{name}: {before.run_id} and {kept.run_id} left {kept.version}")
                continue
            base: Told | None = kept.told.get("over")
            base = book.reads.get(place, {}) if base is None and book.whole else base
            text = f"{name}: {kept.run_id} left {kept.version}"
            if base is not None:
                value = base.get("value", MISSING)
                mine = book.lasting().get(place, []) if book.whole else None
                if mine is not None:
                    wish = merged(RULES[place.name], value, [one.told for one in mine])
                    if wish != kept.value:
                        self.found(f"{text}: {kept.value}, its writes come to {wish}")
                if RULES[place.name] == "replace" and "over" in kept.told:
                    self.found(f"{text} over what others wrote, and replaces it")
                if not adopts:
                    self._check_base(book, place, text, base, before, kept, is_plain)
            elif kept.version > (before.version if before else 0) + 1 and self._all_known(place):
                self.found(f"{text} behind {before}")
            before = kept

    def _check_base(
        self,
        book: Book,
        place: Place,
        text: str,
        base: Told,
        before: Kept | None,
        kept: Kept,
        is_plain: bool,
    ) -> None:
        version, value = int(base.get("version", 0)), base.get("value", MISSING)
        if before is None:
            own_thread = place.scope == "agent" or is_plain
            if own_thread and (version > 0 or value is not MISSING) and self._all_known(place):
                self.found(f"{text} over {version}, and nobody left anything before")
            return
        if is_plain and before.version != kept.version - 1:
            if self._all_known(place):
                self.found(f"{text} behind {before.version}")
            return
        if is_plain and version != before.version:
            self.found(f"{text} over {version}, not {before.version}")
        if value != before.value and self._all_known(place):
            self.found(f"{text} over {value}, {before.run_id} left {before.value}")

    async def _check_rows(self, reader: Reader) -> None:
        tenants = {book.row.facts.tenant_id for book in self._runs.values()}
        threads = {
            (book.row.facts.tenant_id, book.row.facts.thread_id) for book in self._runs.values()
        }
        seen: set[Place] = set()
        for tenant_id in sorted(tenants):
            for agent_id in KEEPERS:
                rows = await reader.list_state_values(
                    tenant_id, "agent", agent_id, after=None, limit=ROWS_MAX
                )
                seen |= self._check_rows_of(rows)
        gone: set[str] = set()
        for tenant_id, thread_id in sorted(threads):
            rows = await reader.list_state_values(
                tenant_id, "thread", thread_id, after=None, limit=ROWS_MAX
            )
            thread = await reader.find_thread(tenant_id, thread_id)
            if thread is None or thread.deleted_at is not None:
                gone.add(thread_id)
                if rows:
                    self.found(f"{thread_id} is deleted, and its fields are there")
            seen |= self._check_rows_of(rows)
        for place in self._left.keys() - seen:
            if place.scope_id not in gone:
                self.found(f"there is no row of {place}")

    def _check_rows_of(self, rows: Iterable[StateValueRow]) -> set[Place]:
        seen: set[Place] = set()
        for row in rows:
            place = Place(row.tenant_id, row.scope, row.scope_id, row.name)
            seen.add(place)
            source, kept = self._by_event.get(event_id(row.run_id, row.seq), (None, None))
            text = f"the row of {place} at {row.version}"
            if kept is None or source is None:
                if self._all_known(place):
                    self.found(f"{text} is of an event that leaves nothing")
                continue
            if not row.empty and (row.value, row.rule) != (kept.value, kept.told["rule"]):
                self.found(f"{text} holds {row.value}, {kept.value} was left")
            if not self._is_akin(source, place):
                self.found(f"{text} is of {source}")
            self._check_newest(row, place, kept, text)
        return seen

    def _check_newest(self, row: StateValueRow, place: Place, kept: Kept, text: str) -> None:
        """A row is what was left last, unless its thread has adopted a branch."""
        newest = max(self._left.get(place, []), key=lambda one: one.version, default=None)
        if any(one.kind is BaseKind.ADOPT for one in self._bases.get(row.scope_id, [])):
            self.coverage["field row after an adoption"] += 1
            if newest is not None and row.version < newest.version:
                self.found(f"{text} is older than {newest.version}")
            return
        if row.empty:
            self.found(f"{text} is empty")
        elif newest is not None and newest is not kept:
            if self._all_known(place) or row.version < newest.version:
                self.found(f"{text} is not what {newest.run_id} left at {newest.version}")
        elif newest is not None and row.version != newest.version:
            self.found(f"{text} was left at {newest.version}")

    # ---------------------------------------------------------------- what is known

    def _is_akin(self, source: Place, place: Place) -> bool:
        """Tell whether a value may have come from one place to another: by forks and adoptions."""
        if source._replace(scope_id="") != place._replace(scope_id=""):
            return False
        return source == place or (
            place.scope == "thread" and source.scope_id in self._family(place.scope_id)
        )

    def _family(self, thread_id: str) -> set[str]:
        found, todo = set[str](), [thread_id]
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                todo += [base.base_thread_id for base in self._bases.get(one, [])]
        return found

    def _all_known(self, place: Place) -> bool:
        """Tell whether no run of the tenant that may have left something has lost its log."""
        return all(
            book.row.hot.retained_from_seq == 1
            for book in self._runs.values()
            if book.row.facts.tenant_id == place.tenant_id and book.succeeded
        )

    def _known_everywhere(self) -> bool:
        return all(
            book.row.hot.retained_from_seq == 1 for book in self._runs.values() if book.succeeded
        )


def _is_keeper(book: Book) -> bool:
    return book.row.facts.agent_id in KEEPERS


def _from(shared: Sequence[tuple[RunRow, list[RecordedEvent]]], run_id: str) -> list[RunRow]:
    """Return the runs of a line from one on."""
    rows = [row for row, _ in shared]
    names = [row.facts.run_id for row in rows]
    return rows[names.index(run_id) :] if run_id in names else []


def _numbers(step: list[Any], index: int, in_code: bool, heir: bool) -> list[int]:
    """Return the numbers for which a step writes by itself."""
    match step:
        case ["keep" | "last", number, *_]:
            return [number]
        case ["both", first, second] if in_code:
            return [first, first + 1, second, second + 1]
        case ["handoff"] if not in_code and not heir:
            return [index]
        case _:
            return []
