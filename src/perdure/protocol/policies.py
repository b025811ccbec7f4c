"""Limits and policies a run, an agent or a tool may set. All durations are seconds."""

from pydantic import Field

from perdure.protocol.base import Model

MAX_STEPS_DEFAULT = 50
MAX_ATTEMPTS_DEFAULT = 3


class RetryPolicy(Model):
    """How often and how far apart a call is tried. Full jitter over an exponential back-off."""

    attempts_max: int = Field(
        default=3, ge=1, le=20, description="attempts in all, the first included"
    )
    backoff_s: float = Field(default=0.5, ge=0, le=3600)
    backoff_factor: float = Field(default=2.0, ge=1, le=10)
    backoff_max_s: float = Field(default=30.0, ge=0, le=86400)
    jitter: bool = True

    def delay_s(self, failed: int, chance: float) -> float:
        """Return the wait after the `failed`-th failure; `chance` is a number in [0, 1)."""
        limit = min(self.backoff_max_s, self.backoff_s * self.backoff_factor ** max(0, failed - 1))
        return limit * (0.5 + chance / 2) if self.jitter else limit


class Budget(Model):
    """What a run may use. None means no limit. Checked before spending (R-4.3)."""

    model_calls: int | None = Field(default=None, ge=0)
    tool_calls: int | None = Field(default=None, ge=0)
    tokens: int | None = Field(default=None, ge=0)
    output_tokens: int | None = Field(default=None, ge=0)
    cost: float | None = Field(
        default=None, ge=0, description="in the unit of the model's price list"
    )
    wall_time_s: float | None = Field(default=None, gt=0, le=31_536_000)
    context_tokens: int | None = Field(
        default=None, gt=0, description="what the last request to a model may have read"
    )


class Timeouts(Model):
    """The separate timeouts of R-10.4. None takes the default of tool, model or settings."""

    run_s: float | None = Field(default=None, gt=0, le=31_536_000)
    tool_s: float | None = Field(default=None, gt=0, le=86_400)
    model_s: float | None = Field(default=None, gt=0, le=86_400)
    approval_s: float | None = Field(default=None, gt=0, le=31_536_000)
