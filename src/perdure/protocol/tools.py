"""What a tool declares of itself, and what one execution of it came to (R-5.1, R-5.5)."""

from typing import Literal

from pydantic import Field, JsonValue

from perdure.protocol.base import Model, Stored, StoredValue, read_known
from perdure.protocol.codec import digest
from perdure.protocol.durations import WAIT_S_MAX
from perdure.protocol.failures import Failure
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import SideEffect, ToolCallStatus

CALLBACK_S_MAX = WAIT_S_MAX
"""The longest time a callback is waited for."""


_DIGESTED_WHEN_SET = ("agent", "has_compensate", "compensate_idempotent")
"""Later parts of a declaration: without them its digest is what it always was."""


class ToolSpec(Model):
    """A tool's declaration. `definition_digest` binds approvals to exactly this text."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    version: str = Field(default="1", min_length=1, max_length=50)
    description: str = Field(default="", max_length=10_000)
    input_schema: dict[str, JsonValue]
    output_schema: dict[str, JsonValue] | None = None
    side_effect: SideEffect = SideEffect.READ
    idempotent: bool | None = Field(
        default=None,
        description="running it again with the same key has no second effect; None: unsaid",
    )
    timeout_s: float | None = Field(default=None, gt=0, le=86_400, description="None: the default")
    retry: RetryPolicy = RetryPolicy(attempts_max=1)
    parallel: bool = Field(default=True, description="may run beside other calls of the same step")
    rate_limit_per_minute: int | None = Field(default=None, ge=1)
    permission: str | None = Field(default=None, max_length=200)
    risk: Literal["low", "medium", "high"] = "low"
    has_lookup: bool = False
    has_compensate: bool = Field(
        default=False, description="a cancel that asks for it can have a call undone"
    )
    compensate_idempotent: bool = Field(
        default=False, description="undoing it again with the same key has no second effect"
    )
    compensation: str | None = Field(
        default=None, max_length=2000, description="how it is undone, or that it cannot be"
    )
    unknown_outcome: Literal["ask", "tell_planner"] = "ask"
    agent: str | None = Field(
        default=None,
        max_length=100,
        description="a call starts a child run of this agent; its answer is the result",
    )
    trusted: bool = Field(
        default=False, description="built-in code that may run on the engine's loop"
    )

    @property
    def sandbox_only(self) -> bool:
        """Tell whether live agents are kept from it: a side effect with nothing said (R-5.11)."""
        if self.side_effect is SideEffect.READ:
            return False
        repeats = self.idempotent is not None or self.has_lookup
        undone = self.compensation is not None or self.has_compensate
        return not (repeats and self.timeout_s is not None and undone)

    @property
    def repeatable(self) -> bool:
        """Tell whether an open call may be run again with the same key (R-5.7)."""
        if self.idempotent is None:
            return self.side_effect is SideEffect.READ
        return self.idempotent

    @property
    def definition_digest(self) -> str:
        """Return the SHA-256 of the whole declaration."""
        absent = {name for name in _DIGESTED_WHEN_SET if not getattr(self, name)}
        return digest(self.model_dump(mode="json", exclude=absent))


class ToolResult(Stored):
    """What one execution came to. `status` is an outcome, or `pending` for a callback, which is
    waited for as long as `expires_in_s` says (None: the default).
    """

    status: ToolCallStatus
    output: StoredValue = None
    error: Failure | None = None
    external_ref: str | None = None
    done: str | None = None
    not_done: str | None = None
    expires_in_s: float | None = None


def read_spec(stored: JsonValue) -> ToolSpec | None:
    """Return a registered declaration; None for one that this release cannot read."""
    return read_known(ToolSpec, stored)
