"""Bells within one process: what every adapter of signals rings."""

from collections import defaultdict
from collections.abc import AsyncGenerator
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


class Bells:
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
