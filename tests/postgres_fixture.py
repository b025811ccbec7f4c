"""Fixtures for tests on PostgreSQL: one throwaway server a session, a fresh database a test.

Databases are copies of a template that was migrated once, which takes a fraction of a migration.
"""

import itertools
import os
from collections.abc import Generator, Iterator

import anyio
import asyncpg
import pytest

from perdure.ops.local_postgres import LocalPostgres, local_postgres
from perdure.store.postgres import PostgresDatabase

_TEMPLATE = "perdure_template"
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Generator[LocalPostgres]:
    """A PostgreSQL server of the test session's own."""
    with local_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres: LocalPostgres) -> str:
    """The name of a migrated, empty database to copy from."""
    dsn = postgres.create_database(_TEMPLATE)

    async def migrate() -> None:
        async with PostgresDatabase(dsn):
            pass

    anyio.run(migrate)
    return _TEMPLATE


@pytest.fixture
def postgres_dsn(postgres: LocalPostgres, postgres_template: str) -> Iterator[str]:
    """The DSN of a fresh, migrated database; dropped afterwards."""
    name = f"perdure_{os.getpid()}_{next(_numbers)}"
    anyio.run(_execute, postgres.dsn, f'CREATE DATABASE "{name}" TEMPLATE "{postgres_template}"')
    yield postgres.dsn_of(name)
    anyio.run(_execute, postgres.dsn, f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
