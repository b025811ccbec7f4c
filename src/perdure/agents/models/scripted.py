"""A model that replays a script: for tests, the demo and every offline use.

Each entry of the script is a reply, a text, a failure, or a way to misbehave. By default the n-th
request gets the n-th entry. With `position="conversation"` the entry is chosen by how often the
assistant has spoken in the request itself, so that a restarted process goes on where it was.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import anyio

from perdure.agents.models.port import ModelDelta, ModelReply, ModelRequest
from perdure.engine.ports import PlannerFailure
from perdure.protocol.failures import Failure, FailureCode, Stage


@dataclass(frozen=True, slots=True)
class Stall:
    """Say `text`, then nothing more until a timeout or a cancel ends the request."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class SwallowCancel:
    """Hang until cancelled, swallow that cancel, and return the reply all the same (CAN-11)."""

    reply: ModelReply


@dataclass(frozen=True, slots=True)
class Dictation:
    """Say each piece as it comes; their sum is the reply. What the source raises fails it."""

    pieces: Callable[[], AsyncIterator[str]]


ScriptEntry = ModelReply | str | Failure | PlannerFailure | Stall | SwallowCancel | Dictation
Script = Sequence[ScriptEntry] | Callable[[ModelRequest], ScriptEntry]


class ScriptedModel:
    """A deterministic fake of the port. Keeps the last requests it saw."""

    def __init__(
        self,
        replies: Script,
        *,
        name: str = "scripted",
        position: Literal["calls", "conversation"] = "calls",
        requests_max: int = 1000,
    ) -> None:
        self._replies = replies
        self._name = name
        self._position = position
        self._asked = 0
        self.requests: deque[ModelRequest] = deque(maxlen=requests_max)

    @property
    def model(self) -> str:
        """Return the name that replies carry."""
        return self._name

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return or raise what the script says for this request."""
        self.requests.append(request)
        entry = self._entry(request)
        self._asked += 1
        match entry:
            case str():
                return self._say(request, ModelReply(text=entry, finish="stop"))
            case ModelReply():
                return self._say(request, entry)
            case Failure():
                raise PlannerFailure(entry)
            case PlannerFailure():
                raise PlannerFailure(
                    entry.failure, retry_after_s=entry.retry_after_s, model_uses=entry.model_uses
                )
            case Stall():
                return await self._stall(request, entry)
            case SwallowCancel():
                return await self._swallow(request, entry)
            case Dictation():
                return await self._dictate(request, entry)

    def _entry(self, request: ModelRequest) -> ScriptEntry:
        if callable(self._replies):
            return self._replies(request)
        if self._position == "calls":
            index = self._asked
        else:
            index = sum(message.role == "assistant" for message in request.messages)
        if index >= len(self._replies):
            reason = f"the script of {self._name} has {len(self._replies)} replies, not more"
            return Failure(code=FailureCode.MODEL_ERROR, reason=reason, stage=Stage.PLANNING)
        return self._replies[index]

    def _say(self, request: ModelRequest, reply: ModelReply) -> ModelReply:
        if request.on_delta is not None and (reply.text or reply.session):
            request.on_delta(ModelDelta(text=reply.text, session=reply.session))
        return reply if reply.model else replace(reply, model=self._name)

    async def _stall(self, request: ModelRequest, entry: Stall) -> ModelReply:
        if request.on_delta is not None and entry.text:
            request.on_delta(ModelDelta(text=entry.text))
        limit_s = min(request.idle_s, request.timeout_s)
        with anyio.move_on_after(limit_s):
            await anyio.sleep_forever()
        raise PlannerFailure(
            Failure(
                code=FailureCode.MODEL_TIMEOUT,
                reason=f"the model made no progress for {limit_s:g} s",
                retryable=True,
                stage=Stage.PLANNING,
            )
        )

    async def _swallow(self, request: ModelRequest, entry: SwallowCancel) -> ModelReply:
        with suppress(anyio.get_cancelled_exc_class()):  # misbehaving is its purpose
            await anyio.sleep_forever()
        return self._say(request, entry.reply)

    async def _dictate(self, request: ModelRequest, entry: Dictation) -> ModelReply:
        said: list[str] = []
        async for piece in entry.pieces():
            said.append(piece)
            if request.on_delta is not None:
                request.on_delta(ModelDelta(text=piece))
        return ModelReply(text="".join(said), finish="stop", model=self._name)
