"""The one place where any exception of user code stops, `SystemExit` and cancellation included."""

from types import TracebackType
from typing import Literal, Self


class Caught:
    """Keeps what the body of a `with` statement raised, as `error`, and raises nothing.

    For code of the user's, where nobody waits for the exception itself: it becomes an outcome.
    On the engine's loop its caller raises a cancellation from outside again.
    """

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Literal[True]:
        self.error = error
        return True
