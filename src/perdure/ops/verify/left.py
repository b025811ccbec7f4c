"""The versions that runs have left fields at, over all runs, in bounded memory (I68)."""

from collections.abc import Iterable, Iterator, Sequence

from perdure.ops.verify.checks import Check, Finding
from perdure.ops.verify.marks import MARKS_MAX, Marks
from perdure.protocol.events import CustomEvent
from perdure.protocol.fields import KEPT_EVENT_NAME, slot_of
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState
from perdure.store.reader import Reader

I68 = Check(
    id="I68",
    statement="No two runs have left a field of scope thread or agent at one version.",
    scope="store",
)
BACK = 50
"""So many events before a run's end are read at once where only what it left is asked for."""


class Left:
    """The versions of one partition. The first pass sees whole runs, further ones only their ends."""

    def __init__(self, versions_max: int = MARKS_MAX) -> None:
        self._marks = Marks(versions_max)

    def see(self, row: RunRow, events: Iterable[CustomEvent]) -> Iterator[Finding]:
        """Take what a run has left; yield the versions that another run has left too."""
        facts = row.facts
        for data in events:
            told = data.value
            if data.name != KEPT_EVENT_NAME or not isinstance(told, dict):
                continue
            try:
                slot = slot_of(told)
            except ValueError:
                continue
            scope_id, version = slot.agent or facts.thread_id, str(told.get("version"))
            if self._marks.is_again(facts.tenant_id, slot.scope, scope_id, slot.name, version):
                text = f"another run has left {slot.name} of {scope_id} at version {version}"
                yield Finding(check=I68.id, run_id=facts.run_id, subject=slot.name, text=text)

    def next_partition(self) -> bool:
        """Begin another pass over all runs; False when every partition was looked at."""
        return self._marks.next_partition()


async def left_by(reader: Reader, row: RunRow) -> Sequence[CustomEvent]:
    """Return what a run has left: it stands before its end, in the same commit."""
    found: list[CustomEvent] = []
    until = row.hot.terminal_seq
    if row.hot.state is not RunState.SUCCEEDED or until is None:
        return found
    while until > 1:
        after = max(0, until - 1 - BACK)
        page = await reader.events_after(row.facts.run_id, after, limit=until - 1 - after)
        for event in reversed(page):
            data = event.data
            if not isinstance(data, CustomEvent) or data.name != KEPT_EVENT_NAME:
                return found
            found.append(data)
        if not page:
            break
        until = after + 1
    return found
