"""A few read connections, used from threads: a lane for what is short, a pool for what may be long.

A read is one or more statements, each fetched whole, so no read transaction is left open and a
slow caller never keeps the log from being checkpointed.
"""

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from anyio import CapacityLimiter, to_thread

from perdure.protocol.errors import Unavailable, Unreadable
from perdure.store.reading import OnUnreadable
from perdure.store.sqlite.connection import (
    SQL,
    connect_reader,
    fetch_rows,
    read_row,
    translate,
)
from perdure.store.sqlite.lane import Lane
from perdure.store.sqlite.rows import Row

READERS: Final = 4

_T = TypeVar("_T")


class Readers:
    """Opened and closed by the database. `inline` reads where it is asked to."""

    def __init__(self, *, inline: bool = False) -> None:
        self._inline = inline
        self._idle: deque[sqlite3.Connection] = deque()
        self._path: Path | None = None
        self._limiter: CapacityLimiter | None = None
        self._lane: Lane | None = None

    def open(self, path: Path) -> None:
        """Allow reads; connections are made when they are needed."""
        self._path = path
        self._lane = None if self._inline else Lane(self._connect)
        self._limiter = CapacityLimiter(READERS)

    async def close(self) -> None:
        """Wait for reads in progress and close all connections."""
        limiter, self._limiter = self._limiter, None
        lane, self._lane = self._lane, None
        if lane is not None:
            await to_thread.run_sync(lane.stop)
        for _ in range(READERS if limiter is not None else 0):
            assert limiter is not None, "it was open"
            await limiter.acquire_on_behalf_of(object())
        while self._idle:
            self._idle.pop().close()

    async def read(self, body: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a read that may take long on one of the pool's connections."""
        if self._limiter is None:
            raise Unavailable("the database is not open")
        if self._inline:
            return self._on_idle(body)
        return await to_thread.run_sync(self._on_idle, body, limiter=self._limiter)

    def _on_idle(self, body: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            connection = self._idle.pop()  # the last used: its cache is warm
        except IndexError:
            connection = self._connect()
        try:
            return body(connection)
        except sqlite3.Error as error:
            raise translate(error) from error
        finally:
            self._idle.append(connection)

    def _connect(self) -> sqlite3.Connection:
        assert self._path is not None, "reads are allowed after open"
        try:
            return connect_reader(self._path)
        except sqlite3.Error as error:
            raise translate(error) from error

    async def rows(self, name: str, *values: object, convert: Callable[[Row], _T]) -> list[_T]:
        """Return the converted rows of a statement that is bounded by a key or a limit."""

        def fetch(connection: sqlite3.Connection) -> list[_T]:
            return [read_row(convert, row) for row in fetch_rows(connection, SQL[name], values)]

        return await (self.read(fetch) if self._lane is None else self._lane.read(fetch))

    async def page(
        self,
        name: str,
        values: Callable[[object, int], Sequence[object]],
        start: object,
        limit: int,
        *,
        convert: Callable[[Row], _T],
        on_unreadable: OnUnreadable,
    ) -> list[_T]:
        """Return a page of a list without its damaged rows; the first column is the key.

        `values` gives the statement's values for the key to go on after and the rows wanted.
        """
        left_out: list[tuple[str, str]] = []

        def fetch(connection: sqlite3.Connection) -> list[_T]:
            found: list[_T] = []
            after = start
            while (wanted := limit - len(found)) > 0:
                rows = fetch_rows(connection, SQL[name], values(after, wanted))
                for row in rows:
                    try:
                        found.append(read_row(convert, row))
                    except Unreadable as error:
                        left_out.append((row[0].hex(), error.message))
                if len(rows) < wanted:
                    break
                after = rows[-1][0]
            return found

        found = await self.read(fetch)
        for key, reason in left_out:
            on_unreadable(key, reason)
        return found

    async def row(self, name: str, *values: object, convert: Callable[[Row], _T]) -> _T | None:
        """Return the first row of a statement, converted, or None."""
        found = await self.rows(name, *values, convert=convert)
        return found[0] if found else None
