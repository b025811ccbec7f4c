"""The reference is what the code says: generated, compared, nothing left out."""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import get_args

import jsonschema_rs

from perdure.cli import contract
from perdure.cli.contract import COMMAND
from perdure.ops.reference import schemas as schema_reference
from perdure.ops.reference.context import documented_context
from perdure.ops.reference.decisions import documented_fields, documented_kinds
from perdure.ops.reference.events import OWN_NAMES
from perdure.ops.reference.field_notes import FIELD_NOTES, note_of
from perdure.protocol.decisions import Decision
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import EVENT_TYPES
from perdure.protocol.states import RunState, RunStatus, StepStatus, ToolCallStatus
from perdure.tools import ToolContext

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"

# Made by the first test that needs them: each process of a test run imports this module.
pages = cache(contract.pages)
schemas = cache(schema_reference.schemas)


def test_a_page_is_up_to_date() -> None:
    """R-1.1, R-6.9: when this fails, run the command and look at the difference."""
    there = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*.*")}
    stale = [
        name
        for name, text in pages().items()
        if name not in there or there[name].read_text(encoding="utf-8") != text
    ]
    assert not stale, f"run: .venv/bin/{COMMAND}"


def test_no_schema_is_left_over() -> None:
    """R-1.1: a schema of an object that is gone would mislead."""
    there = {f"schemas/{path.name}" for path in (FOLDER / "schemas").iterdir()}
    assert there == {name for name in pages() if name.startswith("schemas/")}, f"run: {COMMAND}"


def test_a_schema_is_a_json_schema() -> None:
    """R-1.1: every stable object has a published JSON Schema."""
    assert schemas()
    assert [name for name, it in schemas().items() if not jsonschema_rs.meta.is_valid(it)] == []


def test_what_a_tool_may_read_of_its_context_is_told() -> None:
    """R-5.1: each name of `ToolContext` stands in the table of the page on tools."""
    page = (ROOT / "docs" / "how-to" / "write-a-tool.md").read_text(encoding="utf-8")
    told = " ".join(line for line in page.splitlines() if line.startswith("| `"))
    slots = [name for name in ToolContext.__slots__ if not name.startswith("_")]
    others = [name for name in vars(ToolContext) if not name.startswith("_")]
    for name in {*slots, *others} - {"request_stop", "close"}:  # these two are the runner's
        assert re.search(rf"`{name}[`(]", told), name


def test_every_field_of_an_event_has_its_line_and_no_line_is_left_over() -> None:
    """R-6.9: an event type or field without documentation fails here."""
    used: set[str] = set()
    for name in EVENT_TYPES:
        for field in schemas()[f"event-{name}"]["properties"]:
            assert note_of(name, field)
            own = f"{name}.{field}"
            used.add(own if own in FIELD_NOTES else field)
    assert set(FIELD_NOTES) == used


def test_every_decision_and_every_field_of_one_is_documented() -> None:
    """R-4.1: a planner's author finds each in one page."""
    assert documented_kinds() == set(get_args(get_args(Decision)[0]))
    shown, noted = documented_fields()
    assert shown == noted


def test_every_field_that_a_planner_reads_is_documented() -> None:
    """R-4.1: beside what it may return."""
    needed, noted = documented_context()
    assert needed == noted
    assert "| `turns` | list of Turn |" in pages()["context.md"]


def test_every_custom_event_of_the_runtime_is_documented() -> None:
    """R-6.9: each name that begins with `perdure.` and is written as an event stands in the page."""
    found: set[str] = set()
    for folder in ("engine", "protocol"):
        for path in (ROOT / "src" / "perdure" / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            found |= set(re.findall(r'^[A-Z_]+ = "(perdure\.\w+)"', text, re.MULTILINE))
    assert found == set(OWN_NAMES)


def test_every_event_type_code_and_state_is_documented() -> None:
    """R-2.1, R-2.4, R-6.2."""
    events, failures, states = (pages()[name] for name in ("events.md", "failures.md", "states.md"))
    assert [name for name in EVENT_TYPES if f"\n## {name}\n" not in events] == []
    assert [code for code in FailureCode if f"`{code}`" not in failures] == []
    words = [*RunState, *RunStatus, *StepStatus, *ToolCallStatus]
    assert [word for word in words if f"`{word}`" not in states] == []


def test_the_layers_in_the_picture_are_those_that_are_checked() -> None:
    """The picture in ARCHITECTURE.md is the import contract, line by line."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    picture = text.partition("## Layers")[2].split("```")[1].strip().splitlines()
    drawn = [_names(line.partition("  ")[0]) for line in picture]
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    checked = [_names(layer.replace("perdure.", "").strip("()")) for layer in layers]
    assert drawn == checked


def _names(line: str) -> set[str]:
    return {name.strip() for name in line.split("|")}
