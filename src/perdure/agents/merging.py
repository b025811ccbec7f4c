"""Merging writes by reducers of users, off the engine's loop: their code may block or never end."""

from collections.abc import Mapping

from pydantic import JsonValue

from perdure.engine.ports import AuthorError, PlannerFailure
from perdure.engine.values import describe
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.fields import Reducers, Slot, values_after
from perdure.tools.bridge import Call
from perdure.tools.usercode import UserCode

MERGE_TIMEOUT_S = 30.0


class UserMerger:
    """Implements the engine's `FieldMerger` in a thread of the process's user code."""

    def __init__(self, reducers: Reducers) -> None:
        self._reducers = reducers
        self._code: UserCode | None = None

    def attach(self, code: UserCode) -> None:
        """Say where reducers run: the user code of this process."""
        self._code = code

    async def __call__(
        self, writes: Mapping[str, JsonValue], over: Mapping[Slot, JsonValue]
    ) -> dict[Slot, JsonValue]:
        """See `FieldMerger`."""
        if self._code is None:
            raise RuntimeError("the merger was not attached to this process's user code")
        if self._code.exhausted:
            raise _not_now("too much user code was given up and still runs in this process")
        own, before = dict(writes), dict(over)
        call = self._code.run_sync(lambda: values_after(own, self._reducers, before))
        ended = has_begun = False
        try:
            ended = await call.wait(MERGE_TIMEOUT_S)
        finally:
            has_begun = not ended and not self._code.withdraw(call)
            if has_begun:
                self._code.abandon(call, _ignore)
        if not ended and not has_begun:
            raise _not_now(f"user code left no room for a reducer within {MERGE_TIMEOUT_S:g} s")
        if not ended:
            raise AuthorError(f"a reducer did not return within {MERGE_TIMEOUT_S:g} s")
        if isinstance(call.error, ValueError):
            raise call.error
        if call.error is not None:
            raise AuthorError(f"a reducer raised {describe(call.error)}")
        assert call.value is not None, "it ended without an error"
        return call.value


def _not_now(reason: str) -> PlannerFailure:
    return PlannerFailure(
        Failure(code=FailureCode.INTERNAL, reason=reason, retryable=True, stage=Stage.OUTPUT)
    )


def _ignore(_: Call[dict[Slot, JsonValue]]) -> None:
    """A value that comes too late is nobody's."""
