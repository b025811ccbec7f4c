"""PostgreSQL: the store for more than one machine.

One connection commits, one inserts runs, one per event loop sends heartbeats; a small pool reads.
All of them come back by themselves. The clock that decides is the database's own (decision 13)
unless one is given.
"""

from collections.abc import Callable
from datetime import datetime
from types import TracebackType
from typing import Self

from perdure.store.postgres.driver import Pool
from perdure.store.postgres.lanes import Access, Lane, keep_trying
from perdure.store.postgres.migrator import check_version, migrate
from perdure.store.postgres.reader import PostgresReader
from perdure.store.postgres.writer import PostgresStore

__all__ = ["PostgresDatabase"]


class PostgresDatabase:
    """A store and its reader on one database.

    `pgbouncer`: `dsn` leads through a transaction-mode pooler; nothing is prepared there, and
    commits, inserts, heartbeats and migrations use `direct_dsn`, which must lead to the server.
    """

    def __init__(
        self,
        dsn: str,
        *,
        clock: Callable[[], datetime] | None = None,
        pgbouncer: bool = False,
        pool_max: int = 8,
        direct_dsn: str | None = None,
    ) -> None:
        self._direct_dsn = direct_dsn or dsn
        self._pool = Pool(dsn, size_max=pool_max, pgbouncer=pgbouncer)
        access = Access(self._pool)
        self._store = PostgresStore(self._direct_dsn, access, clock)
        self._reader = PostgresReader(self._pool, access, clock, check_version)

    @property
    def store(self) -> PostgresStore:
        """The writing port."""
        return self._store

    @property
    def reader(self) -> PostgresReader:
        """The reading port."""
        return self._reader

    async def __aenter__(self) -> Self:
        lane = Lane(self._direct_dsn, migrates=True)
        try:
            await migrate(lane)
        finally:
            await lane.close()
        await keep_trying(lambda _: self._pool.open())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._store.close()
        await self._pool.close()
