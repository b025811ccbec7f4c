"""A tool runner that is short of what tools need, when a test says so."""

from typing import Any

from perdure.engine.ports import ToolInvocation, ToolOutcome
from perdure.protocol.tools import ToolSpec
from perdure.tools.limits import KeptPlace
from perdure.tools.results import unavailable
from perdure.tools.runner import LocalToolRunner


class ScarceToolRunner(LocalToolRunner):
    """Runs tools as any, but has no place for the next `full` wishes and begins none of the next
    `stuck` compensations. `wishes` are the tools that a place was wanted for.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.full = 0
        self.stuck = 0
        self.wishes: list[str] = []

    def reserve(self, spec: ToolSpec, timeout_s: float) -> KeptPlace | None:
        """Keep a place, or have none."""
        self.wishes.append(spec.name)
        if self.full > 0:
            self.full -= 1
            return None
        return super().reserve(spec, timeout_s)

    async def compensate(self, invocation: ToolInvocation) -> ToolOutcome:
        """Have a tool undo a call, or begin nothing."""
        if self.stuck > 0:
            self.stuck -= 1
            return ToolOutcome(result=unavailable("it was not started: no thread"), begun=False)
        return await super().compensate(invocation)
