"""Where a campaign takes place: a database, the ways to it, and what can be done to both.

PostgreSQL has a server of its own; of the workers the first goes straight to it, those after it
through a proxy each, and the last through a pgbouncer where one is installed. SQLite has a file on
a small file system of its own, where this machine lets us mount one.
"""

import math
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio.to_thread

from perdure.ops.local_postgres import LocalPostgres, local_postgres
from perdure.testing.chaos.report import Record
from perdure.testing.pgbouncer import Pooler, find_pgbouncer, pgbouncer
from perdure.testing.proxy import FlakyProxy, flaky_proxy

StoreName = Literal["sqlite", "postgres"]

DATABASE = "chaos"
DISK_BYTES = 4 * 1024**3
"""What the small file system holds while it is not to be full; it takes memory as it is used."""

SPARE_BYTES = 64 * 1024
"""What is left of a full one: less than the write-ahead log needs for the next few commits."""
FILL_TRIES = 5

NO_MOUNT = "no file system can be mounted here: needs root and the right to mount"
NO_POOLER = "pgbouncer is not installed"


@dataclass(slots=True, kw_only=True)
class PostgresGround:
    """A PostgreSQL server with proxies and perhaps a pooler before it."""

    server: LocalPostgres
    url: str
    proxies: list[FlakyProxy]
    pooler: Pooler | None

    def way_of(self, number: int, workers: int) -> Mapping[str, str]:
        """Return the settings of the way that a worker takes to the database."""
        if self.pooler is not None and number == workers - 1 and workers > 2:
            return {
                "PERDURE_DB__URL": self.pooler.url_of(DATABASE),
                "PERDURE_DB__PGBOUNCER": "true",
                "PERDURE_DB__DIRECT_URL": self.url,
            }
        if number == 0 and workers > 1:
            return {"PERDURE_DB__URL": self.url}
        proxy = self.proxies[number]
        url = f"postgresql://postgres@127.0.0.1:{proxy.port}/{DATABASE}?sslmode=disable"
        return {"PERDURE_DB__URL": url}

    def is_proxied(self, number: int, workers: int) -> bool:
        """Tell whether a worker comes through a proxy."""
        return "sslmode" in self.way_of(number, workers)["PERDURE_DB__URL"]


@dataclass(slots=True, kw_only=True)
class Disk:
    """A file system in memory that can be made full, and have room again."""

    folder: Path

    def fill(self) -> None:
        """Leave next to nothing of its room: measured anew when it was used up meanwhile."""
        for left in reversed(range(FILL_TRIES)):
            found = os.statvfs(self.folder)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            size = math.ceil((used + SPARE_BYTES) / found.f_frsize) * found.f_frsize
            try:
                self._resize(size)
            except subprocess.CalledProcessError:
                if not left:
                    raise
            else:
                return

    def clear(self) -> None:
        """Make room."""
        self._resize(DISK_BYTES)

    def _resize(self, size: int) -> None:
        command = ["mount", "-o", f"remount,size={size}", str(self.folder)]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603  # our own mount


@dataclass(slots=True, kw_only=True)
class SqliteGround:
    """A SQLite file, and the small file system that it lies on."""

    url: str
    path: Path
    disk: Disk | None
    proxies: list[FlakyProxy] = field(default_factory=list[FlakyProxy])

    def way_of(self, number: int, workers: int) -> Mapping[str, str]:
        """Return the settings of the way that a worker takes to the database."""
        del number, workers
        return {"PERDURE_DB__URL": self.url}


Ground = PostgresGround | SqliteGround


@asynccontextmanager
async def postgres_ground(workers: int, record: Record) -> AsyncGenerator[PostgresGround]:
    """Start a server with an empty database, and what stands before it."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(local_postgres())
        url = await anyio.to_thread.run_sync(server.create_database, DATABASE)
        proxies = [
            await stack.enter_async_context(flaky_proxy(server.port)) for _ in range(workers)
        ]
        pooler = None
        if find_pgbouncer() is None:
            record.left_out["restart pooler"] = NO_POOLER
        else:
            pooler = stack.enter_context(pgbouncer(server.port))
        yield PostgresGround(server=server, url=url, proxies=proxies, pooler=pooler)


@asynccontextmanager
async def sqlite_ground(folder: Path, record: Record) -> AsyncGenerator[SqliteGround]:
    """Make room for a database file, on a file system of its own if that is allowed."""
    place = folder / "disk"
    place.mkdir()
    if not _mount(place):
        record.left_out["disk full"] = NO_MOUNT
        yield SqliteGround(
            url=f"sqlite:///{place / 'chaos.db'}", path=place / "chaos.db", disk=None
        )
        return
    try:
        path = place / "chaos.db"
        yield SqliteGround(url=f"sqlite:///{path}", path=path, disk=Disk(folder=place))
    finally:
        _run("umount", "--lazy", str(place))


def _mount(place: Path) -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return _run("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "perdure-chaos", str(place))


def _run(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, check=False)  # noqa: S603  # our own
    except OSError:
        return False
    return done.returncode == 0
