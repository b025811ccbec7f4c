"""A zoo of tools: well-behaved ones, and one for each way a tool can misbehave (F40, F41).

`ToolZoo` makes tools that share a journal file and a gate; `hang`, `block` and `swallow_cancel`
end when the gate is opened, so a test leaves nothing behind. Tools for `isolation="process"` are
in `process_tools`.
"""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import anyio
from pydantic import JsonValue

from perdure.engine.ports import ToolInvocation, ToolOutcome
from perdure.protocol.runs import Caller, RunContext
from perdure.protocol.states import SideEffect
from perdure.protocol.tools import ToolSpec
from perdure.tools import (
    FunctionTool,
    Performed,
    Returned,
    ToolContext,
    ToolError,
    ToolRegistry,
    ToolUnavailable,
    not_happened,
    partial,
    pending,
    succeeded,
    tool,
)

WRITE: dict[str, Any] = {
    "side_effect": SideEffect.WRITE,
    "timeout_s": 10.0,
    "compensation": "refund by hand",
}


def append_line(journal: Path, key: str, amount: int) -> None:
    """Add one line to a journal in one write, as a payment provider would note an order."""
    line = json.dumps({"key": key, "amount": amount}) + "\n"
    file = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def read_journal(journal: Path) -> list[dict[str, Any]]:
    """Return the payments noted in a journal, in order."""
    if not journal.exists():
        return []
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]


def invocation_of(
    spec: ToolSpec,
    args: object = None,
    *,
    timeout_s: float = 5.0,
    effect_key: str = "key-1",
    execution: int = 1,
    on_late: Callable[[ToolOutcome], None] = lambda _: None,
) -> ToolInvocation:
    """Return an invocation with made-up ids."""
    return ToolInvocation(
        spec=spec,
        args=cast("JsonValue", {} if args is None else args),
        effect_key=effect_key,
        tool_call_id="call_1",
        run_id="run_1",
        thread_id="thread_1",
        step_index=0,
        execution=execution,
        context=RunContext(user_id="ada"),
        caller=Caller(tenant_id="default", principal="local"),
        timeout_s=timeout_s,
        on_late=on_late,
    )


