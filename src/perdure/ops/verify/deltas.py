"""The fragments of streamed replies (R-6.5).

`Speech` sees each event once while the log is read and keeps the text of messages that no model
event has named yet; the rules read what it found.
"""

from dataclasses import dataclass, field

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.codec import digest_bytes, encode
from perdure.protocol.events import DeltaEvent, ModelEvent
from perdure.protocol.log import EventData, RecordedEvent, Unknown


@dataclass(slots=True)
class _Message:
    """A message as far as it was said, by whom and in which step."""

    said_by: tuple[int, int, int]
    end: int = 0
    parts: list[str] = field(default_factory=list[str])
    named: bool = False


class Speech:
    """Follows the messages of one log; `places` and `texts` are what is wrong with them."""

    def __init__(self, *, from_start: bool) -> None:
        self.places: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self._from_start = from_start
        self._messages: dict[str, _Message] = {}
        self._attempt = 0

    def feed(self, event: RecordedEvent, data: EventData | Unknown) -> None:
        """Take the next event."""
        if event.attempt > self._attempt:
            self._attempt = event.attempt
            for message in self._messages.values():
                message.parts.clear()
        match data:
            case DeltaEvent():
                self._take(event, data)
            case ModelEvent(message_id=str(message_id)):
                self._close(event, data, message_id)
            case _:
                pass

    def _take(self, event: RecordedEvent, data: DeltaEvent) -> None:
        name = f"event {event.seq}"
        said_by = (event.attempt, event.epoch, event.step_index)
        message = self._messages.get(data.message_id)
        if message is None:
            start = 0 if self._from_start else data.offset
            message = self._messages[data.message_id] = _Message(said_by, start)
        if data.offset != message.end:
            self.places.append((name, f"it begins at {data.offset}, not at {message.end}"))
        if not data.text:
            self.places.append((name, "it has no text"))
        if message.named:
            self.places.append((name, "its message was whole before"))
        if said_by != message.said_by:
            self.places.append((name, "its message is of another attempt, epoch or step"))
        message.end = data.offset + len(data.text)
        message.parts.append(data.text)

    def _close(self, event: RecordedEvent, data: ModelEvent, message_id: str) -> None:
        name = f"event {event.seq}"
        message = self._messages.get(message_id)
        if message is None:
            if self._from_start:
                self.texts.append((name, "nothing was said of its message"))
            return
        if message.named:
            self.texts.append((name, "another event names its message"))
        if (event.attempt, event.epoch, event.step_index) != message.said_by:
            self.texts.append((name, "its message is of another attempt, epoch or step"))
        text = "".join(message.parts)
        said = digest_bytes(encode(text)) if data.text_ref is not None else text
        told = data.text_ref.digest if data.text_ref is not None else data.text
        if said != told and self._from_start:
            self.texts.append((name, "its text is not that of the fragments"))
        message.named = True
        message.parts.clear()


@rule(
    "I60",
    "The fragments of a message follow each other without gap or overlap from 0, have text, and "
    "are of one attempt, epoch and step; none comes after the model event that names it; only "
    "streamed runs have any.",
)
def fragments_join(record: RunRecord) -> Found:
    yield from record.replay.speech_places
    if not record.facts.options.stream:
        for line, _ in record.of(DeltaEvent):
            yield line.name, "the run is not streamed"


@rule(
    "I61", "A model event that names a message has the text of its fragments, and names it alone."
)
def fragments_amount_to_text(record: RunRecord) -> Found:
    yield from record.replay.speech_texts


RULES = (fragments_join, fragments_amount_to_text)
