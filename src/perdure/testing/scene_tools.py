"""The tools of the acceptance scene, and the world outside the database that they change.

`Outside` is a folder: `paid.jsonl` is the payment provider's journal, `ran.jsonl` says which
execution of which call began in which process, and `gate-…` files let waiting tools go on. It
outlives every process of the scene.
"""

import asyncio
import fcntl
import json
import os
import random
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.testing.faults import Boundary, Trap
from perdure.tools import FunctionTool, Returned, ToolContext, not_happened, succeeded, tool

WAIT_S = 30.0
"""How long a waiting tool waits at most."""

TIMEOUT_S = 4.0
"""What a payment may take; a lost answer is noticed after it."""

WRITE: dict[str, Any] = {
    "side_effect": SideEffect.WRITE,
    "timeout_s": TIMEOUT_S,
    "compensation": "refund by hand",
}
SLOW_WRITE: dict[str, Any] = {**WRITE, "timeout_s": WAIT_S}
AGAIN = RetryPolicy(attempts_max=3, backoff_s=0.05)

AnyTool = FunctionTool[..., Any]


class Outside:
    """What the scene's tools leave in the world."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._journal = folder / "paid.jsonl"
        self._ran = folder / "ran.jsonl"

    def payments(self) -> list[dict[str, Any]]:
        """Return the journal: key, tool and amount of each payment."""
        return _lines(self._journal)

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the payment under a key."""
        return next((line for line in self.payments() if line["key"] == key), None)

    def executions(self) -> list[dict[str, Any]]:
        """Return what began: key, tool, execution and process."""
        return _lines(self._ran)

    def began(self, name: str, context: ToolContext) -> None:
        """Note that an execution begins."""
        _append(
            self._ran,
            {
                "tool": name,
                "key": context.effect_key,
                "run_id": context.run_id,
                "execution": context.execution,
                "pid": os.getpid(),
            },
        )

    def pay(self, name: str, key: str, amount: int, execution: int = 1) -> None:
        """Add a payment, whatever is there already."""
        _append(self._journal, payment(name, key, amount, execution))

    def pay_once(self, name: str, key: str, amount: int, execution: int = 1) -> None:
        """Add a payment unless there is one under the key, as an idempotent provider does."""
        with self._locked():
            if self.find(key) is None:
                self.pay(name, key, amount, execution)

    def open_gate(self, name: str) -> None:
        """Let a tool that waits for this gate go on."""
        (self.folder / f"gate-{name}").touch()

    def is_open(self, name: str) -> bool:
        """Tell whether a gate is open."""
        return (self.folder / f"gate-{name}").exists()

    @contextmanager
    def _locked(self) -> Generator[None]:
        with (self.folder / "provider.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def payment(name: str, key: str, amount: int, execution: int) -> dict[str, Any]:
    """Return a line of the provider's journal: which execution paid, in which process and when."""
    return {
        "key": key,
        "tool": name,
        "amount": amount,
        "execution": execution,
        "pid": os.getpid(),
        "at": time.time(),
    }


def _append(path: Path, line: dict[str, Any]) -> None:
    """Add a line in one write: it is there whole or not at all."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def receipt(key: str, amount: int) -> Returned:
    """Return what the provider answers to a payment."""
    return succeeded({"paid": amount}, external_ref=f"receipt-{key}")


def scene_tools(outside: Outside, trap: Trap) -> list[AnyTool]:
    """Return all tools of the scene."""
    return [*paying_tools(outside, trap), *_plain(outside, trap), *_waiting(outside)]


def paying_tools(outside: Outside, trap: Trap, *, lag_s: float = 0.0) -> list[AnyTool]:
    """Return the tools that pay. With `lag_s` the way to the provider takes up to so long, and so
    does the way back: that is where real crashes happen."""

    async def travel() -> None:
        if lag_s:
            await asyncio.sleep(random.random() * lag_s)  # noqa: S311  # no secret

    async def effect(name: str, context: ToolContext, amount: int, *, once: bool) -> Returned:
        """Pay, with the trap before and after the line in the journal (B7)."""
        outside.began(name, context)
        await travel()
        trap.before(Boundary.EFFECT, name)
        put = outside.pay_once if once else outside.pay
        put(name, context.effect_key, amount, context.execution)
        await travel()
        if trap.after(Boundary.EFFECT, name):
            await asyncio.Event().wait()  # it took effect, and its answer never comes
        return receipt(context.effect_key, amount)

    def look(effect_key: str) -> Returned:
        paid = outside.find(effect_key)
        return receipt(effect_key, paid["amount"]) if paid is not None else not_happened()

    @tool(idempotent=False, **WRITE)
    async def pay(amount: int, context: ToolContext) -> Returned:
        """Pay; a second execution pays again."""
        return await effect("pay", context, amount, once=False)

    @tool(idempotent=True, retry=AGAIN, **WRITE)
    async def pay_idempotent(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, however often it runs."""
        return await effect("pay_idempotent", context, amount, once=True)

    @tool(idempotent=False, lookup=look, **WRITE)
    async def pay_with_lookup(amount: int, context: ToolContext) -> Returned:
        """Pay; what became of a payment can be looked up."""
        return await effect("pay_with_lookup", context, amount, once=False)

    @tool(idempotent=True, retry=AGAIN, **WRITE)
    async def publish(amount: int, context: ToolContext) -> Returned:
        """Pay once per key, after a person has approved."""
        return await effect("publish", context, amount, once=True)

    return cast("list[AnyTool]", [pay, pay_idempotent, pay_with_lookup, publish])


def _plain(outside: Outside, trap: Trap) -> list[AnyTool]:
    @tool
    def echo(value: JsonValue, context: ToolContext) -> JsonValue:
        """Return the value."""
        outside.began("echo", context)
        return value

    @tool
    def draw(text: str, context: ToolContext) -> str:
        """Make an artifact; where a heartbeat is to fail, wait for it."""
        outside.began("draw", context)
        if trap.plan is not None and trap.plan.boundary is Boundary.HEARTBEAT:
            trap.wait(WAIT_S)
        context.artifact("drawing.txt", text, "text/plain")
        return "drawn"

    return cast("list[AnyTool]", [echo, draw])


def _waiting(outside: Outside) -> list[AnyTool]:
    def wait_at_gate(context: ToolContext) -> None:
        gate, give_up = f"{context.run_id}-{context.execution}", time.monotonic() + WAIT_S
        while not outside.is_open(gate) and time.monotonic() < give_up:
            time.sleep(0.01)

    @tool
    async def hold(context: ToolContext) -> str:
        """Wait for a gate that nobody opens; stop when asked to."""
        outside.began("hold", context)
        await asyncio.sleep(WAIT_S)
        return "held"

    @tool(idempotent=True, **SLOW_WRITE)
    def pay_at_gate(amount: int, context: ToolContext) -> Returned:
        """Wait in a thread at the gate of this execution (the first one only), then pay once."""
        outside.began("pay_at_gate", context)
        if context.execution == 1:
            wait_at_gate(context)
        outside.pay_once("pay_at_gate", context.effect_key, amount)
        return receipt(context.effect_key, amount)

    @tool(idempotent=True, **SLOW_WRITE)
    def poison(context: ToolContext) -> None:
        """End the whole process once the gate is open, as the kernel does without memory."""
        outside.began("poison", context)
        wait_at_gate(context)
        os._exit(137)

    return cast("list[AnyTool]", [hold, pay_at_gate, poison])