class ToolZoo:
    """A registry of tools with what a test needs to steer and observe them.

    `started[name]` is set when that tool begins; `open_gate` lets everything that waits go on.
    """

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self.gate = threading.Event()
        self.started: dict[str, threading.Event] = {}
        self.executions: dict[str, int] = {}
        self._lock = threading.Lock()
        self.registry = ToolRegistry(
            [
                *_good(self),
                *_paying(self),
                *_refunding(self),
                *_stuck(self),
                *_raising(self),
                *_odd_results(),
                *_later(self),
            ]
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.open_gate()

    def open_gate(self) -> None:
        """Let hanging and blocking tools return."""
        self.gate.set()

    def spec(self, name: str) -> ToolSpec:
        """Return the declaration of a tool of the zoo."""
        found = self.registry.find(name)
        if found is None:
            raise KeyError(name)
        return found

    def invocation(
        self,
        name: str,
        args: object = None,
        *,
        timeout_s: float = 5.0,
        effect_key: str = "key-1",
        execution: int = 1,
        on_late: Callable[[ToolOutcome], None] = lambda _: None,
    ) -> ToolInvocation:
        """Return an invocation of a tool of the zoo."""
        return invocation_of(
            self.spec(name),
            args,
            timeout_s=timeout_s,
            effect_key=effect_key,
            execution=execution,
            on_late=on_late,
        )

    def payments(self) -> list[dict[str, Any]]:
        """Return what was paid, in order."""
        return read_journal(self.journal)

    def begin(self, name: str) -> int:
        """Note that a tool begins; return which execution of it this is, from 1."""
        with self._lock:
            self.executions[name] = self.executions.get(name, 0) + 1
            self.started.setdefault(name, threading.Event()).set()
            return self.executions[name]

    async def wait_started(self, name: str, executions: int = 1) -> None:
        """Wait until a tool has begun so many times."""
        while self.executions.get(name, 0) < executions:  # noqa: ASYNC110 (set from other threads)
            await anyio.sleep(0.002)


AnyTool = FunctionTool[..., Any]


def _good(zoo: ToolZoo) -> list[AnyTool]:
    @tool
    async def echo(value: JsonValue = None) -> JsonValue:
        """Return the value."""
        zoo.begin("echo")
        return value

    @tool
    def echo_sync(value: JsonValue = None) -> JsonValue:
        """Return the value, from a thread."""
        zoo.begin("echo_sync")
        return value

    @tool(trusted=True)
    async def echo_inline(value: JsonValue = None) -> JsonValue:
        """Return the value, on the engine's loop."""
        zoo.begin("echo_inline")
        return value

    @tool
    async def slow(seconds: float) -> str:
        """Take some time, and stop at once when asked to."""
        zoo.begin("slow")
        await asyncio.sleep(seconds)
        return "slept"

    @tool
    def draw(text: str, context: ToolContext) -> str:
        """Make an artifact and note a reference."""
        context.artifact("drawing.txt", text, "text/plain")
        context.external_ref("drawing-7")
        return "drawn"

    @tool
    async def which_thread() -> int | None:
        """Return the id of the thread it runs on."""
        return threading.get_ident()

    return cast("list[AnyTool]", [echo, echo_sync, echo_inline, slow, draw, which_thread])


def _paying(zoo: ToolZoo) -> list[AnyTool]:
    def find(effect_key: str) -> Returned:
        zoo.begin("lookup")
        paid = [line for line in zoo.payments() if line["key"] == effect_key]
        return succeeded(paid[0], external_ref=effect_key) if paid else not_happened()

    @tool(idempotent=False, **WRITE)
    def pay(amount: int, context: ToolContext) -> JsonValue:
        """Pay; a second execution pays again."""
        zoo.begin("pay")
        append_line(zoo.journal, context.effect_key, amount)
        return {"paid": amount}

    @tool(idempotent=True, **WRITE)
    def pay_idempotent(amount: int, context: ToolContext) -> JsonValue:
        """Pay once per key, however often it runs."""
        zoo.begin("pay_idempotent")
        if not any(line["key"] == context.effect_key for line in zoo.payments()):
            append_line(zoo.journal, context.effect_key, amount)
        return {"paid": amount}

    @tool(idempotent=False, lookup=find, **WRITE)
    def pay_with_lookup(amount: int, context: ToolContext) -> JsonValue:
        """Pay; what became of a payment can be looked up."""
        zoo.begin("pay_with_lookup")
        append_line(zoo.journal, context.effect_key, amount)
        return {"paid": amount}

    @tool(idempotent=False, lookup=find, **WRITE)
    async def pay_then_hang(amount: int, context: ToolContext) -> JsonValue:
        """Pay, then never answer: the answer was lost on the way."""
        append_line(zoo.journal, context.effect_key, amount)
        zoo.begin("pay_then_hang")
        await asyncio.Event().wait()
        return None

    @tool(idempotent=False, **WRITE)
    async def pay_late(amount: int, context: ToolContext) -> JsonValue:
        """Ignore being cancelled, and pay when the gate opens."""
        zoo.begin("pay_late")
        while not zoo.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.005)
        append_line(zoo.journal, context.effect_key, amount)
        return {"paid": amount}

    return cast("list[AnyTool]", [pay, pay_idempotent, pay_with_lookup, pay_then_hang, pay_late])


def _refunding(zoo: ToolZoo) -> list[AnyTool]:
    def refund(performed: Performed, context: ToolContext) -> JsonValue:
        """Pay back; a tool that is closed the first time."""
        if zoo.begin("refund") == 1:
            raise ToolUnavailable("closed")
        args = cast("dict[str, int]", performed.args)
        append_line(zoo.journal, context.effect_key, -args["amount"])
        return {"refunded": args["amount"]}

    @tool(idempotent=False, compensate=refund, **WRITE)
    def pay_refundable(amount: int, context: ToolContext) -> JsonValue:
        """Pay; it can be paid back."""
        zoo.begin("pay_refundable")
        append_line(zoo.journal, context.effect_key, amount)
        return {"paid": amount}

    return [cast("AnyTool", pay_refundable)]


def _later(zoo: ToolZoo) -> list[AnyTool]:
    def find(effect_key: str) -> Returned:
        zoo.begin("lookup")
        made = [line for line in zoo.payments() if line["key"] == effect_key]
        return succeeded("found", external_ref="order-1") if made else not_happened()

    def order(name: str, amount: int, context: ToolContext, wait_s: float | None) -> Returned:
        zoo.begin(name)
        append_line(zoo.journal, context.effect_key, amount)
        return pending(external_ref="order-1", expires_in_s=wait_s)

    @tool(idempotent=False, output_schema={"type": ["integer", "string"]}, **WRITE)
    def order_later(amount: int, context: ToolContext, wait_s: float | None = None) -> Returned:
        """Order; what became of it comes by callback."""
        return order("order_later", amount, context, wait_s)

    @tool(idempotent=False, lookup=find, **WRITE)
    def order_with_lookup(amount: int, context: ToolContext, wait_s: float) -> Returned:
        """Order; what became of it comes by callback, and can be looked up."""
        return order("order_with_lookup", amount, context, wait_s)

    @tool(idempotent=True, **WRITE)
    def order_idempotent(amount: int, context: ToolContext, wait_s: float) -> object:
        """Order; asked again it knows at once."""
        answer = order("order_idempotent", amount, context, wait_s)
        return answer if zoo.executions["order_idempotent"] == 1 else "asked again"

    @tool(idempotent=False, **WRITE)
    def order_slowly(answer: str) -> object:
        """Order, and answer when the gate opens: `pending`, or the text given."""
        zoo.begin("order_slowly")
        zoo.gate.wait()
        return pending() if answer == "pending" else answer

    return cast("list[AnyTool]", [order_later, order_with_lookup, order_idempotent, order_slowly])


