"""How the objects are declared that each step of a run makes anew.

A frozen dataclass sets each field through `object.__setattr__`, and a call of `list[int]` notes
its type on the list in vain: the one makes an object four times as slow as it must be, the other
a list ten times.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def value(cls: type[_T]) -> type[_T]:
    """Make a dataclass that nobody changes: type checkers see to it, not the interpreter."""
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(cls)


no_items: Callable[[], list[Any]] = list
"""Returns a new list, as a field's `default_factory`."""


no_entries: Callable[[], dict[Any, Any]] = dict
"""Returns a new dictionary, as a field's `default_factory`."""
