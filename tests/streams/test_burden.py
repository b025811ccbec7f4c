"""Clients that do not read, vanish, or come in crowds cost bounded memory and delay nobody.

R-6.3, R-6.7; F23, F31, F33, MEM-01 and MEM-04 on both databases, over real sockets.
"""

import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest

from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.server.serve import DEAD_PEER_MS
from perdure.testing.sse_client import SseEvent, StreamInterrupted, follow_to_the_end
from tests.server.world import World, open_world, value_of
from tests.streams.crowd import assert_exact, stored_log
from tests.waiting import eventually

log = logging.getLogger(__name__)

MIB = 1024 * 1024
PAGE_BYTES = os.sysconf("SC_PAGESIZE")
ANSWER = {"answer": "respond", "value": "north"}


@pytest.fixture
async def world(url: str) -> AsyncGenerator[World]:
    async with open_world(serve=True, url=url, sse_stall_s=1.0) as opened:
        yield opened


def resident_bytes() -> int:
    """Return the memory this process, server and all, holds at the moment."""
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * PAGE_BYTES


@pytest.mark.slow
@pytest.mark.timeout(120)  # 20,000 events are written, and then read over a socket
async def test_mem_01_a_viewer_that_stopped_reading_costs_bounded_memory(world: World) -> None:
    run = await world.start("asker")
    text = "x" * 2000
    await world.until(run["run_id"], "waiting_human")
    await world.add_event(run["run_id"], text, 100)
    client = world.events_of(run["run_id"])
    async with client.connect(receive_buffer=65_536) as stream:
        first = await stream.next()
        assert first is not None
        before = most = resident_bytes()
        for _ in range(199):
            await world.add_event(run["run_id"], text, 100)
            most = max(most, resident_bytes())
        await eventually(lambda: value_of(world.metrics.server.sse_dropped) == 1)
        most = max(most, resident_bytes())
        seen = await _what_is_left(stream.next)
    counts = (len(seen) + 1, 200 * 100)
    log.info("%.1f MB more, %d of %d events before the cut", (most - before) / MIB, *counts)
    assert most - before < 50 * MIB
    ids = [int(first.id), *seen]
    last = (await world.get(f"/v1/runs/{run['run_id']}"))["last_seq"]
    assert len(ids) < last, "it was cut"
    async with client.connect() as stream:
        while ids[-1] < last:
            event = await stream.next()
            assert event is not None
            ids.append(int(event.id))
    assert ids == list(range(1, last + 1))


async def _what_is_left(read: Callable[[], Awaitable[SseEvent | None]]) -> list[int]:
    """Read what had arrived before the cut."""
    found: list[int] = []
    try:
        while (event := await read()) is not None:
            found.append(int(event.id))
    except StreamInterrupted:
        return found
    raise AssertionError("the run has not ended")


async def test_f31_viewers_that_do_not_read_slow_down_neither_run_nor_readers(url: str) -> None:
    """F31."""
    async with open_world(serve=True, url=url, sse_stall_s=60) as world:
        alone = await _write(world, (await world.start("asker"))["run_id"])
        run = await world.start("asker")
        async with AsyncExitStack() as stack:
            for _ in range(20):
                client = world.events_of(run["run_id"])
                stream = await stack.enter_async_context(client.connect(receive_buffer=4096))
                assert stream.status == 200
            watched = await _write(world, run["run_id"])
            with anyio.fail_after(30):
                other = await world.start("echo", wait=5)
                seen = await follow_to_the_end(world.events_of(other["run_id"]))
            assert value_of(world.metrics.server.sse_subscribers) >= 20
        assert watched < 5 * alone + 3
        assert_exact(seen, await stored_log(world.core.reader, other["run_id"]))
        await eventually(lambda: value_of(world.metrics.server.sse_subscribers) == 0)


async def _write(world: World, run_id: str) -> float:
    """Append four megabytes of events and return how long it took."""
    await world.until(run_id, "waiting_human")
    began = time.monotonic()
    for _ in range(20):
        await world.add_event(run_id, "y" * 20_000, 10)
    return time.monotonic() - began


async def test_f31_the_kernel_gives_up_a_peer_that_is_gone_without_a_word(world: World) -> None:
    run = await world.start("sleeper")
    server = world.server
    assert server is not None
    async with world.events_of(run["run_id"]).connect():
        connections: Any = server.server_state.connections
        for connection in connections:
            raw = connection.transport.get_extra_info("socket")
            limit = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == DEAD_PEER_MS


