"""Fields of scope thread and agent, as they are read (R-1.5)."""

from fastapi import APIRouter
from starlette.responses import Response

from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, page
from perdure.server.openapi import may_answer
from perdure.server.paging import LIMIT_DEFAULT, After, Limit, read_cursor, write_cursor
from perdure.service import state_fields
from perdure.service.views import Page, StateFieldView

router = APIRouter(prefix="/v1", route_class=StrictRoute)


@router.get(
    "/threads/{thread_id}/state",
    operation_id="get_thread_state",
    summary="Show what a thread's state fields hold",
    response_model=Page[StateFieldView],
    responses=may_answer("not_found", "gone"),
    tags=["threads"],
)
async def get_thread_state(
    call: InCall, thread_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return the fields of scope `thread` that runs of this thread have left, by name, each with
    its version and the event that left it. What a run writes is there once it has succeeded."""
    key = read_cursor("thread_state", after)
    found = await state_fields.thread_state(
        call.service, call.principal, thread_id, after=key, limit=limit
    )
    return page(found.items, write_cursor("thread_state", found.next))


@router.get(
    "/agents/{agent_id}/state",
    operation_id="get_agent_state",
    summary="Show what an agent's state fields hold",
    response_model=Page[StateFieldView],
    responses=may_answer("not_found"),
    tags=["discovery"],
)
async def get_agent_state(
    call: InCall, agent_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return the fields of scope `agent` that runs of this agent have left in the caller's tenant,
    by name, each with its version and the event that left it."""
    key = read_cursor("agent_state", after)
    found = await state_fields.agent_state(
        call.service, call.principal, agent_id, after=key, limit=limit
    )
    return page(found.items, write_cursor("agent_state", found.next))
