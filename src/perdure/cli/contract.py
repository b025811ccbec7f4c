"""Writes the reference of the public contract: `python -m perdure.cli.contract docs/reference`.

Schemas, events, states, failures, problems and the OpenAPI document are made from the code; the
same code gives the same bytes, and a test compares them with what is committed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio

from perdure.ops.reference.context import context_page
from perdure.ops.reference.decisions import decisions_page
from perdure.ops.reference.events import events_page
from perdure.ops.reference.failures import failures_page
from perdure.ops.reference.schemas import schemas
from perdure.ops.reference.states import states_page
from perdure.ops.settings import Settings
from perdure.runtime import make_application, open_core
from perdure.server import problems

COMMAND = "python -m perdure.cli.contract docs/reference"

_MADE = f"<!-- made by `{COMMAND}`; do not edit -->\n\n"


def pages() -> dict[str, str]:
    """Return every file of the reference by its path within the folder."""
    found = {
        "context.md": _MADE + context_page(),
        "decisions.md": _MADE + decisions_page(),
        "events.md": _MADE + events_page(),
        "states.md": _MADE + states_page(),
        "failures.md": _MADE + failures_page(),
        "problems.md": problems.table(),
        "openapi.json": _text(openapi()),
    }
    return found | {f"schemas/{name}.json": _text(schema) for name, schema in schemas().items()}


def openapi() -> dict[str, Any]:
    """Return the OpenAPI document of the application as it is served."""
    with tempfile.TemporaryDirectory() as folder:
        return anyio.run(_openapi, Path(folder))


async def _openapi(folder: Path) -> dict[str, Any]:
    settings = Settings.model_validate({"db": {"url": f"sqlite:///{folder / 'perdure.db'}"}})
    async with open_core(settings) as core:
        return make_application(settings, core).app.openapi()


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write_pages(folder: Path) -> None:
    """Write the reference into a folder; schemas of objects that are gone are removed."""
    found = pages()
    (folder / "schemas").mkdir(parents=True, exist_ok=True)
    for path in (folder / "schemas").glob("*.json"):
        if f"schemas/{path.name}" not in found:
            path.unlink()
    for name, text in found.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
