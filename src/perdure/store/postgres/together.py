"""Reads by key that wait together travel together: one statement for all of them.

Whoever comes when nobody reads is the first reader: it asks for itself and for all who came in the
meantime. When it has its answer the next of those who wait takes its place. A read begins after it was
asked for, never before, so that it sees all that was committed then.

A damaged row fails the whole statement: each of its group is read by itself then. An outage is told to
all who have waited as long.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from perdure.store.postgres.driver import Row
from perdure.store.postgres.errors import is_damage, is_outage

GROUP_MAX = 64


@dataclass(slots=True, eq=False)
class _Look:
    """One who waits for a row: it is woken when that is there, and when it is to read for all."""

    key: str
    wake: "asyncio.Future[None]"
    is_alone: bool = False
    """It is read by itself: a row of its group is damaged."""
    is_done: bool = False
    row: Row | None = None
    error: Exception | None = None

    def answer(self, row: Row | None, error: Exception | None = None) -> None:
        if self.is_done:  # it was cancelled
            return
        self.is_done, self.row, self.error = True, row, error
        self.call()

    def call(self) -> None:
        if not self.wake.done():
            self.wake.set_result(None)


class Together:
    """Finds rows by key; `load` returns those that are there of so many keys."""

    def __init__(self, load: Callable[[Sequence[str]], Awaitable[Mapping[str, Row]]]) -> None:
        self._load = load
        self._waiting: list[_Look] = []
        self._reader: _Look | None = None

    async def find(self, key: str) -> Row | None:
        """Return the row of a key, or None; raise what the statement raised."""
        mine = _Look(key, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            if self._reader is None:
                self._reader = mine
            else:
                await mine.wake
            while not mine.is_done:
                await self._read()
        finally:
            self._leave(mine)
        if mine.error is not None:
            raise mine.error
        return mine.row

    def _leave(self, mine: _Look) -> None:
        mine.is_done = True  # whoever reads for it now does not let it wait again
        if mine in self._waiting:
            self._waiting.remove(mine)
        if self._reader is mine:
            self._reader = self._waiting[0] if self._waiting else None
            if self._reader is not None:
                self._reader.call()

    async def _read(self) -> None:
        """Read for the first who wait. Those whose reader was cancelled wait again."""
        most = 1 if self._waiting[0].is_alone else GROUP_MAX
        group, behind = self._waiting[:most], self._waiting[most:]
        self._waiting = behind[:]
        try:
            found = await self._load([look.key for look in group])
            for look in group:
                look.answer(found.get(look.key))
        except Exception as error:  # noqa: BLE001  # it is raised to each who asked
            if len(group) > 1 and is_damage(error):
                for look in group:
                    look.is_alone = True
            else:
                for look in (*group, *(behind if is_outage(error) else ())):
                    look.answer(None, error)
        finally:
            self._waiting = [look for look in (*group, *self._waiting) if not look.is_done]
