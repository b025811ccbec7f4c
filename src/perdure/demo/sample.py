"""Makes a small retail CSV of invented sales, the same bytes for the same seed.

It covers a part of a week and two full ones, three countries, cancellations, postage, products
that fall by equal amounts, and codes that differ in case alone.
"""

import csv
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TypeVar

from perdure.demo.files import replace_file
from perdure.demo.sales_csv import COLUMNS

SEED = 20111114
FIRST_DAY = date(2011, 11, 9)
FIRST_MONDAY = date(2011, 11, 14)
LAST_DAY = date(2011, 11, 27)
INVOICE_COUNT = 400
FIRST_INVOICE_NO = 700001

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Product:
    code: str
    names: tuple[str, ...]
    price: Decimal


@dataclass(frozen=True, slots=True)
class _Line:
    invoice_no: str
    product: _Product
    name: str
    quantity: int
    at: datetime
    country: str


# The repetition makes the United Kingdom the largest market.
_COUNTRIES = ("United Kingdom", "United Kingdom", "United Kingdom", "Germany", "France")
_THINGS = ("LANTERN", "CAKE TINS, SET OF 3", "TEA TOWEL", "DOORMAT", "HOT WATER BOTTLE", "BUNTING")
_STYLES = ("RED SPOT", "VINTAGE", "HEART", "WOODEN", "PAPER, HAND MADE", "SILVER", "STAR")
_PRICES = ("0.42", "0.85", "1.25", "1.65", "2.1", "2.95", "4.25", "7.95")
_POSTAGE = _Product("POST", ("POSTAGE",), Decimal(18))
_TWINS = (
    _Product("85123A", ("HANGING HEART HOLDER", "HEART HOLDER, HANGING"), Decimal("2.55")),
    _Product("85123a", ("HANGING HEART HOLDER ", ""), Decimal("2.55")),
)


def write_sample(path: Path, *, seed: int = SEED) -> None:
    """Write about 2,000 lines of sales in one step; equal seeds give equal bytes."""
    replace_file(path, sample_bytes(seed))


def sample_bytes(seed: int) -> bytes:
    """Return the sample as CSV in UTF-8 with CRLF line ends, ordered by date."""
    # Only random() is used: Python promises the same numbers for it in every version.
    dice = random.Random(seed)  # noqa: S311  # the same sample for the same seed
    lines = [*_invoices(dice), *_twin_lines()]
    lines.sort(key=lambda line: (line.at, line.invoice_no))
    stream = io.StringIO(newline="")
    writer = csv.writer(stream)
    writer.writerow(COLUMNS)
    writer.writerows(_fields(line) for line in lines)
    return stream.getvalue().encode()


def _fields(line: _Line) -> Sequence[str]:
    return (
        line.invoice_no,
        line.product.code,
        line.name,
        str(line.quantity),
        line.at.isoformat(" ", "seconds"),
        str(line.product.price),
        line.country,
    )


def _catalogue(dice: random.Random) -> list[_Product]:
    names = [f"{style} {thing}" for style in _STYLES for thing in _THINGS]
    return [
        _Product(str(22000 + 7 * place), (name, f"{name} "), Decimal(_pick(dice, _PRICES)))
        for place, name in enumerate(names)
    ]


def _invoices(dice: random.Random) -> Iterator[_Line]:
    catalogue = _catalogue(dice)
    days = (LAST_DAY - FIRST_DAY).days + 1
    for place in range(INVOICE_COUNT):
        day = FIRST_DAY + timedelta(days=place * days // INVOICE_COUNT)
        at = datetime.combine(day, time(8 + place % 10, int(dice.random() * 60)))
        yield from _invoice(dice, f"{FIRST_INVOICE_NO + place}", at, catalogue)


def _invoice(
    dice: random.Random, number: str, at: datetime, catalogue: Sequence[_Product]
) -> Iterator[_Line]:
    country = _pick(dice, _COUNTRIES)
    for _ in range(2 + int(dice.random() * 6)):
        product = _pick(dice, catalogue)
        quantity = 1 + int(dice.random() * 24)
        line = _Line(number, product, _pick(dice, product.names), quantity, at, country)
        yield line
        if dice.random() < 0.03:
            later = min(at + timedelta(days=2), datetime.combine(LAST_DAY, time(18)))
            yield _Line(f"C{number}", product, line.name, -quantity, later, country)
    if country != "United Kingdom":
        # Less is shipped in the last week, so postage falls.
        parcels = 1 if at.date() >= FIRST_MONDAY + timedelta(days=7) else 3
        yield _Line(number, _POSTAGE, "POSTAGE", parcels, at, country)


def _twin_lines() -> Iterator[_Line]:
    """Yield two products per country that fall by the same amount, with tied descriptions."""
    for place, country in enumerate(dict.fromkeys(_COUNTRIES)):
        for week, quantity in ((0, 400), (1, 20)):
            monday = FIRST_MONDAY + timedelta(days=7 * week)
            at = datetime.combine(monday, time(9, place))
            number = f"{FIRST_INVOICE_NO + INVOICE_COUNT + 2 * place + week}"
            for product in _TWINS:
                for name in product.names:
                    yield _Line(number, product, name, quantity // 2, at, country)


def _pick(dice: random.Random, items: Sequence[T]) -> T:
    return items[int(dice.random() * len(items))]
