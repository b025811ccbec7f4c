"""Fixtures that every test has."""

import pytest

pytest_plugins = ["tests.postgres_fixture", "tests.sqlite_fixture"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Async tests run on asyncio only: the database drivers know no other loop."""
    return "asyncio"
