"""Writes the page of invariants: `python -m tests.ops.invariants docs/reference`.

It is made from the table of checks and from the mutants that prove them.
"""

import sys
from pathlib import Path

from perdure.ops.verify.docs import table
from tests.ops.verify_mutants import by_check

COMMAND = "python -m tests.ops.invariants docs/reference"
NAME = "invariants.md"


def page() -> str:
    """Return the page."""
    return f"<!-- made by `{COMMAND}`; do not edit -->\n\n{table(by_check())}"


if __name__ == "__main__":
    (Path(sys.argv[1]) / NAME).write_text(page(), encoding="utf-8")
