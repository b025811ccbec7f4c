"""`perdure runs wait`, and what it shares with `perdure run`: waiting, and carrying out here."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, NoReturn

import typer

from perdure.cli.options import (
    Agents,
    Db,
    Json,
    RunArgument,
    find_modules_here,
    open_existing,
    print_object,
    settings_of,
)
from perdure.cli.showing import fields_of_run
from perdure.ops.exits import ExitCode, exit_of_run, run_async
from perdure.ops.output import note
from perdure.ops.settings import Settings
from perdure.protocol.errors import Invalid
from perdure.protocol.runs import Run, waits_for_person
from perdure.protocol.states import TERMINAL
from perdure.runtime import open_runtime
from perdure.service.base import Service
from perdure.service.events import follow_run, starting_point
from perdure.service.principal import LOCAL
from perdure.service.runs import get_run

app = typer.Typer()

WAIT_S_DEFAULT = 3600


@app.command()
def wait(
    run: RunArgument,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")
    ] = WAIT_S_DEFAULT,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Carry it out in this process, which meanwhile is a worker for other runs of its "
            "agents, too.",
        ),
    ] = False,
    agents: Agents = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Wait until a run ends or waits for a person, then show it.

    The exit code tells what came of it: 0 succeeded, 1 failed, 3 waits for a person, 124 goes on.
    """
    must_be_here(agents, here=here)
    if here:
        find_modules_here()
    settings = settings_of(db, agents=agents)
    found = run_async(lambda: (_wait_here if here else _wait)(run, settings, timeout))
    end_with(found, json=json)


def end_with(run: Run, *, json: bool) -> NoReturn:
    """Print a run that was waited for, and end with the code that tells what came of it."""
    print_object(run, fields_of_run(run), json=json)
    code = exit_of_run(run)
    if code is ExitCode.TIMED_OUT:
        nobody = "; no worker has taken it yet" if run.attempt == 0 else ""
        note(f"the time is over, and the run goes on{nobody}")
    raise typer.Exit(code)


async def _wait(run_id: str, settings: Settings, seconds: float) -> Run:
    async with open_existing(settings) as service:
        return await wait_for(service, run_id, seconds)


async def _wait_here(run_id: str, settings: Settings, seconds: float) -> Run:
    async with open_existing(settings) as service:  # refused before a worker is made
        run = await get_run(service, LOCAL, run_id)
    async with open_here(settings, run.agent_id, run.options.queue) as service:
        return await wait_for(service, run_id, seconds)


def must_be_here(agents: list[str] | None, *, here: bool) -> None:
    """Refuse `--agents` where this process carries nothing out."""
    if agents and not here:
        raise typer.BadParameter("--agents needs --here: a worker or server has its own")


@asynccontextmanager
async def open_here(settings: Settings, agent_id: str, queue: str) -> AsyncGenerator[Service]:
    """Open the use cases with a worker beside them; raise Invalid if it would not take the run."""
    if queue not in settings.worker.queues:
        raise Invalid(
            f"this process does not serve the queue {queue}, only "
            f"{', '.join(settings.worker.queues)}: name the queue in PERDURE_WORKER__QUEUES"
        )
    async with open_runtime(settings) as runtime:
        served = [hosted.card.agent_id for hosted in runtime.worker.catalog.served()]
        if agent_id not in served:
            raise Invalid(
                f"this process does not serve {agent_id}, only "
                f"{', '.join(served) or 'no agents'}: "
                "name its registry with --agents MODULE:REGISTRY"
            )
        yield runtime.service


async def wait_for(service: Service, run_id: str, seconds: float) -> Run:
    """Return the run once it ends or waits for a person, or as it stands after `seconds`."""
    clock = service.core.clock.monotonic
    end = clock() + seconds
    start = await starting_point(service, LOCAL, run_id, 0)
    async with follow_run(service, start) as feed:
        while not feed.ended and (left := end - clock()) > 0:
            await feed.read(wait_s=min(left, 5.0), limit=200)
            run = await get_run(service, LOCAL, run_id)
            if run.state in TERMINAL or waits_for_person(run):
                return run
    return await get_run(service, LOCAL, run_id)
