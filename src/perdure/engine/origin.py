"""The history that a run shares with others by reference, and where a new run may begin in it.

A run with an origin begins with the fold of the origin's log up to a seq, whose run may have an
origin itself; nothing of it is copied (R-7.5). The engine and `perdure verify` read it here.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from perdure.engine.fold import begin_own, fold
from perdure.engine.snapshot import FAILED_CALLS, RunSnapshot
from perdure.protocol.events import StateEvent, StepEvent
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import TERMINAL
from perdure.store.reader import Reader

PAGE = 1000
ORIGINS_MAX = 1000


class OriginGone(LookupError):
    """Events that a run shares are not there: they were removed, or the row is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A run whose log up to `until` is shared."""

    facts: RunFacts
    until: int


async def origins_of(reader: Reader, facts: RunFacts) -> list[Shared]:
    """Return the runs that a run shares history with, the first one first; [] without an origin.

    Raises OriginGone.
    """
    found: list[Shared] = []
    while facts.origin_run_id is not None:
        row = await reader.find_run(None, facts.origin_run_id)
        if row is None or row.facts.tenant_id != facts.tenant_id or len(found) == ORIGINS_MAX:
            raise OriginGone(f"the origin {facts.origin_run_id} cannot be read")
        found.append(Shared(facts=row.facts, until=facts.origin_seq or 0))
        facts = row.facts
    return found[::-1]


async def retried(reader: Reader, facts: RunFacts) -> list[Shared]:
    """Return the runs that a run goes on from as their retry, the last one first.

    What is shared with others, or cannot be read any more, is left out.
    """
    found: list[Shared] = []
    if facts.retry_of is None:
        return found
    with suppress(OriginGone):
        for shared in reversed(await origins_of(reader, facts)):
            if facts.retry_of is None:
                break
            found.append(shared)
            facts = shared.facts
    return found


async def shared_events(reader: Reader, shared: Shared) -> AsyncIterator[RecordedEvent]:
    """Yield a shared part of a log, in order. Raises OriginGone when an event is missing."""
    seq, run_id = 0, shared.facts.run_id
    while seq < shared.until:
        page = await reader.events_after(run_id, seq, limit=min(PAGE, shared.until - seq))
        if not page or page[0].seq != seq + 1:
            raise OriginGone(f"event {seq + 1} of the origin {run_id} is not there")
        for event in page:
            yield event
        seq = page[-1].seq


async def fold_origins(reader: Reader, facts: RunFacts) -> RunSnapshot:
    """Return the snapshot that a run begins with, before its first event. Raises OriginGone."""
    snapshot = RunSnapshot()
    for shared in await origins_of(reader, facts):
        async for event in shared_events(reader, shared):
            fold(snapshot, event.seq, event.data)
        begin_own(snapshot)
    return snapshot


async def shared_log(reader: Reader, shared: Shared) -> list[RecordedEvent]:
    """Return a shared part of a log. Raises OriginGone when its beginning is no longer kept."""
    return [event async for event in shared_events(reader, shared)]


def end_of_work(log: Sequence[RecordedEvent]) -> int:
    """Return the last seq of an ended run's log before its end was written.

    Results that came with the end count as work: what was done is not done again.
    """
    end = next(
        place
        for place, event in enumerate(log)
        if isinstance(event.data, StateEvent) and event.data.state in TERMINAL
    )
    before = log[end - 1]
    cut_off = isinstance(before.data, StepEvent) and before.data.status != "succeeded"
    return before.seq - 1 if cut_off else before.seq


async def last_failed_calls(reader: Reader, history: Sequence[Shared]) -> Shared:
    """Return the place in the last step with failed calls at which they can be made anew.

    Where no call has failed that is the end: what was cut off is made anew all the same.
    """
    for shared in reversed(history):
        place = _failed_calls(await shared_log(reader, shared))
        if place is not None:
            return replace(shared, until=place)
    return history[-1]


def _failed_calls(log: Sequence[RecordedEvent]) -> int | None:
    """Return the last seq of the last step with failed calls, its end left out."""
    snapshot, place = RunSnapshot(), None
    for event in log:
        if isinstance(event.data, StepEvent) and _some_failed(snapshot):
            place = event.seq - 1
        fold(snapshot, event.seq, event.data)
    return log[-1].seq if _some_failed(snapshot) else place


def _some_failed(snapshot: RunSnapshot) -> bool:
    return any(call.status in FAILED_CALLS for call in snapshot.step_calls.values())
