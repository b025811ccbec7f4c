"""The SQLite adapter keeps every contract of a store."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.store.ports import Database
from perdure.store.sqlite import SqliteDatabase
from perdure.testing import conformance
from perdure.testing.clock import FakeClock


class OnSqlite:
    """A new file for each test."""

    @pytest.fixture
    async def database(self, clock: FakeClock, tmp_path: Path) -> AsyncIterator[Database]:
        """An entered, empty database."""
        async with SqliteDatabase(tmp_path / "perdure.db", clock=clock) as database:
            yield database


# one test class for each contract, also for those that are added later
globals().update(
    {
        f"Test{name.removesuffix('Contract')}OnSqlite": type(
            f"Test{name.removesuffix('Contract')}OnSqlite",
            (OnSqlite, getattr(conformance, name)),
            {"__doc__": f"{name} on SQLite."},
        )
        for name in conformance.__all__
    }
)
