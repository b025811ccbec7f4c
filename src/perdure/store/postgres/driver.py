"""asyncpg behind types: the only module of the store that knows the driver's loose signatures.

Connections of two kinds: direct ones, which keep their prepared statements and settings, and a
small pool for everything that reads or is rare. Every statement is prepared once a connection.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import asyncpg

from perdure.protocol.errors import Unavailable
from perdure.store.postgres.wire import time_from_driver, time_to_driver

Row = Mapping[str, Any]

TURN_S = 30.0
"""How long a caller waits for a free connection of the pool; a crowd is no outage yet."""

CONNECT_S = 10.0
PORT_DEFAULT = 5432
CLOSE_S = 2.0

# Nearly every statement finds its rows by key. Plans must not depend on statistics that are minutes
# old in a database that has just begun to fill, so only nested loops over indexes are left.
SETTINGS = {
    "application_name": "perdure",
    "jit": "off",
    "timezone": "UTC",
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "lock_timeout": "5s",
    # a process that was paused in the middle of its work keeps nobody's rows
    "idle_in_transaction_session_timeout": "10s",
    "statement_timeout": "25s",
}
SHARED_SETTINGS = {**SETTINGS, "lock_timeout": "100ms"}
"""Of connections that carry the work of many callers, one after the other."""

POOL_SETTINGS = {**SETTINGS, "lock_timeout": "500ms"}
"""Of connections that are few: who waits for a row that is locked waits without one, in between."""

MIGRATION_SETTINGS = {**SETTINGS, "statement_timeout": "0"}
"""Of a connection whose statements take as long as the database is large."""


class Connection(Protocol):
    """What the store needs of one connection."""

    async def fetch(self, query: str, *args: object) -> Sequence[Row]:
        """Run one statement and return its rows."""
        ...

    async def execute(self, query: str, *args: object) -> str:
        """Run one statement, or several without arguments."""
        ...

    def transaction(self) -> AbstractAsyncContextManager[object]:
        """Return a transaction as a context manager."""
        ...

    async def close(self) -> None:
        """Say goodbye and close."""
        ...

    def terminate(self) -> None:
        """Close at once."""
        ...

    def is_closed(self) -> bool:
        """Tell whether the connection is closed."""
        ...


async def connect(
    dsn: str, *, timeout_s: float = CONNECT_S, settings: Mapping[str, str] = SETTINGS
) -> Connection:
    """Open a direct connection.

    Raises Unreached, with the host, when nobody answers there; the driver's other errors pass, and
    `errors.translate` reads them.
    """
    opened: Any = None
    is_ready = False
    try:
        async with asyncio.timeout(timeout_s):
            opened = await asyncpg.connect(
                dsn,
                timeout=timeout_s,
                max_cached_statement_lifetime=0,
                max_cacheable_statement_size=0,
                server_settings=dict(settings),
            )
            await _have_times_told(opened)
        is_ready = True
    except (OSError, TimeoutError) as error:
        raise Unreached(place_of(dsn), error) from error
    finally:
        if opened is not None and not is_ready:
            opened.terminate()
    return cast("Connection", opened)


async def _have_times_told(opened: Any) -> None:
    """Have times read so that one which is damaged fails its row, and not the statement.

    The driver looks the type up: behind a pooler both round trips must meet one server.
    """
    async with opened.transaction():
        await opened.set_type_codec(
            "timestamptz",
            schema="pg_catalog",
            encoder=time_to_driver,
            decoder=time_from_driver,
            format="tuple",
        )


class Unreached(OSError):
    """Nobody answers where the database should be."""

    def __init__(self, place: str, reason: Exception) -> None:
        super().__init__(f"{place}: {type(reason).__name__}")
        self.place = place


def place_of(dsn: str) -> str:
    """Return host and port of a DSN, never its user, password or parameters."""
    try:
        parts = urlsplit(dsn)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "the host of the DSN"
    if host is None:
        return "the host that the driver chose"
    return f"{f'[{host}]' if ':' in host else host}:{port or PORT_DEFAULT}"


async def _keep(_connection: object) -> None:
    """Leave a returned connection as it is: the reset query costs half of the throughput."""


class Pool:
    """A small pool. Statements of this store leave no session state, so nothing is reset.

    Behind a transaction-mode pooler nothing is prepared, and each statement runs in a transaction
    of its own so that its two round trips meet one server.
    """

    def __init__(self, dsn: str, *, size_max: int, pgbouncer: bool) -> None:
        self._dsn = dsn
        self._size_max = size_max
        self._pgbouncer = pgbouncer
        self._pool: Any = None

    @property
    def is_open(self) -> bool:
        """Tell whether the pool was opened and not closed."""
        return self._pool is not None

    async def open(self) -> None:
        """Open the pool with one connection."""
        self._pool = await asyncpg.create_pool(
            self._dsn,
            min_size=1,
            max_size=self._size_max,
            max_inactive_connection_lifetime=300.0,
            timeout=CONNECT_S,
            init=_have_times_told,
            reset=_keep,
            statement_cache_size=0 if self._pgbouncer else 200,
            max_cached_statement_lifetime=0,
            max_cacheable_statement_size=0,
            server_settings=None if self._pgbouncer else POOL_SETTINGS,
        )

    async def close(self) -> None:
        """Close all connections, after a short wait by force."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        try:
            await asyncio.wait_for(pool.close(), CLOSE_S)
        except TimeoutError:
            pool.terminate()

    @asynccontextmanager
    async def acquire(self) -> AsyncGenerator[Connection]:
        """Lend a connection; one that was cut off in its work is dropped.

        Its rollback is cut off as well, and the driver would wait for its answer before the
        connection is free again.
        """
        pool = self._pool
        if pool is None:
            raise Unavailable("the database is not open")
        lent = await pool.acquire(timeout=TURN_S)
        try:
            yield cast("Connection", lent)
        except BaseException as error:
            if not isinstance(error, Exception):
                lent.terminate()
            raise
        finally:
            await pool.release(lent, timeout=CLOSE_S)

    async def fetch(self, query: str, *args: object) -> Sequence[Row]:
        """Run one statement on any connection."""
        async with self.acquire() as connection:
            if not self._pgbouncer:
                return await connection.fetch(query, *args)
            async with connection.transaction():
                return await connection.fetch(query, *args)
