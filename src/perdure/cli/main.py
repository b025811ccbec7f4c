"""The program `perdure`: reads the command line, runs one command, reports one error."""

import os
import sys
from collections.abc import Callable

from perdure.cli.commands import Command, build
from perdure.cli.names import option_of
from perdure.ops.exits import ExitCode, exit_of_error, sole_error
from perdure.ops.output import complain
from perdure.protocol.errors import Invalid, PerdureError


def main() -> None:
    """Run the command of `sys.argv` and exit with its code. Errors are one line on stderr."""
    try:
        _check_words(sys.argv[1:])
        build(_wanted(sys.argv[1:]))()
    except PerdureError as error:
        complain(error, option_of)
        sys.exit(exit_of_error(error))
    except BaseExceptionGroup as group:
        error = sole_error(group)
        if not isinstance(error, PerdureError):
            raise
        complain(error, option_of)
        sys.exit(exit_of_error(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


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
