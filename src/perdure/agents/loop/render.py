"""How one turn, message or input reads to a model. Pure functions: the same in, the same out.

What is rendered is legal for strict providers: every tool call has exactly one result, in order,
right after its message; ids are unique in the conversation; arguments are the text of an object.
"""

from collections.abc import Container, Sequence
from typing import Literal, assert_never

from pydantic import JsonValue

from perdure.agents.models.port import ChatCall, ChatMessage
from perdure.engine.context import AskRecord, CallRecord, Turn
from perdure.protocol.codec import encode
from perdure.protocol.failures import Failure
from perdure.protocol.messages import (
    AudioPart,
    DataPart,
    FilePart,
    ImagePart,
    Message,
    Part,
    Role,
    TextPart,
    ToolCallPart,
    ToolResultPart,
)
from perdure.protocol.states import ToolCallStatus, is_open

ASK_TOOL = "ask_human"
GO_ON = "Go on."


def text_of(value: JsonValue) -> str:
    """Return a value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else encode(value).decode()


def render_input(value: JsonValue) -> ChatMessage:
    """Return the run's input; providers refuse an empty message."""
    text = "" if value is None else text_of(value)
    return ChatMessage(role="user", text=text if text.strip() else "(no input)")


def render_thread(messages: Sequence[Message]) -> list[ChatMessage]:
    """Return the thread's earlier messages; calls they mention are told as text.

    What the system says later than at the very beginning is told by the user: providers refuse it.
    """
    told: list[ChatMessage] = []
    for message in messages:
        role, text = _role(message.role), _text_of_message(message)
        if not text.strip():
            continue
        if role == "system" and told and told[-1].role != "system":
            role, text = "user", f"[system] {text}"
        told.append(ChatMessage(role=role, text=text))
    return told


def render_turn(turn: Turn, used_ids: Container[str]) -> list[ChatMessage]:
    """Return the messages of one turn; ids that earlier turns used are replaced by ours."""
    ids = _call_ids(turn.calls, used_ids)
    calls = [_chat_call(record, call_id) for record, call_id in zip(turn.calls, ids, strict=True)]
    results = [
        ChatMessage(role="tool", call_id=call_id, text=_result_text(record))
        for record, call_id in zip(turn.calls, ids, strict=True)
    ]
    for ask in turn.asks:
        calls.append(_ask_call(ask))
        results.append(ChatMessage(role="tool", call_id=ask.interrupt_id, text=_answer_text(ask)))
    told = [ChatMessage(role="user", text=_note_text(note)) for note in turn.notes]
    if not (turn.text or calls or told):
        return []
    said = [ChatMessage(role="assistant", text=turn.text, calls=tuple(calls))]
    after = results + told
    if not after:
        after = [ChatMessage(role="user", text=GO_ON)]
    return (said if turn.text or calls else []) + after


def _call_ids(records: Sequence[CallRecord], used_ids: Container[str]) -> list[str]:
    ids: list[str] = []
    for record in records:
        wanted = record.planner_call_id
        taken = not wanted or wanted in used_ids or wanted in ids
        ids.append(record.tool_call_id if taken else str(wanted))
    return ids


def _chat_call(record: CallRecord, call_id: str) -> ChatCall:
    args: JsonValue = record.args
    if not isinstance(args, dict):
        args = {} if args is None else {"not_json": args}
    return ChatCall(call_id=call_id, tool=record.tool, arguments=encode(args).decode())


def _result_text(record: CallRecord) -> str:
    """Return a success as the output alone, everything else as data about what happened."""
    if record.status is ToolCallStatus.SUCCEEDED:
        return text_of(record.output)
    told: dict[str, JsonValue] = {
        "status": "running" if is_open(record.status) else record.status.value
    }
    if record.error is not None:
        told["error"] = _failure_data(record.error)
    if record.output is not None:
        told["output"] = record.output
    more = {
        "done": record.done,
        "not_done": record.not_done,
        "external_ref": record.external_ref,
    }
    told |= {key: value for key, value in more.items() if value is not None}
    return encode(told).decode()


def _ask_call(ask: AskRecord) -> ChatCall:
    return ChatCall(
        call_id=ask.interrupt_id,
        tool=ASK_TOOL,
        arguments=encode({"question": ask.title}).decode(),
    )


def _answer_text(ask: AskRecord) -> str:
    told: dict[str, JsonValue] = {"outcome": ask.outcome or "open"}
    more: dict[str, JsonValue] = {"answer": ask.answer, "value": ask.value, "by": ask.by}
    told |= {key: value for key, value in more.items() if value is not None}
    return encode(told).decode()


def _note_text(note: Failure) -> str:
    return encode({"runtime_note": _failure_data(note)}).decode()


def _failure_data(failure: Failure) -> dict[str, JsonValue]:
    data: dict[str, JsonValue] = {"code": failure.code.value, "reason": failure.reason}
    if failure.retryable:
        data["retryable"] = True
    if failure.details:
        data["details"] = failure.details
    return data


def _role(role: Role) -> Literal["system", "user", "assistant"]:
    match role:
        case Role.USER | Role.TOOL:
            return "user"
        case Role.ASSISTANT:
            return "assistant"
        case Role.SYSTEM:
            return "system"
        case _:
            assert_never(role)


def _text_of_message(message: Message) -> str:
    if not message.parts and message.ref is not None:
        return message.ref.preview
    return "\n".join(_text_of_part(part) for part in message.parts)


def _text_of_part(part: Part) -> str:
    match part:
        case TextPart():
            return part.text
        case DataPart():
            return encode(part.data).decode()
        case ImagePart() | AudioPart():
            return f"[{part.type}: {part.url or part.media_type}]"
        case FilePart():
            return f"[file: {part.name}]"
        case ToolCallPart():
            return f"[called {part.tool}: {encode(part.args).decode()}]"
        case ToolResultPart():
            return f"[result, {part.status}: {encode(part.output).decode()}]"
        case _:
            assert_never(part)
