"""What a run that did not succeed has left in the world, as its end tells (R-9.4)."""

from pydantic import JsonValue

from perdure.protocol.events import StateEvent
from perdure.service.base import Service, own_run
from perdure.service.principal import Principal
from perdure.service.tool_calls import data_of
from perdure.service.values import events_at


async def effects_left(
    service: Service, principal: Principal, run_id: str
) -> list[dict[str, JsonValue]]:
    """Return the effects of a run's terminal event; [] for one that goes on, or has none.

    Each has `tool_call_id`, `tool`, `status` and `external_ref`; after a cancel that asked for
    it, `compensation` too. Raises NotFound.
    """
    row = await own_run(service, principal, run_id)
    seq = row.hot.terminal_seq
    if seq is None:
        return []
    end = data_of((await events_at(service.reader, run_id, [seq])).get(seq), StateEvent)
    return [] if end is None else end.effects or []
