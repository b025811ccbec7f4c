"""Which tests prove which reported case and fault: `python -m tests.docs.catalogues FOLDER`.

Each page is made from the ids that tests cite (as for the rows of the specification) and from a
data file, which has the titles, and the reason of each entry that no test can prove yet.
"""

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.spec_coverage import ROOT, Test, citations

COMMAND = "python -m tests.docs.catalogues docs/reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is said of a case or fault."""

    title: str
    reason: str = ""
    waits: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """A page and the data file it is made from. An entry belongs to the group its id begins with."""

    name: str
    data: Path
    head: str

    @property
    def file(self) -> str:
        """Return the name of the page."""
        return f"{self.name}.md"

    def groups(self) -> dict[str, str]:
        """Return the titles of the groups by the beginning of their ids."""
        return self._load()["groups"]

    def entries(self) -> dict[str, Entry]:
        """Return the entries of the data file, in its order."""
        return {name: Entry(**fields) for name, fields in self._load()["entries"].items()}

    def page(self) -> str:
        """Return the page."""
        cited, entries = citations(), self.entries()
        parts = [f"<!-- made by `{COMMAND}`; do not edit -->\n\n", self.head]
        for group, title in self.groups().items():
            parts.append(f"\n## {title}\n\n| id | what | tests |\n|---|---|---|\n")
            for name, entry in entries.items():
                if name.startswith(group):
                    parts.append(f"| {name} | {entry.title} | {_last_cell(cited, name, entry)} |\n")
        return "".join(parts)

    def _load(self) -> dict[str, Any]:
        with self.data.open("rb") as file:
            return tomllib.load(file)


CASES = Catalogue(
    name="reported-cases",
    data=ROOT / "docs" / "reported_cases.toml",
    head="""\
# Reported cases

What broke in other systems, and the tests that show what happens here instead. A case without a
test says why it cannot apply yet; "waits" names what of a case comes with later work.
""",
)
FAULTS = Catalogue(
    name="faults",
    data=ROOT / "docs" / "faults.toml",
    head="""\
# Faults

What happens to processes, databases, clocks, clients, tools and models sooner or later, and the
tests that show how a run gets through. A fault without a test says why there is none yet; "waits"
names what of a fault comes with later work.
""",
)


def proofs_of(cited: Mapping[str, Sequence[Test]], name: str) -> list[Test]:
    """Return the tests that cite an id; a module's own docstring proves nothing by itself."""
    return [test for test in cited.get(name, []) if test.name]


def _last_cell(cited: Mapping[str, Sequence[Test]], name: str, entry: Entry) -> str:
    tests = "<br>".join(f"`{test}`" for test in proofs_of(cited, name))
    notes = [
        f"Cannot apply yet: {entry.reason}." if entry.reason else "",
        f"Waits: {entry.waits}." if entry.waits else "",
        f"{entry.note}." if entry.note else "",
    ]
    return "<br>".join(text for text in (tests, *notes) if text)


if __name__ == "__main__":
    for catalogue in (CASES, FAULTS):
        (Path(sys.argv[1]) / catalogue.file).write_text(catalogue.page(), encoding="utf-8")
