"""stdout is data, and every command and setting is documented."""

import json
from pathlib import Path

import pytest
import typer

from perdure.cli.commands import COMMANDS, leaves, load
from perdure.cli.reference import cli_page, settings_page
from tests.cli.program import Program
from tests.cli.shop import REFERENCE

PAGES = Path(__file__).parents[2] / "docs" / "reference"

READING = [
    ("runs", "list"),
    ("interrupts", "list"),
    ("agents", "list"),
    ("db", "upgrade"),
    ("config", "show"),
    ("config", "show", "--sources"),
    ("verify",),
]


@pytest.mark.parametrize("words", READING)
def test_json_is_one_document_with_sorted_keys(perdure: Program, words: tuple[str, ...]) -> None:
    perdure("run", "ships", "--here", "--agents", REFERENCE)
    done = perdure(*words, "--json")
    assert done.code == 0
    assert done.out == json.dumps(done.json, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("words", [*READING, ("--help",), ("runs", "--help"), ("nonsense",)])
def test_there_are_no_escape_sequences_in_pipes(perdure: Program, words: tuple[str, ...]) -> None:
    done = perdure(*words)
    assert "\x1b" not in done.out + done.err


def test_a_schema_that_is_behind_is_told_by_the_exit_code(perdure: Program) -> None:
    before = perdure("db", "status", "--json")
    assert (before.code, before.json["database_version"]) == (1, 0)
    assert not (perdure.folder / ".perdure").exists()
    assert perdure("db", "upgrade").code == 0
    after = perdure("db", "status", "--json")
    assert (after.code, after.json["pending"]) == (0, [])


def test_every_leaf_command_prints_json(perdure: Program) -> None:
    for command in COMMANDS:
        found = load(command)
        if isinstance(found, typer.Typer):
            for _, callback in leaves(found):
                assert "json" in callback.__annotations__, callback
        else:
            assert "json" in found.__annotations__, command


def test_the_version_is_printed(perdure: Program) -> None:
    done = perdure("--version")
    assert (done.code, done.out.split()[0]) == (0, "perdure")


def test_the_help_of_the_program_names_every_command(perdure: Program) -> None:
    listed = perdure("--help").out
    for command in COMMANDS:
        assert command.help in " ".join(listed.split()), command


def test_the_page_of_commands_is_up_to_date() -> None:
    assert (PAGES / "cli.md").read_text(encoding="utf-8") == cli_page()


def test_the_page_of_settings_is_up_to_date() -> None:
    assert (PAGES / "settings.md").read_text(encoding="utf-8") == settings_page()
