"""Discovery: agents, their cards, tools (R-1.7)."""

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from perdure.protocol.agents import AgentCard, AgentView
from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, one, page
from perdure.server.openapi import may_answer
from perdure.service import agents, tools
from perdure.service.views import Page, ToolView

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["discovery"])


@router.get(
    "/agents",
    operation_id="list_agents",
    summary="List the agents that workers serve",
    response_model=Page[AgentView],
    responses=may_answer(),
)
async def list_agents(call: InCall) -> Response:
    """Return every registered agent with its newest version."""
    return page(await agents.list_agents(call.service, call.principal), None)


@router.get(
    "/agents/{agent_id}",
    operation_id="get_agent",
    summary="Show an agent",
    response_model=AgentView,
    responses=may_answer("not_found"),
)
async def get_agent(call: InCall, agent_id: str) -> Response:
    """Return one agent."""
    return one(await agents.get_agent(call.service, call.principal, agent_id))


@router.get(
    "/agents/{agent_id}/card",
    operation_id="get_agent_card",
    summary="Show an agent's card",
    response_model=AgentCard,
    responses=may_answer("not_found"),
)
async def get_agent_card(
    call: InCall,
    agent_id: str,
    version: Annotated[str | None, Query(max_length=50, description="the newest if absent")] = None,
) -> Response:
    """Return the card of one version: identity, skills, types, tools, permissions, bindings."""
    return one(await agents.get_card(call.service, call.principal, agent_id, version=version))


@router.get(
    "/tools",
    operation_id="list_tools",
    summary="List the tools that workers offer",
    response_model=Page[ToolView],
    responses=may_answer(),
)
async def list_tools(call: InCall) -> Response:
    """Return every registered tool with its versions and schemas."""
    return page(await tools.list_tools(call.service, call.principal), None)
