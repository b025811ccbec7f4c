"""Measurements beside their floor: each in a fresh process on a fresh database.

The floor is measured right before the runtime on the same store, so that the ratio of the two
means something on a machine that is shared and noisy.
"""

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import asyncpg
from pydantic import BaseModel

from perdure.bench.child import Job, Seen, measure_w1
from perdure.bench.machine import percentile, tree_cpu_s
from perdure.bench.payloads import INFORMATION_BYTES, STEPS
from perdure.ops.local_postgres import LocalPostgres, local_postgres

CHILD_LIMIT_S = 600.0
SQLITE = "sqlite"
POSTGRES = "postgres"
STORES = (SQLITE, POSTGRES)


class Row(BaseModel):
    """One measured point. `information_per_run` is what the run's payloads hold, in bytes."""

    workload: str
    store: str
    concurrency: int
    workers: int
    runs_per_s: float
    steps_per_s: float
    p50_ms: float
    p99_ms: float
    cpu_ms_per_run: float
    bytes_per_run: float
    information_per_run: int
    floor_steps_per_s: float
    floor_p50_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is to be measured."""

    store: str
    concurrency: int
    seconds: float
    isolated: bool = False


class Bench:
    """Takes measurements; its PostgreSQL runs only while the context of `stores` is open."""

    def __init__(self, folder: Path, server: LocalPostgres | None) -> None:
        self._folder = folder
        self._server = server
        self._count = 0

    def measure(self, point: Point) -> Row:
        """Return one point of W1 beside its floor."""
        floor, _, _ = self._take(point, "floor")
        seen, stored, cpu_s = self._take(point, "w1")
        return Row(
            workload="w1",
            store=point.store,
            concurrency=point.concurrency,
            workers=1,
            runs_per_s=round(seen.runs / seen.elapsed_s, 2),
            steps_per_s=round(seen.runs * STEPS / seen.elapsed_s, 1),
            p50_ms=round(percentile(seen.latencies_ms, 0.5), 3),
            p99_ms=round(percentile(seen.latencies_ms, 0.99), 3),
            cpu_ms_per_run=round(cpu_s * 1000 / seen.runs, 3),
            bytes_per_run=round(stored / seen.runs),
            information_per_run=INFORMATION_BYTES,
            floor_steps_per_s=round(floor.runs * STEPS / floor.elapsed_s, 1),
            floor_p50_ms=round(percentile(floor.latencies_ms, 0.5), 3),
        )

    def _take(self, point: Point, what: str) -> tuple[Seen, int, float]:
        """Return what a child saw, the bytes it stored, and all CPU seconds it caused."""
        with self.database(point.store) as (url, size):
            if what == "w1":
                anyio.run(_warm_up, url)
            before, server_cpu = size(), self._server_cpu_s(point.store)
            job = Job.model_validate(
                {
                    "what": what,
                    "url": url,
                    "concurrency": point.concurrency,
                    "seconds": point.seconds,
                    "isolated": point.isolated,
                }
            )
            seen = _run_child(job)
            cpu_s = seen.cpu_s + self._server_cpu_s(point.store) - server_cpu
            return seen, size() - before, cpu_s

    @contextmanager
    def database(self, store: str) -> "Generator[tuple[str, Callable[[], int]]]":
        """Make an empty database; yield its URL and a function that returns its bytes."""
        self._count += 1
        name = f"bench_{self._count}"
        if store == SQLITE:
            path = self._folder / f"{name}.db"
            yield f"sqlite:///{path}", lambda: _sqlite_size(path)
            return
        assert self._server is not None
        dsn = self._server.create_database(name)
        try:
            yield dsn, lambda: anyio.run(_postgres_size, dsn)
        finally:
            self._server.drop_database(name)

    def _server_cpu_s(self, store: str) -> float:
        return tree_cpu_s(self._server.pid) if store == POSTGRES and self._server else 0.0


def _sqlite_size(path: Path) -> int:
    """Return the bytes of a SQLite file once its log is written back."""
    if not path.exists():
        return 0
    with sqlite3.connect(path) as connection:
        connection.execute("pragma wal_checkpoint(truncate)")
    return path.stat().st_size


async def _postgres_size(dsn: str) -> int:
    """Return the bytes of a PostgreSQL database."""
    connection: Any = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select pg_database_size(current_database())"))
    finally:
        await connection.close()


async def _warm_up(url: str) -> None:
    """Carry out a few runs, so that the first pages of each table do not count as growth."""
    await measure_w1(Job(what="w1", url=url, concurrency=4, seconds=0.2))


def _run_child(job: Job) -> Seen:
    done = subprocess.run(  # our own module, our own arguments
        [sys.executable, "-m", "perdure.bench.child"],
        input=job.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a measurement failed: {done.stderr[-2000:]}")
    return Seen.model_validate_json(done.stdout)


@contextmanager
def stores(wanted: tuple[str, ...]) -> Generator[Bench]:
    """Open what the wanted stores need: a folder, and a PostgreSQL of our own."""
    with tempfile.TemporaryDirectory(prefix="perdure-bench-") as folder:
        if POSTGRES in wanted:
            settings = {"shared_buffers": "256MB", "max_wal_size": "4GB"}
            with local_postgres(settings=settings) as server:
                yield Bench(Path(folder), server)
        else:
            yield Bench(Path(folder), None)
