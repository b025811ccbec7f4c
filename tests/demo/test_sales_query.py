"""The guard around SQL from elsewhere: reading works, nothing else does, and limits hold."""

import hashlib
import itertools
import sqlite3
from pathlib import Path

import pytest

from perdure.demo import sales_query
from perdure.demo.sales import QueryResult, SalesQueryError, query
from tests.demo.shop import load, sale

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT {} FROM n"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return load(tmp_path, [sale("A", 2, "1.50"), sale("B", -1, "0.25")])


def test_a_select_returns_columns_and_rows(database: Path) -> None:
    sql = "SELECT stock_code, quantity AS pieces, NULL FROM sale WHERE country = ? ORDER BY 1"
    assert query(database, sql, ("Germany",)) == QueryResult(
        columns=("stock_code", "pieces", "NULL"),
        rows=(("A", 2, None), ("B", -1, None)),
        truncated=False,
    )


def test_parameters_may_have_names(database: Path) -> None:
    assert query(database, "SELECT :a + :b", {"a": 1, "b": 2.5}).rows == ((3.5,),)


@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO sale SELECT * FROM sale",
        "INSERT INTO load SELECT * FROM load RETURNING lines",
        "UPDATE sale SET quantity = 0",
        "DELETE FROM sale",
        "DROP TABLE sale",
        "CREATE TABLE t (a)",
        "CREATE TEMP TABLE t (a)",
        "CREATE VIRTUAL TABLE t USING fts5(a)",
        "ALTER TABLE sale RENAME TO sold",
        "REINDEX",
        "ANALYZE",
        "VACUUM",
        "VACUUM INTO 'copy.sqlite'",
        "ATTACH 'other.sqlite' AS other",
        "DETACH main",
        "PRAGMA query_only = OFF",
        "PRAGMA table_info(sale)",
        "SELECT * FROM pragma_table_info('sale')",
        "SELECT load_extension('evil')",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "SELECT FORMAT('%1000000000d', 1)",
        "BEGIN IMMEDIATE",
        "SAVEPOINT a",
        "SELECT 1; DELETE FROM sale",
        "WITH x AS (SELECT 1) DELETE FROM sale",
        "",
        "-- nothing",
        "SELECT",
        "SELECT * FROM nowhere",
        "SELECT ?",
        "SELECT 'a\0b'",
        "SELECT '\ud800'",
        "SELECT CAST(x'ff' AS TEXT)",
    ],
)
def test_anything_but_one_reading_select_is_refused(
    database: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    monkeypatch.chdir(database.parent)
    files = sorted(database.parent.iterdir())
    before = hashlib.sha256(database.read_bytes()).digest()
    with pytest.raises(SalesQueryError) as caught:
        query(database, sql)
    assert str(caught.value)
    assert hashlib.sha256(database.read_bytes()).digest() == before
    assert sorted(database.parent.iterdir()) == files


def test_a_refused_write_is_told_what_is_allowed(database: Path) -> None:
    with pytest.raises(SalesQueryError, match="only one reading SELECT"):
        query(database, "DELETE FROM sale")


def test_writes_are_refused_even_without_the_authorizer(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allow(*_: object) -> int:
        return sqlite3.SQLITE_OK

    monkeypatch.setattr(sales_query, "_authorize", allow)
    for sql in ("DELETE FROM sale", f"ATTACH '{database.parent / 'new.sqlite'}' AS other"):
        with pytest.raises(SalesQueryError):
            query(database, sql)
    assert query(database, "SELECT count(*) FROM sale").rows == ((4,),)
    assert not (database.parent / "new.sqlite").exists()


@pytest.mark.parametrize("parameters", [(2**70,), (object(),), {"a": 1}])
def test_unusable_parameters_are_an_error_of_the_query(
    database: Path, parameters: tuple[int, ...]
) -> None:
    with pytest.raises(SalesQueryError):
        query(database, "SELECT ?", parameters)


def test_an_endless_query_stops_at_the_time_limit(database: Path) -> None:
    with pytest.raises(SalesQueryError, match=r"longer than 0\.01 seconds"):
        query(database, ENDLESS.format("max(i)"), time_max_s=0.01)


def test_costly_functions_stop_at_the_time_limit(database: Path) -> None:
    text = "hex(zeroblob(49000))"
    sql = ENDLESS.format(f"sum(instr({text}, substr({text}, 1, 49000) || i))")
    with pytest.raises(SalesQueryError, match="longer than"):
        query(database, sql, time_max_s=0.01)


def test_the_time_limit_is_counted_by_the_given_clock(database: Path) -> None:
    ticks = itertools.count()
    with pytest.raises(SalesQueryError, match="longer than 3 seconds"):
        query(
            database,
            ENDLESS.format("max(i)"),
            time_max_s=3,
            clock=lambda: float(next(ticks)),
        )
    assert next(ticks) == 5


def test_rows_beyond_the_limit_are_left_out_and_said_so(database: Path) -> None:
    result = query(database, ENDLESS.format("i"))
    assert (len(result.rows), result.truncated) == (1000, True)


@pytest.mark.parametrize(("rows_max", "truncated"), [(3, True), (4, False)])
def test_exactly_as_many_rows_as_the_limit_are_not_truncated(
    database: Path, rows_max: int, truncated: bool
) -> None:
    assert query(database, "SELECT 1 FROM sale", rows_max=rows_max).truncated is truncated


def test_bytes_beyond_the_limit_are_left_out_and_said_so(database: Path) -> None:
    result = query(database, ENDLESS.format("'ä'"), output_bytes_max=7)
    assert (len(result.rows), result.truncated) == (3, True)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT length(zeroblob(1000000000) || '')",
        "SELECT length(hex(zeroblob(60000)))",
    ],
)
def test_a_single_huge_value_is_refused(database: Path, sql: str) -> None:
    with pytest.raises(SalesQueryError, match="too big"):
        query(database, sql)


def test_every_cell_fits_into_json(database: Path) -> None:
    assert query(database, "SELECT x'00ff', 9e999, -9e999").rows == (("00ff", "inf", "-inf"),)


def test_a_missing_database_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(SalesQueryError, match="load the CSV first"):
        query(tmp_path / "none.sqlite", "SELECT 1")
    assert list(tmp_path.iterdir()) == []


def test_a_path_with_marks_of_an_address_is_opened_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "a?mode=rwc#b %41"
    folder.mkdir()
    assert query(load(folder, []), "SELECT count(*) FROM sale").rows == ((2,),)
