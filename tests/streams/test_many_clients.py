"""Many clients, lost connections, lost signals: each client's log is the stored log.

A5; R-6.3, R-6.4, R-6.6, R-12.2; F25, F32.

The server, the worker and the clients share one process and talk over real sockets. What happens
is drawn from a seed; when it happens is not.
"""

import logging
import random
import time

import anyio
import pytest

from perdure.signals.local import LocalSignals
from perdure.signals.off import NoSignals
from perdure.signals.ports import Signals
from perdure.signals.postgres import PostgresSignals
from perdure.testing.signals import DroppingSignals
from tests.server.world import World, open_world, value_of
from tests.streams.crowd import Viewer, assert_exact, stored_log
from tests.waiting import eventually

log = logging.getLogger(__name__)

TEXT = "é\u2028👩‍👩‍👧\r\n\x85" * 12
CUTS_MAX = 12
POLL_S = 0.25


def _signals(kind: str, url: str) -> Signals:
    """Return the signals of an installation: all of them, none, or half."""
    if kind == "off":
        return NoSignals()
    whole = PostgresSignals(url) if url.startswith("postgresql://") else LocalSignals()
    return DroppingSignals(whole, seed=5) if kind == "half" else whole


async def _start(world: World, runs: int) -> list[str]:
    """Start runs that take a while each, and return their ids."""
    chance, made = random.Random(runs), list[str]()  # noqa: S311  # not secret
    for _ in range(runs):
        wish = {"times": chance.randrange(2, 7), "seconds": 0.03, "text": TEXT}
        made.append((await world.start("walker", wish))["run_id"])
    return made


async def _watch(url: str, kind: str, *, clients: int, runs: int) -> None:
    began = time.monotonic()
    async with open_world(
        serve=True, url=url, signals=_signals(kind, url), poll_s=POLL_S, sse_heartbeat_s=0.2
    ) as world:
        viewers: list[tuple[str, Viewer]] = []
        started = await _start(world, runs)
        async with anyio.create_task_group() as group:
            for number in range(clients):
                run_id = started[number % runs]
                chance = random.Random(number)  # noqa: S311  # not secret
                viewer = Viewer(world.events_of(run_id), chance, cuts=chance.randrange(CUTS_MAX))
                viewers.append((run_id, viewer))
                group.start_soon(viewer.follow)
        logs = {run_id: await stored_log(world.core.reader, run_id) for run_id in started}
        pages = {
            run_id: await world.get(f"/v1/runs/{run_id}/events", limit=200) for run_id in started
        }
        for run_id, viewer in viewers:
            assert_exact(viewer.seen, logs[run_id])
            assert [event.json() for event in viewer.seen] == pages[run_id]["items"]
            assert viewer.seen[-1].json()["data"]["state"] == "succeeded"
            assert await viewer.come_again() == 204
        await eventually(lambda: value_of(world.metrics.server.sse_subscribers) == 0)
    cuts = sum(viewer.cut for _, viewer in viewers)
    events = sum(len(viewer.seen) for _, viewer in viewers)
    took = time.monotonic() - began
    log.info("%s: %d clients, %d cuts, %d events, %.1f s", kind, clients, cuts, events, took)


@pytest.mark.parametrize("kind", ["on", "off", "half"])
async def test_each_clients_log_is_the_stored_log(url: str, kind: str) -> None:
    """F25."""
    with anyio.fail_after(18):
        await _watch(url, kind, clients=20, runs=8)


@pytest.mark.crash_full
@pytest.mark.timeout(240)  # 200 clients, the server and 50 runs share one loop
@pytest.mark.parametrize("kind", ["on", "off", "half"])
async def test_two_hundred_clients_of_fifty_runs_see_their_logs(url: str, kind: str) -> None:
    with anyio.fail_after(230):
        await _watch(url, kind, clients=200, runs=50)
