"""A step's function as the runtime runs it: with its own copy of the arguments each time."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import cast

from pydantic import JsonValue

from perdure.engine.ports import LocalStep
from perdure.protocol.policies import RetryPolicy
from perdure.tools.api import ToolError
from perdure.tools.jobs import copied

NO_RETRY = RetryPolicy(attempts_max=1)


def local_step(
    function: Callable[..., object],
    args: list[JsonValue],
    retry: RetryPolicy | None,
    timeout_s: float | None,
) -> LocalStep:
    """Return a step that calls a function with the arguments as they are now."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    is_async = inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
        getattr(inner, "__call__", None)  # noqa: B004  # an object with an async __call__
    )
    own = [copied(arg) for arg in args]

    def run() -> object:
        with _told(retry is not None):
            return function(*[copied(arg) for arg in own])

    async def run_async() -> object:
        with _told(retry is not None):
            return await cast("Awaitable[object]", function(*[copied(arg) for arg in own]))

    return LocalStep(
        run=run_async if is_async else run,
        is_async=is_async,
        retry=retry or NO_RETRY,
        timeout_s=timeout_s,
    )


class _told:  # reads as a statement: with _told(...)
    """Says of an error of a step's function that it may be tried again, when the author says so."""

    def __init__(self, retryable: bool) -> None:
        self._retryable = retryable

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._retryable and isinstance(error, Exception) and not isinstance(error, ToolError):
            text = ""
            with suppress(Exception):
                text = str(error)
            name = type(error).__name__
            reason = f"{name}: {text}" if text else name
            raise ToolError(reason, {"type": name}, retryable=True) from error
