"""SIGTERM with idle subscribers ends at once and cleanly (dependencies.md §3.1); bindings."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from perdure.protocol.errors import Invalid
from perdure.server.serve import check_binding
from perdure.server.settings import ServerSettings
from perdure.testing.sse_client import SseClient, SseStream, StreamInterrupted
from tests.server.world import open_world
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
async def test_sigterm_ends_idle_streams_and_waits_before_the_grace_is_over() -> None:
    command = [sys.executable, "-m", "tests.server.serve_one"]
    process = await anyio.open_process(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    ends: list[bool] = []
    waited: list[bytes] = []
    asked = [0.0]
    try:
        with anyio.fail_after(30):
            line = await process.stdout.receive()
        port, run_id = line.decode().split()[:2]
        client = SseClient("127.0.0.1", int(port), f"/v1/runs/{run_id}/events")

        async def read(stream: SseStream) -> None:
            with pytest.raises(StreamInterrupted) as end:
                await stream.rest()
            assert stream.parser.comments[-1].startswith("the server is stopping")
            ends.append(end.value.clean)

        async def wait() -> None:
            request = (
                f"GET /v1/runs/{run_id}?wait=60 HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
                "Connection: close\r\n\r\n"
            )
            async with await anyio.connect_tcp("127.0.0.1", int(port)) as socket:
                await socket.send(request.encode())
                waited.append(await socket.receive())

        async with (
            client.connect() as first,
            client.connect() as second,
            anyio.create_task_group() as group,
        ):
            await first.next()
            await second.next()
            for stream in (first, second):
                group.start_soon(read, stream)
            group.start_soon(wait)
            await anyio.sleep(0.3)  # lets the waiting request arrive
            asked[0] = time.monotonic()
            process.send_signal(signal.SIGTERM)
            with anyio.fail_after(30):
                await process.wait()
            asked.append(time.monotonic())
    finally:
        if process.returncode is None:
            process.kill()
        await process.aclose()
    assert ends == [True, True]
    assert waited[0].startswith(b"HTTP/1.1 200")
    assert asked[1] - asked[0] < ServerSettings().shutdown_grace_s


async def test_a_server_listens_on_loopback_unless_told_otherwise() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        check_binding(host, insecure=False)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org", ""):  # noqa: S104  # refused
        with pytest.raises(Invalid, match="refusing to listen"):
            check_binding(host, insecure=False)
        check_binding(host, insecure=True)


async def test_a_wait_ends_when_its_client_leaves() -> None:
    async with open_world(serve=True) as world:
        run = await world.start("sleeper")
        async with await anyio.connect_tcp("127.0.0.1", world.port) as socket:
            request = f"GET /v1/runs/{run['run_id']}?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            await socket.send(request.encode())
            server = world.server
            assert server is not None
            await eventually(lambda: server.server_state.tasks)
        await eventually(lambda: not server.server_state.tasks)
