"""What a client makes of the text of a stream: messages put together by their offsets (R-6.5)."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Transcript:
    """The messages of a run as a client has them: by id, and those that a model event named."""

    texts: dict[str, str] = field(default_factory=dict[str, str])
    named: dict[str, str] = field(default_factory=dict[str, str])

    def take(self, view: dict[str, Any]) -> None:
        """Take an event, or live text: `text[:offset] + piece` is the message so far."""
        data = view["data"]
        if view["type"] == "delta":
            before = self.texts.get(data["message_id"], "")
            assert len(before) >= data["offset"], "a part is missing"
            self.texts[data["message_id"]] = before[: data["offset"]] + data["text"]
        elif view["type"] == "model" and data.get("message_id") is not None:
            self.named[data["message_id"]] = data["text"]

    @property
    def replies(self) -> list[str]:
        """The text of the messages that count, in order; fails when one was put together wrongly.

        A client that began behind the start of a message lacks it and is not to use this.
        """
        for message_id, text in self.named.items():
            assert self.texts[message_id] == text, (self.texts[message_id], text)
        return list(self.named.values())
