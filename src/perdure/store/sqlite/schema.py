"""Applying migrations to a file, or refusing to start on it.

Several processes may start at once: one migrates under the file's write lock, the others wait,
bounded, and say so in the log. A file that lacks nothing is opened without that lock.
"""

import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Final

from perdure.store.migrate import Applied, Migration, plan_migrations, read_migrations
from perdure.store.sqlite.connection import begin_immediate, is_busy

log = logging.getLogger(__name__)

WAIT_S: Final = 300.0
_LOG_EVERY_S: Final = 10.0

_HAS_TABLE: Final = "SELECT count(*) FROM sqlite_schema WHERE name = 'schema_migrations'"
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


def bring_up_to_date(
    connection: sqlite3.Connection,
    known: Sequence[Migration],
    now: int,
    *,
    wait_s: float = WAIT_S,
) -> None:
    """Apply what the file lacks, in one transaction; the first process does it for all.

    Raises SchemaRefused, and the driver's error when another process kept the file for too long.
    """
    has_table = connection.execute(_HAS_TABLE).fetchone()[0]
    if has_table and not pending_migrations(connection, known):
        return
    _wait_for_turn(connection, wait_s)
    migrate(connection, known, now)
    connection.execute("COMMIT")


def _wait_for_turn(connection: sqlite3.Connection, wait_s: float) -> None:
    started, logged = time.monotonic(), 0.0
    while True:
        try:
            begin_immediate(connection, 0.0)
        except sqlite3.OperationalError as error:
            waited_s = time.monotonic() - started
            if not is_busy(error):
                raise
            if waited_s >= logged:
                log.warning("waiting for another process that migrates the file")
                logged = waited_s + _LOG_EVERY_S
            if waited_s >= wait_s:
                raise
        else:
            return


def migrate(connection: sqlite3.Connection, known: Sequence[Migration], now: int) -> None:
    """Apply what the file lacks, all in the open transaction (the file's write lock)."""
    connection.execute(_TABLE)
    for migration in pending_migrations(connection, known):
        for statement in split_script(migration.sql):
            connection.execute(statement)
        connection.execute(_RECORD, (migration.version, migration.name, migration.checksum, now))
