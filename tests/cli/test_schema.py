"""Commands and the database's schema: only what serves runs, and `db upgrade`, may apply migrations."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import anyio
import asyncpg
import pytest

from perdure.ops.exits import ExitCode
from perdure.ops.local_postgres import LocalPostgres
from tests.cli.program import Program
from tests.cli.shop import REFERENCE

LOOKING = (
    ("runs", "list"),
    ("interrupts", "list"),
    ("agents", "list"),
    ("verify",),
    ("run", "echo"),
    ("drill", "--clear"),
)

Statement = Callable[[str], list[str]]
"""Carries a statement out on the database, and returns the first column of what it gives."""


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Statement, str]:
    """Return the URL of an empty database, how to talk to it, and how to list its tables."""
    if request.param == "sqlite":
        path = tmp_path / "empty.db"
        path.touch()

        def on_sqlite(statement: str) -> list[str]:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                return [str(row[0]) for row in connection.execute(statement)]

        return f"sqlite:///{path}", on_sqlite, "SELECT name FROM sqlite_schema"
    server: LocalPostgres = request.getfixturevalue("postgres")
    url = server.create_database(f"empty_{tmp_path.name.replace('-', '_')}"[:60])

    def on_postgres(statement: str) -> list[str]:
        async def body() -> list[str]:
            connection = await asyncpg.connect(url)
            try:
                return [str(row[0]) for row in await connection.fetch(statement)]
            finally:
                await connection.close()

        return anyio.run(body)

    return url, on_postgres, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"


def test_commands_that_only_look_apply_no_migration(
    perdure: Program, empty: tuple[str, Statement, str]
) -> None:
    """R-20.3: an empty database stays empty, an older one as it is; both are told, with code 5."""
    url, ask, tables = empty

    def refused(words: tuple[str, ...], version: int) -> None:
        done = perdure(*words, "--db", url)
        assert (done.code, done.out) == (ExitCode.CONFLICT, "")
        assert done.err.startswith("error: conflict: the database ")
        assert f"has schema version {version}, " in done.err
        assert "run `perdure db upgrade`" in done.err

    for words in LOOKING:
        refused(words, 0)
    assert ask(tables) == []
    assert perdure("db", "status", "--db", url).code == ExitCode.RUN_FAILED

    assert perdure("db", "upgrade", "--db", url).code == 0
    for words in (("runs", "list"), ("verify",)):
        assert perdure(*words, "--db", url).code == 0
    newest = "SELECT max(version) FROM schema_migrations"
    (version,) = map(int, ask(newest))
    ask(f"DELETE FROM schema_migrations WHERE version = {version}")  # noqa: S608  # a number
    for words in LOOKING:
        refused(words, version - 1)
    assert ask(newest) == [str(version - 1)]


def test_what_serves_runs_applies_migrations_by_itself(
    perdure: Program, empty: tuple[str, Statement, str]
) -> None:
    url, _, _ = empty
    words = ("run", "echo", "--here", "--agents", REFERENCE, "--timeout", "15")
    assert perdure(*words, "--db", url).code == 0
    assert perdure("db", "status", "--db", url).code == 0
