"""Returning a damaged run to its last consistent checkpoint (R-7.7).

A log is never cut. A new run of the same thread begins with the damaged one's history up to that
checkpoint, by reference, as a retry does; then the damaged one ends, with a `repair` event that
names the new run, the checkpoint, and who returned it and why. The new run is there first, under a
key of the old one's id: whoever dies in between makes no second one when it is asked for again.

It is done only where nothing can happen twice or be lost by it: no call with a side effect was begun
or ended behind the checkpoint, no child run was begun there or open there, and nobody waits for the
run itself. All else is for a person, who may also end such a run: from its rows alone, with a result
for each open call and an end to each open question.
"""

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import anyio
from pydantic import JsonValue

from perdure.engine.branch import BranchWish, open_at_checkpoint
from perdure.engine.closing import CANCELLED, close_run, end_transition
from perdure.engine.committer import announce
from perdure.engine.continuing import BY, continuation, key_of_return, stop_continuing
from perdure.engine.core import Core
from perdure.engine.counting import count_draft
from perdure.engine.effects_told import left_behind
from perdure.engine.fold import fold
from perdure.engine.origin import OriginGone, fold_origins
from perdure.engine.reports import take_reports
from perdure.engine.rowview import view_from_rows
from perdure.engine.snapshot import RunSnapshot, is_side_effect, snapshot_digest
from perdure.engine.tree import tell_parent
from perdure.engine.unheld import unheld_draft
from perdure.engine.values import short
from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.codec import digest
from perdure.protocol.errors import Conflict, PerdureError
from perdure.protocol.events import ChildEvent, RepairEvent, StateEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.ids import checkpoint_id
from perdure.protocol.log import DamagedEvent, RecordedEvent, Unknown
from perdure.protocol.records import CheckpointRow
from perdure.protocol.runs import RunRow
from perdure.protocol.schema import is_readable
from perdure.protocol.states import TERMINAL, ParkedOn
from perdure.store.commits import Committed, Refused
from perdure.store.reader import RunFilter

log = logging.getLogger(__name__)

RETURN: Final = "return"
FAIL: Final = "fail"
_ENDS = frozenset({FailureCode.CHECKPOINT_INCOMPATIBLE, FailureCode.RUN_CANCELLED})
"""The codes of runs that a repair has ended."""
"""Actions of `repair` events: the run was returned to a checkpoint, or ended."""
PAGE = 1000
CALLS_NAMED_MAX = 20
WRITES_MAX = 50
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """What is known of a run that was put aside, and whether it can be returned.

    `damage` is the first place where log and checkpoints do not agree (None: nowhere), `checkpoint`
    the last one before it that the log folds to, `obstacles` say why the run is for a person.
    """

    damage: str | None
    checkpoint: CheckpointRow | None
    obstacles: tuple[str, ...]

    @property
    def can_return(self) -> bool:
        """Tell whether the run may be returned to the checkpoint."""
        return self.checkpoint is not None and not self.obstacles


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairWish:
    """Who repairs a run, and why."""

    by: str
    reason: str


# ---------------------------------------------------------------- what can be done


async def assess(core: Core, row: RunRow) -> Assessment:
    """Return how far a run's log can be trusted, and what lies behind that place."""
    consistent = await _fold_consistent(core, row)
    obstacles = _obstacles_of(row)
    checkpoint = None
    if consistent.seq is None:
        obstacles.append("no checkpoint of its own agrees with its log")
    else:
        checkpoint = await core.reader.find_checkpoint(
            row.facts.tenant_id, row.facts.run_id, consistent.seq
        )
        obstacles += consistent.obstacles
        obstacles += await _effects_behind(core, row, consistent)
    return Assessment(damage=consistent.damage, checkpoint=checkpoint, obstacles=tuple(obstacles))


@dataclass(slots=True)
class _Consistent:
    """The last checkpoint that agrees with the log, and what the log says up to it."""

    seq: int | None = None
    damage: str | None = None
    children: frozenset[str] = frozenset()
    obstacles: tuple[str, ...] = ()


def _obstacles_of(row: RunRow) -> list[str]:
    facts, hot = row.facts, row.hot
    found: list[str] = []
    if hot.cancel_epoch > 0:
        found.append("it is being cancelled")
    if facts.parent_run_id is not None and not facts.detached:
        found.append(f"the run {facts.parent_run_id} waits for it")
    return found


