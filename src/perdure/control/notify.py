"""A user's function that tells approvers, run beside the engine like any code of users."""

import inspect
from collections.abc import Awaitable, Callable
from typing import cast

from perdure.engine.ports import ApprovalNotice
from perdure.tools.usercode import UserCode

NOTIFY_TIMEOUT_S = 20.0

Notify = Callable[[ApprovalNotice], object]


class FunctionNotifier:
    """Tells approvers by a function, sync or async, in a thread of its own. Implements `Notifier`."""

    def __init__(self, function: Notify, code: UserCode) -> None:
        self._function = function
        self._code = code

    async def notify(self, notice: ApprovalNotice) -> None:
        """Call the function; raise what it raises, and TimeoutError when it does not end in time."""
        function = self._function
        if inspect.iscoroutinefunction(function):
            call = self._code.run_async(lambda: cast("Awaitable[object]", function(notice)))
        else:
            call = self._code.run_sync(lambda: function(notice))
        if not await call.wait(NOTIFY_TIMEOUT_S):
            self._code.request_stop(call)
            self._code.abandon(call, lambda _: None)
            raise TimeoutError(f"it did not end within {NOTIFY_TIMEOUT_S:g} s")
        if call.error is not None:
            raise RuntimeError(f"{type(call.error).__name__}: {call.error}") from call.error
