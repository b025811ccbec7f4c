"""Every flow runs on SQLite and on PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.testing.tools import ToolZoo


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """The place of an empty database: a file, or a DSN."""
    if request.param == "sqlite":
        return str(request.getfixturevalue("sqlite_path"))
    return request.getfixturevalue("postgres_dsn")


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[ToolZoo]:
    """The tools of the zoo, with a journal of their own."""
    with ToolZoo(tmp_path / "journal.jsonl") as tools:
        yield tools
