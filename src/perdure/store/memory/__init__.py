"""The memory store: the readable specification of the ports, and a store for tests.

Everything is lost when the object is. It keeps every rule of `perdure.store.ports`; what the
ports leave open, other stores do as it does.
"""

import time
from datetime import datetime
from types import TracebackType
from typing import Self

from perdure.protocol.base import from_micros
from perdure.store.memory.reader import MemoryReader
from perdure.store.memory.tables import Clock, Tables
from perdure.store.memory.writer import MemoryStore

__all__ = ["MemoryDatabase"]


def _system_clock() -> datetime:
    return from_micros(time.time_ns() // 1000)


class MemoryDatabase:
    """A store and its reader over one set of tables; `clock` defaults to the system's."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._is_open = False
        tables = Tables(clock or _system_clock)
        self._store = MemoryStore(tables)
        self._reader = MemoryReader(tables, lambda: self._is_open)

    @property
    def store(self) -> MemoryStore:
        """The writing port."""
        return self._store

    @property
    def reader(self) -> MemoryReader:
        """The reading port."""
        return self._reader

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_open = False
