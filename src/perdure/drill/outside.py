"""The world that the drill's tools change: a folder, outside of the database and of every worker.

`paid.jsonl` is the journal of a payment provider; `ran.jsonl` says which execution of which tool
began; a gate is a file that a tool waits for.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

GATE_S_MAX = 120.0
LOOK_S = 0.02


class Outside:
    """What the drill's tools leave in the world. Safe to use from several processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pay(self, run_id: str, tool: str, key: str, amount: int) -> None:
        """Add a payment, whatever is there already."""
        line = {"run_id": run_id, "tool": tool, "key": key, "amount": amount}
        self._append("paid.jsonl", line)

    def pay_once(self, run_id: str, tool: str, key: str, amount: int) -> None:
        """Add a payment unless there is one under the key, as a provider with keys does."""
        with self._locked():
            if self.find(key) is None:
                self.pay(run_id, tool, key, amount)

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the payment under a key."""
        return next((line for line in self._lines("paid.jsonl") if line["key"] == key), None)

    def payments(self, run_id: str) -> list[dict[str, Any]]:
        """Return the payments of a run, in order; what was paid back is negative."""
        return [line for line in self._lines("paid.jsonl") if line["run_id"] == run_id]

    def began(self, run_id: str, tool: str) -> int:
        """Note that an execution begins; return how many did, with this one."""
        self._append("ran.jsonl", {"run_id": run_id, "tool": tool})
        return self.executions(run_id, tool)

    def executions(self, run_id: str, tool: str) -> int:
        """Return how many executions of a tool have begun in a run."""
        lines = self._lines("ran.jsonl")
        return sum((line["run_id"], line["tool"]) == (run_id, tool) for line in lines)

    def open_gate(self, run_id: str) -> None:
        """Let the tools of a run go on that wait at its gate."""
        self._gate(run_id).touch()

    def wait_at_gate(self, run_id: str) -> None:
        """Wait, in a thread, until the gate is open."""
        give_up = time.monotonic() + GATE_S_MAX
        while not self._gate(run_id).exists() and time.monotonic() < give_up:
            time.sleep(LOOK_S)

    def _gate(self, run_id: str) -> Path:
        return self._folder / f"gate-{run_id}"

    def _append(self, name: str, line: dict[str, Any]) -> None:
        """Add a line in one write: it is there whole or not at all."""
        file = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, orjson.dumps(line) + b"\n")
        finally:
            os.close(file)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self._folder / name
        if not path.exists():
            return []
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]

    @contextmanager
    def _locked(self) -> Generator[None]:
        with (self._folder / "provider.lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
