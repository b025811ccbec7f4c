"""Loading a CSV: what is accepted, what is refused and where, and which weeks are full."""

from datetime import date
from pathlib import Path

import pytest

from perdure.demo import sales_load
from perdure.demo.sales import (
    SalesDataError,
    Week,
    falling_products,
    full_weeks,
    open_sales,
    query,
    schema_text,
)
from tests.demo.shop import HEADER, sale, write_csv

GOOD = "536365,85123A,LANTERN,6,2011-11-15 08:26:00,2.55,Germany"


def dated(*days: str) -> list[str]:
    return [sale("A", 1, "1.00", at=f"{day} 12:00:00") for day in days]


def test_loading_tells_what_the_file_holds(tmp_path: Path) -> None:
    csv_path = write_csv(tmp_path, [*dated("2011-11-16", "2011-11-15"), sale("B", 1, "1")])
    summary = open_sales(csv_path, tmp_path / "new" / "sales.sqlite")
    assert (summary.lines, summary.stock_codes, summary.countries) == (3, 2, 1)
    assert (summary.first_date, summary.last_date) == (date(2011, 11, 15), date(2011, 11, 16))
    assert summary.units_per_pound == 10_000
    assert not summary.reused


def test_the_same_file_again_leaves_the_database_as_it_is(tmp_path: Path) -> None:
    csv_path, database = write_csv(tmp_path, [GOOD]), tmp_path / "sales.sqlite"
    open_sales(csv_path, database)
    before = (database.stat().st_ino, database.read_bytes())
    assert open_sales(csv_path, database).reused
    assert (database.stat().st_ino, database.read_bytes()) == before


def test_the_same_file_gives_the_same_bytes_elsewhere(tmp_path: Path) -> None:
    csv_path = write_csv(tmp_path, [GOOD])
    for name in ("one.sqlite", "two.sqlite"):
        open_sales(csv_path, tmp_path / name)
    assert (tmp_path / "one.sqlite").read_bytes() == (tmp_path / "two.sqlite").read_bytes()


def test_another_file_replaces_the_tables(tmp_path: Path) -> None:
    database = tmp_path / "sales.sqlite"
    open_sales(write_csv(tmp_path, [GOOD]), database)
    summary = open_sales(write_csv(tmp_path, [GOOD, GOOD]), database)
    assert (summary.lines, summary.reused) == (2, False)
    assert query(database, "SELECT count(*) FROM sale").rows == ((2,),)


def test_a_file_that_is_no_database_is_replaced(tmp_path: Path) -> None:
    database = tmp_path / "sales.sqlite"
    database.write_bytes(b"half a database" * 100)
    assert open_sales(write_csv(tmp_path, [GOOD]), database).lines == 1


def test_an_error_in_the_file_keeps_the_earlier_database(tmp_path: Path) -> None:
    database = tmp_path / "sales.sqlite"
    open_sales(write_csv(tmp_path, [GOOD]), database)
    with pytest.raises(SalesDataError):
        open_sales(write_csv(tmp_path, [GOOD, GOOD.replace("2.55", "x")]), database)
    assert query(database, "SELECT count(*) FROM sale").rows == ((1,),)


def test_a_crash_before_the_last_step_leaves_nothing_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"

    def crash(scratch: Path, path: Path) -> None:
        assert query(scratch, "SELECT count(*) FROM sale").rows == ((1,),)
        raise SystemExit

    monkeypatch.setattr(sales_load, "put_in_place", crash)
    with pytest.raises(SystemExit):
        open_sales(write_csv(tmp_path, [GOOD]), folder / "sales.sqlite")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", None, None, "empty"),
        ("\n\n", None, None, "empty"),
        (HEADER, None, None, "no lines"),
        (HEADER.replace("quantity,", "") + "\n" + GOOD, 1, "quantity", "missing columns: quantity"),
        (HEADER.upper() + "\n" + GOOD, 1, "invoice_no", "missing columns: invoice_no, stock"),
        (HEADER + ",country\n" + GOOD + ",x", 1, "country", "twice"),
        (f"{HEADER}\n{GOOD}\n{GOOD},more", 3, None, "8 fields, the header has 7"),
        (f"{HEADER}\n{GOOD}\n536365", 3, None, "1 fields"),
        (f"{HEADER}\n\n{GOOD.replace(',6,', ',6.5,')}", 3, "quantity", "'6.5'"),
        (f"{HEADER}\n{GOOD.replace(',6,', ',,')}", 2, "quantity", "whole number"),
        (f"{HEADER}\n{GOOD.replace(',6,', ',٣,')}", 2, "quantity", "whole number"),
        (f"{HEADER}\n{GOOD.replace(',6,', ',1000001,')}", 2, "quantity", "beyond 1000000"),
        (f"{HEADER}\n{GOOD.replace(',6,', ',' + '9' * 4999 + ',')}", 2, "quantity", "beyond"),
        (f"{HEADER}\n{GOOD.replace('2.55', '2,55')}", 2, None, "8 fields"),
        (f"{HEADER}\n{GOOD.replace('2.55', 'NaN')}", 2, "unit_price", "'NaN'"),
        (f"{HEADER}\n{GOOD.replace('2.55', '1e3')}", 2, "unit_price", "decimal number"),
        (f"{HEADER}\n{GOOD.replace('2.55', '')}", 2, "unit_price", "decimal number"),
        (f"{HEADER}\n{GOOD.replace('2.55', '1000000.01')}", 2, "unit_price", "beyond"),
        (f"{HEADER}\n{GOOD.replace('2.55', '0.0000001')}", 2, "unit_price", "more than 6"),
        (f"{HEADER}\n{GOOD.replace('2011-11-15', '2011-11-31')}", 2, "invoice_date", "11-31"),
        (f"{HEADER}\n{GOOD.replace('2011-11-15', '15/11/2011')}", 2, "invoice_date", "not a date"),
        (f"{HEADER}\n{GOOD.replace(' 08:26:00', '')}", 2, "invoice_date", "not a date"),
        (f"{HEADER}\n{GOOD.replace(' 08:26:00', 'T08:26:00')}", 2, "invoice_date", "not a date"),
        (f"{HEADER}\n{GOOD.replace(':00', ':00+01:00')}", 2, "invoice_date", "not a date"),
        (f"{HEADER}\n{GOOD.replace('85123A', '')}", 2, "stock_code", "missing"),
        (f"{HEADER}\n{GOOD.replace('Germany', '')}", 2, "country", "missing"),
        (f"{HEADER}\n{GOOD.replace('LANTERN', 'x' * 5001)}", 2, "description", "longer than 5000"),
        (f"{HEADER}\n{GOOD.replace('LANTERN', 'x' * 200_000)}", 2, None, "CSV record"),
        (HEADER + "\n" + GOOD.replace("LANTERN", '"LANTERN'), 2, None, "CSV record"),
    ],
)
def test_a_file_with_a_fault_is_refused_with_its_place(
    tmp_path: Path, text: str, line: int | None, column: str | None, message: str
) -> None:
    csv_path = tmp_path / "sales.csv"
    csv_path.write_text(text, encoding="utf-8")
    with pytest.raises(SalesDataError, match=message) as caught:
        open_sales(csv_path, tmp_path / "sales.sqlite")
    assert (caught.value.line, caught.value.column) == (line, column)
    assert caught.value.code == "sales_data"
    assert not (tmp_path / "sales.sqlite").exists()


