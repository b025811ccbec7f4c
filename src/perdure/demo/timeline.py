"""What happens, as it happens, on stderr: one short line an event, coloured on a terminal."""

import os
import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

from perdure.ops.timeline import line_of, short
from perdure.protocol.event_views import EventView

_STYLES = {
    "state": "bold cyan",
    "action": "yellow",
    "result": "green",
    "approval_request": "bold magenta",
    "interrupt": "bold magenta",
    "resume": "bold magenta",
    "attempt": "dim",
    "artifact": "blue",
    "retry": "red",
    "error": "red",
    "late": "red",
}

LINE_CHARACTERS_MAX = 160


class Timeline:
    """Prints events and remarks."""

    def __init__(self, stream: TextIO | None = None) -> None:
        to = stream or sys.stderr
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._is_styled = to.isatty() and not plain
        self._stream = to
        self._console = Console(file=to, highlight=False, soft_wrap=True)

    def event(self, event: EventView, since_start_s: float) -> None:
        """Print an event."""
        line = line_of(event)
        if line:
            head = f"{since_start_s:7.2f}s {event.seq:>4}  "
            self._print(head, short(line, LINE_CHARACTERS_MAX), _STYLES.get(event.type, ""))

    def say(self, text: str, style: str = "bold") -> None:
        """Print a remark of the demo itself."""
        self._print("", text, style)

    def _print(self, head: str, text: str, style: str) -> None:
        if not self._is_styled:
            self._stream.write(head + text + "\n")
            self._stream.flush()
            return
        self._console.print(Text.assemble((head, "dim"), (text, style)))
