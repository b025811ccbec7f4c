"""Every reported case and fault is proved by a test that cites it, or says why there is none yet."""

import pytest

from tests.docs.catalogues import CASES, COMMAND, FAULTS, Catalogue, proofs_of
from tests.docs.spec_coverage import ROOT, citations

BOTH = pytest.mark.parametrize("catalogue", [CASES, FAULTS], ids=lambda one: one.name)


@pytest.mark.parametrize(
    ("catalogue", "name"), [(one, name) for one in (CASES, FAULTS) for name in one.entries()]
)
def test_an_entry_has_a_test_or_a_reason(catalogue: Catalogue, name: str) -> None:
    has_test = bool(proofs_of(citations(), name))
    has_reason = bool(catalogue.entries()[name].reason)
    assert has_test is not has_reason, f"{name}: a test that cites it, or a reason, and not both"


@BOTH
def test_what_tests_cite_is_on_the_page(catalogue: Catalogue) -> None:
    known = tuple(catalogue.groups())
    assert {name for name in citations() if name.startswith(known)} <= set(catalogue.entries())


@BOTH
def test_the_page_is_up_to_date(catalogue: Catalogue) -> None:
    page = ROOT / "docs" / "reference" / catalogue.file
    assert page.exists(), f"run: .venv/bin/{COMMAND}"
    assert page.read_text(encoding="utf-8") == catalogue.page(), f"run: .venv/bin/{COMMAND}"
