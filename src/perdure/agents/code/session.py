"""A code agent at work on one run for one attempt: from what its function waits for to decisions.

The session lives on the engine's loop, the function on the user loop. In each step the session
hands the function what was recorded since, lets it run until nothing moves, asks the models it
wants asked, lets it go on once, and decides: all new operations of all branches in one decision.
"""

from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

import anyio
from pydantic import JsonValue, ValidationError

from perdure.agents.code.api import Context
from perdure.agents.code.asking import reply_of, request_of, use_of_reply
from perdure.agents.code.errors import AgentFailed, ToolFailed
from perdure.agents.code.live import LiveFunction, ModelWish, Recorded, Stand, Waiting
from perdure.agents.models.port import (
    ModelClient,
)
from perdure.engine.context import Entry, PlannerContext
from perdure.engine.journal import CODE
from perdure.engine.ports import LocalStep, PlannerFailure, SessionSurroundings
from perdure.engine.values import describe
from perdure.protocol.decisions import (
    GIVE_UP_CODES,
    Ask,
    ChildRequest,
    Decision,
    Finish,
    GiveUp,
    ModelUse,
    Note,
    Operate,
    Record,
    ToolRequest,
)
from perdure.protocol.errors import Invalid, PerdureError
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.fields import StateField
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.values import CALLS_PER_STEP_MAX
from perdure.tools.bridge import Call
from perdure.tools.jobs import copied
from perdure.tools.usercode import UserCode

PULSE_S = 0.5
"""How often a drive looks whether its loop was given up as blocked."""

CODE_POSITION = "~code"

Function = Callable[[Context, Any], Awaitable[object]]
"""What an author writes: `async def function(ctx, input)`."""


