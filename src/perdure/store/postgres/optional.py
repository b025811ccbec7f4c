"""Statements with optional parts: `/*[name]*/ … /*[]*/` is left out when the part is not present.

`/*[!name]*/` is the other way round. Parameters that nothing names any more are left out too.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Final

from perdure.store.postgres.statements import SQL

_PART: Final = re.compile(r"/\*\[(!?)(\w+)\]\*/(.*?)/\*\[\]\*/", re.DOTALL)
_PARAMETER: Final = re.compile(r"\$(\d+)")


@cache
def compose(name: str, present: frozenset[str]) -> tuple[str, tuple[int, ...]]:
    """Return a statement with the parts that are present, and which of its arguments it takes."""

    def chosen(found: re.Match[str]) -> str:
        return found[3] if (found[2] in present) is not bool(found[1]) else ""

    text = _PART.sub(chosen, SQL[name])
    taken = sorted({int(number) for number in _PARAMETER.findall(text)})
    places = {number: place for place, number in enumerate(taken, start=1)}
    text = _PARAMETER.sub(lambda found: f"${places[int(found[1])]}", text)
    return text, tuple(number - 1 for number in taken)


def call(
    name: str, present: frozenset[str], arguments: Sequence[object]
) -> tuple[str, Sequence[object]]:
    """Return a statement as it is sent, and the arguments it takes of all there are."""
    text, taken = compose(name, present)
    return text, [arguments[place] for place in taken]
