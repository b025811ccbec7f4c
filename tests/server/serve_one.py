"""A server process for the shutdown tests: prints its port and a sleeping run's id, then serves."""

import sys

import anyio

from tests.server.world import open_world
from tests.waiting import eventually


async def _main() -> None:
    async with open_world(serve=True, listens=False) as world:
        server = world.server
        assert server is not None
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve)
            await eventually(lambda: server.started)
            run = await world.start("sleeper")
            sys.stdout.write(f"{world.port} {run['run_id']}\n")
            sys.stdout.flush()
        sys.stdout.write("ended in order\n")
        sys.stdout.flush()


anyio.run(_main)
