"""What the operations of a code agent raise in its function.

`ToolFailed` with its kinds `StepFailed` and `ChildFailed`, and `InterruptExpired` are ordinary
errors that a function may catch. `AgentFailed` is for the author: it ends the run with a code of their choice. `Diverged`
is no `Exception`, so that a broad `except` does not swallow it; the run fails all the same.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from perdure.protocol.decisions import GIVE_UP_CODES
from perdure.protocol.failures import Failure, FailureCode


class ToolFailed(Exception):
    """A call did not succeed. `output` is what came back all the same: a part, a person's word."""

    def __init__(self, name: str, status: str, failure: Failure | None, output: JsonValue) -> None:
        reason = failure.reason if failure is not None else f"it ended {status}"
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.status = status
        self.failure = failure
        self.output = output

    @property
    def code(self) -> FailureCode:
        """Return the failure's code."""
        return self.failure.code if self.failure is not None else FailureCode.TOOL_ERROR


class StepFailed(ToolFailed):
    """The function of a step raised, as often as it may be tried."""


class ChildFailed(ToolFailed):
    """A child run failed, or could not be started (`status` is then "refused")."""


class InterruptExpired(Exception):
    """Nobody answered in time, and the question was asked with `on_expiry="deny"`."""


class AgentFailed(Exception):
    """End the run as failed, with this code, reason and details."""

    def __init__(
        self,
        reason: str,
        code: FailureCode | str = FailureCode.INTERNAL,
        details: Mapping[str, JsonValue] | None = None,
    ) -> None:
        super().__init__(reason)
        self.code = FailureCode(code)
        if self.code not in GIVE_UP_CODES:
            raise ValueError(f"{self.code} is for the runtime alone")
        self.reason = reason
        self.details = dict(details or {})


class StateConflict(AgentFailed):
    """Two branches replaced one field of the state. Uncaught, it ends the run with CONFLICT."""

    def __init__(self, name: str, first: str, second: str) -> None:
        super().__init__(
            f"two branches replaced the field {name}, at {first} and at {second}",
            FailureCode.CONFLICT,
            {"field": name, "positions": [first, second]},
        )


class Diverged(BaseException):
    """The function asks for something else than its journal says at this position."""
