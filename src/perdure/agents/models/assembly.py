"""Puts a streamed reply together, whatever order and repetition the pieces come in.

Servers that call themselves compatible differ in how they number parallel tool calls: some repeat
the id and name in every piece, some give all calls the index 0 and tell them apart by id, some
leave the index out. A piece that belongs to no call, and a stream without its end, are errors.
"""

import json
from dataclasses import dataclass, field
from typing import cast

from perdure.agents.models.port import ModelReply, tool_request
from perdure.protocol.codec import clean
from perdure.protocol.decisions import ToolRequest
from perdure.protocol.events import Usage
from perdure.protocol.values import CALLS_PER_STEP_MAX

REPLY_CHARACTERS_MAX = 4_000_000
CALLS_SEEN_MAX = 1000


class BrokenReply(Exception):
    """The stream does not amount to a reply. The message says why, without any content."""


@dataclass(slots=True)
class _Call:
    call_id: str | None
    name: str
    arguments: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Assembly:
    """The pieces of one reply so far. `add_…` tell whether the piece was progress."""

    model: str
    session: str | None = None
    finish: str = ""
    usage: Usage | None = None
    _text: list[str] = field(default_factory=list[str])
    _calls: list[_Call] = field(default_factory=list[_Call])
    _by_index: dict[int, _Call] = field(default_factory=dict[int, _Call])
    _characters: int = 0

    @property
    def finished(self) -> bool:
        """Tell whether the model said that it is done."""
        return self.finish != ""

    def add_text(self, text: str | None) -> bool:
        """Take a piece of the text."""
        if not text:
            return False
        if self.finished:
            raise BrokenReply("the stream went on after its end")
        self._count(text)
        self._text.append(text)
        return True

    def add_call(
        self, index: int | None, call_id: str | None, name: str | None, arguments: str | None
    ) -> bool:
        """Take a piece of a tool call."""
        if self.finished:
            raise BrokenReply("the stream went on after its end")
        call = self._call_for(index, call_id, name)
        if name and not call.name:
            call.name = name
        if arguments and name and _is_repeated(call, arguments):
            return False
        if arguments:
            self._count(arguments)
            call.arguments.append(arguments)
        return bool(call_id or name or arguments)

    def end(self, finish: str | None) -> bool:
        """Take the model's word that it is done; said twice it changes nothing."""
        if not finish or self.finished:
            return False
        self.finish = finish
        return True

    def add_usage(self, usage: Usage) -> bool:
        """Take the usage so far; each report replaces the one before."""
        changed = usage != self.usage
        self.usage = usage
        return changed

    def reply(self, duration_ms: int) -> ModelReply:
        """Return the whole reply; raise BrokenReply when there is none."""
        if not self.finished:
            raise BrokenReply("the stream ended before the reply did")
        text = cast("str", clean("".join(self._text)))
        calls = self._requests()
        if not text.strip() and not calls and self.finish in {"stop", "tool_calls"}:
            raise BrokenReply("the reply is empty")
        return ModelReply(
            text=text,
            calls=calls,
            usage=self.usage or Usage(),
            finish=self.finish,
            model=self.model,
            session=self.session,
            duration_ms=duration_ms,
        )

    def _count(self, piece: str) -> None:
        self._characters += len(piece)
        if self._characters > REPLY_CHARACTERS_MAX:
            raise BrokenReply(f"the reply is longer than {REPLY_CHARACTERS_MAX} characters")

    def _call_for(self, index: int | None, call_id: str | None, name: str | None) -> _Call:
        found = self._by_index.get(index) if index is not None else self._last_call()
        if found is not None and not _starts_another(found, index, call_id, name):
            found.call_id = found.call_id or call_id
            return found
        same = next((call for call in self._calls if call_id and call.call_id == call_id), None)
        if same is not None and not name:
            return same
        if not call_id and not name:
            raise BrokenReply("a piece of a tool call belongs to no call")
        return self._open(index, call_id, name)

    def _open(self, index: int | None, call_id: str | None, name: str | None) -> _Call:
        if len(self._calls) >= CALLS_SEEN_MAX:
            raise BrokenReply(f"the reply asks for more than {CALLS_SEEN_MAX} tool calls")
        call = _Call(call_id or None, name or "")
        self._calls.append(call)
        if index is not None:
            self._by_index[index] = call
        return call

    def _last_call(self) -> _Call | None:
        return self._calls[-1] if self._calls else None

    def _requests(self) -> tuple[ToolRequest, ...]:
        if any(not call.name for call in self._calls):
            raise BrokenReply("a tool call has no name")
        seen: set[str] = set()
        requests: list[ToolRequest] = []
        for call in self._calls[:CALLS_PER_STEP_MAX]:
            call_id = call.call_id if call.call_id not in seen else None
            if call_id is not None:
                seen.add(call_id)
            requests.append(tool_request(call.name, "".join(call.arguments), call_id))
        return tuple(requests)


def _starts_another(call: _Call, index: int | None, call_id: str | None, name: str | None) -> bool:
    if call_id and call.call_id:
        return call_id != call.call_id
    return index is None and bool(name) and bool(call.arguments)


def _is_repeated(call: _Call, arguments: str) -> bool:
    """Tell a piece sent twice: whole arguments said again can never go on as JSON."""
    if "".join(call.arguments) != arguments:
        return False
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True
