"""What a planner says while it decides: live at once, durable in coalesced fragments (R-6.5).

One `Replies` belongs to one decision. Its messages are spoken on the engine's loop. While the
planner is asked, `keep_durable` writes what has gathered, at most every `delta_interval_s`, in
commits of the holder that carry nothing else; they are fenced like all others and move the view's
last seq, so the step's own commit follows on. What is left at the end goes into that commit,
before the `model` event that names the message: its text is then exactly what was streamed.

A message that no `model` event names is superseded: the request failed, its worker died, or the
planner went another way. Its text is never an answer. Text of one request has one message id.
"""

import hashlib
from collections.abc import Awaitable, Callable

import anyio

from perdure.engine.context import OpenMessage
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.lease import Lease
from perdure.engine.live import Fragment
from perdure.engine.view import RunView
from perdure.protocol.codec import clean
from perdure.protocol.decisions import ModelUse
from perdure.protocol.events import DeltaEvent
from perdure.protocol.ids import MESSAGE

EVENT_CHARACTERS_MAX = 8_000
"""Characters of one `delta` event: six bytes each at most, so it stays within an event's limit."""

COMMIT_CHARACTERS = 32_000
"""How much text is written without waiting for the interval, and at most in one commit."""

MESSAGE_CHARACTERS_MAX = 1_000_000
"""What is streamed of one message. A longer one is whole in its `model` event only."""

MESSAGES_MAX = 32
"""Messages of one decision that are streamed; the text of further ones is not."""


class _Message:
    """One message under way: `base` characters of it are durable, `parts` are not yet."""

    def __init__(self, replies: "Replies", message_id: str) -> None:
        self.replies = replies
        self.message_id = message_id
        self.base = 0
        self.end = 0
        self.parts: list[str] = []
        self.is_whole = True
        self._hash = hashlib.sha256()

    def say(self, text: str) -> None:
        """Pass on the next piece; never blocks, never raises."""
        text = str(clean(text))
        if not text:
            return
        if not self.is_whole or self.end + len(text) > MESSAGE_CHARACTERS_MAX:
            self.is_whole = False
            self.replies.drop("long")
            return
        if not self.replies.may_speak(self):
            self.is_whole = False
            return
        fragment = self.replies.fragment(self, self.end, text)
        self.parts.append(text)
        self.end += len(text)
        self._hash.update(text.encode())
        self.replies.said(fragment)

    def rest(self) -> Fragment:
        """Return the text that is not durable yet."""
        return self.replies.fragment(self, self.base, "".join(self.parts))

    def written(self, upto: int) -> None:
        """Note that the text up to a place is durable."""
        rest = "".join(self.parts)[upto - self.base :]
        self.base = upto
        self.parts = [rest] if rest else []

    def is_text(self, text: str) -> bool:
        """Tell whether exactly this text was streamed."""
        return self.is_whole and self._hash.digest() == hashlib.sha256(text.encode()).digest()


class Replies:
    """The messages of one decision."""

    def __init__(self, core: Core, lease: Lease, view: RunView) -> None:
        self._core = core
        self._lease = lease
        self._run_id = view.facts.run_id
        self._step = view.snapshot.step_index
        self._attempt = view.snapshot.attempt
        self._epoch = view.snapshot.cancel_epoch
        self._messages: dict[str, _Message] = {}
        self._bell = anyio.Event()
        self._full = anyio.Event()
        self._pending = 0
        self._is_closed = False

    # ------------------------------------------------------------ while the planner is asked

    def open(self) -> OpenMessage:
        """Begin a message; from any thread. Its first word announces it."""
        return _Message(self, self._core.ids.new(MESSAGE))

    def may_speak(self, message: _Message) -> bool:
        """Tell whether a message may go on; count what is dropped."""
        known = message.message_id in self._messages
        if not known and len(self._messages) >= MESSAGES_MAX:
            self.drop("long")
        elif self._is_closed:
            self.drop("ended")
        elif not self._lease.is_valid(self._core.clock.monotonic()):
            self.drop("lease")
        elif self._lease.epoch > self._epoch:
            self.drop("epoch")
        else:
            if not known:
                self._messages[message.message_id] = message
                self._core.live.open(self._run_id, message.message_id, message)
            return True
        return False

    def drop(self, reason: str) -> None:
        """Count a fragment that goes nowhere."""
        self._core.metrics.engine.fragments_dropped.labels(reason=reason).inc()

    def fragment(self, message: _Message, offset: int, text: str) -> Fragment:
        """Return a piece of a message as followers get it."""
        return Fragment(
            run_id=self._run_id,
            message_id=message.message_id,
            offset=offset,
            text=text,
            step_index=self._step,
            attempt=self._attempt,
            epoch=self._epoch,
        )

    def said(self, fragment: Fragment) -> None:
        """Hand a piece to the followers, and to the next durable fragment."""
        self._core.live.say(fragment)
        self._pending += len(fragment.text)
        self._bell.set()
        if self._pending >= COMMIT_CHARACTERS:
            self._full.set()

    def close(self) -> None:
        """End all messages: nothing is said any more."""
        self._is_closed = True
        for message_id in self._messages:
            self._core.live.close(self._run_id, message_id)
        self._bell.set()
        self._full.set()

    async def keep_durable(self, write: Callable[["Replies"], Awaitable[None]]) -> None:
        """Have what gathers written until `close`; a write under way is finished."""
        while not self._is_closed:
            await self._bell.wait()
            with anyio.move_on_after(self._core.settings.delta_interval_s):
                await self._full.wait()
            if self._is_closed:
                return
            await write(self)

    # ------------------------------------------------------------ in drafts

    def draft_pending(self, draft: Draft) -> dict[str, int]:
        """Draft what has gathered; return up to where each message is then durable."""
        room, upto = COMMIT_CHARACTERS, dict[str, int]()
        for message in self._messages.values():
            rest = message.rest().text[:room]
            if rest:
                _add(draft, message.message_id, message.base, rest)
                upto[message.message_id] = message.base + len(rest)
                room -= len(rest)
        return upto

    def written(self, upto: dict[str, int]) -> None:
        """Note what is durable, and whether more waits."""
        for message_id, place in upto.items():
            message = self._messages[message_id]
            self._pending -= place - message.base
            message.written(place)
        if not self._is_closed:
            self._bell, self._full = anyio.Event(), anyio.Event()
            if self._pending:
                self._bell.set()
            if self._pending >= COMMIT_CHARACTERS:
                self._full.set()

    def draft_rest(self, draft: Draft, use: ModelUse, text: str) -> str | None:
        """Draft the end of a message that a request's record names; return its id.

        None when there is no such message, or when other text was streamed than was replied: the
        message is superseded then.
        """
        message = self._messages.get(use.message_id or "")
        if message is None or not message.end or not message.is_text(text):
            return None
        _add(draft, message.message_id, message.base, message.rest().text)
        return message.message_id


def _add(draft: Draft, message_id: str, offset: int, text: str) -> None:
    for start in range(0, len(text), EVENT_CHARACTERS_MAX):
        part = text[start : start + EVENT_CHARACTERS_MAX]
        draft.add(DeltaEvent(message_id=message_id, offset=offset + start, text=part))
