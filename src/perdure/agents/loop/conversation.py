"""The conversation of a run as models read it: it grows by appending and is never remade.

A step renders the turns it has not seen, so a run of 1,000 steps costs about 1,000 times one
step. The newest turn may still change (results, answers, notes), so it is rendered afresh each
time and kept once another follows. What is kept is checked by position before it is used; a
conversation made from nothing is equal to it byte for byte.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from perdure.agents.loop.render import render_input, render_thread, render_turn
from perdure.agents.models.port import ChatMessage
from perdure.engine.context import PlannerContext, Turn
from perdure.protocol.codec import canonical

CONVERSATIONS_MAX = 256
CHARACTERS_MAX = 64 * 1024 * 1024


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def copy(self) -> "_Digest": ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class View:
    """The whole conversation of one step, with the digest of all of it."""

    messages: tuple[ChatMessage, ...]
    digest: str


@dataclass(slots=True)
class _Kept:
    """The part of a conversation that no longer changes: `turns` turns of it are in `messages`."""

    opening: tuple[object, ...]
    messages: list[ChatMessage]
    turns: int = 0
    last: list[ChatMessage] = field(default_factory=list[ChatMessage])
    last_index: int | None = None
    ids: set[str] = field(default_factory=set[str])
    last_ids: set[str] = field(default_factory=set[str])
    characters: int = 0
    hash: "_Digest" = field(default_factory=hashlib.sha256)


class Conversations:
    """Conversations by run, the longest unused forgotten first. Not for several threads."""

    def __init__(
        self,
        *,
        conversations_max: int = CONVERSATIONS_MAX,
        characters_max: int = CHARACTERS_MAX,
    ) -> None:
        self._conversations_max = conversations_max
        self._characters_max = characters_max
        self._characters = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def view(self, context: PlannerContext, system: str = "", *tail: ChatMessage) -> View:
        """Return the conversation up to this step; `tail` is added for this request alone."""
        opening = _opening(context, system)
        kept = self._known(context, opening) or self._opened(context, opening, system)
        before = kept.characters
        for position in range(kept.turns, len(context.turns) - 1):
            _keep(kept, context.turns[position])
        self._characters += kept.characters - before
        self._forget_old()
        newest = [*_newest(context, kept.ids), *tail]
        digest = kept.hash.copy()
        _feed(digest, newest)
        return View((*kept.messages, *newest), digest.hexdigest())

    def _known(self, context: PlannerContext, opening: tuple[object, ...]) -> _Kept | None:
        """Return what is kept of this run, if it is the beginning of what the context says."""
        kept = self._kept.get(context.facts.run_id)
        if kept is None:
            return None
        if kept.opening == opening and _agrees(kept, context):
            self._kept.move_to_end(context.facts.run_id)
            return kept
        self._drop(context.facts.run_id)
        return None

    def _opened(self, context: PlannerContext, opening: tuple[object, ...], system: str) -> _Kept:
        messages = [ChatMessage(role="system", text=system)] if system else []
        messages += render_thread(context.messages)
        messages.append(render_input(context.input))
        kept = _Kept(opening, messages)
        _feed(kept.hash, messages)
        kept.characters = _size(messages)
        self._characters += kept.characters
        self._kept[context.facts.run_id] = kept
        return kept

    def _forget_old(self) -> None:
        while len(self._kept) > self._conversations_max or (
            self._characters > self._characters_max and len(self._kept) > 1
        ):
            self._drop(next(iter(self._kept)))

    def _drop(self, run_id: str) -> None:
        self._characters -= self._kept.pop(run_id).characters


def _opening(context: PlannerContext, system: str) -> tuple[object, ...]:
    """Return what tells one opening of a conversation from another, at constant cost."""
    messages = context.messages
    ends = (messages[0].message_id, messages[-1].message_id) if messages else ()
    return (system, len(messages), ends, context.facts.thread_id, context.input)


def _agrees(kept: _Kept, context: PlannerContext) -> bool:
    if kept.turns == 0:
        return True
    if kept.turns >= len(context.turns):
        return False
    turn = context.turns[kept.turns - 1]
    if turn.step_index != kept.last_index:
        return False
    kept.ids -= kept.last_ids
    again = render_turn(turn, kept.ids)
    kept.ids |= kept.last_ids
    return again == kept.last


def _keep(kept: _Kept, turn: Turn) -> None:
    messages = render_turn(turn, kept.ids)
    kept.messages += messages
    kept.turns += 1
    kept.last, kept.last_index = messages, turn.step_index
    kept.last_ids = {call.call_id for message in messages for call in message.calls}
    kept.ids |= kept.last_ids
    kept.characters += _size(messages)
    _feed(kept.hash, messages)


def _newest(context: PlannerContext, used_ids: set[str]) -> list[ChatMessage]:
    return render_turn(context.turns[-1], used_ids) if context.turns else []


def _size(messages: list[ChatMessage]) -> int:
    return sum(
        100 + len(message.text) + sum(100 + len(call.arguments) for call in message.calls)
        for message in messages
    )


def _feed(digest: "_Digest", messages: list[ChatMessage]) -> None:
    for message in messages:
        calls: list[JsonValue] = [
            [call.call_id, call.tool, call.arguments] for call in message.calls
        ]
        digest.update(canonical([message.role, message.text, calls, message.call_id]))
