"""One thread that reads what is found by its key, and how reads reach it in groups.

A thread for each read costs several times the read: two threads are woken, and both want the
interpreter's lock. Here callers enqueue, the thread reads all that waits, one after the other, and
answers with one call into each loop. What it is given must be short: bounded by a key or a limit.
What searches or counts goes by the pool (`readers.py`).
"""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from perdure.protocol.errors import Unavailable
from perdure.store.sqlite.answers import Asked, Outcome, answer_all
from perdure.store.sqlite.connection import is_busy, translate

ANSWER_S: Final = 0.002
"""Answers that have waited so long are given before the next read begins."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Read(Asked):
    """A read that waits for its turn."""

    body: Callable[[sqlite3.Connection], object]


class Lane:
    """The thread and its queue. The connection is made when the first read comes."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._reads: SimpleQueue[_Read | None] = SimpleQueue()
        self._door = threading.Lock()
        self._is_open = True
        self._thread = threading.Thread(target=self._serve, name="sqlite-reader", daemon=True)
        self._thread.start()

    async def read(self, body: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a read in the thread and return its value. Whoever is cancelled does not wait.

        Raises Unavailable once the lane was stopped, and what `translate` makes of errors.
        """
        loop = asyncio.get_running_loop()
        read = _Read(loop, loop.create_future(), body)
        with self._door:
            if not self._is_open:
                raise Unavailable("the database is not open")
            self._reads.put(read)
        return await read.answer

    def stop(self) -> None:
        """Answer what waits, end the thread and close the connection; blocks."""
        with self._door:
            self._is_open = False
            self._reads.put(None)
        self._thread.join()

    def _serve(self) -> None:
        is_open = True
        while is_open:
            waiting = [self._reads.get()]
            with suppress(Empty):
                while True:
                    waiting.append(self._reads.get_nowait())
            is_open = None not in waiting
            self._answer([read for read in waiting if read is not None])
        if self._connection is not None:
            self._connection.close()

    def _answer(self, reads: Sequence[_Read]) -> None:
        """Read for all; when the file is busy for one, the others do not wait for it again."""
        done: list[Outcome] = []
        since = time.monotonic()
        for place, read in enumerate(reads):
            try:
                done.append(Outcome(read, value=read.body(self._connected())))
            except Exception as error:  # noqa: BLE001  # it is answered to the one who asked
                cause = error.__cause__ if isinstance(error, Unavailable) else error
                locked = isinstance(cause, sqlite3.OperationalError) and is_busy(cause)
                told = reads[place:] if locked else [read]
                done += [Outcome(one, error=translate(error)) for one in told]
                if locked:
                    break
            if time.monotonic() - since >= ANSWER_S:
                answer_all(done)
                done, since = [], time.monotonic()
        answer_all(done)

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection
