"""Chat Completions over the `openai` package, at any base URL that speaks that protocol.

One call makes one streamed request: the package's own retries and timeouts are off, ours hold.
Only output counts as progress (text, reasoning, tool calls, finish, new usage), so bytes that
keep a connection alive do not keep a request alive (TIM-04). A stream without a finish reason is
an error (F43); what comes after one may get lost without harm. Errors never carry the API key.

Runs on its caller's loop; each event loop gets a client of its own, made at its first request.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import anyio
import httpx2
from anyio.lowlevel import RunVar

from perdure.agents.models.assembly import Assembly, BrokenReply
from perdure.agents.models.openai_errors import failure_of, redactor
from perdure.agents.models.openai_wire import ToolNames, wire_messages, wire_tools
from perdure.agents.models.port import ModelDelta, ModelReply, ModelRequest
from perdure.engine.ports import PlannerFailure
from perdure.protocol.decisions import ModelUse
from perdure.protocol.durations import WORK_S_MAX, checked_s
from perdure.protocol.events import Usage
from perdure.protocol.failures import Failure, FailureCode, Stage

try:
    import openai
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "OpenAIModel needs the extra `openai`: pip install 'perdure[openai]'"
    ) from None

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from openai.types.chat import ChatCompletionChunk
    from openai.types.completion_usage import CompletionUsage

USAGE_GRACE_S = 2.0
"""How long a finished reply waits for its usage and the end of the stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a million tokens cost, in the unit of the run's budget."""

    input_per_million: float = 0.0
    output_per_million: float = 0.0


class OpenAIModel:
    """A model behind a Chat Completions endpoint.

    `api_key` defaults to OPENAI_API_KEY; an endpoint given by `base_url` may need none.
    `extra_body` is sent along as it is, for what a vendor adds to the protocol.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        price: Price | None = None,
        limit_field: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens",
        headers: Mapping[str, str] | None = None,
        extra_body: Mapping[str, object] | None = None,
        usage_grace_s: float = USAGE_GRACE_S,
    ) -> None:
        self.model = model
        self._api_key = api_key or os.environ.get("OPENAI_API_KEY") or ("none" if base_url else "")
        if not self._api_key:
            raise ValueError(f"the model {model!r} needs an api_key, OPENAI_API_KEY or a base_url")
        self._base_url = base_url
        self._price = price
        self._limit_field = limit_field
        self._headers = dict(headers or {})
        self._extra_body = dict(extra_body or {})
        self._usage_grace_s = checked_s(
            "usage_grace_s", usage_grace_s, WORK_S_MAX, may_be_zero=True
        )
        self._redact = redactor((self._api_key, *self._headers.values()))
        self._client: RunVar[openai.AsyncOpenAI | None] = RunVar("openai_client", None)

    def __repr__(self) -> str:
        return f"OpenAIModel({self.model!r})"

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Make one streamed request; see the port for what it raises."""
        client = self._connect()
        started = anyio.current_time()
        names = ToolNames(request.tools)
        assembly = Assembly(self.model)
        watch = _Watch(request, started, self._usage_grace_s)
        try:
            with watch.scope:
                await self._stream(client, request, names, assembly, watch)
            if watch.scope.cancelled_caught and not assembly.finished:
                raise self._failure(watch.timeout(started), assembly)
            reply = assembly.reply(round((anyio.current_time() - started) * 1000))
        except BrokenReply as error:
            failure = Failure(
                code=FailureCode.MODEL_ERROR,
                reason=f"{self.model}: {error}",
                retryable=True,
                stage=Stage.PLANNING,
            )
            raise self._failure(failure, assembly) from None
        return names.restore(reply)

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        client = self._client.get()
        if client is not None:
            self._client.set(None)
            await client.close()

    def _connect(self) -> openai.AsyncOpenAI:
        client = self._client.get()
        if client is None:
            client = openai.AsyncOpenAI(
                api_key=self._api_key,
                base_url=self._base_url,
                max_retries=0,
                timeout=None,
                default_headers=self._headers,
                http_client=openai.DefaultAsyncHttpxClient(
                    timeout=None, follow_redirects=False, verify=_tls()
                ),
            )
            self._client.set(client)
        return client

    async def _stream(
        self,
        client: openai.AsyncOpenAI,
        request: ModelRequest,
        names: ToolNames,
        assembly: Assembly,
        watch: _Watch,
    ) -> None:
        """Take the stream to its end; raise PlannerFailure for what the client raises."""
        try:
            stream = await client.chat.completions.create(
                model=self.model,
                messages=wire_messages(request.messages, names),
                stream=True,
                stream_options={"include_usage": True},
                extra_body=self._extra_body or None,
                **self._optional(request, names),
            )
            async with stream:
                async for chunk in stream:
                    self._take(chunk, request, assembly, watch)
        except openai.APIConnectionError as error:
            if not assembly.finished:
                raise self._translated(error, assembly) from None
        except (openai.OpenAIError, ValueError, RecursionError) as error:  # not JSON, not UTF-8
            raise self._translated(error, assembly) from None

    def _optional(self, request: ModelRequest, names: ToolNames) -> dict[str, Any]:
        """Return the parameters that are sent only when they are set."""
        found: dict[str, Any] = {}
        if request.tools:
            found["tools"] = wire_tools(request.tools, names)
        if request.temperature is not None:
            found["temperature"] = request.temperature
        if request.max_output_tokens is not None:
            found[self._limit_field] = request.max_output_tokens
        return found

    def _take(
        self, chunk: ChatCompletionChunk, request: ModelRequest, assembly: Assembly, watch: _Watch
    ) -> None:
        """Add one chunk. Chunks are not validated by the client: any field may be missing."""
        self._open_session(chunk, request, assembly)
        progress = False
        usage: object = getattr(chunk, "usage", None)
        if usage is not None:
            progress = assembly.add_usage(self._usage(chunk.usage))
        for choice in _items(getattr(chunk, "choices", None)):
            if not (getattr(choice, "index", 0) or 0):
                progress = _take_choice(choice, request, assembly) or progress
        if progress:
            watch.progress(finished=assembly.finished)

    def _open_session(
        self, chunk: ChatCompletionChunk, request: ModelRequest, assembly: Assembly
    ) -> None:
        session: object = getattr(chunk, "id", None)
        if assembly.session is None and isinstance(session, str) and session:
            assembly.session = session
            if request.on_delta is not None:
                request.on_delta(ModelDelta(session=session))

    def _usage(self, usage: CompletionUsage | None) -> Usage:
        tokens_in = _whole(getattr(usage, "prompt_tokens", 0))
        tokens_out = _whole(getattr(usage, "completion_tokens", 0))
        cost: object = getattr(usage, "cost", None)  # some gateways tell what they charge
        if self._price is not None:
            cost = (
                tokens_in * self._price.input_per_million
                + tokens_out * self._price.output_per_million
            ) / 1_000_000
        known = isinstance(cost, int | float) and 0 <= cost < float("inf")
        return Usage(
            input_tokens=tokens_in,
            output_tokens=tokens_out,
            cost=float(cost) if known and isinstance(cost, int | float) else 0.0,
        )

    def _translated(self, error: Exception, assembly: Assembly) -> PlannerFailure:
        failure, retry_after_s = failure_of(error, self.model, self._redact)
        return self._failure(failure, assembly, retry_after_s)

    def _failure(
        self, failure: Failure, assembly: Assembly, retry_after_s: float | None = None
    ) -> PlannerFailure:
        """Return the failure with the record of what was paid for; its text is not kept."""
        if assembly.session is None and assembly.usage is None:
            return PlannerFailure(failure, retry_after_s=retry_after_s)
        use = ModelUse(
            model=self.model,
            finish="error",
            usage=assembly.usage or Usage(),
            session=assembly.session,
        )
        return PlannerFailure(failure, retry_after_s=retry_after_s, model_uses=(use,))