async def _fold_consistent(core: Core, row: RunRow) -> _Consistent:
    """Fold a log as far as it can be, and compare it with every checkpoint on the way."""
    found = _Consistent()
    try:
        snapshot = await fold_origins(core.reader, row.facts)
    except (OriginGone, DamagedEvent, ValueError, TypeError) as error:
        found.damage = f"what it shares with others cannot be read: {error}"
        return found
    digests = await _digests(core, row)
    children: set[str] = set()
    async for event in _log(core, row):
        found.damage = _apply(snapshot, event, children)
        told = digests.get(event.seq)
        if found.damage is None and told is not None and told != _digests_of(snapshot):
            found.damage = f"the log does not fold to the checkpoint at {event.seq}"
        if found.damage is not None:
            return found
        if told is not None:
            found.seq, found.children = event.seq, frozenset(children)
            found.obstacles = tuple(_obstacles_at(row, snapshot))
    if snapshot.last_seq < row.hot.last_seq:
        found.damage = f"event {snapshot.last_seq + 1} is missing"
    return found


def _apply(snapshot: RunSnapshot, event: RecordedEvent, children: set[str]) -> str | None:
    """Fold an event; return what is wrong with it, or None."""
    if not is_readable(event.schema_version):
        return f"event {event.seq} is of schema version {event.schema_version}"
    try:
        data = event.data
        if isinstance(data, Unknown):
            return f"event {event.seq} is of the unknown type {event.type}"
        fold(snapshot, event.seq, data)
    except (DamagedEvent, ValueError, TypeError) as error:
        return short(f"event {event.seq}: {error}")
    if isinstance(data, ChildEvent) and data.child_run_id is not None:
        children.add(data.child_run_id)
    return None


def _obstacles_at(row: RunRow, snapshot: RunSnapshot) -> list[str]:
    """Return what a checkpoint holds that a run which begins there would not take over."""
    found: list[str] = []
    if snapshot.open_children:
        found.append(f"{len(snapshot.open_children)} child runs were open at the checkpoint")
    if snapshot.agent not in {None, (row.facts.agent_id, row.facts.agent_version)}:
        found.append("it had been handed to another agent at the checkpoint")
    if snapshot.ending is not None:
        found.append("its end was decided already")
    return found


def _digests_of(snapshot: RunSnapshot) -> tuple[str, str]:
    return snapshot_digest(snapshot), digest(snapshot.agent_state)


async def _digests(core: Core, row: RunRow) -> dict[int, tuple[str, str]]:
    """Return what each checkpoint of this schema version says the log folds to."""
    found: dict[int, tuple[str, str]] = {}
    before: int | None = None
    while page := await core.reader.list_checkpoints(row.facts.run_id, before=before, limit=PAGE):
        for item in page:
            if item.schema_version == SCHEMA_VERSION:
                found[item.seq] = item.digest, digest(item.agent_state)
        before = page[-1].seq
    return found


async def _log(core: Core, row: RunRow) -> AsyncIterator[RecordedEvent]:
    seq = 0
    while seq < row.hot.last_seq:
        page = await core.reader.events_after(
            row.facts.run_id, seq, limit=min(PAGE, row.hot.last_seq - seq)
        )
        for event in page:
            yield event
        if not page:
            return
        seq = page[-1].seq


async def _effects_behind(core: Core, row: RunRow, place: _Consistent) -> list[str]:
    """Return the effects that lie behind a place, as the rows tell them: calls and child runs."""
    run_id, seq = row.facts.run_id, place.seq or 0
    handed = {item.tool_call_id for item in await core.reader.list_executions(run_id)}
    found: list[str] = []
    after: tuple[int, int] | None = None
    while calls := await core.reader.list_tool_calls(run_id, after=after, limit=PAGE):
        found += [
            f"{call.tool} ({call.tool_call_id}) was run behind the checkpoint"
            for call in calls
            if call.tool_call_id in handed
            and is_side_effect(call.side_effect)
            and (call.result_seq is None or call.result_seq > seq)
        ]
        after = (calls[-1].step_index, calls[-1].ordinal)
    where, last = RunFilter(parent_run_id=run_id), None
    while rows := await core.reader.list_runs(None, where, after=last, limit=PAGE):
        found += [
            f"the child run {child.facts.run_id} was begun behind the checkpoint"
            for child in rows
            if child.facts.run_id not in place.children
        ]
        found += [
            f"the child run {child.facts.run_id} has not ended"
            for child in rows
            if child.facts.run_id in place.children
            and not child.facts.detached
            and child.hot.state not in TERMINAL
        ]
        last = rows[-1].facts.run_id
    left = len(found) - CALLS_NAMED_MAX
    return found if left <= 0 else [*found[:CALLS_NAMED_MAX], f"and {left} more"]


