"""Discarding what a cancelled run made, when its cancel asks for it (R-9.7).

The artifacts' rows stay, with the status `discarded`; their content is given out no longer, and the
sweep of content frees it where nothing else uses it. A run that goes on from such a run does not have
them: what it owes it makes anew.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.origin import OriginGone, Shared, origins_of
from perdure.engine.view import RunView
from perdure.protocol.log import DamagedEvent, EventData, Unknown, ref_of
from perdure.protocol.runs import RunFacts
from perdure.protocol.states import ArtifactStatus

PAGE = 500


async def content_to_discard(core: Core, draft: Draft) -> frozenset[str]:
    """Return the digests of a run's artifacts which the run refers to in no other way.

    None of a run whose log cannot be read: nobody knows what else it refers to.
    """
    facts = draft.view.facts
    made, kept = {item.digest for item in draft.artifacts}, set[str]()
    after: str | None = None
    while page := await core.reader.list_artifacts(
        facts.tenant_id, run_id=facts.run_id, thread_id=None, after=after, limit=PAGE
    ):
        for row in page:
            (kept if row.status is ArtifactStatus.ADOPTED else made).add(row.digest)
        after = page[-1].artifact_id
    if not made:
        return frozenset()
    if facts.input.ref is not None:
        kept.add(facts.input.ref.digest)
    try:
        async for data in _log(core, draft):
            if isinstance(data, Unknown):
                return frozenset()
            ref = ref_of(data)
            if ref is not None:
                kept.add(ref.digest)
    except DamagedEvent:
        return frozenset()
    return frozenset(made - kept)


async def note_discarded(core: Core, view: RunView) -> None:
    """Note which artifacts that a run owes it only shares with runs whose cancel discarded them.

    Only a run that shares a history and owes artifacts costs a read.
    """
    facts = view.facts
    owed = view.snapshot.artifacts.keys() & set(facts.options.required_artifacts)
    if facts.origin_run_id is None or not owed:
        return
    with suppress(OriginGone):
        shared = await origins_of(core.reader, facts)
        view.discarded = frozenset(owed) - await _kept_names(core, facts, shared)


async def _kept_names(core: Core, facts: RunFacts, shared: Sequence[Shared]) -> set[str]:
    """Return the names of artifacts of a run, and of what it shares, that were not discarded."""
    found: set[str] = set()
    until: dict[str, int] = {part.facts.run_id: part.until for part in shared}
    for run_id in (facts.run_id, *until):
        after: str | None = None
        while page := await core.reader.list_artifacts(
            facts.tenant_id, run_id=run_id, thread_id=None, after=after, limit=PAGE
        ):
            found |= {
                row.name
                for row in page
                if row.status is not ArtifactStatus.DISCARDED
                and row.seq <= until.get(run_id, row.seq)
            }
            after = page[-1].artifact_id
    return found


async def _log(core: Core, draft: Draft) -> AsyncIterator[EventData | Unknown]:
    """Yield the run's events: those of its log, and those of the draft."""
    seq = 0
    while page := await core.reader.events_after(draft.view.facts.run_id, seq, limit=PAGE):
        for event in page:
            yield event.data
        seq = page[-1].seq
    for event in draft.events:
        yield event.data
