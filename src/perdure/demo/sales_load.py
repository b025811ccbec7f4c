"""Turns a retail CSV into an SQLite file that holds money as whole units.

The same CSV gives the same tables. The file appears complete and in one step, so a crash while
loading leaves the earlier database untouched.
"""

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from perdure.demo.files import put_in_place, scratch_beside
from perdure.demo.sales_csv import SalesDataError, SalesFile, parse_sales, read_bytes
from perdure.demo.sales_query import SalesQueryError, query

SCHEMA_VERSION = 1
_SCHEMA_SQL = """
CREATE TABLE sale (
    line INTEGER PRIMARY KEY,
    invoice_no TEXT NOT NULL,
    stock_code TEXT NOT NULL,
    description TEXT NOT NULL,
    quantity INTEGER NOT NULL,
    sold_at TEXT NOT NULL,
    sold_on TEXT NOT NULL,
    unit_price_units INTEGER NOT NULL,
    revenue_units INTEGER NOT NULL,
    country TEXT NOT NULL
) STRICT;
CREATE TABLE load (
    schema_version INTEGER NOT NULL,
    csv_sha256 TEXT NOT NULL,
    units_per_pound INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    stock_codes INTEGER NOT NULL,
    countries INTEGER NOT NULL,
    first_date TEXT NOT NULL,
    last_date TEXT NOT NULL
) STRICT;
"""
_INDEX_SQL = """
CREATE INDEX sale_by_country ON sale (country, sold_on);
CREATE INDEX sale_by_stock_code ON sale (stock_code);
"""
_INSERT_SALE_SQL = "INSERT INTO sale VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_LOAD_SQL = """
INSERT INTO load
SELECT ?, ?, ?, count(*), count(DISTINCT stock_code), count(DISTINCT country),
       min(sold_on), max(sold_on)
FROM sale
"""
_SELECT_LOAD_SQL = """
SELECT schema_version, csv_sha256, units_per_pound, lines, stock_codes, countries,
       first_date, last_date
FROM load
"""


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """What the database holds. `reused` says that it already held this very file."""

    lines: int
    stock_codes: int
    countries: int
    first_date: date
    last_date: date
    units_per_pound: int
    csv_sha256: str
    reused: bool


def open_sales(csv_path: Path, database: Path) -> LoadSummary:
    """Load the CSV into an SQLite file, unless the file already holds exactly this CSV.

    The tables appear complete and in one step; after an error or a crash the database is what it
    was before. Raises `sales_data` with line and column for a file that cannot be understood.
    """
    data = read_bytes(csv_path)
    csv_sha256 = hashlib.sha256(data).hexdigest()
    present = _find_summary(database)
    if present is not None and present.csv_sha256 == csv_sha256:
        return replace(present, reused=True)
    sales = parse_sales(data)
    database.parent.mkdir(parents=True, exist_ok=True)
    with scratch_beside(database) as scratch:
        _build(scratch, sales, csv_sha256)
        put_in_place(scratch, database)
    return get_summary(database)


def get_summary(database: Path) -> LoadSummary:
    """Return what the database holds; `sales_data` if no CSV was loaded."""
    summary = _find_summary(database)
    if summary is None:
        raise SalesDataError("there is no sales database; load the CSV first")
    return summary


def _build(database: Path, sales: SalesFile, csv_sha256: str) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        # Nobody sees this file before it is complete, so SQLite's own safety is not needed.
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(_SCHEMA_SQL)
        connection.execute("BEGIN")
        connection.executemany(_INSERT_SALE_SQL, _sale_rows(sales))
        connection.execute(_INSERT_LOAD_SQL, (SCHEMA_VERSION, csv_sha256, 10**sales.price_places))
        connection.execute("COMMIT")
        connection.executescript(_INDEX_SQL)


def _sale_rows(sales: SalesFile) -> Iterator[tuple[int | str, ...]]:
    for number, line in enumerate(sales.lines, start=1):
        units = int(line.unit_price.scaleb(sales.price_places))
        yield (
            number,
            line.invoice_no,
            line.stock_code,
            line.description,
            line.quantity,
            line.invoice_date.isoformat(" ", "seconds"),
            line.invoice_date.date().isoformat(),
            units,
            line.quantity * units,
            line.country,
        )


def _find_summary(database: Path) -> LoadSummary | None:
    """Return what the file holds; None if it is missing or not of this module's making."""
    try:
        rows = query(database, _SELECT_LOAD_SQL).rows
    except SalesQueryError:
        return None
    if len(rows) != 1 or rows[0][0] != SCHEMA_VERSION:
        return None
    _, sha256, units_per_pound, lines, stock_codes, countries, first, last = rows[0]
    return LoadSummary(
        lines=int(lines or 0),
        stock_codes=int(stock_codes or 0),
        countries=int(countries or 0),
        first_date=date.fromisoformat(str(first)),
        last_date=date.fromisoformat(str(last)),
        units_per_pound=int(units_per_pound or 0),
        csv_sha256=str(sha256),
        reused=False,
    )
