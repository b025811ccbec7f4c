"""The long run of B4: two hundred schedules of answers, with workers killed on the way."""

from pathlib import Path

import anyio
import pytest

from perdure.engine.core import EngineSettings
from perdure.signals.local import LocalSignals
from perdure.testing.embedded import core_of
from perdure.testing.tools import ToolZoo
from tests.flow.schedules import asker, play
from tests.flow.world import database_at, flow

SHORT = EngineSettings(
    lease_ttl_s=0.5,
    heartbeat_s=0.1,
    lease_margin_s=0.1,
    poll_interval_s=0.05,
    maintenance_interval_s=0.05,
    cancel_grace_s=0.1,
    drain_grace_s=1.0,
)
"""A dead worker's runs are taken away after half a second."""

SCHEDULES = 200
AT_ONCE = 10


@pytest.mark.crash_full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_two_hundred_schedules_lose_and_mix_up_nothing(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """R-8.2, R-7.3, issue 3 B4: each answer once, at its own point, whatever dies meanwhile."""
    url = str(tmp_path / "perdure.db")
    if store == "postgres":
        url = request.getfixturevalue("postgres_dsn")
    with ToolZoo(tmp_path / "journal.jsonl") as zoo:
        async with (
            flow(url, [asker], zoo, settings=SHORT) as engine,
            database_at(url) as database,
            LocalSignals() as signals,
        ):
            cores = [engine.core, core_of(database, signals)]
            for first in range(0, SCHEDULES, AT_ONCE):
                async with anyio.create_task_group() as group:
                    for seed in range(first, first + AT_ONCE):
                        run_id = await engine.submit("asker", max_attempts=20)
                        group.start_soon(play, cores, run_id, seed)
                    await engine.kill_worker()
                    await engine.start_worker()
