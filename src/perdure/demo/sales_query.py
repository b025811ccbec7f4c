"""Asks a database read-only, so that the SQL may come from a language model.

Four guards stand behind each other: the file is opened read-only, SQLite refuses writes, an
authorizer lets only reads through, and limits bound time, rows and bytes.
"""

import math
import sqlite3
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

ROWS_MAX = 1000
OUTPUT_BYTES_MAX = 1_000_000
TIME_MAX_S = 5.0
SQL_BYTES_MAX = 20_000
LIKE_PATTERN_BYTES_MAX = 200

# The clock is asked between instructions only. Short values keep the slowest single one (a search
# of a long text in another) well below a second, and few instructions run between two looks.
VALUE_BYTES_MAX = 100_000
INSTRUCTIONS_PER_CHECK = 20

Cell = str | int | float | None
Parameters = Sequence[Cell] | Mapping[str, Cell]

_ALLOWED_ACTIONS = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    }
)
# One call of printf can take minutes: its widths have no limit.
_DENIED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "printf", "format"})


class SalesQueryError(ValueError):
    """The query was refused, failed or took too long; whoever wrote the SQL can mend it."""

    code: ClassVar[str] = "sales_query"


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The rows of a query in their order; `truncated` says that a limit left some out."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    truncated: bool


def query(
    database: Path,
    sql: str,
    parameters: Parameters = (),
    *,
    rows_max: int = ROWS_MAX,
    output_bytes_max: int = OUTPUT_BYTES_MAX,
    time_max_s: float = TIME_MAX_S,
    clock: Callable[[], float] = time.monotonic,
) -> QueryResult:
    """Run one SELECT and return its rows, without any right to change something.

    `printf` and `format` are refused too, as no limit would hold for them; `round` is there.
    Rows beyond `rows_max`, and those that would take the text of the answer beyond
    `output_bytes_max`, are left out and `truncated` says so. Blobs come as hexadecimal text,
    infinite numbers as text: every cell fits into JSON. Raises `sales_query` for anything but one
    reading statement, for an error in it, and after `time_max_s` seconds of `clock`.
    """
    deadline = clock() + time_max_s
    timed_out = False

    def is_late() -> bool:
        nonlocal timed_out
        timed_out = clock() > deadline
        return timed_out

    try:
        with _guarded(database) as connection:
            connection.set_progress_handler(is_late, INSTRUCTIONS_PER_CHECK)
            with closing(connection.execute(sql, parameters)) as cursor:
                return _collect(cursor, rows_max, output_bytes_max)
    except SalesQueryError:
        raise
    except (sqlite3.Error, sqlite3.Warning, ValueError, TypeError, OverflowError) as error:
        if timed_out:
            message = f"the query took longer than {time_max_s:g} seconds"
        else:
            message = _explained(error)
        raise SalesQueryError(message) from error


@contextmanager
def _guarded(database: Path) -> Generator[sqlite3.Connection]:
    uri = f"{database.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("PRAGMA trusted_schema = OFF")
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES_MAX)
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, SQL_BYTES_MAX)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LIKE_PATTERN_BYTES_MAX)
        connection.set_authorizer(_authorize)
        yield connection


def _authorize(action: int, _: str | None, function: str | None, *_names: str | None) -> int:
    if action not in _ALLOWED_ACTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_FUNCTION and (function or "").lower() in _DENIED_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


def _collect(cursor: sqlite3.Cursor, rows_max: int, output_bytes_max: int) -> QueryResult:
    described: Sequence[tuple[Any, ...]] | None = cursor.description
    if described is None:
        raise SalesQueryError("not a query: it has no columns")
    rows: list[tuple[Cell, ...]] = []
    output_bytes = 0
    truncated = False
    for values in cursor:
        row = tuple(_cell(value) for value in values)
        output_bytes += sum(len(str(cell).encode()) for cell in row)
        if len(rows) == rows_max or output_bytes > output_bytes_max:
            truncated = True
            break
        rows.append(row)
    return QueryResult(tuple(str(column[0]) for column in described), tuple(rows), truncated)


def _cell(value: object) -> Cell:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    assert value is None or isinstance(value, (str, int, float))
    return value


def _explained(error: Exception) -> str:
    text = str(error)
    if "not authorized" in text or "prohibited" in text or "readonly" in text:
        return f"only one reading SELECT is allowed ({text})"
    if "unable to open" in text:
        return "there is no sales database; load the CSV first"
    return text
