"""The invented sales: the same for a seed, and with everything the demo wants to show."""

import csv
import io
from collections import Counter
from pathlib import Path

from perdure.demo.sales import open_sales
from perdure.demo.sample import SEED, sample_bytes, write_sample


def records() -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(sample_bytes(SEED).decode(), newline="")))


def test_equal_seeds_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    write_sample(tmp_path / "a.csv")
    write_sample(tmp_path / "b.csv", seed=1)
    assert (tmp_path / "a.csv").read_bytes() == sample_bytes(20111114)
    assert (tmp_path / "b.csv").read_bytes() == sample_bytes(1) != sample_bytes(20111114)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_the_sample_has_about_two_thousand_lines_of_three_countries() -> None:
    countries = Counter(record["country"] for record in records())
    assert set(countries) == {"United Kingdom", "Germany", "France"}
    assert 1_900 <= countries.total() <= 2_100
    assert min(countries.values()) >= 200


def test_the_sample_covers_a_part_of_a_week_and_two_full_ones() -> None:
    days = sorted({record["invoice_date"][:10] for record in records()})
    assert (days[0], days[-1], len(days)) == ("2011-11-09", "2011-11-27", 19)


def test_the_sample_has_cancellations_commas_postage_and_codes_that_differ_in_case() -> None:
    lines = records()
    assert sum(record["quantity"].startswith("-") for record in lines) >= 20
    assert all(
        record["invoice_no"].startswith("C") == (int(record["quantity"]) < 0) for record in lines
    )
    assert any("," in record["description"] for record in lines)
    assert any(record["description"].endswith(" ") for record in lines)
    assert {"POST", "85123A", "85123a"} <= {record["stock_code"] for record in lines}


def test_any_seed_gives_a_file_that_loads(tmp_path: Path) -> None:
    for seed in range(5):
        write_sample(tmp_path / "sample.csv", seed=seed)
        assert open_sales(tmp_path / "sample.csv", tmp_path / "sales.sqlite").countries == 3
