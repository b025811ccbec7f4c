"""Stored rows that cannot be read: one of them is told, and keeps nobody from all the others."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, TypeVar

from perdure.protocol.errors import Unreadable

log = logging.getLogger(__name__)

BROKEN = (ValueError, TypeError, LookupError, ArithmeticError)
"""What reading a damaged row may raise; arithmetic for a time beyond those that there are."""

FIRST_TIME: Final = datetime.min.replace(tzinfo=UTC)
"""Stands for a due time that is damaged and before all times: whoever acts on it looks at the run."""

OnUnreadable = Callable[[str, str], None]
"""Is told the id of a row that a list leaves out, and why."""

_Row = TypeVar("_Row")
_T = TypeVar("_T")


def read(convert: Callable[[_Row], _T], row: _Row) -> _T:
    """Return what a row holds; raise Unreadable when it is damaged."""
    try:
        return convert(row)
    except BROKEN as error:
        raise unreadable(error) from error


def unreadable(error: Exception) -> Unreadable:
    """Return the error that a caller meets, without the data itself."""
    lines = str(error).splitlines() or [type(error).__name__]
    return Unreadable(f"a stored row cannot be read: {lines[0][:300]}")


def log_unreadable(key: str, reason: str) -> None:
    """Tell an operator of a row that a list leaves out."""
    log.error("%s is left out of a list: %s", key, reason)
