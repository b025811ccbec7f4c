"""Planners written by users, run off the engine's loop and given up when they do not decide.

A user's planner may block, exit, swallow its cancellation or change what it is shown; it fails
its own decision only (decision 15). Async ones run on the user loop, sync ones in a thread. It
gets sequences of its own; what they hold is shared with the engine and must not be changed.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol, cast

import anyio
from pydantic import TypeAdapter, ValidationError

from perdure.engine.context import OpenMessage, PlannerContext
from perdure.engine.ports import AuthorError, PlannerFailure
from perdure.engine.values import describe
from perdure.protocol.decisions import Decision
from perdure.protocol.durations import WORK_S_MAX, checked_s
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.tools.bridge import Call, Mailbox
from perdure.tools.usercode import UserCode

DECISION_TIMEOUT_S_DEFAULT = 900.0
GRACE_S_DEFAULT = 1.0
SAID_CHARACTERS_MAX = 1_000_000

_decision: TypeAdapter[Decision] = TypeAdapter(Decision)


class UserPlanner(Protocol):
    """What a user writes: `next_step`, sync or async."""

    def next_step(self, context: PlannerContext, /) -> "Decision | Awaitable[Decision]":
        """Return the next decision."""
        ...


class PlannerBroken(AuthorError):
    """The planner's code raised, or returned what is no decision. A fault of the agent's code."""


class IsolatedPlanner:
    """Runs a user's planner on `UserCode`, which the process attaches before the first step."""

    def __init__(
        self,
        planner: UserPlanner | Callable[[PlannerContext], Any],
        *,
        timeout_s: float = DECISION_TIMEOUT_S_DEFAULT,
        grace_s: float = GRACE_S_DEFAULT,
    ) -> None:
        method = getattr(planner, "next_step", planner)
        if not callable(method):
            raise TypeError(f"{type(planner).__name__} has no next_step")
        self._decide = cast("Callable[[PlannerContext], Any]", method)
        self._is_async = inspect.iscoroutinefunction(method) or inspect.iscoroutinefunction(
            type(method).__call__
        )
        self._timeout_s = checked_s("timeout_s", timeout_s, WORK_S_MAX)
        self._grace_s = checked_s("grace_s", grace_s, WORK_S_MAX, may_be_zero=True)
        self._code: UserCode | None = None

    def attach(self, code: UserCode) -> None:
        """Say where the planner runs: the user code of this process."""
        self._code = code

    @property
    def attached(self) -> bool:
        """Tell whether the planner knows where to run."""
        return self._code is not None

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the user's decision.

        Raises PlannerFailure: the user's own, or INTERNAL (retryable) when there was no decision
        in time. Raises PlannerBroken for any other error. Cancelled, it asks the code to stop,
        waits the grace at most, and gives it up.
        """
        code = self._code
        if code is None:
            raise RuntimeError("the planner was not attached to this process's user code")
        if code.exhausted:
            raise _late("too much user code was given up and still runs in this process")
        shown = _shown(context)
        if context.open_message is not None:
            shown.open_message = _handed_over(context.open_message)
        call = self._start(code, shown)
        ended = False
        try:
            ended = await call.wait(self._timeout_s)
        finally:
            if not ended:
                with anyio.CancelScope(shield=True):  # bounded by the grace
                    await self._give_up(code, call)
        if not ended:
            raise _late(f"the planner made no decision within {self._timeout_s:g} s")
        return _decided(call)

    def _start(self, code: UserCode, context: PlannerContext) -> Call[object]:
        if self._is_async:
            return code.run_async(
                lambda: self._decide(context), f"the planner of run {context.facts.run_id}"
            )
        return code.run_sync(lambda: self._decide(context))

    async def _give_up(self, code: UserCode, call: Call[object]) -> None:
        if code.withdraw(call):
            return
        code.request_stop(call)
        if not await call.wait(self._grace_s):
            code.abandon(call, _ignore)


def _ignore(_: Call[object]) -> None:
    """A decision that comes too late is nobody's: it was never recorded."""


def _shown(context: PlannerContext) -> PlannerContext:
    """Return the context with sequences of its own: the engine's may grow meanwhile."""
    return replace(
        context,
        messages=tuple(context.messages),
        turns=tuple(context.turns),
        plan=tuple(context.plan),
        tools=tuple(context.tools),
        participants=dict(context.participants),
    )


def _handed_over(open_message: Callable[[], OpenMessage]) -> Callable[[], OpenMessage]:
    """Return what begins messages that any thread may speak."""
    engine = asyncio.get_running_loop()
    return lambda: _HandedMessage(open_message(), engine)


class _HandedMessage:
    """A message whose pieces travel to the engine's loop together, bounded in all."""

    def __init__(self, message: OpenMessage, engine: asyncio.AbstractEventLoop) -> None:
        self.message_id = message.message_id
        self._pieces = Mailbox[str](engine, message.say)
        self._left = SAID_CHARACTERS_MAX

    def say(self, text: str) -> None:
        """Pass on the next piece; from any thread."""
        self._left -= len(text)
        if self._left >= 0:
            self._pieces.post(text)


def _decided(call: Call[object]) -> Decision:
    error = call.error
    if isinstance(error, PlannerFailure):
        raise error
    if error is not None:
        raise PlannerBroken(f"the planner raised {describe(error)}") from error
    value = call.value
    if inspect.iscoroutine(value):
        value.close()
        raise PlannerBroken("a sync next_step returned a coroutine: write it as async def")
    try:
        return _decision.validate_python(value)
    except ValidationError:
        raise PlannerBroken(f"the planner returned {type(value).__name__}, no decision") from None


def _late(reason: str) -> PlannerFailure:
    return PlannerFailure(
        Failure(code=FailureCode.INTERNAL, reason=reason, retryable=True, stage=Stage.PLANNING)
    )
