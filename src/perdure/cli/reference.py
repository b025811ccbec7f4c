"""Writes the reference of commands and settings: `python -m perdure.cli.reference docs/reference`.

Both pages are made from the code, and a test compares them.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from perdure.cli.commands import COMMANDS, build, leaves, load
from perdure.ops.exits import MEANING
from perdure.ops.settings import Settings

_MADE = "<!-- made by `python -m perdure.cli.reference docs/reference`; do not edit -->\n\n"

_CLI_HEAD = """\
# Command line

Data goes to stdout, progress and errors to stderr. `--json` prints one JSON document with sorted
keys, `--jsonl` one document a line. There are no colours where output is not a terminal, nor with
`NO_COLOR`. Commands work on the database itself, so no server is needed. An error is one
line, `error: code: message`; the code of a wrong command line is `usage`. Faults that were logged on
the way stand before it.

"""

_SETTINGS_HEAD = """\
# Settings

A command's flag goes before the environment, that before `./perdure.toml` or else `[tool.perdure]`
in `./pyproject.toml`, that before `$XDG_CONFIG_HOME/perdure/config.toml`, and that before the
default. `perdure config show --sources` tells what is in force and why. Names that end in `_s` are
seconds. Lists in the environment are separated by commas. Keep secrets in the environment or in a
file that only the service may read, not in flags.

| Setting | Environment | Default | Meaning |
|:--------|:------------|:--------|:--------|
"""


def cli_page() -> str:
    """Return the page of commands: the help of each, and the exit codes."""
    program = build(lambda _: True)
    parts = [_MADE + _CLI_HEAD, "## Exit codes\n\n| Code | Meaning |\n|-----:|:--------|\n"]
    parts += [f"| {code.value} | {text} |\n" for code, text in MEANING.items()]
    for words in _leaves():
        parts.append(f"\n## perdure {' '.join(words)}\n\n```text\n{_help(program, words)}```\n")
    return "".join(parts)


def settings_page() -> str:
    """Return the page of settings."""
    rows: list[str] = []
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            rows += [
                _row(f"{name}.{inner}", f"{name}__{inner}", inner_field)
                for inner, inner_field in section.model_fields.items()
            ]
        else:
            rows.append(_row(name, name, field))
    return _MADE + _SETTINGS_HEAD + "".join(rows)


def _leaves() -> Iterator[tuple[str, ...]]:
    for command in COMMANDS:
        found = load(command)
        if not isinstance(found, typer.Typer):
            yield (command.name,)
            continue
        for name, _ in leaves(found):
            yield command.name, name


def _help(program: typer.Typer, words: tuple[str, ...]) -> str:
    result = CliRunner().invoke(
        program,
        [*words, "--help"],
        prog_name="perdure",
        env={"COLUMNS": "100", "NO_COLOR": "1"},
        catch_exceptions=False,
    )
    return "\n".join(line.rstrip() for line in result.stdout.strip().splitlines()) + "\n"


def _row(name: str, variable: str, field: FieldInfo) -> str:
    meaning = field.description or ""
    choices = [value for value in get_args(field.annotation) if isinstance(value, str)]
    if choices:
        meaning += "; one of " + ", ".join(f"`{choice}`" for choice in choices)
    default = _default(field.get_default(call_default_factory=True, validated_data={}))
    cells = (f"`{name}`", f"`PERDURE_{variable.upper()}`", default, meaning.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |\n"


def _default(value: object) -> str:
    match value:
        case None:
            return "unset"
        case () | {}:
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case _:
            return f"`{value}`"


def write_pages(folder: Path) -> None:
    """Write both pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cli.md").write_text(cli_page(), encoding="utf-8")
    (folder / "settings.md").write_text(settings_page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
