"""Pages: opaque cursors, bounded limits, one shape of answer."""

import base64
import binascii
from typing import Annotated

from fastapi import Query

from perdure.protocol.errors import Malformed
from perdure.protocol.ids import is_id
from perdure.service.base import PAGE_LIMIT_DEFAULT, PAGE_LIMIT_MAX

CURSOR_CHARACTERS_MAX = 300

Limit = Annotated[
    int,
    Query(ge=1, le=PAGE_LIMIT_MAX, description="how many items at most"),
]
After = Annotated[
    str | None,
    Query(
        max_length=CURSOR_CHARACTERS_MAX,
        description="the `next` of the page before; opaque, bound to its list",
    ),
]
LIMIT_DEFAULT = PAGE_LIMIT_DEFAULT


def write_cursor(kind: str, key: str | None) -> str | None:
    """Return the cursor that stands for a key of a list; None stays None."""
    if key is None:
        return None
    return base64.urlsafe_b64encode(f"{kind}:{key}".encode()).decode().rstrip("=")


def read_cursor(kind: str, cursor: str | None) -> str | None:
    """Return the key in a cursor; raise Malformed for one that this list did not write."""
    if cursor is None:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        text = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise Malformed("not a cursor of this list", field="after") from None
    found, separator, key = text.partition(":")
    if found != kind or not separator or not key.isprintable():
        raise Malformed("not a cursor of this list", field="after")
    return key


def read_id(kind: str, prefix: str, cursor: str | None) -> str | None:
    """Return the id in a cursor; raise Malformed for anything else."""
    key = read_cursor(kind, cursor)
    if key is not None and not is_id(prefix, key):
        raise Malformed("not a cursor of this list", field="after")
    return key


def read_number(kind: str, cursor: str | None) -> int | None:
    """Return the number in a cursor; raise Malformed for anything else."""
    key = read_cursor(kind, cursor)
    if key is None:
        return None
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise Malformed("not a cursor of this list", field="after")
    return int(key)


def read_pair(kind: str, cursor: str | None) -> tuple[int, int] | None:
    """Return the two numbers in a cursor; raise Malformed for anything else."""
    key = read_cursor(kind, cursor)
    if key is None:
        return None
    first, _, second = key.partition(".")
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in (first, second)):
        raise Malformed("not a cursor of this list", field="after")
    return int(first), int(second)
