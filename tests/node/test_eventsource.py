"""A browser-grade client follows a run through a restart of its server and stops on 204 (A5).

Needs Node and the packages of this folder: `make test-node`.
"""

import json
import shutil
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from anyio.streams.text import TextReceiveStream

from tests.flow.world import assert_sound, database_at
from tests.server.processes import ApiProcess, serving
from tests.server.world import free_port
from tests.streams.crowd import stored_log

FOLDER = Path(__file__).parent
ANSWER = {"answer": "respond", "value": "north"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),  # two server processes and a client that waits before it comes again
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node on PATH"),
]


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The place of an empty database: a file, or a DSN."""
    if request.param == "sqlite":
        return str(tmp_path / "perdure.db")
    return request.getfixturevalue("postgres_dsn")


class Node:
    """The program in Node, and what it said so far."""

    def __init__(self, process: anyio.abc.Process) -> None:
        assert process.stdout is not None
        self._text = TextReceiveStream(process.stdout)
        self._rest = ""
        self.events: list[dict[str, Any]] = []
        self.ids: list[str] = []
        self.lost = 0

    async def next(self) -> dict[str, Any]:
        """Return the next thing it says."""
        while "\n" not in self._rest:
            self._rest += await self._text.receive()
        line, _, self._rest = self._rest.partition("\n")
        said: dict[str, Any] = json.loads(line)
        if "event" in said:
            self.ids.append(said["event"])
            self.events.append(said["data"])
        self.lost = said.get("lost", self.lost)
        return said

    async def until_type(self, name: str) -> None:
        """Return once it has seen an event of a type."""
        while not (self.events and self.events[-1]["type"] == name):
            await self.next()

    async def until_end(self) -> dict[str, Any]:
        """Return what it said when it stopped."""
        while "end" not in (said := await self.next()):
            pass
        return said


@asynccontextmanager
async def node(api: ApiProcess, run_id: str) -> AsyncGenerator[Node]:
    """Let Node follow a run."""
    address = f"http://127.0.0.1:{api.port}/v1/runs/{run_id}/events"
    command = ["node", str(FOLDER / "follow.mjs"), address]
    async with await anyio.open_process(command, cwd=FOLDER, stderr=None) as process:
        try:
            yield Node(process)
            assert await process.wait() == 0, "Node has nothing left to do once its client stopped"
        finally:
            if process.returncode is None:
                process.kill()


async def start(api: ApiProcess, agent: str) -> str:
    """Start a run once its agent is served, and return its id."""
    with anyio.fail_after(20):
        while True:
            answer = await api.http.post(f"/v1/agents/{agent}/run", json={"input": {"times": 3}})
            if answer.status_code == 202:
                return answer.json()["run_id"]
            await anyio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_event_source_comes_again_by_itself_and_stops_on_204(
    url: str, tmp_path: Path, number: signal.Signals
) -> None:
    port = free_port()
    with anyio.fail_after(80):
        async with AsyncExitStack() as stack:
            async with serving(url, tmp_path, port=port) as api:
                run_id = await start(api, "asker")
                client = await stack.enter_async_context(node(api, run_id))
                await client.until_type("interrupt")
                api.process.send_signal(number)
                await api.ended()
            async with serving(url, tmp_path, port=port) as api:
                reply = await api.http.post(f"/v1/runs/{run_id}/resolve", json=ANSWER)
                assert reply.status_code == 200, reply.text
                said = await client.until_end()
    assert said == {"end": 204}
    assert client.lost >= 2, "at the restart, and at the end of the run's stream"
    async with database_at(url) as database:
        log = await stored_log(database.reader, run_id)
        await assert_sound(database)
    assert client.ids == [str(event.seq) for event in log]
    assert [event["type"] for event in client.events] == [event.type for event in log]
    assert client.events[-1]["data"]["state"] == "succeeded"
