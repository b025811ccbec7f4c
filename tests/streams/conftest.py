"""Streams and keys are tested on SQLite and on PostgreSQL."""

import pytest


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """The place of an empty database: a file, or a DSN."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_path"))
    return request.getfixturevalue("postgres_dsn")
