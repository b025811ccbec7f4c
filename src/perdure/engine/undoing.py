"""What a cancelled run still has to undo: read from rows and log, never kept (R-9.4).

The calls of a run that took effect and whose tools have `compensate`, and those of the runs below
it that ended before the cancel reached them, the last one first. How far each is stands in the
run's `compensation` events.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.effects_told import effects_told
from perdure.engine.history import load_value
from perdure.engine.kin import Kin
from perdure.engine.standing import Standing, standing_of
from perdure.engine.undone import (
    PAGE,
    TOOK_EFFECT,
    at_and_below,
    became_of_undoing,
    children_of,
    has_undone,
    keep_unreadable,
    strongest,
    tail_of,
    undone_by,
)
from perdure.protocol.codec import digest
from perdure.protocol.events import (
    ActionEvent,
    CompensationEvent,
    ResultEvent,
    ResumeEvent,
)
from perdure.protocol.log import EventData, Unknown
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL
from perdure.protocol.tools import ToolSpec, read_spec
from perdure.protocol.values import Value
from perdure.store.reader import InterruptFilter


@dataclass(slots=True, kw_only=True)
class Undo:
    """One call that is to be undone. `tries` are its `compensation` events, in order.

    Without `facts` its run, or one above that, cannot be read, and may have undone the call itself.
    """

    facts: RunFacts | None
    tenant_id: str
    depth: int
    call: ToolCallRow
    spec: ToolSpec
    done_at: datetime
    tries: list[tuple[datetime, CompensationEvent]]
    is_stood_on: bool
    """Another run stands on the effect, has undone it, or is to undo it."""
    is_elsewhere: bool
    """Another run is undoing it right now: what comes of that is waited for."""

    @property
    def key(self) -> str:
        """Return the idempotency key: the same for every try, and not the call's own."""
        return digest(["compensate", self.call.effect_key])

    @property
    def last(self) -> CompensationEvent | None:
        """Return what was recorded of it last."""
        return self.tries[-1][1] if self.tries else None

    @property
    def tries_used(self) -> int:
        """Return how many tries began, or may have."""
        not_begun = {one.number for _, one in self.tries if not one.begun}
        return len({one.number for _, one in self.tries} - not_begun)

    @property
    def not_begun_since(self) -> int:
        """Return how many tries, the last ones without a gap, did not begin."""
        ends = [one for _, one in self.tries if one.status != "started"]
        return next((i for i, one in enumerate(reversed(ends)) if one.begun), len(ends))

    @property
    def is_over(self) -> bool:
        """Tell whether nothing more is tried."""
        last = self.last
        if last is None:
            return self.is_stood_on
        return last.status != "started" and (self.is_stood_on or not last.again)

    @property
    def is_under_way(self) -> bool:
        """Tell whether a try was begun whose end is not recorded."""
        return self.last is not None and self.last.status == "started"

    @property
    def must_wait(self) -> bool:
        """Tell whether no try may begin, and none is under way, for as long as its run cannot be
        read. What else there is to undo is not kept by it.
        """
        return self.facts is None and not self.is_under_way

    @property
    def became(self) -> str:
        """Return what the end of the run tells of it."""
        if self.facts is None and not self.tries:
            return "unknown"
        return became_of_undoing([one for _, one in self.tries])


