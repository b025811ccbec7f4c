"""Agents as they are discovered (R-1.7): from the rows that workers register."""

from itertools import groupby

from perdure.protocol.agents import AgentCard, AgentView, read_card
from perdure.protocol.errors import NotFound
from perdure.service.base import Service
from perdure.service.principal import Principal
from perdure.store.reader import RegisteredAgent


async def list_agents(service: Service, principal: Principal) -> list[AgentView]:
    """Return every registered agent, by id."""
    del principal  # every tenant may see every agent until authentication lands
    registered = await service.reader.list_agents()
    return [
        _view(agent_id, list(versions))
        for agent_id, versions in groupby(registered, key=lambda row: row.agent_id)
    ]


async def get_agent(service: Service, principal: Principal, agent_id: str) -> AgentView:
    """Return one agent. Raises NotFound."""
    for view in await list_agents(service, principal):
        if view.agent_id == agent_id:
            return view
    raise NotFound("there is no such agent")


async def get_card(
    service: Service, principal: Principal, agent_id: str, *, version: str | None
) -> AgentCard:
    """Return the card of a version, the newest when none is named. Raises NotFound."""
    del principal
    rows = [row for row in await service.reader.list_agents() if row.agent_id == agent_id]
    for row in reversed(rows):
        if version in {None, row.version}:
            return _card(row)
    raise NotFound("there is no such agent" if not rows else "there is no such version")


def _view(agent_id: str, rows: list[RegisteredAgent]) -> AgentView:
    card = _card(rows[-1])
    return AgentView(
        agent_id=agent_id,
        name=card.name,
        description=card.description,
        owner=card.owner,
        latest_version=rows[-1].version,
        versions=[row.version for row in rows],
        registered_at=rows[-1].registered_at,
    )


def _card(row: RegisteredAgent) -> AgentCard:
    """Return a stored card; fields of a later release pass by (R-20.4)."""
    unread = AgentCard.model_construct(agent_id=row.agent_id, version=row.version)
    return read_card(row.card) or unread
