"""Model requests of a code agent: from what its function wishes to what its journal keeps."""

from collections.abc import Callable

from pydantic import JsonValue

from perdure.agents.code.live import ModelWish, Recorded, request_digest
from perdure.agents.models.port import (
    MODEL_TIMEOUT_S_DEFAULT,
    ChatMessage,
    ModelDelta,
    ModelReply,
    ModelRequest,
    use_of,
)
from perdure.engine.context import Entry, OpenMessage, PlannerContext
from perdure.engine.ports import PlannerFailure
from perdure.protocol.decisions import ModelUse
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.values import Value


def request_of(
    context: PlannerContext, wish: ModelWish, message: OpenMessage | None
) -> ModelRequest:
    """Return the request that a function wishes. Raises PlannerFailure for one that cannot be made."""
    try:
        messages = tuple(ChatMessage(**message) for message in wish.messages)  # pyright: ignore[reportArgumentType]  # what does not fit raises
    except TypeError as error:
        raise _broken(f"ctx.model: a message has role and text: {error}") from None
    known = {spec.name: spec for spec in context.tools}
    missing = [name for name in wish.tools if name not in known]
    if missing:
        raise _broken(f"ctx.model: the agent is not granted {missing[0]}")
    return ModelRequest(
        messages=messages,
        tools=tuple(known[name] for name in wish.tools),
        temperature=wish.temperature,
        max_output_tokens=wish.max_output_tokens,
        timeout_s=wish.timeout_s
        or context.facts.options.timeouts.model_s
        or MODEL_TIMEOUT_S_DEFAULT,
        on_delta=None if message is None else _into(message),
    )


def _into(message: OpenMessage) -> Callable[[ModelDelta], None]:
    """Return what passes the pieces of a reply on to those who follow the run."""

    def take(delta: ModelDelta) -> None:
        if delta.text:
            message.say(delta.text)

    return take


def use_of_reply(
    reply: ModelReply, position: str, wish: ModelWish, message: OpenMessage | None
) -> ModelUse:
    """Return what a reply used, with all that is to be recorded of it at its position."""
    calls: tuple[dict[str, JsonValue], ...] = tuple(
        {"tool": call.tool, "args": call.args, "call_id": call.call_id} for call in reply.calls
    )
    use = use_of(
        reply,
        request_digest=request_digest(wish),
        message_id=message.message_id if message is not None else None,
    )
    return use.model_copy(update={"position": position, "calls": calls or None})


def reply_of(position: str, use: ModelUse) -> Recorded:
    """Return a reply as the journal holds it."""
    return Recorded(
        entry=Entry(
            position=position,
            kind="model",
            name="",
            digest=use.request_digest or "",
            done=True,
            value=Value(),
            finish=use.finish,
            calls=use.calls or (),
        ),
        value=use.text,
    )


def _broken(reason: str) -> PlannerFailure:
    return PlannerFailure(Failure(code=FailureCode.INTERNAL, reason=reason, stage=Stage.PLANNING))