class CodeSession:
    """Implements the engine's `PlannerSession`."""

    def __init__(
        self,
        function: Function,
        code: UserCode,
        around: SessionSurroundings,
        *,
        digest: str,
        models: tuple[ModelClient, ...],
        model_retry: RetryPolicy,
        timeout_s: float,
        grace_s: float,
        fields: Mapping[str, StateField],
    ) -> None:
        self._fields = fields
        self._function = function
        self._code = code
        self._around = around
        self._digest = digest
        self._models = models
        self._model_retry = model_retry
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._live: LiveFunction | None = None
        self._generation = 0
        self._stand = Stand()
        self._uses: dict[str, ModelUse] = {}
        self._noted: set[str] = set()

    # ---------------------------------------------------------------- the engine's side

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return everything that the function's branches wait for, its end, or its failure.

        Raises PlannerFailure for a model's trouble, and INTERNAL (retryable) when the function
        neither ended nor came to wait for an operation in time.
        """
        if self._code.exhausted:
            raise _failure("too much user code was given up and still runs in this process")
        stand = await self._drive(context)
        replies = await self._ask_models(context, stand)
        if replies:
            stand = await self._drive(context, replies)
        return self._decided(context, stand)

    async def prepare(self, context: PlannerContext) -> None:
        """Bring the function to where its journal ends; see the port."""
        stand = await self._drive(context)
        if stand.difference is not None:
            raise PlannerFailure(self._difference(context, stand))
        missing = [
            entry
            for entry in context.journal.values()
            if entry.kind == "step" and not entry.done and self.step_at(entry.position) is None
        ]
        if missing:
            entry = missing[0]
            reason = f"the function does not come to the step {entry.name} at {entry.position}"
            raise PlannerFailure(
                Failure(code=FailureCode.NON_DETERMINISTIC, reason=reason, stage=Stage.RECOVERY)
            )

    def step_at(self, position: str) -> LocalStep | None:
        """Return the step that the function waits for at a position."""
        return next((item.step for item in self._stand.waiting if item.position == position), None)

    async def close(self) -> None:
        """Stop the function; what does not end in the grace period is given up."""
        live, self._live = self._live, None
        self._stand = Stand()
        if live is not None:
            await self._stop(live)

    # ---------------------------------------------------------------- driving

    async def _drive(
        self, context: PlannerContext, replies: dict[str, Recorded] | None = None
    ) -> Stand:
        """Let the function run until nothing of it moves."""
        until = self._around.clock.monotonic() + self._timeout_s
        news = dict(replies or {})
        while True:
            if self._live is not None and self._generation != self._code.generation:
                self._live.cancel_from_afar()
                self._live = None
            live = self._live
            if live is None:
                live = self._live = await self._new_live(context)
                news = {}
            else:
                news |= await self._results(context)
            stand = await self._driven(live, news, context, until)
            if stand is not None:
                self._stand = stand
                return stand

    async def _driven(
        self, live: LiveFunction, news: dict[str, Recorded], context: PlannerContext, until: float
    ) -> Stand | None:
        """Return the stand, or None when a neighbour blocked the loop and all begins anew."""
        now = self._around.clock.now()
        written = self._written(context)
        call = self._code.run_async(
            lambda: live.drive(news, written, now), f"the code of run {context.facts.run_id}"
        )
        ended = False
        try:
            while not ended and self._around.clock.monotonic() < until:
                ended = await call.wait(
                    min(PULSE_S, max(0.0, until - self._around.clock.monotonic()))
                )
                replaced = self._code.generation != self._generation
                if not ended and replaced and not live.is_executing():
                    return None
        finally:
            if not ended:
                self._live = None
                live.cancel_from_afar()
                with anyio.CancelScope(shield=True):  # bounded by the grace
                    await self._give_up(call)
        if not ended:
            raise _failure(
                "the function neither ended nor came to wait for an operation within "
                f"{self._timeout_s:g} s"
            )
        if call.error is not None:
            raise RuntimeError("a code agent's function could not be driven") from call.error
        return call.value

    async def _new_live(self, context: PlannerContext) -> LiveFunction:
        """Return the function at its start, with all that its journal holds."""
        journal = {
            entry.position: await self._recorded(context, entry)
            for entry in list(context.journal.values())
        }
        for position, use in self._uses.items():
            if position not in journal:
                journal[position] = reply_of(position, use)
        self._generation = self._code.generation
        value = copied(context.input)
        live = LiveFunction(
            start=lambda: self._function(Context(live, context, self._fields), value),
            run_id=context.facts.run_id,
            journal=journal,
            now=self._around.clock.now(),
        )
        return live

    async def _results(self, context: PlannerContext) -> dict[str, Recorded]:
        """Return the results, recorded by now, of what the function waits for."""
        found: dict[str, Recorded] = {}
        for waiting in self._stand.waiting:
            entry = context.journal.get(waiting.position)
            if entry is not None and entry.done and waiting.kind != "value":
                found[waiting.position] = await self._recorded(context, entry)
        return found

    async def _recorded(self, context: PlannerContext, entry: Entry) -> Recorded:
        value = await self._around.load(context.facts.tenant_id, entry.value)
        return Recorded(
            entry=Entry(
                position=entry.position,
                kind=entry.kind,
                name=entry.name,
                digest=entry.digest,
                done=entry.done,
                outcome=entry.outcome,
                answer=entry.answer,
                error=entry.error,
                finish=entry.finish,
                calls=entry.calls,
                run_id=entry.run_id,
                writes=entry.writes,
            ),
            value=value,
        )

    def _written(self, context: PlannerContext) -> set[str]:
        written = {position for position in self._noted if position in context.journal}
        self._noted -= written
        for position in [position for position in self._uses if position in context.journal]:
            del self._uses[position]
        return written

    async def _stop(self, live: LiveFunction) -> None:
        if live.home is None:
            return
        if self._generation != self._code.generation:
            live.cancel_from_afar()
            return
        call = self._code.run_async(live.stop)
        if not await call.wait(self._grace_s):
            self._code.abandon(call, _ignore)

    async def _give_up(self, call: Call[Stand]) -> None:
        if self._code.withdraw(call):
            return
        self._code.request_stop(call)
        if not await call.wait(self._grace_s):
            self._code.abandon(call, _ignore)

    # ---------------------------------------------------------------- models

    async def _ask_models(self, context: PlannerContext, stand: Stand) -> dict[str, Recorded]:
        """Ask the models that branches wait for, side by side; return the replies by position.

        What was answered is kept, and recorded, also when another request failed.
        """
        wanted = [
            (waiting, waiting.wish)
            for waiting in stand.waiting
            if isinstance(waiting.wish, ModelWish) and waiting.position not in self._uses
        ]
        if not wanted:
            return {}
        if not self._models:
            raise PlannerFailure(
                Failure(
                    code=FailureCode.MODEL_ERROR,
                    reason="the agent has no model: name some with models=",
                    stage=Stage.PLANNING,
                )
            )
        failed: list[PlannerFailure] = []
        answered: dict[str, Recorded] = {}

        async def ask(waiting: Waiting, wish: ModelWish) -> None:
            message = context.open_message() if context.open_message is not None else None
            try:
                reply = await self._client(context).complete(request_of(context, wish, message))
            except PlannerFailure as error:
                failed.append(error)
                return
            use = use_of_reply(reply, waiting.position, wish, message)
            self._uses[waiting.position] = use
            answered[waiting.position] = reply_of(waiting.position, use)

        async with anyio.create_task_group() as group:
            for waiting, wish in wanted:
                group.start_soon(ask, waiting, wish)
        if failed:
            first = failed[0]
            paid = tuple(self._uses.values()) + tuple(
                use for error in failed for use in error.model_uses
            )
            raise PlannerFailure(first.failure, retry_after_s=first.retry_after_s, model_uses=paid)
        return answered

    def _client(self, context: PlannerContext) -> ModelClient:
        turn = context.model_failures // self._model_retry.attempts_max
        return self._models[min(turn, len(self._models) - 1)]

    # ---------------------------------------------------------------- deciding

    def _decided(self, context: PlannerContext, stand: Stand) -> Decision:
        records = self._records(context, stand)
        uses = tuple(self._uses.values())
        if stand.difference is not None:
            failure = self._difference(context, stand)
            return GiveUp(
                code=failure.code,
                reason=failure.reason,
                details=failure.details,
                model_uses=uses,
            )
        if stand.end is not None:
            return self._ended(context, stand, records, uses)
        return self._operate(context, stand, records, uses)

    def _records(self, context: PlannerContext, stand: Stand) -> tuple[Record, ...]:
        new = tuple(item for item in stand.records if item.position not in context.journal)
        self._noted.update(item.position for item in new if item.position is not None)
        if CODE_POSITION in context.journal:
            return new
        return (Note(position=CODE_POSITION, name=CODE, value=self._digest), *new)

    def _operate(
        self,
        context: PlannerContext,
        stand: Stand,
        records: tuple[Record, ...],
        uses: tuple[ModelUse, ...],
    ) -> Decision:
        new = [item for item in stand.waiting if item.position not in context.journal]
        calls = [item.wish for item in new if isinstance(item.wish, ToolRequest)]
        asks = [item.wish for item in new if isinstance(item.wish, Ask)]
        models = [
            item
            for item in new
            if isinstance(item.wish, ModelWish) and item.position not in self._uses
        ]
        sleeps = [item.wish for item in stand.waiting if isinstance(item.wish, datetime)]
        children = [item.wish for item in new if isinstance(item.wish, ChildRequest)]
        moving = bool(calls or children or models or len(asks) > CALLS_PER_STEP_MAX)
        wake_in: timedelta | None = None
        if sleeps and not moving:
            now = self._around.clock.now()
            wake_in = max(min(sleeps) - now, timedelta(0))
        return Operate(
            calls=tuple(calls[:CALLS_PER_STEP_MAX]),
            asks=tuple(asks[:CALLS_PER_STEP_MAX]),
            children=tuple(children[:CALLS_PER_STEP_MAX]),
            for_person=not moving and not sleeps,
            wake_in=wake_in,
            records=records,
            model_uses=uses,
        )

    def _ended(
        self,
        context: PlannerContext,
        stand: Stand,
        records: tuple[Record, ...],
        uses: tuple[ModelUse, ...],
    ) -> Decision:
        if stand.end == "raised":
            return _raised(stand.error, records, uses)
        open_still = [entry for entry in context.journal.values() if not entry.done]
        if open_still:
            entry = open_still[0]
            reason = f"the function ended while {entry.kind} {entry.name} was open"
            return GiveUp(reason=reason, records=records, model_uses=uses)
        notes = context.turns[-1].notes if context.turns else []
        if notes and notes[-1].code is FailureCode.OUTPUT_INVALID:
            return GiveUp(code=FailureCode.OUTPUT_INVALID, reason=notes[-1].reason)
        return Finish(answer=stand.value, records=records, model_uses=uses)

    def _difference(self, context: PlannerContext, stand: Stand) -> Failure:
        found = stand.difference
        assert found is not None
        begun = context.journal.get(CODE_POSITION)
        began = begun.value.inline if begun is not None else None
        changed = began is not None and began != self._digest
        why = "; its code has changed since the run began" if changed else ""
        return Failure(
            code=FailureCode.NON_DETERMINISTIC,
            reason=(
                f"at {found.position} the journal holds {found.expected}, "
                f"the function asks for {found.got}{why}"
            ),
            stage=Stage.RECOVERY,
            details={
                "position": found.position,
                "expected": found.expected,
                "got": found.got,
                "code_recorded": began,
                "code_running": self._digest,
            },
        )


def _raised(
    error: BaseException | None,
    records: tuple[Record, ...],
    uses: tuple[ModelUse, ...],
) -> GiveUp:
    details: dict[str, JsonValue] = {"type": type(error).__name__}
    code, reason = FailureCode.INTERNAL, describe(error or RuntimeError("no error"))
    match error:
        case AgentFailed():
            code, reason = error.code, error.reason
            details = {**error.details}
        case ToolFailed():
            code = error.code if error.code in GIVE_UP_CODES else FailureCode.INTERNAL
            reason = describe(error)
        case PerdureError():
            reason = error.message
        case _:
            pass
    try:
        return GiveUp(code=code, reason=reason, details=details, records=records, model_uses=uses)
    except (ValidationError, Invalid):
        return GiveUp(code=code, reason=reason, records=records, model_uses=uses)


def _failure(reason: str) -> PlannerFailure:
    return PlannerFailure(
        Failure(code=FailureCode.INTERNAL, reason=reason, retryable=True, stage=Stage.PLANNING)
    )


def _ignore(_: Call[Any]) -> None:
    """What a function that was given up comes to is nobody's: it was never recorded."""
