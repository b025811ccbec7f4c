"""One helper for short work that must not be cut in half by a cancellation."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")


async def shielded(work: Callable[[], Awaitable[T]]) -> T:
    """Run `work` to its end whatever cancels the caller; only for what is short and bounded."""
    with anyio.CancelScope(shield=True):
        return await work()
    raise AssertionError("a shielded scope is never cancelled")
