"""Messages and tools as the Chat Completions protocol writes them.

Function names of the protocol are narrower than ours (`[A-Za-z0-9_-]`, 64 characters), so names
are mapped on the way out and back again on the way in, without two tools sharing one.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from openai.types.chat import (
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)

from perdure.agents.models.port import ChatCall, ChatMessage, ModelReply
from perdure.protocol.tools import ToolSpec

_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")
_NAME_CHARACTERS_MAX = 64


class ToolNames:
    """The names of one request's tools in the protocol, and back."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None:
        self._wire: dict[str, str] = {}
        self._ours: dict[str, str] = {}
        for tool in sorted(tools, key=lambda tool: _legal(tool.name) != tool.name):
            if tool.name in self._wire:
                continue
            name, number = _legal(tool.name), 1
            while name in self._ours:
                number += 1
                suffix = f"_{number}"
                name = _legal(tool.name)[: _NAME_CHARACTERS_MAX - len(suffix)] + suffix
            self._wire[tool.name] = name
            self._ours[name] = tool.name

    def wire(self, name: str) -> str:
        """Return a tool's name in the protocol; one that is not offered is made legal."""
        return self._wire.get(name) or _legal(name)

    def restore(self, reply: ModelReply) -> ModelReply:
        """Return the reply with our names; an unknown one stays as the model wrote it."""
        if all(self._ours.get(call.tool, call.tool) == call.tool for call in reply.calls):
            return reply
        calls = tuple(
            call.model_copy(update={"tool": self._ours.get(call.tool, call.tool)})
            for call in reply.calls
        )
        return replace(reply, calls=calls)


def _legal(name: str) -> str:
    return _FORBIDDEN.sub("_", name)[:_NAME_CHARACTERS_MAX] or "_"


def wire_tools(tools: Sequence[ToolSpec], names: ToolNames) -> list[ChatCompletionToolParam]:
    """Return the tools of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": names.wire(tool.name),
                "description": tool.description,
                "parameters": dict[str, object](tool.input_schema),
            },
        }
        for tool in tools
    ]


def wire_messages(
    messages: Sequence[ChatMessage], names: ToolNames
) -> list[ChatCompletionMessageParam]:
    """Return the messages of a request."""
    return [_message(message, names) for message in messages]


def _message(message: ChatMessage, names: ToolNames) -> ChatCompletionMessageParam:
    match message.role:
        case "system":
            return {"role": "system", "content": message.text}
        case "user":
            return {"role": "user", "content": message.text}
        case "tool":
            return {
                "role": "tool",
                "tool_call_id": message.call_id or "",
                "content": message.text,
            }
        case "assistant" if message.calls:
            return {
                "role": "assistant",
                "content": message.text or None,
                "tool_calls": [_call(call, names) for call in message.calls],
            }
        case "assistant":
            return {"role": "assistant", "content": message.text}
        case _:
            assert_never(message.role)


def _call(call: ChatCall, names: ToolNames) -> ChatCompletionMessageFunctionToolCallParam:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": names.wire(call.tool), "arguments": call.arguments},
    }