# ---------------------------------------------------------------- doing it


async def return_run(core: Core, row: RunRow, wish: RepairWish) -> RunRow:
    """Return a run that is put aside to its last consistent checkpoint; return the run that goes on.

    Asked for again it returns the same one. Raises Conflict for a run that is not put aside, or
    that is for a person (details list why); else as `submit_run` does.
    """
    if row.hot.state in TERMINAL:
        return await _returned_before(core, row)
    if row.hot.parked_on is not ParkedOn.REPAIR:
        raise Conflict("the run is not put aside for repair")
    found = await assess(core, row)
    if found.checkpoint is None or found.obstacles:
        obstacles: list[JsonValue] = list(found.obstacles)
        raise Conflict(
            f"the run cannot be returned to a checkpoint: {found.obstacles[0]}",
            details={"run_id": row.facts.run_id, "obstacles": obstacles},
        )
    order = await continuation(
        core,
        row,
        key=key_of_return(row.facts.run_id),
        agent_id=row.facts.agent_id,
        version=row.facts.agent_version,
    )
    branch = BranchWish(mode=RETURN, by=wish.by, reason=wish.reason, checkpoint=found.checkpoint)
    made = (await open_at_checkpoint(core, row, order, branch)).row
    refused: Conflict | None = None
    try:
        ended = await _end(core, row, _returned(wish, made), _told(row, made, found, wish))
    except Conflict as error:
        refused = error
    else:
        if not ended and not await _goes_on_as(core, row, made):
            refused = Conflict("the run was ended otherwise in the meantime")
    if refused is not None:
        await stop_continuing(core, row, made.facts.run_id)
        raise refused
    log.warning("run %s goes on from a checkpoint as %s", row.facts.run_id, made.facts.run_id)
    return await core.reader.find_run(row.facts.tenant_id, made.facts.run_id) or made


async def _goes_on_as(core: Core, row: RunRow, made: RunRow) -> bool:
    """Tell whether a run that has ended was returned, by whoever it was, and goes on as another."""
    now = await core.reader.find_run(None, row.facts.run_id) or row
    async for event in _log(core, now):
        if event.type != "repair" or event.seq <= row.hot.last_seq:
            continue  # others may be damaged
        data = event.data
        if isinstance(data, RepairEvent) and data.action == RETURN:
            return isinstance(data.after, dict) and data.after.get("run_id") == made.facts.run_id
    return False


def _returned(wish: RepairWish, goes_on: RunRow) -> Failure:
    return Failure(
        code=FailureCode.CHECKPOINT_INCOMPATIBLE,
        reason=short(f"returned to a checkpoint: {wish.reason}"),
        stage=Stage.RECOVERY,
        details={"continued_by": goes_on.facts.run_id},
    )


def _told(row: RunRow, goes_on: RunRow, found: Assessment, wish: RepairWish) -> "_Told":
    assert found.checkpoint is not None, "it was returned to one"
    seq = found.checkpoint.seq
    after: dict[str, JsonValue] = {
        "run_id": goes_on.facts.run_id,
        "checkpoint_id": checkpoint_id(row.facts.run_id, seq),
        "seq": seq,
    }
    return _Told(action=RETURN, wish=wish, damage=found.damage, after=after)


async def _returned_before(core: Core, row: RunRow) -> RunRow:
    facts = row.facts
    key = key_of_return(facts.run_id)
    known = await core.reader.find_run_by_key(facts.tenant_id, facts.agent_id, key)
    if known is None or row.hot.code is not FailureCode.CHECKPOINT_INCOMPATIBLE:
        raise Conflict(f"the run is {row.hot.state}: it was not put aside for repair")
    return known.row


