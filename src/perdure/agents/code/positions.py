"""Positions of operations, and what a journal says about their order.

An operation's position is a path: its index in its branch, behind the path of the branch. The
function itself is the branch without a path; `gather` at index 2 opens the branches `2.0`, `2.1`,
…, whose operations are `2.0.0`, `2.0.1`, …
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from perdure.protocol.errors import Invalid

POSITION_CHARACTERS_MAX = 200
MARK = "~"
"""Between a branch and the id of a version marker: `2.0~id`. Markers are not numbered."""


@dataclass(slots=True, eq=False)
class Branch:
    """A line of operations, one at a time. `count` is how many it has asked for."""

    path: str = ""
    count: int = 0
    is_waiting: bool = False

    def take(self) -> str:
        """Return the position of the next operation."""
        position = at(self.path, self.count)
        self.count += 1
        return position

    def marker(self, name: str) -> str:
        """Return the position of a version marker."""
        return _bounded(f"{self.path}{MARK}{name}")


def at(path: str, index: int) -> str:
    """Return the position at an index of a branch."""
    return _bounded(f"{path}.{index}" if path else str(index))


def _bounded(position: str) -> str:
    if len(position) > POSITION_CHARACTERS_MAX:
        raise Invalid(f"a position has at most {POSITION_CHARACTERS_MAX} characters: nest less")
    return position


def levels(position: str) -> list[tuple[str, int]]:
    """Return branch and index of an operation, and those of the gathers around it."""
    parts = position.split(".")
    return [(".".join(parts[:end]), int(parts[end])) for end in range(0, len(parts), 2)]


def is_past(position: str, other: str) -> bool:
    """Tell whether whoever asks at a position has been at another one: in its branch, or in one
    around it.
    """
    if MARK in position:
        return False
    been = dict(levels(position))
    return any(been.get(path, -1) > index for path, index in levels(other))


@dataclass(slots=True)
class Order:
    """How far each branch had come by its journal."""

    _last: dict[str, int] = field(default_factory=dict[str, int])
    _branches: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def of(cls, positions: Iterable[str]) -> "Order":
        """Return the order of recorded positions."""
        order = cls()
        for position in positions:
            if MARK not in position:
                order._note(position)
        return order

    def _note(self, position: str) -> None:
        for path, index in levels(position):
            self._last[path] = max(self._last.get(path, -1), index)
            if path:
                gather, _, branch = path.rpartition(".")
                self._branches[gather] = max(self._branches.get(gather, -1), int(branch))

    def last(self, path: str) -> int:
        """Return the last index recorded in a branch, -1 for none."""
        return self._last.get(path, -1)

    def has_branches(self, position: str) -> bool:
        """Tell whether a gather was recorded at a position."""
        return position in self._branches

    def last_branch(self, position: str) -> int:
        """Return the last branch recorded of a gather, -1 for none."""
        return self._branches.get(position, -1)

    def passed(self, position: str) -> str | None:
        """Return a recorded position that came after this one, or None."""
        for path, index in levels(position):
            if self.last(path) > index:
                return at(path, self.last(path))
        return None
