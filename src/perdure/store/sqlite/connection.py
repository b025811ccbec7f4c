"""Connections to the file, the statements by name, and the translation of the driver's errors.

Every connection uses the write-ahead log; a writer syncs fully at each commit unless the database
may be thrown away. Transactions are begun by hand (`BEGIN IMMEDIATE`); reads are single
statements that are fetched whole, so that no read transaction stays open.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from perdure.protocol.errors import (
    Conflict,
    Invalid,
    PerdureError,
    StoreFull,
    Unavailable,
    Unreadable,
)
from perdure.store.reading import read
from perdure.store.sqlfiles import load_statements

SQLITE_VERSION_MIN: Final = (3, 37, 0)
"""STRICT tables; RETURNING is older."""

BUSY_MS: Final = 2_000
BUSY_DEADLINE_S: Final = 10.0
CACHED_STATEMENTS: Final = 512

Synchronous = Literal["full", "off"]
Row = Sequence[Any]
_T = TypeVar("_T")

SQL: Final[Mapping[str, str]] = load_statements(files("perdure.store.sqlite") / "sql")


# Python 3.11 looks for an adapter of each value that is no int, float or str, and does so by an
# exception that it makes and drops: 0.6 us a value, of which a step has eighty. Found at once, an
# adapter that changes nothing costs a third.
sqlite3.register_adapter(bytes, bytes.__bytes__)
sqlite3.register_adapter(type(None), dict[None, None]().get)
sqlite3.register_adapter(bool, int)


def check_version(version: tuple[int, ...] = sqlite3.sqlite_version_info) -> None:
    """Raise Unavailable when the linked SQLite is too old."""
    if version < SQLITE_VERSION_MIN:
        found, wanted = (".".join(map(str, parts)) for parts in (version, SQLITE_VERSION_MIN))
        raise Unavailable(f"SQLite {found} is too old: {wanted} or later is needed")


def connect(path: Path) -> sqlite3.Connection:
    """Open the file for one thread at a time. The log mode is kept in the file itself."""
    connection = sqlite3.connect(
        path,
        timeout=BUSY_MS / 1000,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=CACHED_STATEMENTS,
    )
    try:
        wait_for_file(lambda: _use_log(connection))
        # rows point at rows that are written in the same transaction, and are deleted with them
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute("PRAGMA cache_size = -16384")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_log(connection: sqlite3.Connection) -> None:
    mode = connection.execute("PRAGMA journal_mode = WAL").fetchall()[0][0]
    if mode != "wal":
        raise Unavailable(f"the file cannot have a write-ahead log (it stays {mode})")


def connect_writer(path: Path, synchronous: Synchronous) -> sqlite3.Connection:
    """Open the file for writing. `off` is for databases that may be thrown away."""
    connection = connect(path)
    mode = "PRAGMA synchronous = FULL" if synchronous == "full" else "PRAGMA synchronous = OFF"
    connection.execute(mode)
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open the file for reading only."""
    connection = connect(path)
    connection.execute("PRAGMA query_only = ON")
    return connection


def begin_immediate(connection: sqlite3.Connection, deadline_s: float = BUSY_DEADLINE_S) -> None:
    """Take the file's write lock, waiting for other processes up to the deadline."""
    wait_for_file(lambda: connection.execute("BEGIN IMMEDIATE"), deadline_s)


def wait_for_file(action: Callable[[], object], deadline_s: float = BUSY_DEADLINE_S) -> None:
    """Repeat an action that finds the file busy, up to a deadline; then raise what it raised."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            action()
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.001)
        else:
            return


def is_busy(error: sqlite3.Error) -> bool:
    """Tell whether another connection was in the way."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    }


class BrokenRow(tuple[Any, ...]):
    """A row with a text that is not UTF-8; its ids and numbers are sound."""

    __slots__ = ()


class _BrokenText(bytes):
    __slots__ = ()


def fetch_rows(
    connection: sqlite3.Connection, statement: str, values: Sequence[object]
) -> list[Row]:
    """Return all rows of a statement; those with a text that is not UTF-8 as BrokenRow."""
    try:
        return connection.execute(statement, values).fetchall()
    except sqlite3.OperationalError as error:
        if not _is_undecodable(error):
            raise
    connection.text_factory = _lenient
    try:
        found = connection.execute(statement, values).fetchall()
    finally:
        connection.text_factory = str
    return [BrokenRow(row) if any(_is_broken(cell) for cell in row) else row for row in found]


def _is_undecodable(error: sqlite3.Error) -> bool:
    return "Could not decode to UTF-8" in str(error)


def _lenient(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _BrokenText(data)


def _is_broken(cell: object) -> bool:
    return isinstance(cell, _BrokenText)


def read_row(convert: Callable[[Row], _T], row: Row) -> _T:
    """Return what a row holds; raise Unreadable when it is damaged."""
    if isinstance(row, BrokenRow):
        raise Unreadable("a stored row cannot be read: a text in it is not UTF-8")
    return read(convert, row)


def is_data_error(error: Exception) -> bool:
    """Tell whether the values are at fault, and not the database."""
    if isinstance(error, sqlite3.Error):
        return isinstance(error, (sqlite3.IntegrityError, sqlite3.DataError))
    return not isinstance(error, PerdureError)


def translate(error: Exception) -> Exception:
    """Return the error a caller meets for one of the driver's; ours and a bug's are kept."""
    match error:
        case sqlite3.IntegrityError():
            return Conflict(f"the database refused a row: {error}")
        case sqlite3.DataError() | OverflowError() | UnicodeError():
            return Invalid(f"a value cannot be stored: {error}")
        case sqlite3.Error():
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                return StoreFull("the database or its disk is full")
            if code == sqlite3.SQLITE_NOTADB:
                return Unavailable(
                    "the file is not an SQLite database: name another one with --db or "
                    "PERDURE_DB__URL, or restore a backup"
                )
            return Unavailable(f"the database cannot answer: {error}")
        case _:
            return error