@dataclass(frozen=True, slots=True, kw_only=True)
class Undoing:
    """All that is to be undone, the last call first. `asked_at`: when the cancel asked for it, or
    when the last child had ended since: what a run below waits for takes none of the time.
    """

    items: tuple[Undo, ...]
    asked_at: datetime | None

    def owed(self, now: datetime, deadline_s: float) -> list[Undo]:
        """Return what is left to do; after the deadline only what was begun is seen to its end."""
        left = [item for item in self.items if not item.is_over]
        if self.is_late(now, deadline_s):
            return [item for item in left if item.is_under_way]
        return left

    def is_late(self, now: datetime, deadline_s: float) -> bool:
        """Tell whether the time for undoing is over."""
        asked_at = self.asked_at
        return asked_at is not None and now >= asked_at + timedelta(seconds=deadline_s)

    def report(
        self, run_id: str, effects: list[dict[str, JsonValue]]
    ) -> list[dict[str, JsonValue]]:
        """Return the effects of a run, each with what became of undoing it, and those below it."""
        return effects_told(run_id, effects, [(item.call, item.became) for item in self.items])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A run whose calls are to be undone, and what became of those that others have undone already.

    Without a `row` it, or one above it, cannot be read.
    """

    run_id: str
    depth: int
    row: RunRow | None
    undone: dict[str, str]


async def read_undoing(
    core: Core, row: RunRow, done_at: dict[tuple[str, int], datetime] | None = None
) -> Undoing:
    """Return what a cancelled run has to undo, and how far it is.

    `done_at` remembers between two readings when results were written, by run and seq.
    """
    times = {} if done_at is None else done_at
    tail = await tail_of(core, row)
    specs = await _compensating(core)
    items: list[Undo] = []
    kin = Kin(core)
    async for part in _with_runs_below(core, row, {}):
        others = Standing() if part.row is None else await standing_of(kin, part.row, row)
        for call in (await kin.calls_of(part.run_id)).effects:
            spec, tries = specs.get((call.tool, call.version or "")), tail.tries
            if spec is None or call.status not in TOOK_EFFECT or call.result_seq is None:
                continue
            is_stood_on = call.effect_key in others.held | others.first
            if is_stood_on and call.tool_call_id not in tries:
                continue
            told = part.undone.get(call.tool_call_id)
            if told == "succeeded" or (told == "unknown" and not spec.compensate_idempotent):
                continue
            at = await _written_at(core, part.run_id, call.result_seq, times)
            if at is None:
                continue
            items.append(
                Undo(
                    facts=None if part.row is None else part.row.facts,
                    tenant_id=row.facts.tenant_id,
                    depth=part.depth,
                    call=call,
                    spec=spec,
                    done_at=at,
                    tries=tries.get(call.tool_call_id, []),
                    is_stood_on=is_stood_on,
                    is_elsewhere=call.effect_key in others.under_way,
                )
            )
    items.sort(key=lambda item: (item.done_at, item.depth, item.call.result_seq))
    return Undoing(items=tuple(reversed(items)), asked_at=tail.asked_at)


async def _written_at(
    core: Core, run_id: str, seq: int, times: dict[tuple[str, int], datetime]
) -> datetime | None:
    """Return when the event at a seq was written, or the first one that is kept behind it."""
    if (run_id, seq) not in times:
        found = await core.reader.events_after(run_id, seq - 1, limit=1)
        if not found:
            return None
        times[run_id, seq] = found[0].at
    return times[run_id, seq]


async def _compensating(core: Core) -> dict[tuple[str, str], ToolSpec]:
    """Return the registered tools that can undo their calls."""
    found: dict[tuple[str, str], ToolSpec] = {}
    for tool in await core.reader.list_tools():
        spec = read_spec(tool.spec)
        if spec is not None and spec.has_compensate:
            found[tool.name, tool.version] = spec
    return found


async def _with_runs_below(core: Core, row: RunRow, undone: dict[str, str]) -> AsyncIterator[_Part]:
    """Yield a run, and those below it that ended without undoing what they did themselves, or that
    may have; with what became of calls that runs in between, or that run itself, have undone.
    """
    run_id, depth, lost = row.facts.run_id, row.facts.depth, list[str]()
    yield _Part(run_id=run_id, depth=depth, row=row, undone=undone)
    async for child in children_of(core, run_id, keep_unreadable(lost)):
        if child.facts.detached or child.hot.state not in TERMINAL or has_undone(child):
            continue
        known = strongest(undone, await undone_by(core, child))
        async for below in _with_runs_below(core, child, known):
            yield below
    for child_id in lost:
        async for one in at_and_below(core, child_id):
            yield _Part(run_id=one, depth=depth + 1, row=None, undone=undone)


async def performed(core: Core, item: Undo) -> dict[str, JsonValue]:
    """Return what the call did, as its tool's `compensate` gets it.

    Raises LookupError when that is not stored any more.
    """
    call, tenant = item.call, item.tenant_id
    action = await _event(core, call.run_id, call.action_seq)
    result = await _event(core, call.run_id, call.result_seq or 0)
    if not isinstance(action, ActionEvent) or not isinstance(result, ResultEvent):
        raise LookupError("the history of the call is no longer kept")
    args = await load_value(core, tenant, Value(inline=action.args, ref=action.args_ref))
    if call.effective_digest != call.args_digest:
        args = await _edited(core, item)
    output = await load_value(core, tenant, Value(inline=result.output, ref=result.output_ref))
    return {
        "args": args,
        "output": output,
        "external_ref": call.external_ref,
        "effect_key": call.effect_key,
        "status": call.status,
        "done": result.done,
        "not_done": result.not_done,
    }


async def _edited(core: Core, item: Undo) -> JsonValue:
    """Return the arguments as a person changed them."""
    call, after = item.call, None
    where = InterruptFilter(run_id=call.run_id)
    while page := await core.reader.list_interrupts(item.tenant_id, where, after=after, limit=PAGE):
        for row in page:
            if row.tool_call_id == call.tool_call_id and row.closed_seq is not None:
                answer = await _event(core, call.run_id, row.closed_seq)
                if isinstance(answer, ResumeEvent) and answer.effective_digest is not None:
                    return answer.effective_args
        after = page[-1].interrupt_id
    raise LookupError("the arguments that were approved are no longer kept")


async def _event(core: Core, run_id: str, seq: int) -> EventData | Unknown | None:
    found = await core.reader.events_after(run_id, seq - 1, limit=1)
    return found[0].data if found and found[0].seq == seq else None
