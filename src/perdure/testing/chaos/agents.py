"""What the workers of a chaos campaign serve: the simulation's agents over a provider on disk.

`perdure worker --agents perdure.testing.chaos.agents:registry`; the environment names the folder
of the world outside. That folder outlives every process and lies on no disk that is made full.
"""

import asyncio
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perdure.agents.catalog import AgentRegistry
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect
from perdure.testing.faults import Trap
from perdure.testing.scene_tools import AnyTool, Outside, paying_tools, payment
from perdure.testing.sim.actors import mixed_agents
from perdure.tools import Returned, ToolContext, failed, succeeded, tool

FOLDER_VARIABLE = "PERDURE_TEST_CHAOS_FOLDER"
REGISTRY = "perdure.testing.chaos.agents:registry"

LAG_S = 0.15
"""What the way to the provider takes at most, and the way back."""

SLOW_S = 1.5
_AGAIN = RetryPolicy(attempts_max=4, backoff_s=0.2)


class Provider(Outside):
    """A payment provider with a file for each key: it has no lock that a stopped worker could hold,
    and finds one of thousands of payments at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._paid = folder / "paid"
        self._paid.mkdir(parents=True, exist_ok=True)

    def payments(self) -> list[dict[str, Any]]:
        """Return all payments."""
        return [line for file in sorted(self._paid.iterdir()) for line in _lines(file)]

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the first payment under a key."""
        return next(_lines(self._paid / key), None)

    def pay(self, name: str, key: str, amount: int, execution: int = 1) -> None:
        """Add a payment in one write: it is there whole or not at all."""
        file = os.open(self._paid / key, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, _line(payment(name, key, amount, execution)))
        finally:
            os.close(file)

    def pay_once(self, name: str, key: str, amount: int, execution: int = 1) -> None:
        """Add a payment unless there is one under the key: the link is made once."""
        with tempfile.NamedTemporaryFile(dir=self.folder) as draft:
            draft.write(_line(payment(name, key, amount, execution)))
            draft.flush()
            try:
                os.link(draft.name, self._paid / key)
            except FileExistsError:
                return


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        yield json.loads(line)


def _plain_tools() -> list[AnyTool]:
    @tool
    def echo(amount: int) -> int:
        """Return the amount."""
        return amount

    @tool
    async def slow(amount: int) -> int:
        """Take some time."""
        await asyncio.sleep(SLOW_S * random.random())  # noqa: S311  # no secret
        return amount

    @tool
    def draw(amount: int, context: ToolContext) -> str:
        """Make an artifact."""
        context.artifact(f"drawing-{amount}.txt", f"a drawing of {amount}", "text/plain")
        return "drawn"

    @tool(
        side_effect=SideEffect.WRITE,
        idempotent=True,
        retry=_AGAIN,
        timeout_s=20.0,
        compensation="nothing to undo",
    )
    def flaky(amount: int, context: ToolContext) -> Returned:
        """Fail as often as the amount says, then work; waits in a thread meanwhile."""
        if context.execution <= amount % 3:
            return failed("not this time", retryable=True)
        return succeeded(amount)

    return [echo, slow, draw, flaky]


def chaos_registry(folder: Path) -> AgentRegistry:
    """Return the loop agent and the code agent with their tools."""
    made = AgentRegistry()
    made.add(*mixed_agents())
    made.add_tool(*paying_tools(Provider(folder), Trap(None), lag_s=LAG_S), *_plain_tools())
    return made


def __getattr__(name: str) -> AgentRegistry:
    """Make `registry` for the worker that names it: only there the environment has the folder."""
    if name == "registry":
        return chaos_registry(Path(os.environ[FOLDER_VARIABLE]))
    raise AttributeError(name)
