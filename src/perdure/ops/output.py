"""How commands speak: data on stdout, everything else on stderr, no colours.

What prints data raises Invalid when stdout is closed or takes no more. A reader that has gone away
is no error: the program ends.
"""

import json
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TextIO

import orjson
from pydantic import BaseModel, JsonValue

from perdure.ops.timeline import short
from perdure.protocol.errors import Invalid, PerdureError

CELL_CHARACTERS_MAX = 60


def print_json(value: object) -> None:
    """Print one JSON document with sorted keys."""
    text = orjson.dumps(value, default=_json_of, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
    print_line(text.decode())


def print_line(text: str) -> None:
    """Print one line of data."""
    with _stdout() as stdout:
        stdout.write(text + "\n")


def print_bytes(data: bytes) -> None:
    """Print content as it is. Raises Invalid for what could steer a terminal, on one."""
    with _stdout() as stdout:
        if stdout.isatty() and not _is_plain(data):
            raise Invalid("this is not plain text: give --out, or send stdout to a file")
        stdout.buffer.write(data)


@contextmanager
def _stdout() -> Generator[TextIO]:
    if sys.stdout is None:  # closed when the program was started
        raise Invalid("stdout is closed")
    try:
        yield sys.stdout
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is left in the buffer is written at the exit
        raise Invalid(f"stdout: {error.strerror}") from None


def _is_plain(data: bytes) -> bool:
    """Tell whether bytes are text without characters that steer a terminal."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return all(character.isprintable() or character in "\t\r\n" for character in text)


def print_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print aligned columns; nothing for no rows."""
    if not rows:
        return
    texts = [list(heads), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(line[place]) for line in texts) for place in range(len(heads))]
    for line in texts:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def print_fields(fields: Sequence[tuple[str, object]]) -> None:
    """Print names with their values, one a line; those without a value are left out."""
    shown = [(name, value) for name, value in fields if value not in (None, "", [])]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print_line(f"{name.ljust(width)}  {_cell(value, 10_000)}")


def print_value(head: str, value: JsonValue) -> None:
    """Print a value in full under a head, as JSON; what could steer a terminal is escaped."""
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2).decode()
    print_line(
        f"\n{head}\n" + "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)
    )


def note(text: str) -> None:
    """Print a line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def complain(error: PerdureError, named: Callable[[str], str] = str) -> None:
    """Print an error as one line on stderr; `named` turns its field into what was typed.

    A run that the error's details name and its message does not is named too.
    """
    where = f" ({named(error.field)})" if error.field else ""
    run_id = str(error.details.get("run_id") or "")
    which = f": {run_id}" if run_id and run_id not in error.message else ""
    note(f"error: {error.code}: {short(error.message, 2000)}{which}{where}")


def json_text(value: JsonValue) -> str:
    """Return a value as one line of JSON with sorted keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _escaped(character: str) -> str:
    return json.dumps(character).strip('"')


def _cell(value: object, characters_max: int = CELL_CHARACTERS_MAX) -> str:
    if isinstance(value, (dict, list)):
        return short(orjson.dumps(value, default=_json_of).decode(), characters_max)
    return short("-" if value is None else str(value), characters_max)


def _json_of(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value)
