"""The PostgreSQL store keeps its contract through a pooler in transaction mode (F15).

Each transaction may get another connection: nothing that is prepared, set or locked for a session
may be counted on. Skipped where no pgbouncer is installed.
"""

from collections.abc import AsyncIterator, Generator

import pytest

from perdure.ops.local_postgres import LocalPostgres
from perdure.store.ports import Database
from perdure.store.postgres import PostgresDatabase
from perdure.testing import conformance
from perdure.testing.clock import FakeClock
from perdure.testing.pgbouncer import Pooler, find_pgbouncer, pgbouncer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_pgbouncer() is None, reason="pgbouncer is not installed"),
]


@pytest.fixture(scope="module")
def pooler(postgres: LocalPostgres) -> Generator[Pooler]:
    """A pooler before the server of the tests."""
    with pgbouncer(postgres.port) as pooler:
        yield pooler


class ThroughPooler:
    """Gives a contract its database, at the end of a pooler."""

    @pytest.fixture
    async def database(
        self, clock: FakeClock, postgres_dsn: str, pooler: Pooler
    ) -> AsyncIterator[Database]:
        url = pooler.url_of(postgres_dsn.rsplit("/", 1)[1])
        async with PostgresDatabase(
            url, pgbouncer=True, direct_dsn=postgres_dsn, clock=clock
        ) as database:
            yield database


class TestFence(ThroughPooler, conformance.FenceContract): ...


class TestRace(ThroughPooler, conformance.RaceContract): ...


async def test_a_pooler_that_is_restarted_is_found_again(pooler: Pooler, postgres_dsn: str) -> None:
    """F15, F14: all its connections are gone; the next reads and writes make new ones."""
    url = pooler.url_of(postgres_dsn.rsplit("/", 1)[1])
    async with PostgresDatabase(url, pgbouncer=True, direct_dsn=postgres_dsn) as database:
        await database.reader.ping()
        pooler.restart()
        await database.reader.ping()
        assert await database.reader.list_agents() == []
