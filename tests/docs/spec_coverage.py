"""Which tests cite which row of the specification: `python -m tests.docs.spec_coverage FOLDER`.

A test cites a row (R-2.1), a reported case (CAN-01), a fault (F03) or a decision by naming it in
its docstring, in a comment inside it, or in the docstring of its module or class. The page is made
from the tests and from `docs/spec_rows.toml`.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "docs" / "spec_rows.toml"
COMMAND = "python -m tests.docs.spec_coverage docs/reference"

_SUITES = ("tests", "src/perdure/testing/conformance")
_ROW = re.compile(r"\bR-\d+\.\d+\b")
_CASE = re.compile(r"\b[A-Z]{2,4}-\d{2}\b")
_FAULT = re.compile(r"\bF\d{2}\b")
_KINDS = (_ROW, _CASE, _FAULT)


@dataclass(frozen=True, slots=True, order=True)
class Test:
    """A test by its file and name; a module's own docstring counts as a test without a name."""

    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.path}::{self.name}" if self.name else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What is claimed of a row."""

    title: str
    claimed: Literal["yes", "part", "no"]
    reason: str = ""
    waits: str = ""


def load_rows() -> dict[str, Row]:
    """Return the rows of the data file, in its order."""
    with ROWS.open("rb") as file:
        data: dict[str, Any] = tomllib.load(file)
    return {name: Row(**fields) for name, fields in data["rows"].items()}


@cache
def citations() -> Mapping[str, Sequence[Test]]:
    """Return the tests that cite each id, in order. All tests are read once a process."""
    found: dict[str, set[Test]] = {}
    for suite in _SUITES:
        for path in sorted((ROOT / suite).rglob("*.py")):
            if "node_modules" in path.parts or not _has_tests(path):
                continue
            for test, text in _texts(path):
                for kind in _KINDS:
                    for name in kind.findall(text):
                        found.setdefault(name, set()).add(test)
    return {name: sorted(tests) for name, tests in found.items()}


def _has_tests(path: Path) -> bool:
    return path.name.startswith("test_") or "conformance" in path.parts


def _texts(path: Path) -> Iterator[tuple[Test, str]]:
    """Yield each test of a file with the text in which it may cite something."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    where = path.relative_to(ROOT).as_posix()
    yield Test(where, ""), ast.get_docstring(tree) or ""
    comments = _comments(source)
    for node in _definitions(tree):
        if not node.name.lower().startswith("test") and not isinstance(node, ast.ClassDef):
            continue
        text = ast.get_docstring(node) or ""
        if not isinstance(node, ast.ClassDef):
            last = node.end_lineno or node.lineno
            text += "\n".join(comments.get(line, "") for line in range(node.lineno, last + 1))
        yield Test(where, node.name), text


def _definitions(
    scope: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node)


def _comments(source: str) -> dict[int, str]:
    """Return the comments by line; none, and quickly, when no line with a `#` cites anything."""
    lines = [line for line in source.splitlines() if "#" in line]
    if not any(kind.search(line) for line in lines for kind in _KINDS):
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


_HEAD = """\
# Which tests prove which row

Made from the tests and `docs/spec_rows.toml`. A row that is claimed has at least one test that
cites it; what is claimed in part, or not, says why. "Waits" names halves that come with later work.

| row | what it says | claimed | tests | |
|---|---|---|---:|---|
"""


def page() -> str:
    """Return the page."""
    cited, rows = citations(), load_rows()
    parts = [f"<!-- made by `{COMMAND}`; do not edit -->\n\n", _HEAD]
    for name, row in rows.items():
        notes = [
            f"{row.reason}." if row.reason else "",
            f"Waits: {row.waits}." if row.waits else "",
        ]
        count = len(cited.get(name, []))
        text = " ".join(note for note in notes if note)
        parts.append(f"| {name} | {row.title} | {row.claimed} | {count} | {text} |\n")
    parts.append("\n## Tests of each row\n")
    parts += [_tests(name, cited.get(name, [])) for name in rows]
    others = sorted(set(cited) - set(rows), key=_order)
    for title, kind in (("Other rows", _ROW), ("Reported cases", _CASE), ("Faults", _FAULT)):
        parts.append(f"\n## {title}\n")
        parts += [_tests(name, cited[name]) for name in others if kind.fullmatch(name)]
    return "".join(parts)


def _tests(name: str, tests: Sequence[Test]) -> str:
    lines = "".join(f"- `{test}`\n" for test in tests) or "- none\n"
    return f"\n### {name}\n\n{lines}"


def _order(name: str) -> tuple[str, list[int]]:
    letters = re.sub(r"[\d.]+", "", name)
    return letters, [int(number) for number in re.findall(r"\d+", name)]


if __name__ == "__main__":
    (Path(sys.argv[1]) / "spec-coverage.md").write_text(page(), encoding="utf-8")
