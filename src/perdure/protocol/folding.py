"""What a field holds after its writes, kept up as they come: one in order costs one merge (R-1.5).

A write that comes behind others is merged over what they made. Only one that stands before others
(branches and calls of one step end in any order) has those behind it merged anew.
"""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from pydantic import JsonValue

from perdure.protocol.fields import (
    Reducers,
    are_keys_side_by_side,
    is_key_before,
    merge_write,
    place_of,
)
from perdure.protocol.plain import no_items

Held = tuple[()] | tuple[JsonValue]
"""What a field holds; (): nothing."""


TOP_LEVEL = 2
"""How long the key of a place is that is in no branch."""


class _Write(NamedTuple):
    key: tuple[int, ...]
    place: str
    told: JsonValue


_key_of = attrgetter("key")


@dataclass(frozen=True, slots=True)
class Unmerged:
    """Writes that are not merged yet, by place, and what they are merged over."""

    writes: dict[str, JsonValue]
    over: Held
    of_change: int


@dataclass(slots=True)
class FoldedField:
    """The writes to one field in the order of their places, and what the first of them come to.

    Nothing is merged before it is asked for. Values are shared with the writes: who hands them on
    to others copies them.
    """

    base: Held = ()
    """What the field held before the writes."""
    _writes: list[_Write] = field(default_factory=no_items)
    _merged: int = 0
    """How many of the writes are merged, into `_held`."""
    _held: Held = ()
    _kept: tuple[int, Held] | None = None
    """What came before a write that was put between others: the next one will stand near it."""
    _between: int | None = None
    """The place in the order of the last write that was put between others."""
    _changes: int = 0
    _has_parallel: bool = False

    @property
    def first(self) -> dict[str, JsonValue] | None:
        """Return the first of its writes, which all are by one rule; None: there are none."""
        told = self._writes[0].told if self._writes else None
        return told if isinstance(told, dict) else None

    @property
    def rule(self) -> str | None:
        """Return the rule of its writes; None: there are none."""
        return str(self.first.get("rule")) if self.first is not None else None

    @property
    def has_parallel(self) -> bool:
        """Tell whether two writes stand side by side: then two do that follow each other."""
        return self._has_parallel

    def begin(self, base: Held) -> None:
        """Say what the field held before the writes."""
        self.base, self._kept = base, None
        self._go_back(0)

    def add(self, place: str, told: JsonValue) -> None:
        """Take a write, in the place of another one that stood there. Raises ValueError."""
        write = _Write(place_of(place), place, told)
        if not self._writes or self._writes[-1].key < write.key:
            self._writes.append(write)
            self._changes += 1
            self._look_beside(len(self._writes) - 1)
            return
        index = bisect_left(self._writes, write.key, key=_key_of)
        if self._writes[index].key == write.key:
            self._writes[index] = write
        else:
            self._writes.insert(index, write)
        self._go_back(index)
        self._between = index
        self._look_beside(index)

    def _look_beside(self, index: int) -> None:
        """Look at a write and those before and behind it."""
        near = self._writes[max(0, index - 1) : index + 2]
        self._has_parallel |= any(
            are_keys_side_by_side(one.key, other.key) for one, other in pairwise(near)
        )

    def leave_out(self, places: Collection[str]) -> None:
        """Forget writes."""
        found = [index for index, write in enumerate(self._writes) if write.place in places]
        if found:
            self._writes = [write for write in self._writes if write.place not in places]
            self._has_parallel = any(
                are_keys_side_by_side(one.key, other.key) for one, other in pairwise(self._writes)
            )
            self._go_back(found[0])

    def _go_back(self, index: int) -> None:
        """Forget what the writes from this one on came to."""
        self._changes += 1
        self._between = None
        if self._kept is not None and self._kept[0] > index:
            self._kept = None
        if self._merged > index or index == 0:
            self._merged, self._held = self._kept or (0, self.base)

    def copy(self) -> "FoldedField":
        """Return one that takes other writes from here on."""
        return FoldedField(
            base=self.base,
            _writes=list(self._writes),
            _merged=self._merged,
            _held=self._held,
            _kept=self._kept,
            _between=self._between,
            _has_parallel=self._has_parallel,
        )

    def writes(self, but: Collection[str] = ()) -> dict[str, JsonValue]:
        """Return the writes by place, but those at some places."""
        return {write.place: write.told for write in self._writes if write.place not in but}

    def seen_from(self, place: str) -> "FoldedField":
        """Return the field as an operation at a place sees it: by the writes that are past."""
        here = place_of(place)
        last = self._writes[-1].key if self._writes else here
        if len(here) == TOP_LEVEL and last < here:
            return self  # nothing stands beside the function's own level
        if all(is_key_before(write.key, here) for write in self._writes):
            return self
        past = [write for write in self._writes if is_key_before(write.key, here)]
        return FoldedField(base=self.base, _writes=past, _held=self.base)

    def value(self, reducers: Reducers | None = None) -> Held:
        """Return what the field holds. Raises ValueError for a write that does not fit."""
        if not self._merged:
            self._held = self.base
        for index in range(self._merged, len(self._writes)):
            if index == self._between:
                self._kept, self._between = (index, self._held), None
            write = self._writes[index]
            self._held = (merge_write(write.place, write.told, self._held, reducers or {}),)
            self._merged = index + 1
        return self._held

    def unmerged(self) -> Unmerged:
        """Return what is left to do, for somebody who does it elsewhere."""
        held = self._held if self._merged else self.base
        rest = {write.place: write.told for write in self._writes[self._merged :]}
        return Unmerged(rest, held, self._changes)

    def keep(self, done: Unmerged, held: Held) -> None:
        """Take what unmerged writes came to, unless other writes have come since."""
        if done.of_change == self._changes:
            self._merged, self._held = len(self._writes), held
