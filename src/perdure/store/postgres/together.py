"""Reads by key that wait together travel together: one statement for all of them.

Whoever comes when nobody reads is the first reader: it asks for itself and for all who came in the
meantime. When it has its answer the next of those who wait takes its place. A read begins after it was
asked for, never before, so that it sees all that was committed then.

A damaged row fails the whole statement: each of its group is read by itself then. An outage is told to
all who have waited as long. A connection that has fallen silent keeps its reader waiting and nobody
else: after `OVERDUE_S` the next one reads for the others, by another connection, and whatever comes
first is the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from perdure.store.postgres.driver import Row
from perdure.store.postgres.errors import is_damage, is_outage

GROUP_MAX = 64
OVERDUE_S = 0.5
"""Longer than a read takes, also of a server that has much to do."""


@dataclass(slots=True, eq=False)
class _Look:
    """One who waits for a row: it is woken when that is there, and when it is to read for all."""

    key: str
    wake: "asyncio.Future[None]"
    is_done: bool = False
    """It has its answer, or has gone."""
    row: Row | None = None
    error: Exception | None = None

    def answer(self, row: Row | None, error: Exception | None = None) -> None:
        """Take what came first."""
        if not self.is_done:
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
        """The one who takes who waits; a reader before it may still be on its way."""

    async def find(self, key: str) -> Row | None:
        """Return the row of a key, or None; raise what the statement raised."""
        mine = _Look(key, asyncio.get_running_loop().create_future())
        self._waiting.append(mine)
        try:
            if self._reader is None:
                self._reader = mine
            else:
                await mine.wake
            if not mine.is_done:
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
        """Read for the first who wait, of whom `mine` is one.

        Those whose reader was cancelled wait again.
        """
        group, behind = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
        self._waiting = behind[:]
        overdue = asyncio.get_running_loop().call_later(OVERDUE_S, self._overtake, mine, group)
        try:
            await self._read_for(group, behind)
        finally:
            overdue.cancel()
            if self._reader is mine:  # else they wait again already, or have been read for
                self._wait_again(group)

    async def _read_for(self, group: Sequence[_Look], behind: Sequence[_Look]) -> None:
        try:
            found = await self._load([look.key for look in group])
        except Exception as error:  # noqa: BLE001  # it is raised to each who asked
            if len(group) == 1 or not is_damage(error):
                for look in (*group, *(behind if is_outage(error) else ())):
                    look.answer(None, error)
                return
        else:
            for look in group:
                look.answer(found.get(look.key))
            return
        for look in group:
            if not look.is_done:
                await self._read_for([look], ())
