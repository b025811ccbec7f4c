"""Applying migrations to a file, or refusing to start on it."""

import sqlite3
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final

from perdure.store.migrate import Applied, Migration, plan_migrations, read_migrations

_LIST: Final = "SELECT version, name, checksum FROM schema_migrations ORDER BY version"
_RECORD: Final = (
    "INSERT INTO schema_migrations (version, name, checksum, applied_at) VALUES (?, ?, ?, ?)"
)
_TABLE: Final = (
    "CREATE TABLE IF NOT EXISTS schema_migrations (version INTEGER PRIMARY KEY,"
    " name TEXT NOT NULL, checksum TEXT NOT NULL, applied_at INTEGER NOT NULL) STRICT"
)


def known_migrations() -> tuple[Migration, ...]:
    """Return the migrations of this code."""
    return read_migrations(files("perdure.store.sqlite") / "migrations")


def split_script(script: str) -> Iterator[str]:
    """Yield the statements of a script; a trigger with its body is one."""
    statement = ""
    for line in script.split("\n"):
        statement += line + "\n"
        if line.rstrip().endswith(";") and sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip() and not all(
        line.startswith("--") or not line.strip() for line in statement.split("\n")
    ):
        yield statement


def pending_migrations(
    connection: sqlite3.Connection, known: Sequence[Migration]
) -> list[Migration]:
    """Return what the file lacks; raise SchemaRefused when this code must not work on it."""
    rows = connection.execute(_LIST).fetchall()
    applied = [Applied(version=row[0], name=row[1], checksum=row[2]) for row in rows]
    return plan_migrations(known, applied)


def migrate(connection: sqlite3.Connection, known: Sequence[Migration], now: int) -> None:
    """Apply what the file lacks, all in the open transaction (the file's write lock)."""
    connection.execute(_TABLE)
    for migration in pending_migrations(connection, known):
        for statement in split_script(migration.sql):
            connection.execute(statement)
        connection.execute(_RECORD, (migration.version, migration.name, migration.checksum, now))
