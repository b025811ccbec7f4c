"""`perdure agents`: what is registered."""

import typer

from perdure.cli.options import Db, Json, on_service
from perdure.ops.output import print_json, print_table
from perdure.protocol.agents import AgentView
from perdure.service import agents as service_agents
from perdure.service.base import Service
from perdure.service.principal import LOCAL

app = typer.Typer()


@app.callback()
def agents() -> None:
    """List the registered agents."""


@app.command("list")
def list_(db: Db = None, json: Json = False) -> None:
    """List the agents that workers have registered on the database, by id."""

    async def work(service: Service) -> list[AgentView]:
        return await service_agents.list_agents(service, LOCAL)

    found = on_service(db, work)
    if json:
        print_json({"items": found, "next": None})
        return
    print_table(
        ("AGENT", "NEWEST", "VERSIONS", "DESCRIPTION"),
        [
            (item.agent_id, item.latest_version, ", ".join(item.versions), item.description)
            for item in found
        ],
    )
