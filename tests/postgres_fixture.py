"""Fixtures for tests on PostgreSQL: one throwaway server a session, an empty database a test.

`postgres_dsn` is one migrated database that is emptied before each test, which costs milliseconds;
`postgres_own_dsn` is a copy of it for tests that change the schema, kill the server or leave
connections behind.
"""

import itertools
import os
from collections.abc import Awaitable, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import asyncpg
import pytest

from perdure.ops.local_postgres import LocalPostgres, local_postgres
from perdure.store.postgres import PostgresDatabase

os.environ.setdefault("PGSSLMODE", "disable")
"""The server has no TLS; a connection that is cut off while it is asked for leaves a loose error."""

_SETTINGS = {"fsync": "off", "full_page_writes": "off", "max_connections": "200"}
_numbers = itertools.count(1)

_EMPTY = """
DO $$
DECLARE name text;
BEGIN
    FOR name IN SELECT tablename FROM pg_tables
                 WHERE schemaname = 'public' AND tablename <> 'schema_migrations' LOOP
        EXECUTE format('DELETE FROM %I', name);
    END LOOP;
END $$
"""


@pytest.fixture(scope="session")
def postgres() -> Generator[LocalPostgres]:
    """A PostgreSQL server of the test session's own.

    Without fsync: what a test loses by killing the server is in the system's cache all the same.
    """
    with local_postgres(settings=_SETTINGS) as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: LocalPostgres) -> str:
    """The name of a migrated database that nobody writes to."""
    return _migrated(postgres, "perdure_template")


@pytest.fixture(scope="session")
def postgres_shared(postgres: LocalPostgres) -> str:
    """The name of a migrated database that tests use one after the other."""
    return _migrated(postgres, "perdure_shared")


@pytest.fixture
def postgres_dsn(postgres: LocalPostgres, postgres_shared: str) -> str:
    """The DSN of an empty, migrated database."""
    dsn = postgres.dsn_of(postgres_shared)
    _run(_execute, dsn, _EMPTY)
    return dsn


@pytest.fixture
def postgres_emptied(postgres: LocalPostgres, postgres_shared: str) -> Callable[[], str]:
    """Empty the shared database at each call and return its DSN."""

    def empty() -> str:
        dsn = postgres.dsn_of(postgres_shared)
        _run(_execute, dsn, _EMPTY)
        return dsn

    return empty


@pytest.fixture
def postgres_own_dsn(postgres: LocalPostgres, postgres_template: str) -> Iterator[str]:
    """The DSN of an empty, migrated database that goes with the test."""
    name = f"perdure_{next(_numbers)}"
    _run(_execute, postgres.dsn, f'CREATE DATABASE "{name}" TEMPLATE "{postgres_template}"')
    yield postgres.dsn_of(name)
    postgres.drop_database(name)


def _migrated(postgres: LocalPostgres, name: str) -> str:
    dsn = postgres.create_database(name)

    async def migrate() -> None:
        async with PostgresDatabase(dsn):
            pass

    _run(migrate)
    return name


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _run(work: Callable[..., Awaitable[None]], *args: str) -> None:
    """Run it on a loop of its own, also while the test's loop stands in this thread."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(anyio.run, work, *args).result()
