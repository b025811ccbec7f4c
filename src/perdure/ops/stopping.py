"""Ending a process in order: the first signal asks for a drain, a second one ends at once."""

import os
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio


class StopSignal:
    """Which signal asked the process to end; 0 while none did."""

    def __init__(self) -> None:
        self.number = 0


@asynccontextmanager
async def stopping_on_signals(drain: Callable[[], None]) -> AsyncGenerator[StopSignal]:
    """Call `drain` at the first SIGTERM or SIGINT; end the process at once at a second one."""
    asked = StopSignal()
    async with anyio.create_task_group() as group:
        await group.start(_heed, asked, drain)
        yield asked
        group.cancel_scope.cancel()


async def _heed(
    asked: StopSignal,
    drain: Callable[[], None],
    *,
    task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for number in signals:
            if asked.number:
                os._exit(128 + number)
            asked.number = number
            drain()
