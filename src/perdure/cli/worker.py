"""`perdure worker`: a process that carries out runs."""

import typer

from perdure.cli.options import Agents, Db, Json, find_modules_here, settings_of
from perdure.ops.exits import ExitCode, exit_of_signal, run_async
from perdure.ops.output import note, print_json
from perdure.ops.settings import Settings
from perdure.ops.stopping import StopSignal, stopping_on_signals
from perdure.runtime import open_core, open_worker


def worker(agents: Agents = None, db: Db = None, json: Json = False) -> None:
    """Carry out runs until SIGTERM or Ctrl-C.

    The first signal stops claiming and hands held runs back at their next boundary; a second one
    ends the process at once, and its leases expire.
    """
    find_modules_here()
    settings = settings_of(db, agents=agents)
    asked = run_async(lambda: _work(settings, json=json))
    raise typer.Exit(exit_of_signal(asked.number) if asked.number else ExitCode.OK)


async def _work(settings: Settings, *, json: bool) -> StopSignal:
    async with open_core(settings) as core, open_worker(core, settings) as made:
        async with stopping_on_signals(made.drain) as asked:
            served = [hosted.card.agent_id for hosted in made.catalog.served()]
            if json:
                print_json({"agents": served, "worker_id": made.worker_id})
            note(f"worker {made.worker_id} serves {', '.join(served) or 'no agents'}")
            await made.run()
        return asked
