"""A worker with the demo's agent that is armed to kill itself: `python -m perdure.demo.worker`.

Settings come from the environment. It ends when its stdin does, so it never outlives the demo.
"""

import sys
from pathlib import Path

import anyio

from perdure.agents.catalog import Catalog
from perdure.demo.agent import registry
from perdure.demo.crash import arm
from perdure.ops.exits import run_async
from perdure.ops.settings import Settings, load_settings
from perdure.runtime import open_core, open_worker
from perdure.telemetry.logs import configure_logs


def main() -> None:
    """Work until stdin ends; the argument is the folder of the drill's marks."""
    arm(Path(sys.argv[1]))
    settings = load_settings()
    configure_logs("info", "json")
    run_async(lambda: _work(settings))


async def _work(settings: Settings) -> None:
    async with (
        open_core(settings) as core,
        open_worker(core, settings, Catalog([registry])) as worker,
        anyio.create_task_group() as group,
    ):

        async def until_orphaned() -> None:
            await anyio.wait_readable(sys.stdin.fileno())
            worker.drain()

        group.start_soon(until_orphaned)
        await worker.run()
        group.cancel_scope.cancel()


if __name__ == "__main__":
    main()
