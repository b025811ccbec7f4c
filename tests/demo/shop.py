"""Small sales files for the tests, and the two weeks that they are about."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from perdure.demo.sales import Week, open_sales

HEADER = "invoice_no,stock_code,description,quantity,invoice_date,unit_price,country"
BEFORE = Week(date(2011, 11, 14))
AFTER = Week(date(2011, 11, 21))
IN_BEFORE = "2011-11-15 10:00:00"
IN_AFTER = "2011-11-22 10:00:00"
FIRST = "1,EDGE,EDGE,1,2011-11-14 00:00:00,1.00,Nowhere"
LAST = "2,EDGE,EDGE,1,2011-11-27 23:59:59,1.00,Nowhere"


def sale(
    code: str,
    quantity: int,
    price: str,
    *,
    at: str = IN_BEFORE,
    name: str = "LANTERN",
    country: str = "Germany",
) -> str:
    """Return one line of a CSV."""
    return f'536365,{code},"{name}",{quantity},{at},{price},{country}'


def write_csv(folder: Path, lines: Sequence[str]) -> Path:
    """Write the lines below the header."""
    path = folder / "sales.csv"
    path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    return path


def load(folder: Path, lines: Sequence[str]) -> Path:
    """Return a database with the lines, and two more so that both weeks are full."""
    database = folder / "sales.sqlite"
    open_sales(write_csv(folder, [FIRST, *lines, LAST]), database)
    return database
