"""How commands speak: data on stdout, everything else on stderr, no colours."""

import sys
from collections.abc import Callable, Sequence

import orjson
from pydantic import BaseModel, JsonValue

from perdure.ops.timeline import short
from perdure.protocol.errors import PerdureError

CELL_CHARACTERS_MAX = 60


def print_json(value: object) -> None:
    """Print one JSON document with sorted keys."""
    text = orjson.dumps(value, default=_plain, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2)
    sys.stdout.write(text.decode() + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """Print one line of data."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


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


def note(text: str) -> None:
    """Print a line of progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def complain(error: PerdureError, named: Callable[[str], str] = str) -> None:
    """Print an error as one line on stderr; `named` turns its field into what was typed."""
    where = f" ({named(error.field)})" if error.field else ""
    note(f"error: {error.code}: {short(error.message, 2000)}{where}")


def json_text(value: JsonValue) -> str:
    """Return a value as one line of JSON with sorted keys."""
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


def _cell(value: object, characters_max: int = CELL_CHARACTERS_MAX) -> str:
    if isinstance(value, (dict, list)):
        return short(orjson.dumps(value, default=_plain).decode(), characters_max)
    return short("-" if value is None else str(value), characters_max)


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value)
