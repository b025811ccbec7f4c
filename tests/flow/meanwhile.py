"""What happens between two reads of the same thing."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from perdure.service.base import Service
from perdure.store.reader import Reader
from perdure.testing.embedded import Embedded


class Meanwhile:
    """A reader that lets something happen once, before it answers one kind of question."""

    def __init__(
        self, reader: Reader, before: str, happens: Callable[[], Awaitable[object]]
    ) -> None:
        self._reader, self._before, self._happens = reader, before, happens
        self.is_due = True

    def __getattr__(self, name: str) -> object:
        found = getattr(self._reader, name)
        if name != self._before or not self.is_due:
            return found

        async def late(*args: object, **named: object) -> object:
            if self.is_due:
                self.is_due = False
                await self._happens()
            return await cast("Callable[..., Awaitable[object]]", found)(*args, **named)

        return late


def disturbed(engine: Embedded, before: str, happens: Callable[[], Awaitable[object]]) -> Service:
    """Return the service with a reader that is disturbed once."""
    reader = cast("Any", Meanwhile(engine.core.reader, before, happens))
    return Service(core=replace(engine.core, reader=reader))
