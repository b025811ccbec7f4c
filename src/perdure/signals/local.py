"""Signals within one process, and between processes that share a SQLite file."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import anyio

from perdure.signals.bells import Bells


class LocalSignals(Bells):
    """Signals of one process: nothing leaves the event loop."""


class PolledSignals(Bells):
    """Local signals, and a hint for everybody when `version` changes: another process wrote.

    For several processes on one SQLite file (decision 40): `version` is the file's data version.
    """

    def __init__(self, version: Callable[[], int], *, interval_s: float = 0.075) -> None:
        super().__init__()
        self._version = version
        self._interval_s = interval_s
        self._group = anyio.create_task_group()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._group.start_soon(self._poll)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(kind, error, trace)

    async def _poll(self) -> None:
        last = self._version()
        while True:
            await anyio.sleep(self._interval_s)
            if not self.has_subscribers():
                continue
            version = self._version()
            if version != last:
                last = version
                self.ring_all()
