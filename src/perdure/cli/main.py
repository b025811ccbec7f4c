"""The program `perdure`: reads the command line, runs one command, reports one error."""

import os
import sys
from collections.abc import Callable

import typer

from perdure.cli.commands import Command, build
from perdure.cli.names import option_of
from perdure.ops.exits import ExitCode, exit_of_error, sole_error
from perdure.ops.output import complain, note
from perdure.ops.timeline import short
from perdure.protocol.errors import Invalid, PerdureError


def main() -> None:
    """Run the command of `sys.argv` and exit with its code. Errors are one line on stderr."""
    words = sys.argv[1:]
    try:
        _check_words(words)
        sys.exit(build(_wanted(words))(standalone_mode=False) or ExitCode.OK)
    except typer.TyperException as error:
        _complain_of_words(error)
        sys.exit(error.exit_code)
    except PerdureError as error:
        complain(error, lambda field: option_of(field, words))
        sys.exit(exit_of_error(error))
    except BaseExceptionGroup as group:
        error = sole_error(group)
        if isinstance(error, KeyboardInterrupt):
            sys.exit(ExitCode.INTERRUPTED)
        if not isinstance(error, PerdureError):
            raise
        complain(error, lambda field: option_of(field, words))
        sys.exit(exit_of_error(error))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(ExitCode.INTERRUPTED)


def _complain_of_words(error: typer.TyperException) -> None:
    """Say in one line what is wrong with a command line; a group alone is answered by its help."""
    text = error.format_message().replace(": Value error, ", ": ")  # the validator's own prefix
    if text.startswith("Usage: "):
        note(text)
        return
    context = getattr(error, "ctx", None)
    hint = f" (`{context.command_path} --help`)" if context is not None else ""
    note(f"error: usage: {short(text.rstrip('.'), 2000)}{hint}")


def _check_words(words: list[str]) -> None:
    """Raise Invalid for a word that is not UTF-8: nothing could be stored, sent or printed of it."""
    for place, word in enumerate(words, 1):
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise Invalid(f"word {place} of the command line is not UTF-8")


def _wanted(words: list[str]) -> Callable[[Command], bool]:
    """Return which commands a command line is about: its first word's, or all for completion."""
    first = next((word for word in words if not word.startswith("-")), None)
    completes = "_PERDURE_COMPLETE" in os.environ
    return lambda command: completes or command.name == first


if __name__ == "__main__":
    main()
