"""A worker of the drill that dies on purpose: `python -m perdure.drill.child FOLDER`.

Settings come from the environment. It ends when its stdin does, so it never outlives the drill.
"""

import sys
from dataclasses import replace
from pathlib import Path

import anyio

from perdure.drill.agents import make_catalog
from perdure.drill.outside import Outside
from perdure.drill.own import own_reader, own_store
from perdure.ops.exits import run_async
from perdure.ops.settings import Settings, load_settings
from perdure.runtime import open_core, open_worker
from perdure.telemetry.logs import configure_logs


def main() -> None:
    """Work until stdin ends, or until the tools have killed the process."""
    settings = load_settings()
    configure_logs("info", "json")
    run_async(lambda: _work(settings, Outside(Path(sys.argv[1]))))


async def _work(settings: Settings, outside: Outside) -> None:
    async with open_core(settings) as opened:
        core = replace(
            opened, reader=own_reader(opened.reader, set()), store=own_store(opened.store)
        )
        async with (
            open_worker(core, settings, make_catalog(outside, mortal=True)) as worker,
            anyio.create_task_group() as group,
        ):

            async def until_orphaned() -> None:
                await anyio.wait_readable(sys.stdin.fileno())
                worker.drain()

            worker.beside = ()
            group.start_soon(until_orphaned)
            await worker.run()
            group.cancel_scope.cancel()


if __name__ == "__main__":
    main()
