"""Whatever word a command line has, the program says what is wrong with it and breaks nowhere."""

from collections.abc import Iterator
from typing import cast

import pytest
import typer
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from perdure.cli.commands import COMMANDS, load
from perdure.ops.exits import ExitCode
from tests.cli.program import Program
from tests.cli.shop import REFERENCE

SERVES = {"serve", "worker", "demo", "bench"}
"""They go on until they are stopped, or take long."""
LEFT = {"--db", "--agents"}
"""Where the program works, which these tests decide."""
ODD = st.sampled_from(
    [
        *(
            "",
            " ",
            "a\nb",
            "\u2028",
            "\ufeffx",
            "\u202ex",
            "\U0001f600",
            "\x7f\x1b[31m",
            "\udcff\udc80",
        ),
        *("../../etc/passwd", "@", "@/", "@/nowhere", "x" * 300, "é" * 128, "\U0001f600" * 5000),
        *(
            "null",
            "0",
            "-1",
            "1e400",
            "NaN",
            "9" * 400,
            "9" * 5000,
            "1e308",
            "0x10",
            "[",
            "{}",
            "[1]",
        ),
        *('{"a":1,"a":2}', '"\\ud83d"', '{"a":"\\u0000"}', "[" * 1000, "run_" + "0" * 32),
        *("PT1H", "2026-13-01", "-9999-01-01T00:00:00Z", "10000-01-01T00:00:00Z", "1" + "0" * 30),
    ]
) | st.text(st.characters(exclude_characters="\0"), max_size=12)


def _leaves() -> Iterator[tuple[tuple[str, ...], TyperCommand]]:
    """Yield every command that ends by itself, with the words that lead to it."""
    for command in COMMANDS:
        if command.name in SERVES:
            continue
        found = load(command)
        if not isinstance(found, typer.Typer):
            app = typer.Typer(add_completion=False)
            app.command()(found)
            yield (command.name,), cast("TyperCommand", typer.main.get_command(app))
            continue
        group = typer.main.get_command(found)
        assert isinstance(group, TyperGroup)
        for name, inner in group.commands.items():
            yield (command.name, name), cast("TyperCommand", inner)


def _places() -> list[tuple[tuple[str, ...], TyperCommand, TyperArgument | TyperOption]]:
    return [
        (words, command, parameter)
        for words, command in _leaves()
        for parameter in command.params
        if isinstance(parameter, TyperArgument | TyperOption)
        and not (isinstance(parameter, TyperOption) and (parameter.is_flag or parameter.count))
        and not LEFT & set(parameter.opts)
    ]


PLACES = _places()


def _line(
    place: tuple[tuple[str, ...], TyperCommand, TyperArgument | TyperOption], odd: str
) -> list[str]:
    """Return the words of a command with something odd at one place."""
    words, command, parameter = place
    line = [*words, "--json"]
    if words == ("run",):
        line += ["--here", "--agents", REFERENCE, "--timeout", "5"]
    if isinstance(parameter, TyperOption):
        line.append(f"{parameter.opts[-1]}={odd}" if parameter.opts[-1][:2] == "--" else odd)
    line.append("--")
    for one in command.params:
        if isinstance(one, TyperArgument):
            known = "echo" if one.name == "agent" else "run_" + "0" * 32
            line.append(odd if one is parameter else known)
    return line


@pytest.mark.timeout(90)
@settings(
    max_examples=15,
    derandomize=True,
    deadline=None,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.function_scoped_fixture,
        HealthCheck.data_too_large,
    ],
)
@given(place=st.sampled_from(PLACES), odd=ODD)
def test_no_word_breaks_a_command(
    perdure: Program,
    place: tuple[tuple[str, ...], TyperCommand, TyperArgument | TyperOption],
    odd: str,
) -> None:
    """F36, F38, R-19.9: an exit code of ours, one line that tells why, no traceback."""
    done = perdure(*_line(place, odd))
    assert done.code in set(ExitCode), (place, done)
    assert "Traceback" not in done.err, (place, done)
    assert done.code == 0 or done.err.strip(), (place, done)
