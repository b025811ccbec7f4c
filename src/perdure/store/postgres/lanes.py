"""Connections that come back by themselves.

Every piece of work is a whole transaction that may be sent again. `keep_trying` does so: a lost
connection is opened anew within a deadline, a deadlock or lock timeout is tried again a bounded
number of times with jitter, a stale plan leads to one new connection. What is left is translated.

No work is waited for without end: each try has `SILENCE_S`, a little more than the server gives a
statement, and then its connection is dropped. Only migrations take the time that they need.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import anyio

from perdure.protocol.errors import PerdureError
from perdure.store.postgres.driver import (
    CLOSE_S,
    MIGRATION_SETTINGS,
    SETTINGS,
    SHARED_SETTINGS,
    Connection,
    Pool,
    Row,
    Unreached,
    connect,
)
from perdure.store.postgres.errors import (
    DataRefused,
    StillBusy,
    Trouble,
    refusal_of,
    refuse,
    translate,
    trouble_of,
)

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Work = Callable[[Connection], Awaitable[Result]]

PATIENCE_S = 8.0
SILENCE_S = 30.0
AGAIN_MAX = 8
_BACKOFF_S = 0.02
_BACKOFF_MAX_S = 0.5
_CHANCE = random.random  # noqa: S311 - jitter needs no secrecy


async def pause(failed: int, chance: Callable[[], float] = _CHANCE) -> None:
    """Wait before the next try: full jitter over an exponential back-off."""
    limit = min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(failed, 10))
    await anyio.sleep(limit * (0.5 + chance() / 2))


async def keep_trying(
    once: Callable[[int], Awaitable[Result]], *, patience_s: float | None = None
) -> Result:
    """Return what `once` returns, tried as often as the kind of trouble allows.

    `once` is given the number of tries before. Raises DataRefused for data that cannot be stored,
    Unavailable (`unavailable`) or StoreFull (`store_full`) when the database stays away or full,
    or cannot do what it is asked. StillBusy passes.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    started, failed, stale = time.monotonic(), 0, 0
    while True:
        try:
            return await once(failed)
        except (PerdureError, DataRefused, StillBusy):
            raise
        except Exception as error:
            trouble = trouble_of(error)
            if trouble is None:
                raise
            if trouble is Trouble.DATA:
                raise refuse(error) from error
            if trouble is Trouble.BUG:
                log.error("the database cannot do a statement: %r", error)  # noqa: TRY400  # expected: no trace
            failed += 1
            stale += trouble is Trouble.STALE_PLAN
            if _is_hopeless(trouble, failed, stale, time.monotonic() - started, patience_s):
                raise translate(error) from error
            level = logging.INFO if failed == 1 else logging.DEBUG  # one line a trouble
            log.log(
                level, "%s (%s): trying again for %g s at most", trouble, _named(error), patience_s
            )
        await pause(failed)


def _named(error: Exception) -> str:
    if isinstance(error, Unreached):
        return str(error)
    return refusal_of(error) or type(error).__name__


def _is_hopeless(
    trouble: Trouble, failed: int, stale: int, passed_s: float, patience_s: float
) -> bool:
    match trouble:
        case Trouble.FULL | Trouble.BUG:
            return True
        case Trouble.AGAIN | Trouble.LOCKED:
            return failed > AGAIN_MAX or passed_s > patience_s
        case Trouble.STALE_PLAN:
            return stale > 2
        case _:
            return passed_s > patience_s


class Lane:
    """One held direct connection, used by one caller at a time in order of arrival.

    Behind one that is `shared` by the work of many, nobody waits for a row that somebody else has
    locked for long: StillBusy then, and the work tries again when it is its turn. One that
    `migrates` waits for its statements as long as they take.
    """

    def __init__(self, dsn: str, *, shared: bool = False, migrates: bool = False) -> None:
        self._dsn = dsn
        self._shared = shared
        self._migrates = migrates
        self._lock = anyio.Lock(fast_acquire=True)
        self._connection: Connection | None = None

    async def run(self, work: Work[Result], *, patience_s: float | None = None) -> Result:
        """Do one transaction's work, again where that helps; errors as in `keep_trying`."""
        async with self._lock:
            return await keep_trying(lambda _: self._once(work), patience_s=patience_s)

    @property
    def _settings(self) -> dict[str, str]:
        if self._migrates:
            return MIGRATION_SETTINGS
        return SHARED_SETTINGS if self._shared else SETTINGS

    async def _once(self, work: Work[Result]) -> Result:
        connection = self._connection
        if connection is None or connection.is_closed():
            connection = self._connection = await connect(self._dsn, settings=self._settings)
        try:
            with anyio.fail_after(None if self._migrates else SILENCE_S):
                return await work(connection)
        except Exception as error:
            trouble = trouble_of(error)
            if trouble in {Trouble.LOST, Trouble.STALE_PLAN}:
                self.terminate()
            if trouble is Trouble.LOCKED and self._shared:
                raise StillBusy from error
            raise
        except BaseException:
            self.terminate()
            raise

    async def close(self) -> None:
        """Say goodbye to the server."""
        connection, self._connection = self._connection, None
        if connection is None or connection.is_closed():
            return
        try:
            with anyio.fail_after(CLOSE_S):
                await connection.close()
        except Exception as error:
            if trouble_of(error) is None:
                raise
            connection.terminate()

    def terminate(self) -> None:
        """Drop the connection at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()


class LaneOfEachLoop:
    """A lane for each event loop that asks, so that heartbeats may run on a loop of their own.

    A lane closes with its loop (an async generator's end is awaited when a loop shuts down).
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._lanes: dict[asyncio.AbstractEventLoop, tuple[Lane, AsyncGenerator[None]]] = {}

    async def here(self) -> Lane:
        """Return the running loop's lane."""
        loop = asyncio.get_running_loop()
        known = self._lanes.get(loop)
        if known is not None:
            return known[0]
        lane = Lane(self._dsn)
        keeper = self._keep(lane, loop)
        self._lanes[loop] = (lane, keeper)
        await anext(keeper)
        return lane

    async def _keep(self, lane: Lane, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            self._lanes.pop(loop, None)
            await lane.close()

    async def close(self) -> None:
        """Close the running loop's lane, and have the other loops drop theirs."""
        here = asyncio.get_running_loop()
        for loop, (lane, keeper) in list(self._lanes.items()):
            if loop is here:
                await keeper.aclose()
            else:
                with suppress(RuntimeError):  # that loop has just ended, and its lane with it
                    loop.call_soon_threadsafe(lane.terminate)


class Access:
    """The pool, with the same stubbornness."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    async def run(self, work: Work[Result], *, patience_s: float | None = None) -> Result:
        """Do the work in one transaction of a pooled connection."""

        async def once(_: int) -> Result:
            with anyio.fail_after(SILENCE_S):
                async with self._pool.acquire() as connection, connection.transaction():
                    return await work(connection)

        return await keep_trying(once, patience_s=patience_s)

    async def fetch(self, query: str, *args: object) -> Sequence[Row]:
        """Run one statement that only reads."""

        async def once(_: int) -> Sequence[Row]:
            with anyio.fail_after(SILENCE_S):
                return await self._pool.fetch(query, *args)

        return await keep_trying(once)
