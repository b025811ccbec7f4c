"""Computes the falling products by plain dictionaries and decimals.

It shares no code with the demo, so that the two can be compared: python independent.py FILE REGION
"""

import csv
import json
import sys
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from datetime import date, timedelta
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

CENT = Decimal("0.01")


@dataclass(frozen=True)
class Expected:
    """A product whose revenue fell, with money in pounds and two decimals."""

    stock_code: str
    description: str
    before: str
    after: str
    change: str


def read(path: Path) -> list[dict[str, str]]:
    """Return the records of the CSV as they are."""
    with path.open(encoding="utf-8-sig", newline="") as stream:
        return list(csv.DictReader(stream))


def last_two_full_weeks(records: list[dict[str, str]]) -> tuple[date, date]:
    """Return the Mondays of the last two weeks that the range of dates covers."""
    days = sorted({day_of(record) for record in records})
    sunday = max(day for day in days_between(days[0], days[-1]) if day.isoweekday() == 7)
    after = sunday - timedelta(days=6)
    before = after - timedelta(days=7)
    if before < days[0]:
        raise SystemExit("the file does not cover two full weeks")
    return before, after


def days_between(first: date, last: date) -> list[date]:
    """Return every day from the first to the last."""
    return [date.fromordinal(number) for number in range(first.toordinal(), last.toordinal() + 1)]


def day_of(record: dict[str, str]) -> date:
    """Return the calendar day of a record."""
    return date(*(int(part) for part in record["invoice_date"].split(" ")[0].split("-")))


def falling(path: Path, region: str, count: int = 5) -> list[Expected]:
    """Return the products of the region that fell most between the last two full weeks."""
    records = read(path)
    before, after = last_two_full_weeks(records)
    sums: dict[str, dict[date, Decimal]] = defaultdict(lambda: defaultdict(Decimal))
    near: dict[str, Counter[str]] = defaultdict(Counter)
    far: dict[str, Counter[str]] = defaultdict(Counter)
    for record in records:
        code, name = record["stock_code"], record["description"].strip()
        far[code][name] += 1
        monday = day_of(record) - timedelta(days=day_of(record).weekday())
        if record["country"] == region and monday in (before, after):
            near[code][name] += 1
            sums[code][monday] += Decimal(record["quantity"]) * Decimal(record["unit_price"])
    fallen: list[tuple[Decimal, str, Decimal, Decimal]] = []
    for code, weeks in sums.items():
        old = weeks[before].quantize(CENT, ROUND_HALF_UP)
        new = weeks[after].quantize(CENT, ROUND_HALF_UP)
        if new < old:
            fallen.append((new - old, code, old, new))
    return [
        Expected(code, favourite(near[code]) or favourite(far[code]), str(old), str(new), str(diff))
        for diff, code, old, new in sorted(fallen)[:count]
    ]


def favourite(names: Counter[str]) -> str:
    """Return the most frequent name, the alphabetically first of equals, or nothing."""
    candidates = [(-number, name) for name, number in names.items() if name]
    return min(candidates)[1] if candidates else ""


def main() -> None:
    """Print the weeks and the five products as JSON."""
    path, region = Path(sys.argv[1]), sys.argv[2]
    before, after = last_two_full_weeks(read(path))
    products = [asdict(product) for product in falling(path, region)]
    answer = {
        "region": region,
        "before": before.isoformat(),
        "after": after.isoformat(),
        "products": products,
    }
    sys.stdout.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
