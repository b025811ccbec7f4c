"""Reads a retail CSV strictly: every line is understood exactly, or the file is refused.

Money never becomes a binary fraction, stock codes and countries stay exactly as written, and an
error names the line of the file and the column.
"""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import ClassVar

COLUMNS = (
    "invoice_no",
    "stock_code",
    "description",
    "quantity",
    "invoice_date",
    "unit_price",
    "country",
)
CSV_BYTES_MAX = 256 * 1024 * 1024
TEXT_CHARS_MAX = 5_000  # a row of such texts fits into the values that a query may handle

# Together these keep quantity * price below 2**63, so SQLite never leaves integer arithmetic.
QUANTITY_MAX = 1_000_000
UNIT_PRICE_MAX = Decimal(1_000_000)
PRICE_PLACES_MIN = 4
PRICE_PLACES_MAX = 6

_INTEGER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)")


class SalesDataError(ValueError):
    """The sales data cannot be used; whoever supplies the file can mend it.

    `line` counts the lines of the file from 1 (the header's); `column` is a column's name. Both
    are None when the error is about the file as a whole.
    """

    code: ClassVar[str] = "sales_data"

    def __init__(self, message: str, *, line: int | None = None, column: str | None = None) -> None:
        place = [f"line {line}"] if line is not None else []
        if column is not None:
            place.append(f"column {column}")
        super().__init__(f"{', '.join(place)}: {message}" if place else message)
        self.line = line
        self.column = column


@dataclass(frozen=True, slots=True)
class SalesLine:
    """One line of an invoice; a negative quantity is a cancellation. The price is in pounds."""

    invoice_no: str
    stock_code: str
    description: str
    quantity: int
    invoice_date: datetime
    unit_price: Decimal
    country: str


@dataclass(frozen=True, slots=True)
class SalesFile:
    """A file that was understood: its lines in order, and the decimals that its prices need."""

    lines: tuple[SalesLine, ...]
    price_places: int


def read_bytes(csv_path: Path) -> bytes:
    """Return the bytes of the file; `sales_data` if it is missing, empty or over CSV_BYTES_MAX."""
    try:
        with csv_path.open("rb") as stream:
            data = stream.read(CSV_BYTES_MAX + 1)
    except OSError as error:
        raise SalesDataError(f"the file cannot be read: {error.strerror}") from error
    if not data:
        raise SalesDataError("the file is empty")
    if len(data) > CSV_BYTES_MAX:
        raise SalesDataError(f"the file has more than {CSV_BYTES_MAX} bytes")
    return data


def parse_sales(data: bytes) -> SalesFile:
    """Understand the bytes of a CSV in UTF-8; a byte order mark and any line ends are accepted.

    The columns are those of COLUMNS in any order; others are ignored. Raises `sales_data`.
    """
    records = _records(_decoded(data))
    header = next(records, None)
    if header is None:
        raise SalesDataError("the file is empty")
    places = _column_places(*header)
    width = len(header[1])
    lines: list[SalesLine] = []
    for number, fields in records:
        if len(fields) != width:
            raise SalesDataError(f"{len(fields)} fields, the header has {width}", line=number)
        lines.append(_sales_line(number, {name: fields[at] for name, at in places.items()}))
    if not lines:
        raise SalesDataError("the file has a header and no lines")
    needed = max(_places(line.unit_price) for line in lines)
    return SalesFile(lines=tuple(lines), price_places=max(PRICE_PLACES_MIN, needed))


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # error.object lacks the byte order mark, and so does error.start.
        before = bytes(error.object[: error.start])
        line = before.count(b"\n") + 1
        offset = error.start - (before.rfind(b"\n") + 1)
        raise SalesDataError(f"byte {offset + 1} is not UTF-8", line=line) from error


def _records(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each record with the number of its first line; blank lines are skipped."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    first = 1
    try:
        for fields in reader:
            if fields:
                yield first, fields
            first = reader.line_num + 1
    except csv.Error as error:
        raise SalesDataError(f"not a readable CSV record: {error}", line=first) from error


def _column_places(number: int, header: list[str]) -> dict[str, int]:
    names = [name.strip() for name in header]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise SalesDataError(
            f"missing columns: {', '.join(missing)}", line=number, column=missing[0]
        )
    for name in COLUMNS:
        if names.count(name) > 1:
            raise SalesDataError("the column appears twice", line=number, column=name)
    return {name: names.index(name) for name in COLUMNS}


def _sales_line(number: int, fields: dict[str, str]) -> SalesLine:
    for name in ("stock_code", "country"):
        if not fields[name]:
            raise SalesDataError("the value is missing", line=number, column=name)
    for name, text in fields.items():
        if len(text) > TEXT_CHARS_MAX:
            raise SalesDataError(
                f"longer than {TEXT_CHARS_MAX} characters", line=number, column=name
            )
    return SalesLine(
        invoice_no=fields["invoice_no"],
        stock_code=fields["stock_code"],
        description=fields["description"].strip(),
        quantity=_quantity(number, fields["quantity"].strip()),
        invoice_date=_date(number, fields["invoice_date"].strip()),
        unit_price=_price(number, fields["unit_price"].strip()),
        country=fields["country"],
    )


def _quantity(number: int, text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise SalesDataError(f"not a whole number: {text[:40]!r}", line=number, column="quantity")
    # The length is judged first: Python refuses to convert thousands of digits.
    if len(text) > 20 or abs(int(text)) > QUANTITY_MAX:
        raise SalesDataError(f"beyond {QUANTITY_MAX}", line=number, column="quantity")
    return int(text)


def _price(number: int, text: str) -> Decimal:
    if _DECIMAL.fullmatch(text) is None:
        raise SalesDataError(
            f"not a decimal number: {text[:40]!r}", line=number, column="unit_price"
        )
    price = Decimal(text)
    if abs(price) > UNIT_PRICE_MAX:
        raise SalesDataError(f"beyond {UNIT_PRICE_MAX}", line=number, column="unit_price")
    if _places(price) > PRICE_PLACES_MAX:
        raise SalesDataError(
            f"more than {PRICE_PLACES_MAX} decimals", line=number, column="unit_price"
        )
    return price


def _places(price: Decimal) -> int:
    """Return how many decimals the number needs; closing zeros need none."""
    fraction = format(price, "f").partition(".")[2]
    return len(fraction.rstrip("0"))


def _date(number: int, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    # The comparison refuses the other forms of ISO 8601.
    if moment is None or moment.tzinfo is not None or moment.isoformat(" ", "seconds") != text:
        raise SalesDataError(
            f"not a date like 2011-11-14 08:10:00: {text[:40]!r}",
            line=number,
            column="invoice_date",
        )
    return moment
