"""The comparison of two weeks: what counts, how it is rounded, ordered and named."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.demo.sales import (
    FallingProduct,
    SalesDataError,
    falling_products,
    full_weeks,
    open_sales,
)
from perdure.demo.sample import write_sample
from tests.demo import independent
from tests.demo.shop import AFTER, BEFORE, IN_AFTER, load, sale

REGIONS = ("United Kingdom", "Germany", "France")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sample") / "sample.csv"
    write_sample(path)
    return path


def fallen(folder: Path, *lines: str) -> list[FallingProduct]:
    return falling_products(load(folder, lines), "Germany", BEFORE, AFTER)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("count", [5, 1000])
def test_the_sql_agrees_with_the_independent_computation(
    sample: Path, tmp_path: Path, region: str, count: int
) -> None:
    database = tmp_path / "sales.sqlite"
    open_sales(sample, database)
    before, after = full_weeks(database)[-2:]
    found = falling_products(database, region, before, after, limit=count)
    expected = independent.falling(sample, region, count)
    assert len(found) >= 5
    assert [dataclasses.asdict(product) for product in found] == [
        dataclasses.asdict(product) for product in expected
    ]


def test_the_independent_computation_runs_as_a_program(sample: Path) -> None:
    command = [sys.executable, independent.__file__, str(sample), "Germany"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert (answer["before"], answer["after"]) == ("2011-11-14", "2011-11-21")
    assert len(answer["products"]) == 5


def test_only_products_that_fell_are_named(tmp_path: Path) -> None:
    found = fallen(
        tmp_path,
        *(sale("FELL", 2, "1.00"), sale("FELL", 1, "1.00", at=IN_AFTER)),
        *(sale("SAME", 2, "1.00"), sale("SAME", 2, "1.00", at=IN_AFTER)),
        *(sale("ROSE", 2, "1.00"), sale("ROSE", 3, "1.00", at=IN_AFTER)),
    )
    assert found == [FallingProduct("FELL", "LANTERN", "2.00", "1.00", "-1.00")]


def test_a_product_without_sales_in_the_later_week_falls_to_nothing(tmp_path: Path) -> None:
    assert fallen(tmp_path, sale("GONE", 3, "1.25")) == [
        FallingProduct("GONE", "LANTERN", "3.75", "0.00", "-3.75")
    ]


def test_a_product_with_only_cancellations_later_falls_below_nothing(tmp_path: Path) -> None:
    assert fallen(tmp_path, sale("BACK", -2, "0.30", at=IN_AFTER)) == [
        FallingProduct("BACK", "LANTERN", "0.00", "-0.60", "-0.60")
    ]


def test_cancellations_lower_the_week_that_they_are_in(tmp_path: Path) -> None:
    lines = [sale("A", 10, "1.00"), sale("A", -4, "1.00"), sale("A", 5, "1.00", at=IN_AFTER)]
    assert fallen(tmp_path, *lines) == [FallingProduct("A", "LANTERN", "6.00", "5.00", "-1.00")]


def test_equal_falls_are_ordered_by_stock_code_as_written(tmp_path: Path) -> None:
    codes = ["b", "B", "a ", "a", "POST"]
    found = fallen(tmp_path, *(sale(code, 1, "5.00") for code in codes))
    assert [product.stock_code for product in found] == ["B", "POST", "a", "a ", "b"]


def test_codes_that_differ_in_case_or_spaces_are_different_products(tmp_path: Path) -> None:
    found = fallen(tmp_path, sale("85123A", 3, "1.00"), sale("85123a", 2, "1.00"))
    assert [(product.stock_code, product.before) for product in found] == [
        ("85123A", "3.00"),
        ("85123a", "2.00"),
    ]


def test_the_limit_keeps_the_largest_falls(tmp_path: Path) -> None:
    database = load(tmp_path, [sale(f"P{number}", number, "1.00") for number in range(1, 9)])
    found = falling_products(database, "Germany", BEFORE, AFTER, limit=3)
    assert [product.stock_code for product in found] == ["P8", "P7", "P6"]


def test_the_limit_keeps_the_first_codes_of_equal_falls(tmp_path: Path) -> None:
    database = load(tmp_path, [sale(code, 1, "5.00") for code in "dbca"])
    found = falling_products(database, "Germany", BEFORE, AFTER, limit=2)
    assert [product.stock_code for product in found] == ["a", "b"]


@pytest.mark.parametrize("limit", [0, -1, 1001])
def test_a_limit_out_of_range_is_refused(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ValueError, match="limit"):
        falling_products(load(tmp_path, []), "Nowhere", BEFORE, AFTER, limit=limit)


@pytest.mark.parametrize(
    ("quantity", "price", "cents"),
    [(1, "0.005", "0.01"), (1, "0.0049", None), (3, "0.0049", "0.01"), (1, "1.0150", "1.02")],
)
def test_the_exact_sum_is_rounded_to_cents_with_halves_away_from_zero(
    tmp_path: Path, quantity: int, price: str, cents: str | None
) -> None:
    found = fallen(tmp_path, sale("A", quantity, price))
    assert [product.before for product in found] == ([] if cents is None else [cents])


def test_a_negative_half_cent_is_rounded_away_from_zero(tmp_path: Path) -> None:
    assert [product.after for product in fallen(tmp_path, sale("A", -1, "0.005", at=IN_AFTER))] == [
        "-0.01"
    ]


def test_ranking_compares_the_rounded_cents(tmp_path: Path) -> None:
    found = fallen(tmp_path, sale("B", 1, "1.0049"), sale("A", 1, "1.0001"))
    assert [(product.stock_code, product.change) for product in found] == [
        ("A", "-1.00"),
        ("B", "-1.00"),
    ]


def test_money_is_added_without_binary_fractions(tmp_path: Path) -> None:
    found = fallen(tmp_path, *(sale("A", 1, "0.1") for _ in range(1005)))
    assert found[0].before == "100.50"


def test_prices_finer_than_the_usual_units_stay_exact(tmp_path: Path) -> None:
    assert fallen(tmp_path, sale("A", 1_000_000, "0.000001"))[0].before == "1.00"


def test_the_largest_accepted_line_stays_exact(tmp_path: Path) -> None:
    found = fallen(tmp_path, sale("A", 1_000_000, "999999.999999"))
    assert found[0].before == "999999999999.00"


def test_lines_of_other_regions_and_other_days_do_not_count(tmp_path: Path) -> None:
    found = fallen(
        tmp_path,
        sale("A", 1, "1.00"),
        sale("A", 9, "1.00", country="germany"),
        sale("A", 9, "1.00", at="2011-11-13 23:59:59"),
        sale("A", 9, "1.00", at="2011-11-28 00:00:00"),
    )
    assert [product.before for product in found] == ["1.00"]


def test_a_week_runs_from_the_first_to_the_last_second(tmp_path: Path) -> None:
    found = fallen(
        tmp_path,
        sale("A", 1, "1.00", at="2011-11-14 00:00:00"),
        sale("A", 1, "1.00", at="2011-11-20 23:59:59"),
        sale("A", 1, "1.00", at="2011-11-21 00:00:00"),
    )
    assert [(product.before, product.after) for product in found] == [("2.00", "1.00")]


def test_an_unknown_region_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    database = load(tmp_path, [sale("A", 1, "1.00")])
    with pytest.raises(SalesDataError, match="known: Germany, Nowhere"):
        falling_products(database, "germany", BEFORE, AFTER)


@pytest.mark.parametrize(
    ("names", "description"),
    [
        (["RED", "BLUE", "RED"], "RED"),
        (["RED ", " RED", "BLUE"], "RED"),
        (["RED", "BLUE"], "BLUE"),
        (["", " ", "RED"], "RED"),
        (["", "  "], ""),
        (["CAKE TINS, SET OF 3"], "CAKE TINS, SET OF 3"),
    ],
)
def test_the_description_is_the_most_frequent_trimmed_one(
    tmp_path: Path, names: list[str], description: str
) -> None:
    found = fallen(tmp_path, *(sale("A", 1, "1.00", name=name) for name in names))
    assert [product.description for product in found] == [description]


def test_the_description_comes_from_the_region_before_the_rest_of_the_file(tmp_path: Path) -> None:
    elsewhere = [sale("A", 1, "1.00", name="RED", country="France")] * 3
    found = fallen(tmp_path, sale("A", 1, "1.00", name="BLUE"), *elsewhere)
    assert [product.description for product in found] == ["BLUE"]


def test_the_rest_of_the_file_names_a_product_that_is_blank_in_the_region(tmp_path: Path) -> None:
    elsewhere = [sale("A", 1, "1.00", name=name, country="France") for name in ("RED", "", "")]
    found = fallen(tmp_path, sale("A", 1, "1.00", name=""), *elsewhere)
    assert [product.description for product in found] == ["RED"]
