"""No signals: everybody finds news by looking. For drills, and where nothing can be passed on."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

import anyio

from perdure.signals.ports import Wakeup


class NoSignals:
    """Subscribers are never woken; they poll."""

    def publish(self, topic: str) -> None:
        """Wake nobody."""

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[Wakeup]:
        """Listen to silence."""
        del topic
        return _silence()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class _Silent:
    async def wait(self) -> None:
        await anyio.sleep_forever()


@asynccontextmanager
async def _silence() -> AsyncGenerator[Wakeup]:
    yield _Silent()