@pytest.mark.slow
@pytest.mark.timeout(60)  # three hundred connections on a machine that is busy
async def test_mem_04_clients_that_vanish_are_forgotten_and_a_long_call_is_not(
    world: World,
) -> None:
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    client = world.events_of(run["run_id"])
    gauge = world.metrics.server.sse_subscribers
    waited: list[Any] = []

    async def visit(number: int) -> None:
        async with client.connect() as stream:
            for _ in range(number % 3):
                await stream.next()

    async def call() -> None:
        path = f"/v1/runs/{run['run_id']}"
        answer = await world.http.get(path, params={"wait": 50}, timeout=55)
        waited.append(answer.json()["state"])

    with anyio.fail_after(50):
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            async with anyio.create_task_group() as visitors:
                for number in range(300):
                    visitors.start_soon(visit, number)
            await eventually(lambda: value_of(gauge) == 0)
            assert waited == [], "the long call still waits"
            await world.http.post(f"/v1/runs/{run['run_id']}/resolve", json=ANSWER)
    assert waited == ["succeeded"]


@pytest.mark.slow
@pytest.mark.timeout(60)  # three hundred open streams on a machine that is busy
async def test_f23_idle_streams_hold_no_connection_to_the_database(url: str) -> None:
    """F23."""
    async with open_world(serve=True, url=url, poll_s=5) as world:
        run = await world.start("asker")
        await world.until(run["run_id"], "waiting_human")
        ends: list[SseEvent] = []

        async def view(*, task_status: anyio.abc.TaskStatus[None]) -> None:
            async with world.events_of(run["run_id"]).connect() as stream:
                await stream.next()
                task_status.started()
                ends.append((await stream.rest())[-1])

        with anyio.fail_after(50):
            async with anyio.create_task_group() as group:
                for _ in range(300):
                    await group.start(view)
                assert value_of(world.metrics.server.sse_subscribers) == 300
                with anyio.fail_after(30):
                    for _ in range(20):
                        await world.get(f"/v1/runs/{run['run_id']}")
                    assert (await world.start("echo", wait=5))["state"] == "succeeded"
                await world.http.post(f"/v1/runs/{run['run_id']}/resolve", json=ANSWER)
        assert len(ends) == 300
        assert all(event.is_end for event in ends)


@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("from_end", [True, False])
async def test_f33_a_subscription_at_the_very_moment_of_the_end_sees_it(
    url: str, monkeypatch: pytest.MonkeyPatch, from_end: bool, is_before: bool
) -> None:
    """F33."""
    async with open_world(serve=True, url=url, poll_s=30) as world:
        for place in range(1, 5 if from_end else 6):  # as many as there are before it waits
            run = await world.start("asker")
            row = await world.until(run["run_id"], "waiting_human")

            async def end(run: dict[str, Any] = run) -> None:
                path = f"/v1/runs/{run['run_id']}"
                await world.http.post(f"{path}/resolve", json=ANSWER)
                await world.get(path, wait=5)

            client = world.events_of(run["run_id"])
            client.last_event_id = str(row["last_seq"]) if from_end else ""
            with monkeypatch.context() as patch, anyio.fail_after(30):
                moment = _At(patch, world, run["run_id"], place, end, is_before=is_before)
                seen = await follow_to_the_end(client)
            assert moment.left <= 0, "the moment never came"
            stored = await stored_log(world.core.reader, run["run_id"])
            assert_exact(seen, stored[row["last_seq"] if from_end else 0 :])
            assert seen[-1].is_end


class _At:
    """Does something just before or just after the n-th read of a run, once."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        world: World,
        run_id: str,
        place: int,
        work: Callable[[], Awaitable[None]],
        *,
        is_before: bool,
    ) -> None:
        self.left = place
        reader = world.core.reader
        find_run, events_after = reader.find_run, reader.events_after

        async def find(tenant_id: str | None, wanted: str) -> RunRow | None:
            return await at(wanted, lambda: find_run(tenant_id, wanted))

        async def after(wanted: str, seq: int, *, limit: int) -> list[RecordedEvent]:
            return await at(wanted, lambda: events_after(wanted, seq, limit=limit))

        async def at(wanted: str, read: Callable[[], Awaitable[Any]]) -> Any:
            self.left -= wanted == run_id
            is_now = wanted == run_id and self.left == 0
            if is_now and is_before:
                await work()
            found = await read()
            if is_now and not is_before:
                await work()
            return found

        patch.setattr(reader, "find_run", find)
        patch.setattr(reader, "events_after", after)
