"""Signals that get lost (F25): a hint that never comes may cost time, never an event."""

import random
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from perdure.signals.ports import Signals, Wakeup


class DroppingSignals:
    """Passes on a share of what is published; which ones, a seed decides."""

    def __init__(self, inner: Signals, *, share_lost: float = 0.5, seed: int = 1) -> None:
        self._inner = inner
        self._share_lost = share_lost
        self._chance = random.Random(seed)  # noqa: S311  # a test that can be repeated
        self.lost = 0
        self.passed = 0

    def publish(self, topic: str) -> None:
        """Wake the topic's subscribers, or forget to."""
        if self._chance.random() < self._share_lost:
            self.lost += 1
            return
        self.passed += 1
        self._inner.publish(topic)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[Wakeup]:
        """Listen while the context is open."""
        return self._inner.subscribe(topic)

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._inner.__aexit__(kind, error, trace)
