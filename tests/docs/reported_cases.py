"""Which tests prove which reported case: `python -m tests.docs.reported_cases FOLDER`.

The page is made from the ids that tests cite (as for the rows of the specification) and from
`docs/reported_cases.toml`, which has the titles, and the reason of each case that cannot apply yet.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.spec_coverage import ROOT, Test, citations

CASES = ROOT / "docs" / "reported_cases.toml"
PAGE = ROOT / "docs" / "reference" / "reported-cases.md"
COMMAND = "python -m tests.docs.reported_cases docs/reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is said of a case."""

    title: str
    reason: str = ""
    waits: str = ""
    note: str = ""


def load_groups() -> dict[str, str]:
    """Return the titles of the groups."""
    return _data()["groups"]


def load_cases() -> dict[str, Case]:
    """Return the cases of the data file, in its order."""
    return {name: Case(**fields) for name, fields in _data()["cases"].items()}


def _data() -> dict[str, Any]:
    with CASES.open("rb") as file:
        return tomllib.load(file)


def proofs_of(cited: Mapping[str, Sequence[Test]], name: str) -> list[Test]:
    """Return the tests that cite a case; a module's own docstring proves nothing by itself."""
    return [test for test in cited.get(name, []) if test.name]


_HEAD = """\
# Reported cases

What broke in other systems, and the tests that show what happens here instead. A case without a
test says why it cannot apply yet; "waits" names what of a case comes with later work.
"""


def page() -> str:
    """Return the page."""
    cited, cases = citations(), load_cases()
    parts = [f"<!-- made by `{COMMAND}`; do not edit -->\n\n", _HEAD]
    for group, title in load_groups().items():
        parts.append(f"\n## {group}: {title}\n\n| case | what | tests |\n|---|---|---|\n")
        for name, case in cases.items():
            if name.startswith(f"{group}-"):
                tests = "<br>".join(f"`{test}`" for test in proofs_of(cited, name))
                notes = [
                    f"Cannot apply yet: {case.reason}." if case.reason else "",
                    f"Waits: {case.waits}." if case.waits else "",
                    f"{case.note}." if case.note else "",
                ]
                last = "<br>".join(text for text in (tests, *notes) if text)
                parts.append(f"| {name} | {case.title} | {last} |\n")
    return "".join(parts)


if __name__ == "__main__":
    (Path(sys.argv[1]) / PAGE.name).write_text(page(), encoding="utf-8")
