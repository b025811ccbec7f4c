"""Signals within one process: nothing leaves the event loop."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

import anyio

from perdure.signals.ports import Wakeup


class Bell:
    """Rings once for any number of signals since it was last heard."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def ring(self) -> None:
        """Wake whoever waits; remembered when nobody does."""
        self._event.set()

    async def wait(self) -> None:
        """Return once the bell has rung since the last return."""
        await self._event.wait()
        self._event = anyio.Event()


class LocalSignals:
    """In-process signals; `ring_all` lets an adapter pass on a hint without a topic."""

    def __init__(self) -> None:
        self._bells: dict[str, set[Bell]] = defaultdict(set)

    def publish(self, topic: str) -> None:
        """Wake the topic's subscribers."""
        for bell in self._bells.get(topic, ()):
            bell.ring()

    def ring_all(self) -> None:
        """Wake every subscriber of every topic."""
        for bells in self._bells.values():
            for bell in bells:
                bell.ring()

    def has_subscribers(self) -> bool:
        """Tell whether anybody listens."""
        return bool(self._bells)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[Wakeup]:
        """Listen while the context is open."""
        return self._listen(topic)

    @asynccontextmanager
    async def _listen(self, topic: str) -> AsyncGenerator[Wakeup]:
        bell = Bell()
        self._bells[topic].add(bell)
        try:
            yield bell
        finally:
            self._bells[topic].discard(bell)
            if not self._bells[topic]:
                del self._bells[topic]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class PolledSignals(LocalSignals):
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
