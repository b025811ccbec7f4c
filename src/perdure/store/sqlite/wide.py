"""Statements over many rows: one call of the driver where one for each row would be needed.

Each call hands the interpreter's lock to the other threads and takes it back, which costs more
than the row. A statement for many rows stands in its file with one parenthesised row of
parameters, `VALUES (?, ?)`, and no parameter elsewhere; `widen` repeats that row. The numbers of
rows are powers of two, so that few texts are prepared and all stay in the cache of statements.
What is left over is filled with rows that begin with NULL: such statements pass over them.
"""

import re
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any, Final

from perdure.store.sqlite.connection import SQL

ROWS_MAX: Final = 256
"""Rows of one call; with up to 24 columns it stays far below the 32,766 parameters of SQLite."""

_ROW: Final = re.compile(r"VALUES\s*(\([?,\s]+\))")

Values = Sequence[Any]


@cache
def widen(name: str, count: int) -> str:
    """Return a statement with its row of parameters written `count` times."""
    statement = SQL[name]
    found = _ROW.search(statement)
    assert found is not None, f"{name} has no row of parameters"
    row = found[1]
    assert statement.count("?") == row.count("?"), f"{name} has parameters beside its row"
    return statement[: found.start(1)] + ", ".join([row] * count) + statement[found.end(1) :]


def write_rows(db: sqlite3.Connection, name: str, rows: Sequence[Values]) -> int:
    """Run a statement over rows; return how many it wrote.

    `<name>_one`, where there is one, is the same for a lone row.
    """
    lone = SQL.get(f"{name}_one") if len(rows) == 1 else None
    if lone is not None:
        return db.execute(lone, rows[0]).rowcount
    before = db.total_changes
    for statement, values in _calls(name, rows):
        db.execute(statement, values)
    return db.total_changes - before


def ask_rows(db: sqlite3.Connection, name: str, rows: Sequence[Values]) -> list[Any]:
    """Return the one value that a statement answers for each call over rows."""
    return [
        db.execute(statement, values).fetchall()[0][0] for statement, values in _calls(name, rows)
    ]


def _calls(name: str, rows: Sequence[Values]) -> Iterator[tuple[str, list[Any]]]:
    for start in range(0, len(rows), ROWS_MAX):
        part = rows[start : start + ROWS_MAX]
        count = 1 << (len(part) - 1).bit_length()
        empty = [None, *[0] * (len(part[0]) - 1)]
        values = [*chain.from_iterable(part), *empty * (count - len(part))]
        yield widen(name, count), values
