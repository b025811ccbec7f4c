"""What the project claims of the specification is proved by tests that say so."""

import pytest

from tests.docs.spec_coverage import COMMAND, ROOT, citations, load_rows, page

CLAIMED = {name: row for name, row in load_rows().items() if row.claimed == "yes"}


@pytest.mark.parametrize("name", list(CLAIMED))
def test_a_claimed_row_is_cited_by_a_test(name: str) -> None:
    tests = [test for test in citations().get(name, []) if test.name]
    assert tests, f"no test cites {name}: {CLAIMED[name].title}"


def test_what_is_not_claimed_says_why() -> None:
    for name, row in load_rows().items():
        assert (row.claimed == "yes") is (row.reason == ""), name
        assert row.claimed in {"yes", "part", "no"}, name


def test_the_page_is_up_to_date() -> None:
    path = ROOT / "docs" / "reference" / "spec-coverage.md"
    assert path.exists(), f"run: .venv/bin/{COMMAND}"
    assert path.read_text(encoding="utf-8") == page(), f"run: .venv/bin/{COMMAND}"
