"""A database that takes 200 ms for each statement costs time, but no lease."""

from pathlib import Path
from urllib.parse import urlsplit

import anyio
import pytest

from perdure.protocol.states import RunState
from perdure.testing.proxy import flaky_proxy
from perdure.testing.scene import Order
from tests.crash.stage import staged

LEASE_S = 5.0
STATEMENT_S = 0.2
LOOK_S = 0.1


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_worker_whose_statements_are_slow_keeps_its_run_past_its_lease(
    postgres_own_dsn: str, tmp_path: Path
) -> None:
    """F22: its heartbeat has a connection of its own; another worker stands by and takes nothing."""
    place = urlsplit(postgres_own_dsn)
    async with (
        flaky_proxy(place.port or 0) as proxy,
        staged(postgres_own_dsn, tmp_path, lease_s=LEASE_S) as stage,
    ):
        followed = await stage.submit("gate")
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}{place.path}?sslmode=disable"
        slow = await stage.start(Order(do="work", db_url=url, folder=tmp_path, lease_s=LEASE_S))
        await stage.began("pay_at_gate")
        proxy.delay_s = STATEMENT_S
        quick = await stage.worker()
        began = await stage.core.reader.now()
        with anyio.fail_after(60):
            while True:  # the lease lives on longer than it can without a heartbeat
                expires = (await stage.row(followed.run_id)).hot.lease_expires_at
                if expires is not None and (expires - began).total_seconds() > LEASE_S + 1.0:
                    break
                await anyio.sleep(LOOK_S)
        stage.outside.open_gate(f"{followed.run_id}-1")
        await followed.wait(slow, quick)
        proxy.delay_s = 0.0
        for actor in (slow, quick):
            await actor.drained()
        assert (await stage.row(followed.run_id)).hot.state is RunState.SUCCEEDED
        assert len(await stage.core.reader.list_attempts(followed.run_id)) == 1
        assert await stage.findings() == []
