"""What a planner may decide (R-4.1). It decides and never executes.

A decision may carry the model requests that led to it and a new value of the agent's own small
state; both become durable in the commit that records the decision.
"""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from perdure.protocol.base import Model
from perdure.protocol.events import PlanItem, Usage
from perdure.protocol.states import InterruptKind, OnExpiry
from perdure.protocol.values import CALLS_PER_STEP_MAX


class ModelUse(Model):
    """One model request a planner made for a decision, as it is recorded."""

    model: str
    text: str = ""
    finish: str = ""
    usage: Usage = Usage()
    request_digest: str | None = None
    session: str | None = None
    duration_ms: int = 0
    message_id: str | None = Field(
        default=None, description="the streamed message that this reply is, of `open_message`"
    )


class ToolRequest(Model):
    """A wish to call a tool. `call_id` is the planner's own name for it (a model's call id)."""

    tool: str = Field(max_length=200)
    args: JsonValue = None
    version: str | None = Field(default=None, max_length=50)
    call_id: str | None = Field(default=None, max_length=200)
    problem: str | None = Field(
        default=None, description="set when the model's arguments were not JSON; args hold the text"
    )


class DecisionBase(Model):
    """What every decision carries."""

    model_uses: tuple[ModelUse, ...] = ()
    state: JsonValue = Field(default=None, description="new agent state; None keeps the old one")
    plan: tuple[PlanItem, ...] | None = Field(default=None, description="the whole revised plan")


class CallTools(DecisionBase):
    """Run these calls, in parallel where the tools allow it."""

    kind: Literal["call_tools"] = "call_tools"
    calls: tuple[ToolRequest, ...] = Field(min_length=1, max_length=CALLS_PER_STEP_MAX)
    text: str = ""


class Finish(DecisionBase):
    """The task is done; the runtime checks and ends the run."""

    kind: Literal["finish"] = "finish"
    answer: JsonValue = None


class Ask(DecisionBase):
    """Ask a person and wait without holding a worker."""

    kind: Literal["ask"] = "ask"
    ask: Literal[InterruptKind.INPUT, InterruptKind.AUTH, InterruptKind.APPROVAL] = (
        InterruptKind.INPUT
    )
    title: str = Field(default="", max_length=500)
    payload: JsonValue = None
    key: str | None = Field(default=None, max_length=200)
    answer_schema: dict[str, JsonValue] | None = None
    expires_in: timedelta | None = None
    on_expiry: OnExpiry = OnExpiry.FAIL


class UpdatePlan(DecisionBase):
    """Only revise the plan (`plan` is required)."""

    kind: Literal["update_plan"] = "update_plan"


class Sleep(DecisionBase):
    """Go on after a while, without holding a worker."""

    kind: Literal["sleep"] = "sleep"
    duration: timedelta = Field(ge=timedelta(0), le=timedelta(days=366))


class GiveUp(DecisionBase):
    """The planner cannot go on; the run fails with this code."""

    kind: Literal["give_up"] = "give_up"
    code: Literal["CONTEXT_OVERFLOW", "OUTPUT_INVALID", "MODEL_ERROR", "INTERNAL"] = "INTERNAL"
    reason: str


Decision = Annotated[
    CallTools | Finish | Ask | UpdatePlan | Sleep | GiveUp, Field(discriminator="kind")
]
