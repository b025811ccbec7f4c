"""Streams and keys are tested on SQLite and on PostgreSQL."""

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The place of an empty database: a file, or a DSN."""
    if request.param == "sqlite":
        return str(tmp_path / "perdure.db")
    return request.getfixturevalue("postgres_dsn")
