"""Text on its way: fragments of model replies as they come, for followers in the same process.

Nothing here is kept: what a follower misses it reads from the log, where the same text stands in
coalesced `delta` events a moment later (R-6.5). A follower that does not listen costs a bounded
buffer and delays nobody (R-6.7): what finds no room is dropped and counted. Followers in other
processes see the durable fragments only; a NOTIFY has no room for text and would be paid by every
process that listens.
"""

from collections import defaultdict, deque
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from prometheus_client import Counter

from perdure.protocol.events import DeltaEvent
from perdure.protocol.log import RecordedEvent
from perdure.signals.bells import Bell

HEARD_CHARACTERS_MAX = 64 * 1024
HEARD_FRAGMENTS_MAX = 1000
MESSAGES_TRACKED_MAX = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A piece of a reply with its place in it, and the right under which it was said."""

    run_id: str
    message_id: str
    offset: int
    text: str
    step_index: int
    attempt: int
    epoch: int

    @property
    def end(self) -> int:
        """Return the place behind the text."""
        return self.offset + len(self.text)


class Source(Protocol):
    """A message under way: what of it is not durable yet, for those who join late."""

    def rest(self) -> Fragment:
        """Return the text behind the durable one; it may be empty."""
        ...


class Ear:
    """What one follower has not taken yet. Rings for each fragment."""

    def __init__(self, dropped: Counter) -> None:
        self.bases: dict[str, int] = {}
        self._dropped = dropped
        self._heard: deque[Fragment] = deque()
        self._characters = 0
        self._bell = Bell()

    def hear(self, fragment: Fragment) -> None:
        """Take a fragment, or drop it when the buffer is full."""
        full = len(self._heard) >= HEARD_FRAGMENTS_MAX
        if full or self._characters + len(fragment.text) > HEARD_CHARACTERS_MAX:
            self._dropped.labels(reason="slow").inc()
            return
        self._heard.append(fragment)
        self._characters += len(fragment.text)
        self._bell.ring()

    def take(self) -> list[Fragment]:
        """Return what was heard since the last time, pieces that belong together joined."""
        groups: list[list[Fragment]] = []
        for fragment in self._heard:
            last = groups[-1][-1] if groups else None
            joins = last is not None and last.message_id == fragment.message_id
            if joins and last is not None and last.end == fragment.offset:
                groups[-1].append(fragment)
            else:
                groups.append([fragment])
        self._heard.clear()
        self._characters = 0
        return [replace(group[0], text="".join(item.text for item in group)) for group in groups]

    async def wait(self) -> None:
        """Return once something was heard since the last return."""
        await self._bell.wait()


class LiveHub:
    """Joins those who speak and those who follow, by run. Used on the engine's loop only."""

    def __init__(self) -> None:
        self._ears: dict[str, set[Ear]] = defaultdict(set)
        self._sources: dict[str, dict[str, Source]] = defaultdict(dict)

    def open(self, run_id: str, message_id: str, source: Source) -> None:
        """Announce a message under way."""
        self._sources[run_id][message_id] = source

    def close(self, run_id: str, message_id: str) -> None:
        """End a message."""
        self._sources[run_id].pop(message_id, None)
        if not self._sources[run_id]:
            del self._sources[run_id]

    def say(self, fragment: Fragment) -> None:
        """Hand a fragment to all who follow its run."""
        for ear in self._ears.get(fragment.run_id, ()):
            ear.hear(fragment)

    @contextmanager
    def listen(self, run_id: str, dropped: Counter) -> Generator[Ear]:
        """Follow a run: first what of its messages is not durable yet, then all that is said."""
        ear = Ear(dropped)
        for message_id, source in self._sources.get(run_id, {}).items():
            rest = source.rest()
            ear.bases[message_id] = rest.offset
            if rest.text:
                ear.hear(rest)
        self._ears[run_id].add(ear)
        try:
            yield ear
        finally:
            self._ears[run_id].discard(ear)
            if not self._ears[run_id]:
                del self._ears[run_id]


class Alignment:
    """What one follower was sent of each message, and whose fragments still count (decision 30).

    Live text goes out only where it joins what was sent; the durable fragment that brings the
    same text again is trimmed. A follower begins behind a seq: the text before it, it has.
    """

    def __init__(self, ear: Ear, dropped: Counter, *, attempt: int, epoch: int) -> None:
        self._ear = ear
        self._dropped = dropped
        self._attempt = attempt
        self._epoch = epoch
        self._sent: dict[str, int] = {}

    def durable(self, event: RecordedEvent) -> RecordedEvent:
        """Note an event of the log and return it without the text that was sent before."""
        self._attempt = max(self._attempt, event.attempt)
        self._epoch = max(self._epoch, event.epoch)
        if event.type != "delta" or not isinstance(event.data, DeltaEvent):
            return event
        data = event.data
        sent = self._sent.get(data.message_id, data.offset)
        self._note(data.message_id, max(sent, data.offset + len(data.text)))
        if sent <= data.offset:
            return event
        rest = DeltaEvent(
            message_id=data.message_id, offset=sent, text=data.text[sent - data.offset :]
        )
        raw = rest.model_dump_json(exclude={"type"}).encode()
        return replace(event, raw=raw)

    def live(self) -> list[Fragment]:
        """Return what was heard and is still to be sent."""
        found = [self._aligned(fragment) for fragment in self._ear.take()]
        return [fragment for fragment in found if fragment is not None]

    def drop_all(self) -> None:
        """Drop what was heard of a run that has ended."""
        for fragment in self._ear.take():
            if fragment.end > self._sent.get(fragment.message_id, 0):
                self._dropped.labels(reason="ended").inc()

    def _aligned(self, fragment: Fragment) -> Fragment | None:
        base = self._ear.bases.get(fragment.message_id, 0)
        sent = self._sent.get(fragment.message_id, base)
        reason = ""
        if fragment.attempt < self._attempt:
            reason = "lease"
        elif fragment.epoch < self._epoch:
            reason = "epoch"
        elif fragment.offset > sent:
            reason = "gap"
        if reason:
            self._dropped.labels(reason=reason).inc()
            return None
        if fragment.end <= sent:
            return None
        self._note(fragment.message_id, fragment.end)
        return replace(fragment, offset=sent, text=fragment.text[sent - fragment.offset :])

    def _note(self, message_id: str, sent: int) -> None:
        self._sent[message_id] = sent
        if len(self._sent) > MESSAGES_TRACKED_MAX:
            del self._sent[next(iter(self._sent))]
