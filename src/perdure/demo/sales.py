"""Answers questions about sales from a CSV, exactly and repeatably.

Money is summed in whole units and compared in whole cents, so equal data gives equal answers on
every machine; nothing here can change the data after it was loaded.
"""

from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path

from perdure.demo.sales_csv import SalesDataError
from perdure.demo.sales_load import LoadSummary, get_summary, open_sales
from perdure.demo.sales_query import (
    ROWS_MAX,
    Cell,
    QueryResult,
    SalesQueryError,
    query,
)

__all__ = [
    "FALLING_PRODUCTS_SQL",
    "FallingProduct",
    "LoadSummary",
    "QueryResult",
    "SalesDataError",
    "SalesQueryError",
    "Week",
    "falling_products",
    "full_weeks",
    "open_sales",
    "query",
    "schema_text",
]

REGIONS_NAMED_MAX = 100
COMPARISON_TIME_MAX_S = 60.0

_SELECT_REGION_SQL = "SELECT 1 FROM sale WHERE country = ? LIMIT 1"
_SELECT_REGIONS_SQL = "SELECT DISTINCT country FROM sale ORDER BY country"

FALLING_PRODUCTS_SQL = """
WITH
chosen AS (
    SELECT stock_code, description, revenue_units,
           sold_on BETWEEN :before_first AND :before_last AS is_before,
           sold_on BETWEEN :after_first AND :after_last AS is_after
    FROM sale
    WHERE country = :region
      AND (sold_on BETWEEN :before_first AND :before_last
           OR sold_on BETWEEN :after_first AND :after_last)
),
summed AS (
    SELECT stock_code,
           sum(revenue_units * is_before) AS before_units,
           sum(revenue_units * is_after) AS after_units,
           (SELECT units_per_pound / 100 FROM load) AS units_per_cent
    FROM chosen
    GROUP BY stock_code
),
rounded AS (
    SELECT stock_code,
           sign(before_units)
               * ((abs(before_units) + units_per_cent / 2) / units_per_cent) AS before_cents,
           sign(after_units)
               * ((abs(after_units) + units_per_cent / 2) / units_per_cent) AS after_cents
    FROM summed
),
fallen AS (
    SELECT stock_code, before_cents, after_cents, after_cents - before_cents AS change_cents
    FROM rounded
    WHERE after_cents < before_cents
    ORDER BY change_cents, stock_code
    LIMIT :product_count_max
)
SELECT stock_code,
       coalesce(
           (SELECT description FROM chosen
            WHERE chosen.stock_code = fallen.stock_code AND description <> ''
            GROUP BY description ORDER BY count(*) DESC, description LIMIT 1),
           (SELECT description FROM sale
            WHERE sale.stock_code = fallen.stock_code AND description <> ''
            GROUP BY description ORDER BY count(*) DESC, description LIMIT 1),
           ''
       ) AS description,
       before_cents, after_cents, change_cents
FROM fallen
ORDER BY change_cents, stock_code
"""


@dataclass(frozen=True, slots=True, order=True)
class Week:
    """Seven calendar days from `monday` to `sunday`; ValueError if `monday` is another day."""

    monday: date

    def __post_init__(self) -> None:
        if self.monday.weekday() != 0:
            raise ValueError(f"{self.monday} is not a Monday")

    @property
    def sunday(self) -> date:
        """The last day of the week."""
        return self.monday + timedelta(days=6)


@dataclass(frozen=True, slots=True)
class FallingProduct:
    """A product whose revenue fell; money is in pounds with two decimals, such as "-12.50"."""

    stock_code: str
    description: str
    before: str
    after: str
    change: str


def full_weeks(database: Path) -> list[Week]:
    """Return the weeks that the data's range of dates covers from Monday to Sunday, in order."""
    summary = get_summary(database)
    monday = summary.first_date + timedelta(days=-summary.first_date.weekday() % 7)
    count = ((summary.last_date - monday).days + 1) // 7
    return [Week(monday + timedelta(days=7 * week)) for week in range(count)]


def falling_products(
    database: Path, region: str, before: Week, after: Week, limit: int = 5
) -> list[FallingProduct]:
    """Return the products of a region whose revenue fell between two weeks, the largest first.

    A line's revenue is quantity times unit price, cancellations included. The exact sum of each
    product and week is rounded to cents, halves away from zero, before the comparison; a week
    without lines counts as 0.00. Equal changes are ordered by stock code, compared by code point
    and exactly as written.

    The description is the most frequent trimmed one among the region's lines of both weeks, the
    alphabetically first of equals; blank ones are ignored. Without any there, all lines of the
    file with the stock code are asked the same way; failing that it is "".

    The region is a country exactly as written; `sales_data` names those known if it is none of
    them. ValueError if `limit` is not between 1 and the row limit of a query.
    """
    if not 1 <= limit <= ROWS_MAX:
        raise ValueError(f"limit must be between 1 and {ROWS_MAX}")
    if not query(database, _SELECT_REGION_SQL, (region,)).rows:
        known = ", ".join(_regions(database))
        raise SalesDataError(f"unknown region {region[:80]!r}; known: {known}", column="country")
    parameters: dict[str, Cell] = {
        "region": region,
        "before_first": before.monday.isoformat(),
        "before_last": before.sunday.isoformat(),
        "after_first": after.monday.isoformat(),
        "after_last": after.sunday.isoformat(),
        "product_count_max": limit,
    }
    result = query(database, FALLING_PRODUCTS_SQL, parameters, time_max_s=COMPARISON_TIME_MAX_S)
    return [
        FallingProduct(str(code), str(description), *(_pounds(cents) for cents in money))
        for code, description, *money in result.rows
    ]


def schema_text(database: Path) -> str:
    """Describe tables, units and range of dates in a few lines, for a writer of SQL."""
    summary = get_summary(database)
    return f"""\
SQLite, read-only. Table sale, one row per invoice line ({summary.lines} rows):
  line INTEGER: position in the file, from 1
  invoice_no TEXT, stock_code TEXT, country TEXT: exactly as written, case matters
  description TEXT: trimmed, may be ''
  quantity INTEGER: negative for cancellations
  sold_at TEXT 'YYYY-MM-DD HH:MM:SS', sold_on TEXT 'YYYY-MM-DD'
  unit_price_units INTEGER, revenue_units INTEGER (quantity * unit_price_units):
    money in whole units, {summary.units_per_pound} units are one pound (GBP); sum these
Dates: {summary.first_date} to {summary.last_date}. Weeks run from Monday to Sunday.
Stock codes: {summary.stock_codes}. Countries: {", ".join(_regions(database))}.
"""


def _regions(database: Path) -> list[str]:
    rows = query(database, _SELECT_REGIONS_SQL, rows_max=REGIONS_NAMED_MAX).rows
    return [str(country) for (country,) in rows]


def _pounds(cents: Cell) -> str:
    return str(Decimal(str(cents)).scaleb(-2))
