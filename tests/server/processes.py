"""Real server processes over one database: started, looked at, killed."""

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.abc
import httpx2

from perdure.testing.faults import Plan
from perdure.testing.sse_client import SseClient
from tests.server.documented import checked_client
from tests.server.world import free_port

ROOT = Path(__file__).parents[2]
START_S = 30.0
_numbers = itertools.count(1)
REGISTRY = "tests.server.world:REGISTRY"


def database_url(url: str) -> str:
    """Return a test's place of a database as settings name it."""
    return url if url.startswith("postgresql://") else f"sqlite:///{url}"


@dataclass(frozen=True, slots=True)
class ApiProcess:
    """A server process that answers."""

    process: anyio.abc.Process
    port: int
    http: httpx2.AsyncClient
    log: Path

    def kill(self) -> None:
        """End it as a power cut would."""
        self.process.send_signal(signal.SIGKILL)

    async def ended(self) -> int:
        """Return its exit code once it has ended."""
        with anyio.fail_after(START_S):
            return await self.process.wait()

    def events_of(self, run_id: str) -> SseClient:
        """Return a client of a run's stream."""
        return SseClient("127.0.0.1", self.port, f"/v1/runs/{run_id}/events")


@asynccontextmanager
async def serving(
    url: str, folder: Path, *, port: int | None = None, words: Sequence[str] = ()
) -> AsyncGenerator[ApiProcess]:
    """Run `perdure serve` with the tests' agents and a lease of a second."""
    port = port or free_port()
    command = ["perdure.cli.main", "serve", "--port", str(port), "--db", database_url(url)]
    async with _running([*command, "--agents", REGISTRY, *words], folder, port) as api:
        yield api


@asynccontextmanager
async def serving_with_fault(url: str, folder: Path, plan: Plan) -> AsyncGenerator[ApiProcess]:
    """Run an API without a worker that a fault is planned for."""
    port = free_port()
    command = ["tests.server.api_process", database_url(url), str(port), plan.model_dump_json()]
    async with _running(command, folder, port) as api:
        yield api


@asynccontextmanager
async def _running(command: Sequence[str], folder: Path, port: int) -> AsyncGenerator[ApiProcess]:
    log = folder / f"server-{port}-{next(_numbers)}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PERDURE_WORKER__LEASE_TTL_S": "1",
        "PERDURE_WORKER__POLL_INTERVAL_S": "0.2",
        "PERDURE_LOG__LEVEL": "warning",
    }
    with log.open("wb") as output:
        process = await anyio.open_process(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    async with process, checked_client(f"http://127.0.0.1:{port}") as http:
        api = ApiProcess(process, port, http, log)
        try:
            await _until_ready(api)
            yield api
        finally:
            if process.returncode is None:
                process.kill()


async def _until_ready(api: ApiProcess) -> None:
    """Return once the server answers; fail with what it said when it ends or never does."""
    with anyio.fail_after(START_S):
        while True:
            assert api.process.returncode is None, api.log.read_text("utf-8")
            try:
                answer = await api.http.get("/readyz")
            except httpx2.TransportError:
                await anyio.sleep(0.05)
                continue
            if answer.status_code == 200:
                return
