"""The ceilings of CONTRIBUTING.md: a file that outgrows one is cut where its matter changes."""

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70


def test_files_and_functions_stay_readable() -> None:
    """No file of the source is over 500 lines, no function over 70."""
    over: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > FILE_LINES_MAX:
            over.append(f"{path.relative_to(SOURCE)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES_MAX:
                    over.append(f"{path.relative_to(SOURCE)}: {node.name} has {length} lines")
    assert over == []
