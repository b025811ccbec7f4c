"""What declared fields of scope thread and agent hold (R-1.5)."""

from typing import Literal

from perdure.protocol.records import StateValueRow
from perdure.service.agents import get_agent
from perdure.service.base import Service, Slice, cut
from perdure.service.principal import Principal
from perdure.service.threads import own_thread
from perdure.service.views import StateFieldView


async def thread_state(
    service: Service, principal: Principal, thread_id: str, *, after: str | None, limit: int
) -> Slice[StateFieldView]:
    """Return the fields of a thread, by name. Raises NotFound, Gone."""
    thread = await own_thread(service, principal, thread_id)
    return await _page(service, principal, "thread", thread.thread_id, after, limit)


async def agent_state(
    service: Service, principal: Principal, agent_id: str, *, after: str | None, limit: int
) -> Slice[StateFieldView]:
    """Return the fields of an agent in the caller's tenant, by name. Raises NotFound."""
    agent = await get_agent(service, principal, agent_id)
    return await _page(service, principal, "agent", agent.agent_id, after, limit)


async def _page(
    service: Service,
    principal: Principal,
    scope: Literal["thread", "agent"],
    scope_id: str,
    after: str | None,
    limit: int,
) -> Slice[StateFieldView]:
    found = await service.reader.list_state_values(
        principal.tenant_id, scope, scope_id, after=after, limit=limit + 1
    )
    rows, more = cut(found, limit)
    return Slice([_view(row) for row in rows], rows[-1].name if more else None)


def _view(row: StateValueRow) -> StateFieldView:
    return StateFieldView.model_construct(
        name=row.name,
        tenant_id=row.tenant_id,
        scope=row.scope,
        scope_id=row.scope_id,
        rule=row.rule,
        version=row.version,
        empty=row.empty,
        value=row.value,
        run_id=row.run_id,
        seq=row.seq,
        updated_at=row.updated_at,
    )
