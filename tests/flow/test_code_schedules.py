"""Answers in random order, from two sessions over one database, each with its duplicate (B4)."""

import anyio
import pytest

from perdure.signals.local import LocalSignals
from perdure.testing.embedded import core_of
from perdure.testing.tools import ToolZoo
from tests.flow.schedules import asker, play
from tests.flow.world import database_at, flow


@pytest.mark.slow
async def test_each_answer_lands_once_at_its_own_point(url: str, zoo: ToolZoo) -> None:
    """R-8.2, HITL-08, HITL-11, SUB-05, issue 3 B4: ten of the schedules that `make crash` plays."""
    async with (
        flow(url, [asker], zoo) as engine,
        database_at(url) as database,
        LocalSignals() as signals,
    ):
        cores = [engine.core, core_of(database, signals)]
        async with anyio.create_task_group() as group:
            for seed in range(10):
                run_id = await engine.submit("asker")
                group.start_soon(play, cores, run_id, seed)
