"""Reading what rows only refer to: the events at given seqs, and values kept as blobs."""

from collections.abc import Iterable

from pydantic import JsonValue

from perdure.protocol.codec import decode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.values import BlobRef
from perdure.store.reader import Reader

_WINDOW = 64
"""How far apart two seqs may be to be read by one query."""


async def events_at(reader: Reader, run_id: str, seqs: Iterable[int]) -> dict[int, RecordedEvent]:
    """Return the events at these seqs, in few reads; those no longer kept are missing."""
    wanted = sorted(set(seqs))
    found: dict[int, RecordedEvent] = {}
    place = 0
    while place < len(wanted):
        first = wanted[place]
        end = place
        while end < len(wanted) and wanted[end] < first + _WINDOW:
            end += 1
        group = set(wanted[place:end])
        span = wanted[end - 1] - first + 1
        for event in await reader.events_after(run_id, first - 1, limit=span):
            if event.seq in group:
                found[event.seq] = event
        place = end
    return found


async def full(reader: Reader, tenant_id: str, inline: JsonValue, ref: BlobRef | None) -> JsonValue:
    """Return a value whole; null when it is held by reference and its content is gone."""
    if ref is None:
        return inline
    data = await reader.read_blob(tenant_id, ref.digest)
    return None if data is None else decode(data)
