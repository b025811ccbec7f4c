"""Snippets of the documents run: Python blocks, and shell blocks that are marked with `run`.

The blocks of a document share a folder and run in their order. A Python block whose first line is
`# file: name.py` is kept under that name, so that later blocks can import it.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from perdure.ops.local_postgres import PROGRAMS_VARIABLE, local_postgres
from perdure.ops.settings import Settings
from perdure.protocol.log import EVENT_TYPES
from perdure.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WRITTEN = [page for page in PAGES if "reference" not in page.parts]

_BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    language: str
    marks: tuple[str, ...]
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [Block(language, tuple(marks.split()), text) for language, marks, text in found]


def runnable(page: Path) -> list[Block]:
    """Return the blocks that a test runs."""
    return [
        block for block in blocks_of(page) if block.language == "python" or "run" in block.marks
    ]


def environment(folder: Path) -> dict[str, str]:
    """Return an environment without settings from outside."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",
        "XDG_CONFIG_HOME": str(folder / "config"),
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PERDURE_LOG__LEVEL": "warning",
        "NO_COLOR": "1",
    }


def run(folder: Path, *command: str, **extra: str) -> None:
    """Run a command in a folder; fail with what it printed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(folder) | extra,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "page", [page for page in WRITTEN if runnable(page)], ids=lambda page: page.name
)
def test_the_snippets_of_a_document_run(page: Path, tmp_path: Path) -> None:
    """R-1.6 for the page of operations: its backup and restore are carried out."""
    for number, block in enumerate(runnable(page)):
        if block.language == "python":
            first = block.text.partition("\n")[0]
            name = (
                first.removeprefix("# file: ") if first.startswith("# file: ") else f"s{number}.py"
            )
            (tmp_path / name).write_text(block.text, encoding="utf-8")
            run(tmp_path, sys.executable, name)
        else:
            run(tmp_path, "sh", "-eu", "-c", block.text)


def programs() -> Path | None:
    """Return a folder of PostgreSQL's programs that has the dumping ones as well."""
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wanted = ("pg_dump", "pg_restore", "initdb")
    return next((at for at in folders if all((at / name).exists() for name in wanted)), None)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(programs() is None, reason="needs PostgreSQL's programs with pg_dump")
def test_a_postgres_backup_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R-1.6: the commands of the page of operations, on a server of their own version."""
    folder = programs()
    assert folder is not None
    monkeypatch.setenv(PROGRAMS_VARIABLE, str(folder))
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ.get('PATH', '')}")
    (block,) = [
        block for block in blocks_of(ROOT / "docs" / "operations.md") if "postgres" in block.marks
    ]
    (tmp_path / "shop.py").write_text(blocks_of(ROOT / "docs" / "quickstart.md")[1].text)
    with local_postgres() as server:
        source, copy = server.create_database("source"), server.create_database("copy")
        start = "perdure run shipper --input '\"one\"' --here --agents shop:registry --timeout 20 || test $? = 3"
        run(tmp_path, "sh", "-eu", "-c", start, PERDURE_DB__URL=source)
        run(tmp_path, "sh", "-eu", "-c", block.text, PERDURE_DB__URL=source, RESTORE_URL=copy)
        shown = "perdure runs list --json | grep -q waiting_human"
        run(tmp_path, "sh", "-eu", "-c", shown, PERDURE_DB__URL=copy)


def test_every_document_that_is_promised_is_there() -> None:
    names = """quickstart concepts how-to/write-a-tool how-to/write-an-agent
        how-to/answer-interrupts add-a-store add-a-binding operations glossary reference/cli
        reference/settings reference/events reference/decisions reference/context reference/states reference/failures
        reference/problems reference/invariants reference/spec-coverage"""
    assert [name for name in names.split() if not (ROOT / "docs" / f"{name}.md").exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    broken = [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert broken == []


def test_the_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "quickstart.md"):
        for target in re.findall(
            r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE
        ):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    ("value", "is_on"), [("1", True), ("yes", True), ("true", True), ("0", False), ("no", False)]
)
def test_a_switch_of_the_demo_is_on_with_any_value_that_says_so(value: str, *, is_on: bool) -> None:
    shown = subprocess.run(
        ["make", "-n", "demo", f"YES={value}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ("perdure demo --yes" in shown) is is_on


def test_every_path_of_the_api_that_a_document_names_is_served() -> None:
    served = (ROOT / "docs" / "reference" / "openapi.json").read_text(encoding="utf-8")
    known = {re.sub(r"\{\w+\}", "*", path) for path in re.findall(r'"(/v1/[^"]*)"', served)}
    for page in WRITTEN:
        for path in re.findall(r"/v1/[\w/{}…]+", page.read_text(encoding="utf-8")):
            parts = path.strip("/").split("/")
            fits = [
                pattern
                for pattern in known
                if len(parts) == len(pattern.strip("/").split("/"))
                and all(
                    b in {"*", a} for a, b in zip(parts, pattern.strip("/").split("/"), strict=True)
                )
            ]
            assert fits, f"{page.name}: {path}"


def test_every_setting_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    names: list[str] = []
    for name, field in Settings.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        names += [f"{name}.{key}" for key in inner] if inner else [name]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_metric_is_in_the_page_of_operations() -> None:
    """R-17.3: by the name that is exported, for an alert that is copied to fire."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    series = {
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in Metrics().registry.collect()
    }
    assert sorted(name for name in series if f"`{name}`" not in page) == []


def test_the_glossary_has_the_objects_of_the_protocol() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = ("run", "thread", "step", "tool call", "interrupt", "artifact", "checkpoint", "attempt")
    assert [word for word in words if f"| {word} |" not in page] == []
    assert "event" in page
    assert EVENT_TYPES
