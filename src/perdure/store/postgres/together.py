"""Reads by key that wait together travel together: one statement for all of them.

Whoever comes when nobody reads is the first reader: it asks for itself and for all who came in the
meantime. When it has its answer the next of those who wait takes its place. A read begins after it was
asked for, never before, so that it sees all that was committed then.

A connection that has fallen silent keeps its reader waiting and nobody else: after `OVERDUE_S` the next
one reads for the others, by another connection, and whatever comes first is the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perdure.store.postgres.driver import Row

GROUP_MAX = 64
OVERDUE_S = 0.5
"""Longer than a read takes, also of a server that has much to do."""


@dataclass(slots=True, eq=False)
class _Look:
    """One who waits for a row: it is woken when that is there, and when it is to read for all."""

    key: str
    wake: "asyncio.Future[None]"
    is_done: bool = False
    row: Row | None = None
    error: Exception | None = None

    def answer(self, row: Row | None, error: Exception | None) -> None:
        """Take what was read; a row counts more than what failed before."""
        self.row, self.error, self.is_done = row, error, True
        self.call()

    def call(self) -> None:
        """Wake it."""
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
                await self._read(mine)
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
            self._pass_on()

    def _pass_on(self) -> None:
        self._reader = self._waiting[0] if self._waiting else None
        if self._reader is not None:
            self._reader.call()

    def _wait_again(self, looks: Iterable[_Look]) -> None:
        self._waiting[:0] = [look for look in looks if not look.is_done]

    def _overtake(self, reader: _Look, group: Sequence[_Look]) -> None:
        self._wait_again(look for look in group if look is not reader)
        self._pass_on()

    async def _read(self, mine: _Look) -> None:
        """Read for the first who wait. Those whose reader was cancelled wait again."""
        group, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
        loop = asyncio.get_running_loop()
        overdue = loop.call_later(OVERDUE_S, self._overtake, mine, group)
        try:
            found = await self._load([look.key for look in group])
            for look in group:
                look.answer(found.get(look.key), None)
        except Exception as error:  # noqa: BLE001  # it is raised to each who still waits
            for look in group:
                if not look.is_done:
                    look.answer(None, error)
        finally:
            overdue.cancel()
            if self._reader is mine:  # else others read for them already
                self._wait_again(group)
