"""A SQLite database file, open: its writer, its readers, and what happens at the door.

Several processes of one host may open the same file; each has a writer thread of its own, and
`BEGIN IMMEDIATE` orders them. A process stopped inside a write transaction blocks the others.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from anyio import CancelScope, to_thread

from perdure.protocol.base import from_micros
from perdure.store.migrate import Migration
from perdure.store.sqlite.connection import (
    Synchronous,
    check_version,
    connect_writer,
    translate,
)
from perdure.store.sqlite.files import refuse_network_file
from perdure.store.sqlite.reader import SqliteReader
from perdure.store.sqlite.readers import Readers
from perdure.store.sqlite.schema import bring_up_to_date, known_migrations
from perdure.store.sqlite.store import SqliteStore
from perdure.store.sqlite.writer import Soon, Writer


def _system_clock() -> datetime:
    return from_micros(time.time_ns() // 1000)


class SqliteDatabase:
    """One file. `synchronous="off"` is for simulations on files that are thrown away.

    Entering raises Unavailable when the file cannot be opened, SchemaRefused when it belongs to
    a newer release, NetworkFile when it lies on a network file system. With `inline` it uses no
    threads: reads run where they are asked for, and writes in the turns that it is given.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], datetime] | None = None,
        synchronous: Synchronous = "full",
        migrations: Sequence[Migration] | None = None,
        inline: Soon | None = None,
    ) -> None:
        self._path = path
        self._clock = clock or _system_clock
        self._synchronous: Synchronous = synchronous
        self._migrations = known_migrations() if migrations is None else migrations
        self._inline = inline is not None
        self._writer = Writer(self._clock, inline=inline)
        self._readers = Readers(inline=self._inline)
        self._store = SqliteStore(self._writer)
        self._reader = SqliteReader(self._readers, self._clock)

    @property
    def store(self) -> SqliteStore:
        """The writing port."""
        return self._store

    @property
    def reader(self) -> SqliteReader:
        """The reading port."""
        return self._reader

    @property
    def writer(self) -> Writer:
        """The writer thread, for tests and drills."""
        return self._writer

    def foreign_version(self) -> int:
        """Return a number that changes when another process has committed to the file."""
        self._writer.watch()
        return self._writer.foreign_version

    async def __aenter__(self) -> Self:
        if self._inline:
            self._open()
        else:
            await to_thread.run_sync(self._open)
        return self

    def _open(self) -> None:
        check_version()
        refuse_network_file(self._path)
        try:
            connection = self._migrated()
        except sqlite3.Error as error:
            raise translate(error) from error
        self._readers.open(self._path)
        self._writer.start(connection)

    def _migrated(self) -> sqlite3.Connection:
        connection = connect_writer(self._path, self._synchronous)
        try:
            bring_up_to_date(connection, self._migrations, time.time_ns() // 1000)
        except BaseException:
            connection.close()
            raise
        return connection

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with CancelScope(shield=True):
            if self._inline:
                self._writer.stop()
            else:
                await to_thread.run_sync(self._writer.stop)
            await self._readers.close()
