"""PostgreSQL restarted under load (F12): no acknowledged run is missing, and all of them end."""

from pathlib import Path

import anyio
import pytest

from perdure.ops.local_postgres import StopMode, local_postgres
from perdure.protocol.errors import Unavailable
from perdure.protocol.states import RunState
from perdure.testing.scene import submit_act
from tests.crash.stage import Stage, staged

BEFORE = 5
"""How many runs are acknowledged before and after each restart at least."""


class Load:
    """A client that orders runs all the time, each under a key of its own until it is answered."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.acknowledged: list[str] = []
        self.refused = 0

    async def run(self) -> None:
        """Order runs until cancelled."""
        number = 0
        while True:
            number += 1
            self.acknowledged.append(await self._order(f"load-{number}"))
            await anyio.sleep(0.05)

    async def _order(self, key: str) -> str:
        while True:
            try:
                return await submit_act(self._stage.core, "steps", key)
            except Unavailable:
                self.refused += 1
                await anyio.sleep(0.1)

    async def more(self, count: int) -> None:
        """Return once so many more runs are acknowledged."""
        wanted = len(self.acknowledged) + count
        with anyio.fail_after(60):
            while len(self.acknowledged) < wanted:  # noqa: ASYNC110  # a load, not an event
                await anyio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_no_acknowledged_run_is_lost_when_postgres_restarts_under_load(
    tmp_path: Path,
) -> None:
    """F12: a fast and an immediate restart while workers work and clients order."""
    with local_postgres() as server:
        async with staged(server.create_database("restarted"), tmp_path) as stage:
            workers = [await stage.worker() for _ in range(2)]
            load = Load(stage)
            async with anyio.create_task_group() as group:
                group.start_soon(load.run)
                modes: tuple[StopMode, ...] = ("fast", "immediate")
                for mode in modes:
                    await load.more(BEFORE)
                    await anyio.to_thread.run_sync(server.restart, mode)
                    await load.more(BEFORE)
                group.cancel_scope.cancel()

            runs = [stage.follow(run_id) for run_id in load.acknowledged]
            assert len({followed.run_id for followed in runs}) == len(runs)
            for followed in runs:
                await followed.wait(*workers)
            for actor in workers:
                await actor.drained()
            for followed in runs:
                assert (await stage.row(followed.run_id)).hot.state is RunState.SUCCEEDED
            assert await stage.findings() == []
            keys = [line["key"] for line in stage.outside.payments()]
            assert len(keys) == len(set(keys))
