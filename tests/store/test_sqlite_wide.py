"""Statements over many rows write each row once, however many there are."""

import sqlite3

import pytest

from perdure.store.sqlite.connection import SQL
from perdure.store.sqlite.schema import known_migrations, split_script
from perdure.store.sqlite.wide import ROWS_MAX, ask_rows, widen, write_rows

NAMES = sorted(name for name in SQL if "column1" in SQL[name] or "WITH v" in SQL[name])


@pytest.fixture
def db() -> sqlite3.Connection:
    """An empty database with the schema."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    for migration in known_migrations():
        for statement in split_script(migration.sql):
            connection.execute(statement)
    return connection


def event(place: int) -> tuple[object, ...]:
    """Return the row of an event."""
    return (b"r" * 16, place, 1, 0, 5, 1, 0, 1, b"{}")


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, ROWS_MAX, ROWS_MAX + 1, 3 * ROWS_MAX - 1])
def test_all_rows_are_written_and_nothing_else(db: sqlite3.Connection, count: int) -> None:
    assert write_rows(db, "insert_event", [event(place) for place in range(count)]) == count
    assert db.execute("SELECT seq FROM events ORDER BY seq").fetchall() == [
        (place,) for place in range(count)
    ]


def test_changes_that_find_no_row_are_not_counted(db: sqlite3.Connection) -> None:
    ends = [(b"r" * 16, b"c" * 16, number, 9, "succeeded") for number in (1, 2, 3)]
    begun = [(b"r" * 16, b"c" * 16, number, 1, None, 5) for number in (1, 3)]
    write_rows(db, "insert_first_execution", begun)
    assert write_rows(db, "end_execution", ends) == 2


def test_an_answer_for_rows_that_are_not_there_is_empty(db: sqlite3.Connection) -> None:
    assert ask_rows(db, "find_epoch", [(0, b"r" * 16, 1, "w")] * 3) == ["[]"]
    assert ask_rows(db, "find_epoch", []) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_wide_statement_can_be_prepared_at_full_width(
    db: sqlite3.Connection, name: str
) -> None:
    statement = widen(name, ROWS_MAX)
    plan = db.execute("EXPLAIN QUERY PLAN " + statement, (None,) * statement.count("?")).fetchall()
    walked = [row[3] for row in plan if row[3].startswith("SCAN")]
    assert all("CONSTANT ROW" in line or line.startswith(("SCAN v", "SCAN (")) for line in walked)
