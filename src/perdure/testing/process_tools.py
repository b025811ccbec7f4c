"""Tools that run in a process of their own, at the top of a module so that a child can import them.

They find their files in their arguments, for they share no memory with the test.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from perdure.testing.tools import WRITE, append_line
from perdure.tools import FunctionTool, Performed, ToolContext, tool


@tool(isolation="process")
def process_echo(value: JsonValue, context: ToolContext) -> JsonValue:
    """Return the value with the facts of the process."""
    context.artifact("echo.txt", "echo", "text/plain")
    return {
        "value": value,
        "pid": os.getpid(),
        "key": context.effect_key,
        "environment": [*sorted(os.environ)],
    }


@tool(isolation="process")
async def process_echo_async(value: JsonValue) -> JsonValue:
    """Return the value, from an event loop in the child."""
    await asyncio.sleep(0)
    return value


@tool(isolation="process", idempotent=False, **WRITE)
def process_pay(journal: str, amount: int, then: str, context: ToolContext) -> JsonValue:
    """Pay, then exit, hang or return."""
    append_line(Path(journal), context.effect_key, amount)
    _then(then)
    return {"paid": amount}


def process_refund(performed: Performed, context: ToolContext) -> JsonValue:
    """Pay back, in a process too."""
    args = cast("dict[str, Any]", performed.args)
    append_line(Path(args["journal"]), context.effect_key, -args["amount"])
    return {"refunded": performed.output, "pid": os.getpid()}


@tool(isolation="process", idempotent=False, compensate=process_refund, **WRITE)
def process_pay_refundable(journal: str, amount: int, context: ToolContext) -> int:
    """Pay what can be paid back."""
    append_line(Path(journal), context.effect_key, amount)
    return amount


@tool(isolation="process")
def process_read(then: str, started: str) -> JsonValue:
    """Read, then exit, hang or return."""
    Path(started).write_text(str(os.getpid()), encoding="utf-8")
    _then(then)
    return "read"


@tool(isolation="process")
def process_spawn(pids: str) -> None:
    """Start a child of its own in the same group, then hang."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    path = Path(pids)
    path.with_suffix(".tmp").write_text(json.dumps([os.getpid(), child.pid]), encoding="utf-8")
    path.with_suffix(".tmp").rename(path)
    signal.pause()


@tool(isolation="process")
def process_flood(megabytes: int) -> str:
    """Print a great deal."""
    line = "x" * 1023 + "\n"
    for _ in range(megabytes):
        sys.stdout.write(line * 1024)
    return "printed"


@tool(isolation="process")
def process_big(size: int) -> str:
    """Return a long text."""
    return "x" * size


PROCESS_TOOLS: list[FunctionTool[..., Any]] = cast(
    "list[FunctionTool[..., Any]]",
    [
        process_echo,
        process_echo_async,
        process_pay,
        process_pay_refundable,
        process_read,
        process_spawn,
        process_flood,
        process_big,
    ],
)


def _then(what: str) -> None:
    match what:
        case "exit":
            os._exit(7)
        case "hang":
            signal.pause()
        case "ignore":
            while True:
                with contextlib.suppress(BaseException):
                    signal.pause()
        case _:
            pass
