"""What fields that outlive their runs hold, against the events by which runs left it."""

from dataclasses import dataclass
from typing import Literal

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.load import PAGE, pages
from perdure.protocol.events import CustomEvent
from perdure.protocol.fields import KEPT_EVENT_NAME
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import StateValueRow
from perdure.protocol.runs import RunRow
from perdure.store.reader import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A field's row, with the run that it names and that run's event, as far as it is kept."""

    row: StateValueRow
    run: RunRow | None
    event: RecordedEvent | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """An agent's fields."""

    agent_id: str
    fields: list[Holding]


async def holdings(
    reader: Reader, tenant_id: str, scope: Literal["thread", "agent"], scope_id: str
) -> list[Holding]:
    """Return what the fields of a thread or an agent hold. A row is there only after its event."""

    async def read(after: str | None) -> list[StateValueRow]:
        return await reader.list_state_values(tenant_id, scope, scope_id, after=after, limit=PAGE)

    found: list[Holding] = []
    async for row in pages(read, None, lambda row: str(row.name)):
        events = await reader.events_after(row.run_id, row.seq - 1, limit=1)
        event = events[0] if events and events[0].seq == row.seq else None
        run = await reader.find_run(tenant_id, row.run_id)
        found.append(Holding(row=row, run=run, event=event if run is not None else None))
    return found


def told_otherwise(holding: Holding, *, moves: bool = False) -> Found:
    """Yield what a row says and its event does not. `moves`: its version may have gone on since."""
    row, event, run = holding.row, holding.event, holding.run
    if run is None:
        yield row.name, f"there is no run {row.run_id}"
        return
    name = f"event {row.seq} of {row.run_id}"
    if event is None:
        if row.seq >= run.hot.retained_from_seq:
            yield row.name, f"there is no {name}"
        return
    data = event.data
    told = data.value if isinstance(data, CustomEvent) and data.name == KEPT_EVENT_NAME else {}
    said = told if isinstance(told, dict) else {}
    agent = row.scope_id if row.scope == "agent" else None
    if (said.get("field"), said.get("scope"), said.get("agent")) != (row.name, row.scope, agent):
        yield row.name, f"{name} does not tell of it"
        return
    version = said.get("version")
    is_later = moves and isinstance(version, int) and row.version > version
    if row.version != version and not is_later:
        yield row.name, f"it is at version {row.version}, {name} says {version}"
    if not row.empty and (said.get("value"), said.get("rule")) != (row.value, row.rule):
        yield row.name, f"{name} tells something else"
    if row.empty and not moves:
        yield row.name, f"it is empty, and {name} left something"


@rule(
    "M5",
    "What an agent's field holds is what the event says by which its run left it, at that version.",
    scope="agent",
)
def fields_of_agents_are_told(record: AgentRecord) -> Found:
    for holding in record.fields:
        yield from told_otherwise(holding)


RULES = (fields_of_agents_are_told,)
