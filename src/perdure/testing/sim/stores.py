"""The databases of plays: each begins empty, keeps the play's time and runs on the play's loop.

The SQLite one is the real adapter over a real file, without waiting for the disk. It uses no
threads: its reads run where they are asked for, and its writes in turns that the seed spaces, so
that what comes meanwhile is one transaction, as behind the writer thread.
"""

import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from perdure.store.memory import MemoryDatabase
from perdure.store.ports import Database
from perdure.store.sqlite import SqliteDatabase
from perdure.store.sqlite.connection import connect_writer
from perdure.store.sqlite.schema import bring_up_to_date, known_migrations
from perdure.store.sqlite.writer import Soon

StoreKind = Literal["memory", "sqlite"]
STORES: tuple[StoreKind, ...] = get_args(StoreKind)

IN_MEMORY = Path("/dev/shm")  # noqa: S108  # files of our own names, in a folder of our own


@dataclass(frozen=True, slots=True)
class Backend:
    """A database. `waits`: what it is asked may take a turn of the loop."""

    database: Database
    waits: bool


@contextmanager
def backend_of(kind: StoreKind, clock: Callable[[], datetime], soon: Soon) -> Generator[Backend]:
    """Make an empty database; it is gone afterwards."""
    if kind == "memory":
        yield Backend(MemoryDatabase(clock), waits=False)
        return
    with tempfile.TemporaryDirectory(prefix="perdure-sim-", dir=_folder()) as folder:
        path = Path(folder) / "play.db"
        path.write_bytes(_empty_file())
        database = SqliteDatabase(path, clock=clock, synchronous="off", inline=soon)
        try:
            yield Backend(database, waits=True)
        finally:
            database.writer.stop()  # a play that was given up has not left it


def _folder() -> Path | None:
    return IN_MEMORY if IN_MEMORY.is_dir() else None


@cache
def _empty_file() -> bytes:
    """Return a database with the tables, and nothing in them."""
    folder = Path(tempfile.mkdtemp(prefix="perdure-sim-", dir=_folder()))
    try:
        path = folder / "empty.db"
        connection = connect_writer(path, "off")
        bring_up_to_date(connection, known_migrations(), 0)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()
        return path.read_bytes()
    finally:
        shutil.rmtree(folder)
