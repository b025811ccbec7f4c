"""`perdure agents`: what is registered, and what agents' state fields hold."""

from typing import Annotated

import typer

from perdure.cli.options import LIMIT_DEFAULT, AfterField, Db, Json, Limit, on_service, print_page
from perdure.cli.showing import print_state_fields
from perdure.protocol.agents import AgentView
from perdure.service import agents as service_agents
from perdure.service import state_fields
from perdure.service.base import Service, Slice
from perdure.service.principal import LOCAL
from perdure.service.views import StateFieldView

app = typer.Typer()


@app.callback()
def agents() -> None:
    """List the registered agents, and what their state fields hold."""


@app.command("list")
def list_(db: Db = None, json: Json = False) -> None:
    """List the agents that workers have registered on the database, by id."""

    async def work(service: Service) -> list[AgentView]:
        return await service_agents.list_agents(service, LOCAL)

    found = on_service(db, work)
    print_page(
        Slice(found, None),
        ("AGENT", "NEWEST", "VERSIONS", "DESCRIPTION"),
        lambda item: (
            item.agent_id,
            item.latest_version,
            ", ".join(item.versions),
            item.description,
        ),
        json=json,
    )


@app.command()
def state(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="Id of the agent.")],
    limit: Limit = LIMIT_DEFAULT,
    after: AfterField = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Show what an agent's state fields hold."""

    async def work(service: Service) -> Slice[StateFieldView]:
        return await state_fields.agent_state(service, LOCAL, agent, after=after, limit=limit)

    print_state_fields(on_service(db, work), json=json)
