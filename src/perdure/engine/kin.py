"""Runs that have a history or a tree in common, each read once for one look at them.

A family is a run, those it goes on from, and the branches of all of them (R-7.4, R-10.3). Above a
run stand those that end it with themselves, and undo what it did.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from perdure.engine.core import Core
from perdure.engine.origin import ORIGINS_MAX, OriginGone, Shared, shared_events
from perdure.engine.snapshot import FAILED_CALLS, is_side_effect
from perdure.engine.undone import (
    TOOK_EFFECT,
    WORDS,
    asks_to_compensate,
    calls_of,
    children_of,
    has_undone,
    under_way_of,
    undone_by,
)
from perdure.protocol.errors import Unreadable
from perdure.protocol.events import ChildEvent, StateEvent
from perdure.protocol.log import DamagedEvent, RecordedEvent
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL
from perdure.store.reader import RunFilter

PAGE = 100


@dataclass(frozen=True, slots=True)
class Calls:
    """What a run has called: with side effects, and without them but not to be repeated."""

    effects: tuple[ToolCallRow, ...]
    once: tuple[ToolCallRow, ...]
    has_any: bool


@dataclass(frozen=True, slots=True)
class Children:
    """Children whose results a shared part of a log has, `lost` those that cannot be read."""

    rows: tuple[RunRow, ...]
    lost: tuple[str, ...]


@dataclass(slots=True)
class Kin:
    """What is read of the runs around one, kept for as long as one look takes."""

    core: Core
    is_part: bool = False
    """A run that was looked for cannot be read: what it has is not known, nor who goes on from it.
    Set anew where such a run is come by again."""
    _unread: set[str] = field(default_factory=set[str])
    _cut: set[str] = field(default_factory=set[str])
    """Runs of whose branches one cannot be read."""
    _rows: dict[str, RunRow | None] = field(default_factory=dict[str, RunRow | None])
    _families: dict[str, list[RunRow]] = field(default_factory=dict[str, list[RunRow]])
    _calls: dict[str, Calls] = field(default_factory=dict[str, Calls])
    _told: dict[tuple[str, int], set[str] | None] = field(
        default_factory=dict[tuple[str, int], set[str] | None]
    )
    _redrives: dict[str, bool] = field(default_factory=dict[str, bool])
    _undone: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])

    async def find(self, run_id: str, tenant_id: str) -> RunRow | None:
        """Return a run of a tenant; None when it is not there, or cannot be read."""
        if run_id not in self._rows:
            row = None
            try:
                row = await self.core.reader.find_run(tenant_id, run_id)
            except Unreadable:
                self._unread.add(run_id)
            self._rows[run_id] = row
        self.is_part |= run_id in self._unread
        return self._rows[run_id]

    async def family_of(self, facts: RunFacts) -> list[RunRow]:
        """Return the runs that may have a call of a run, itself too, each behind its origin."""
        first = await self.find(facts.run_id, facts.tenant_id)
        if first is None:
            return []
        for _ in range(ORIGINS_MAX):
            origin = first.facts.origin_run_id
            row = None if origin is None else await self.find(origin, facts.tenant_id)
            if row is None:
                break
            first = row
        known = self._families.get(first.facts.run_id)
        if known is None:
            known = [first]
            for one in known:  # it grows behind
                known += [row async for row in self._branches(one)]
            self._families[first.facts.run_id] = known
        self.is_part |= any(one.facts.run_id in self._cut for one in known)
        return known

    async def _branches(self, row: RunRow) -> AsyncIterator[RunRow]:
        def left_out(run_id: str, reason: str) -> None:
            del run_id, reason  # whoever reads the run itself tells
            self._cut.add(row.facts.run_id)

        after: str | None = None
        where, tenant = RunFilter(origin_run_id=row.facts.run_id), row.facts.tenant_id
        while page := await self.core.reader.list_runs(
            tenant, where, after=after, limit=PAGE, on_unreadable=left_out
        ):
            after = page[-1].facts.run_id
            for branch in page:
                self._rows[branch.facts.run_id] = branch
                yield branch

    async def history_of(self, facts: RunFacts) -> list[Shared]:
        """Return the runs that a run shares history with, as far as they are there."""
        found: list[Shared] = []
        while facts.origin_run_id is not None and len(found) < ORIGINS_MAX:
            row = await self.find(facts.origin_run_id, facts.tenant_id)
            if row is None:
                break
            found.append(Shared(facts=row.facts, until=facts.origin_seq or 0))
            facts = row.facts
        return found

    async def above(self, row: RunRow) -> list[RunRow]:
        """Return the runs that end a run with themselves, the nearest first."""
        found: list[RunRow] = []
        facts = row.facts
        while facts.parent_run_id is not None and not facts.detached:
            parent = await self.find(facts.parent_run_id, facts.tenant_id)
            if parent is None:
                break
            found.append(parent)
            facts = parent.facts
        return found

    async def calls_of(self, run_id: str) -> Calls:
        """Return what a run has called."""
        if run_id not in self._calls:
            has_any, effects, once = False, list[ToolCallRow](), list[ToolCallRow]()
            async for call in calls_of(self.core, run_id):
                has_any = True
                if is_side_effect(call.side_effect):
                    effects.append(call)
                elif not call.repeatable:
                    once.append(call)
            self._calls[run_id] = Calls(tuple(effects), tuple(once), has_any)
        return self._calls[run_id]

    async def done_in(self, shared: Shared) -> list[ToolCallRow]:
        """Return the side effects that a shared part of a log has: calls that took effect in it."""
        effects = (await self.calls_of(shared.facts.run_id)).effects
        return [call for call in effects if _is_over(call, shared) and call.status in TOOK_EFFECT]

    async def to_be_taken_over(self, facts: RunFacts) -> list[ToolCallRow]:
        """Return the calls that a run which has made none yet comes by with its history: those that
        were cut off there, and those that had failed when it is a redrive, or a run in between.
        """
        found: list[ToolCallRow] = []
        line = [facts]
        for shared in await self.history_of(facts):
            calls = await self.calls_of(shared.facts.run_id)
            for call in (*calls.effects, *calls.once):
                if call.action_seq > shared.until:
                    continue
                is_over = _is_over(call, shared)
                if is_over and call.status in TOOK_EFFECT:
                    continue
                if is_over and call.status in FAILED_CALLS and not await self._is_redriven(line):
                    continue
                found.append(call)
            line.append(shared.facts)
        return found

    async def _is_redriven(self, line: Sequence[RunFacts]) -> bool:
        """Tell whether one of some runs makes calls anew that had failed, or may."""
        for facts in line:
            run_id = facts.run_id
            if run_id not in self._redrives:
                first = await self.core.reader.events_after(run_id, 0, limit=1)
                self._redrives[run_id] = _may_redrive(first)
            if self._redrives[run_id]:
                return True
        return False

    async def children_told_in(self, shared: Shared) -> set[str] | None:
        """Return the children whose results a shared part of a log has; None when it cannot be read."""
        key = shared.facts.run_id, shared.until
        if key not in self._told:
            told: set[str] | None = set()
            try:
                async for event in shared_events(self.core.reader, shared):
                    match event.data:
                        case ChildEvent(phase="result", child_run_id=str(child)):
                            told.add(child)
                        case _:
                            pass
            except (OriginGone, DamagedEvent):
                told = None
            self._told[key] = told
        return self._told[key]

    async def children_in(self, shared: Shared) -> Children:
        """Return the children whose results a shared part of a log has: of others a run has its own."""
        lost = list[str]()
        known = children_of(self.core, shared.facts.run_id, lambda run_id, _: lost.append(run_id))
        rows = [child async for child in known if not child.facts.detached]
        told = await self.children_told_in(shared)
        found = Children(
            rows=tuple(row for row in rows if told is None or row.facts.run_id in told),
            lost=tuple(run_id for run_id in lost if told is None or run_id in told),
        )
        self.is_part |= bool(found.lost)
        return found

    async def undone_by(self, row: RunRow) -> dict[str, str]:
        """Return what became of the effects that a run began to undo, by their keys."""
        run_id = row.facts.run_id
        if run_id not in self._undone:
            keys: dict[str, str] = {}
            for tool_call_id, word in (await undone_by(self.core, row)).items():
                call = await self.core.reader.find_tool_call(row.facts.tenant_id, tool_call_id)
                if call is not None:
                    known = keys.get(call.effect_key, word)
                    keys[call.effect_key] = max(word, known, key=WORDS.index)
            self._undone[run_id] = keys
        return self._undone[run_id]

    async def has_undone(self, row: RunRow, call: ToolCallRow) -> bool:
        """Tell whether a call of a run was undone for certain, by the run itself or one above it."""
        for one in (row, *await self.above(row)):
            if (await undone_by(self.core, one)).get(call.tool_call_id) == "succeeded":
                return True
        return False

    async def under_way(self, row: RunRow) -> set[str]:
        """Return the keys of the effects that a run is undoing right now."""
        found: set[str] = set()
        for tool_call_id in await under_way_of(self.core, row):
            call = await self.core.reader.find_tool_call(row.facts.tenant_id, tool_call_id)
            if call is not None:
                found.add(call.effect_key)
        return found

    async def undoer_of(self, row: RunRow) -> RunRow | None:
        """Return the run that is still to undo what a run did: itself, or the nearest above it."""
        for one in (row, *await self.above(row)):
            if has_undone(one):
                return None
            if asks_to_compensate(one.hot.cancel_options) and one.hot.state not in TERMINAL:
                return one
        return None


def _is_over(call: ToolCallRow, shared: Shared) -> bool:
    return call.result_seq is not None and call.result_seq <= shared.until


def _may_redrive(first: Sequence[RecordedEvent]) -> bool:
    """Tell whether the first event of a run says that it is a redrive, or cannot be read."""
    try:
        data = first[0].data if first else None
    except DamagedEvent:
        return True
    if not isinstance(data, StateEvent) or first[0].seq != 1:
        return True
    return data.origin is not None and data.origin.mode == "redrive"