async def fail_run(core: Core, row: RunRow, wish: RepairWish) -> RunRow:
    """End a run that is put aside, from its rows alone; return it. One that has ended so is unchanged.

    It ends CHECKPOINT_INCOMPATIBLE, or as cancelled when that was asked for. A run that was to go on
    from it, begun by a return that was cut off, ends too. Raises Conflict for a run that is not put
    aside, has ended otherwise, or has children that go on.
    """
    if row.hot.state in TERMINAL and row.hot.code not in _ENDS:
        raise Conflict("the run has ended, and was not put aside for repair")
    if row.hot.parked_on is ParkedOn.REPAIR:
        await _stop_returning(core, row)
    failure = CANCELLED
    if row.hot.cancel_epoch == 0:
        failure = Failure(
            code=FailureCode.CHECKPOINT_INCOMPATIBLE,
            reason=short(f"ended by hand: {wish.reason}"),
            stage=Stage.RECOVERY,
        )
    await _end(core, row, failure, _Told(action=FAIL, wish=wish))
    return await core.reader.find_run(row.facts.tenant_id, row.facts.run_id) or row


async def _stop_returning(core: Core, row: RunRow) -> None:
    """Cancel what a return has begun and not finished: it waits in the thread for this run's end."""
    facts = row.facts
    key = key_of_return(facts.run_id)
    begun = await core.reader.find_run_by_key(facts.tenant_id, facts.agent_id, key)
    if begun is not None:
        await stop_continuing(core, row, begun.row.facts.run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What the `repair` event of an end says."""

    action: str
    wish: RepairWish
    damage: str | None = None
    after: dict[str, JsonValue] | None = None

    def event(self, row: RunRow) -> RepairEvent:
        before: dict[str, JsonValue] = {"state": row.hot.state, "last_seq": row.hot.last_seq}
        if self.damage is not None:
            before["damage"] = self.damage
        return RepairEvent(
            action=self.action,
            by=self.wish.by,
            reason=self.wish.reason,
            before=before,
            after=self.after,
        )


async def _end(core: Core, row: RunRow, failure: Failure, told: _Told) -> bool:
    """End a run that is put aside, from its rows alone; False when it had ended before.

    Raises Conflict when it is put aside no more, is cancelled in the meantime, or has children.
    """
    run_id, epoch = row.facts.run_id, row.hot.cancel_epoch
    for attempt in range(WRITES_MAX):
        now = await core.reader.find_run(None, run_id)
        if now is None or now.hot.state in TERMINAL:
            return False
        if now.hot.parked_on is not ParkedOn.REPAIR:
            raise Conflict("the run is not put aside for repair")
        if now.hot.cancel_epoch != epoch:
            raise Conflict("the run was cancelled in the meantime")
        draft = unheld_draft(core, await view_from_rows(core, now), now)
        draft.with_checkpoint = False
        draft.add(told.event(now))
        await take_reports(core, draft)
        if draft.view.snapshot.open_children:
            raise Conflict("the run has children that have not ended: cancel them first")
        effects = None
        if told.action == FAIL:
            left = await left_behind(core, now, draft.view)
            effects = left.effects
            for one in left.cut_off:
                draft.add(one)
        close_run(draft, end_transition(now.hot.state, failure), failure, effects=effects)
        draft.with_checkpoint = False
        commit = draft.build()
        (result,) = await core.store.commit([commit])
        if isinstance(result, Committed):
            announce(core, commit)
            count_draft(core, draft)
            await tell_parent(core, now.facts, None)
            return True
        if isinstance(result, Refused):
            raise Conflict(f"the end cannot be stored: {result.reason}")
        await anyio.sleep(PAUSE_S * attempt * core.chance.random())
    raise Conflict("the run is moving too fast; try again")


async def return_by_policy(core: Core, run_id: str, why: Exception) -> None:
    """Return a run that was just put aside, when the settings ask for it and nothing is against it.

    A run that began in this way itself is left to a person: what damaged it would go on.
    """
    if core.settings.on_damage != "return":
        return
    try:
        row = await core.reader.find_run(None, run_id)
        if (
            row is None
            or row.hot.parked_on is not ParkedOn.REPAIR
            or await _was_returned(core, row)
        ):
            return
        await return_run(core, row, RepairWish(by=BY, reason=short(str(why))))
    except (PerdureError, LookupError) as error:
        log.info("run %s stays aside for a person: %s", run_id, error)


async def _was_returned(core: Core, row: RunRow) -> bool:
    if row.facts.origin_run_id is None:
        return False
    for event in await core.reader.events_after(row.facts.run_id, 0, limit=1):
        try:
            data = event.data
        except DamagedEvent:
            return True
        if isinstance(data, StateEvent) and data.origin is not None:
            return data.origin.mode == RETURN
    return True
