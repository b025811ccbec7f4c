"""`perdure worker`: a process that carries out runs."""

from collections.abc import Sequence
from typing import Annotated

import anyio
import typer

from perdure.cli.options import NO_AGENTS, Agents, Db, Json, find_modules_here, settings_of
from perdure.cli.recycling import start_afresh, stop_when_lost
from perdure.ops.exits import exit_of_signal, run_async
from perdure.ops.output import note, print_json
from perdure.ops.process import tune_interpreter
from perdure.ops.settings import Settings
from perdure.ops.stopping import StopSignal, stopping_on_signals
from perdure.protocol.errors import Invalid
from perdure.runtime import open_core, open_worker


def worker(
    agents: Agents = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queue",
            help="Queue to serve; may be repeated. `default` if none is given.",
            show_default=False,
        ),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Carry out runs until SIGTERM or Ctrl-C.

    The first signal stops claiming and hands held runs back at their next boundary; a second one
    ends the process at once, and its leases expire. When too many tools never came back, the
    worker drains by itself and starts afresh.
    """
    find_modules_here()
    settings = settings_of(db, agents=agents, queues=queues)
    if not settings.agents:
        raise typer.BadParameter(f"a worker without agents would do nothing; {NO_AGENTS}")
    asked = run_async(lambda: _work(settings, json=json))
    if asked.number:
        raise typer.Exit(exit_of_signal(asked.number))
    start_afresh()


async def _work(settings: Settings, *, json: bool) -> StopSignal:
    async with open_core(settings) as core, open_worker(core, settings) as made:
        if not made.catalog.served():
            raise Invalid(f"there is no agent in {', '.join(settings.agents)}")
        tune_interpreter()
        async with (
            stopping_on_signals(made.drain) as asked,
            anyio.create_task_group() as group,
        ):
            cards = [hosted.card for hosted in made.catalog.served()]
            queues = settings.worker.queues
            if json:
                print_json(
                    {
                        "agents": [card.agent_id for card in cards],
                        "queues": queues,
                        "versions": [card.version for card in cards],
                        "worker_id": made.worker_id,
                    }
                )
            named = ", ".join(f"{card.agent_id} {card.version}" for card in cards)
            note(f"worker {made.worker_id} serves {named} from {_told(queues)}")
            group.start_soon(stop_when_lost, made, made.drain)
            await made.run()
            group.cancel_scope.cancel()
        return asked


def _told(queues: Sequence[str]) -> str:
    return f"the {'queue' if len(queues) == 1 else 'queues'} {', '.join(queues)}"
