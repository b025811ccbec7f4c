"""What a planner needs from a language model: one request, one whole reply.

A reply is complete or it is none: a stream that breaks off, stalls or says nothing raises, so
partial text never becomes an answer (F43). Every known trouble is a `PlannerFailure` with one of
three codes; retries are the engine's, adapters make exactly one request.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, cast

from pydantic import JsonValue

from perdure.protocol.codec import clean
from perdure.protocol.decisions import ModelUse, ToolRequest
from perdure.protocol.durations import WORK_S_MAX, checked_s
from perdure.protocol.errors import Invalid
from perdure.protocol.events import Usage
from perdure.protocol.tools import ToolSpec
from perdure.protocol.values import NAME_CHARACTERS_MAX

MODEL_TIMEOUT_S_DEFAULT = 600.0
MODEL_IDLE_S_DEFAULT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A tool call that an assistant message shows. `arguments` are the JSON text of an object."""

    call_id: str
    tool: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of the conversation as models read it. `call_id` names what a result answers."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    calls: tuple[ChatCall, ...] = ()
    call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDelta:
    """A piece of a reply on its way. The first one carries the provider's handle, if it has one."""

    text: str = ""
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One request. `timeout_s` bounds the whole, `idle_s` the time without progress."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...] = ()
    temperature: float | None = None
    max_output_tokens: int | None = None
    timeout_s: float = MODEL_TIMEOUT_S_DEFAULT
    idle_s: float = MODEL_IDLE_S_DEFAULT
    on_delta: Callable[[ModelDelta], None] | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for times out of bounds."""
        checked_s("the timeout_s of a model request", self.timeout_s, WORK_S_MAX)
        checked_s("the idle_s of a model request", self.idle_s, WORK_S_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """A whole reply. `finish` is the provider's word: stop, tool_calls, length, content_filter."""

    text: str = ""
    calls: tuple[ToolRequest, ...] = ()
    usage: Usage = Usage()
    finish: str = "stop"
    model: str = ""
    session: str | None = None
    duration_ms: int = 0


class ModelClient(Protocol):
    """A model that can be asked. Runs on the loop of its caller; holds no state of a run."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the whole reply.

        Raises PlannerFailure with MODEL_TIMEOUT (no progress or no end in time), MODEL_ERROR (the
        service failed or answered nonsense) or CONTEXT_OVERFLOW (the conversation does not fit).
        """
        ...


def use_of(
    reply: ModelReply, *, request_digest: str | None = None, message_id: str | None = None
) -> ModelUse:
    """Return the record of a request that was answered; `message_id`: as which it was streamed."""
    return ModelUse(
        model=reply.model,
        text=reply.text,
        finish=reply.finish,
        usage=reply.usage,
        request_digest=request_digest,
        session=reply.session,
        duration_ms=reply.duration_ms,
        message_id=message_id,
    )


def tool_request(tool: str, arguments: str, call_id: str | None) -> ToolRequest:
    """Return a call from the argument text a model wrote; what is not a JSON object stays text.

    No text at all counts as no arguments: models write it for tools without parameters.
    """
    args, problem = _read_arguments(arguments)
    name = cast("str", clean(tool))[:NAME_CHARACTERS_MAX]
    known = call_id is not None and 0 < len(call_id) <= NAME_CHARACTERS_MAX
    return ToolRequest(
        tool=name,
        args=args,
        call_id=cast("str", clean(call_id)) if known else None,
        problem=problem,
    )


def _read_arguments(arguments: str) -> tuple[JsonValue, str | None]:
    text = cast("str", clean(arguments))
    if not text.strip():
        return {}, None
    try:
        value = clean(cast("object", json.loads(text)))
    except json.JSONDecodeError as error:
        return text, f"the arguments are not JSON: {error.msg} (character {error.pos})"
    except (Invalid, RecursionError):
        return text, "the arguments are nested too deeply"
    except ValueError:
        return text, "the arguments hold a number that cannot be read"
    if not isinstance(value, dict):
        return text, "the arguments are JSON, but not an object"
    return value, None