def _stuck(zoo: ToolZoo) -> list[AnyTool]:
    @tool
    def hang() -> str:
        """Never return (until the gate opens), in a thread."""
        zoo.begin("hang")
        zoo.gate.wait()
        return "late"

    @tool
    async def block() -> str:
        """Block the user loop (until the gate opens)."""
        zoo.begin("block")
        zoo.gate.wait()
        return "late"

    @tool
    async def swallow_cancel() -> str:
        """Ignore every cancellation (until the gate opens)."""
        zoo.begin("swallow_cancel")
        while not zoo.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.005)
        return "late"

    @tool
    async def finish_when_cancelled() -> str:
        """Answer truthfully when it is cancelled."""
        zoo.begin("finish_when_cancelled")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "finished all the same"

    return cast("list[AnyTool]", [hang, block, swallow_cancel, finish_when_cancelled])


def _raising(zoo: ToolZoo) -> list[AnyTool]:
    @tool(idempotent=True)
    def flaky(failures: int) -> int:
        """Be unavailable so many times, then return how often it ran."""
        execution = zoo.begin("flaky")
        if execution <= failures:
            raise ToolUnavailable(f"down, try {execution}")
        return execution

    @tool
    async def cancels_itself() -> NoReturn:
        """Raise CancelledError, though nobody cancelled it."""
        raise asyncio.CancelledError

    @tool
    async def raises(what: str, text: str = "") -> NoReturn:
        """Raise the named exception."""
        raise _EXCEPTIONS[what](text) if text else _EXCEPTIONS[what]()

    @tool
    async def exits_in_a_task() -> None:
        """Start a task of its own that exits, on the user loop."""
        await asyncio.get_running_loop().create_task(_exit())

    @tool
    async def raises_group() -> NoReturn:
        """Raise nested exception groups."""
        inner = ExceptionGroup("inner", [KeyError("b"), ToolError("c")])
        raise ExceptionGroup("outer", [ValueError("a"), inner])

    @tool
    def changes_its_arguments(items: list[int]) -> int:
        """Change what it was given."""
        items.clear()
        return len(items)

    return cast(
        "list[AnyTool]",
        [
            flaky,
            cancels_itself,
            raises,
            exits_in_a_task,
            raises_group,
            changes_its_arguments,
        ],
    )


async def _exit() -> NoReturn:
    raise SystemExit(3)


class UnprintableError(Exception):
    """An exception whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


_EXCEPTIONS: dict[str, type[BaseException]] = {
    "ValueError": ValueError,
    "ToolError": ToolError,
    "ToolUnavailable": ToolUnavailable,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "UnprintableError": UnprintableError,
    "Exception": Exception,
}


def _odd_results() -> list[AnyTool]:
    @tool
    def returns_bytes() -> object:
        """Return bytes, which are not JSON."""
        return b"\x00\x01"

    @tool
    def nan() -> object:
        """Return numbers that JSON does not have."""
        return [float("nan"), float("inf"), -0.0, 2**60]

    @tool
    def surrogate() -> object:
        """Return half of an emoji, and a NUL."""
        return {"half": "\ud83d", "nul": "a\x00b"}

    @tool
    def too_deep(depth: int) -> object:
        """Return lists in lists."""
        value: object = "bottom"
        for _ in range(depth):
            value = [value]
        return value

    @tool
    def big(size: int) -> str:
        """Return a long text."""
        return "x" * size

    @tool(output_schema={"type": "object", "required": ["id"]})
    def breaks_its_schema() -> object:
        """Return something else than it promised."""
        return {"name": "no id"}

    @tool
    def half_done() -> Returned:
        """Do one half."""
        return partial(done="3 of 5 mails", not_done="2 of 5 mails", output=[1, 2, 3])

    @tool
    def answers_later() -> Returned:
        """Answer by callback."""
        return pending(external_ref="job-1")

    return cast(
        "list[AnyTool]",
        [
            returns_bytes,
            nan,
            surrogate,
            too_deep,
            big,
            breaks_its_schema,
            half_done,
            answers_later,
        ],
    )