def test_the_place_is_part_of_the_message(tmp_path: Path) -> None:
    csv_path = write_csv(tmp_path, [GOOD, GOOD.replace("2.55", "x")])
    with pytest.raises(SalesDataError, match=r"^line 3, column unit_price: not a decimal"):
        open_sales(csv_path, tmp_path / "sales.sqlite")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_bytes_that_are_not_utf_8_are_refused_with_their_place(tmp_path: Path, mark: bytes) -> None:
    csv_path = tmp_path / "sales.csv"
    csv_path.write_bytes(mark + f"{HEADER}\r\n".encode() + b"1,caf\xe9,x")
    with pytest.raises(SalesDataError, match="byte 6 is not UTF-8") as caught:
        open_sales(csv_path, tmp_path / "sales.sqlite")
    assert caught.value.line == 2


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SalesDataError, match="cannot be read"):
        open_sales(tmp_path / "none.csv", tmp_path / "sales.sqlite")


def test_marks_line_ends_quotes_order_and_other_columns_are_tolerated(tmp_path: Path) -> None:
    csv_path = tmp_path / "sales.csv"
    header = "country, unit_price,invoice_date,quantity,customer_id,description,stock_code,"
    row = 'Germany, 1.50 ,2011-11-15 10:00:00, -2 ,17,"TINS, ""SET"" OF\r\n3 ", a ,C1'
    csv_path.write_bytes(f"\ufeff{header}invoice_no\r\n{row}\r\n\r\n".encode())
    database = tmp_path / "sales.sqlite"
    open_sales(csv_path, database)
    sql = "SELECT invoice_no, stock_code, description, quantity, sold_on, revenue_units FROM sale"
    assert query(database, sql).rows == (
        ("C1", " a ", 'TINS, "SET" OF\r\n3', -2, "2011-11-15", -30_000),
    )


@pytest.mark.parametrize(
    ("days", "mondays"),
    [
        (["2011-11-14", "2011-11-20"], ["2011-11-14"]),
        (["2011-11-15", "2011-11-20"], []),
        (["2011-11-14", "2011-11-19"], []),
        (["2011-11-09", "2011-11-27"], ["2011-11-14", "2011-11-21"]),
        (["2011-11-14", "2011-12-04"], ["2011-11-14", "2011-11-21", "2011-11-28"]),
        (["2011-12-26", "2012-01-01"], ["2011-12-26"]),
        (["2011-11-16"], []),
    ],
)
def test_a_week_is_full_when_the_range_of_dates_covers_it(
    tmp_path: Path, days: list[str], mondays: list[str]
) -> None:
    database = tmp_path / "sales.sqlite"
    open_sales(write_csv(tmp_path, dated(*days)), database)
    assert full_weeks(database) == [Week(date.fromisoformat(monday)) for monday in mondays]


def test_a_week_begins_on_a_monday() -> None:
    with pytest.raises(ValueError, match="not a Monday"):
        Week(date(2011, 11, 15))


def test_questions_before_the_load_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SalesDataError, match="load the CSV first"):
        full_weeks(tmp_path / "sales.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_the_schema_text_names_every_column_of_the_table(tmp_path: Path) -> None:
    database = tmp_path / "sales.sqlite"
    open_sales(write_csv(tmp_path, [GOOD]), database)
    text = schema_text(database)
    for column in query(database, "SELECT * FROM sale").columns:
        assert column in text
    assert "Countries: Germany." in text
    assert "2011-11-15 to 2011-11-15" in text


def test_an_overflowing_sum_is_an_error_and_never_rounded(tmp_path: Path) -> None:
    database = tmp_path / "sales.sqlite"
    lines = [sale("A", 1_000_000, "999999.999999")] * 10
    open_sales(write_csv(tmp_path, lines), database)
    weeks = (Week(date(2011, 11, 14)), Week(date(2011, 11, 21)))
    with pytest.raises(ValueError, match="overflow"):
        falling_products(database, "Germany", *weeks)