class _Watch:
    """The two clocks of a request as one deadline, moved by progress."""

    def __init__(self, request: ModelRequest, started: float, usage_grace_s: float) -> None:
        self._idle_s = request.idle_s
        self._timeout_s = request.timeout_s
        self._grace_s = usage_grace_s
        self._end = started + request.timeout_s
        self._idle_first = request.idle_s < request.timeout_s
        self.scope = anyio.CancelScope(deadline=min(self._end, started + request.idle_s))

    def progress(self, *, finished: bool) -> None:
        """Start the idle time again; after the finish only the grace is left."""
        wait_s = min(self._grace_s, self._idle_s) if finished else self._idle_s
        idle_end = anyio.current_time() + wait_s
        self._idle_first = idle_end < self._end
        self.scope.deadline = min(self._end, idle_end)

    def timeout(self, started: float) -> Failure:
        """Return the failure of the clock that ran out."""
        if self._idle_first:
            reason, limit_s = f"the model made no progress for {self._idle_s:g} s", self._idle_s
        else:
            reason, limit_s = f"the model gave no end within {self._timeout_s:g} s", self._timeout_s
        return Failure(
            code=FailureCode.MODEL_TIMEOUT,
            reason=reason,
            retryable=True,
            stage=Stage.PLANNING,
            details={"limit_ms": round(limit_s * 1000)},
        )


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return the TLS settings of all clients: reading the certificates takes tens of ms."""
    return httpx2.create_ssl_context()


def _take_choice(choice: Any, request: ModelRequest, assembly: Assembly) -> bool:
    delta = getattr(choice, "delta", None)
    progress = False
    for field in ("content", "refusal"):
        text = _text(getattr(delta, field, None))
        if assembly.add_text(text):
            progress = True
            if request.on_delta is not None and text:
                request.on_delta(ModelDelta(text=text))
    for field in ("reasoning_content", "reasoning"):
        progress = bool(_text(getattr(delta, field, None))) or progress
    for call in _items(getattr(delta, "tool_calls", None)):
        function = getattr(call, "function", None)
        index = getattr(call, "index", None)
        added = assembly.add_call(
            index if isinstance(index, int) else None,
            _text(getattr(call, "id", None)),
            _text(getattr(function, "name", None)),
            _text(getattr(function, "arguments", None)),
        )
        progress = added or progress
    return assembly.end(_text(getattr(choice, "finish_reason", None))) or progress


def _items(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _whole(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0
