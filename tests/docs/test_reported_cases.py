"""Every reported case is proved by a test that cites it, or says why it cannot apply yet."""

import pytest

from tests.docs.reported_cases import COMMAND, PAGE, load_cases, load_groups, page, proofs_of
from tests.docs.spec_coverage import citations

CASES = load_cases()


@pytest.mark.parametrize("name", list(CASES))
def test_a_case_has_a_test_or_a_reason(name: str) -> None:
    has_test, has_reason = bool(proofs_of(citations(), name)), bool(CASES[name].reason)
    assert has_test is not has_reason, f"{name}: a test that cites it, or a reason, and not both"


def test_what_tests_cite_is_on_the_page() -> None:
    known = tuple(f"{group}-" for group in load_groups())
    assert {name for name in citations() if name.startswith(known)} <= set(CASES)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.exists(), f"run: .venv/bin/{COMMAND}"
    assert PAGE.read_text(encoding="utf-8") == page(), f"run: .venv/bin/{COMMAND}"
