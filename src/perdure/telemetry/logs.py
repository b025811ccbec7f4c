"""Log lines on stderr, readable for people or one JSON object each; stdout stays for data.

Modules log through `logging`; what they pass as `extra` (`run_id` above all) becomes fields.
"""

import logging
import os
import sys
from typing import Literal, TextIO

import structlog
from structlog.types import Processor

LogFormat = Literal["auto", "console", "json"]

_NOISY = ("asyncio", "httpx2", "httpcore2", "openai", "uvicorn.error")


def configure_logs(level: str, format: LogFormat, *, to: TextIO | None = None) -> None:
    """Send all log records of this process to stderr, in one format. `level` as in `logging`."""
    stream: TextIO = to or sys.stderr
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_rendering(format, stream),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


def _rendering(format: LogFormat, stream: TextIO) -> list[Processor]:
    is_terminal = stream.isatty()
    if format == "json" or (format == "auto" and not is_terminal):
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    colors = is_terminal and "NO_COLOR" not in os.environ
    return [structlog.dev.ConsoleRenderer(colors=colors, pad_event_to=0)]
