"""The server's wish to stop: ends streams and waits that would otherwise go on for ever."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
from starlette.requests import Request

ResultT = TypeVar("ResultT")


class Stopping:
    """Set once, when the process is asked to end."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        """Ask everything that waits to end. Called on the loop."""
        self._event.set()

    def is_set(self) -> bool:
        """Tell whether the process is about to end."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Return once the process is about to end."""
        await self._event.wait()


async def while_wanted(
    request: Request, stopping: Stopping, work: Callable[[], Awaitable[ResultT]]
) -> ResultT | None:
    """Return what the work returns; None when the client left or the server stops before.

    Only for work that may be given up at any point. The request's body must have been read.
    """
    result: ResultT | None = None
    failure: Exception | None = None

    async def gone(scope: anyio.CancelScope) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        scope.cancel()

    async def stopped(scope: anyio.CancelScope) -> None:
        await stopping.wait()
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(gone, group.cancel_scope)
        group.start_soon(stopped, group.cancel_scope)
        try:
            result = await work()
        except Exception as error:  # noqa: BLE001  # raised again below, outside the group
            failure = error
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result
