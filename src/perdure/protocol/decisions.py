"""What a planner may decide (R-4.1). It decides and never executes.

A decision may carry the model requests that led to it and a new value of the agent's own small
state; both become durable in the commit that records the decision.
"""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from perdure.protocol.base import Model
from perdure.protocol.events import PlanItem, Usage
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import InterruptKind, OnExpiry
from perdure.protocol.values import CALLS_PER_STEP_MAX

Position = Annotated[str, Field(max_length=200)]
"""Where an operation stands in a code agent's function: a path of indexes, `2.0.1`."""


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
    position: Position | None = None
    calls: tuple[dict[str, JsonValue], ...] | None = Field(
        default=None, description="the tool calls of a reply that code asked for"
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
    position: Position | None = None


class Note(Model):
    """A value that code reported or was given: a `custom` event at its position."""

    position: Position
    name: str = Field(max_length=200)
    value: JsonValue = None


class Product(Model):
    """An artifact that code made: an `artifact` event at its position."""

    position: Position
    name: str = Field(min_length=1, max_length=200)
    media_type: str = Field(max_length=200)
    data: bytes


class DecisionBase(Model):
    """What every decision carries."""

    model_uses: tuple[ModelUse, ...] = ()
    records: tuple[Note | Product, ...] = ()
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
    position: Position | None = None


class Operate(DecisionBase):
    """Everything that the branches of a code agent wait for: calls and questions side by side.

    A question does not hold the step open: it is over when its calls have results. With
    `for_person` nothing can go on before an answer, and the run waits; with neither calls nor
    questions `wake_in` lets it sleep without a worker.
    """

    kind: Literal["operate"] = "operate"
    calls: tuple[ToolRequest, ...] = Field(default=(), max_length=CALLS_PER_STEP_MAX)
    asks: tuple[Ask, ...] = Field(default=(), max_length=CALLS_PER_STEP_MAX)
    for_person: bool = False
    wake_in: timedelta | None = Field(default=None, ge=timedelta(0), le=timedelta(days=366))


class UpdatePlan(DecisionBase):
    """Only revise the plan (`plan` is required)."""

    kind: Literal["update_plan"] = "update_plan"


class Sleep(DecisionBase):
    """Go on after a while, without holding a worker."""

    kind: Literal["sleep"] = "sleep"
    duration: timedelta = Field(ge=timedelta(0), le=timedelta(days=366))


GIVE_UP_CODES = frozenset(FailureCode) - {
    FailureCode.RUN_CANCELLED,
    FailureCode.RUN_TIMEOUT,
    FailureCode.APPROVAL_REJECTED,
    FailureCode.APPROVAL_TIMEOUT,
    FailureCode.RETRIES_EXHAUSTED,
    FailureCode.MAX_STEPS,
    FailureCode.ORPHANED,
}
"""The codes a planner may end its run with; the others are the runtime's own word."""


def _for_planners(code: FailureCode) -> FailureCode:
    if code not in GIVE_UP_CODES:
        raise ValueError(f"{code} is for the runtime alone")
    return code


class GiveUp(DecisionBase):
    """The planner cannot go on; the run fails with this code."""

    kind: Literal["give_up"] = "give_up"
    code: Annotated[FailureCode, AfterValidator(_for_planners)] = FailureCode.INTERNAL
    reason: str
    details: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])


Decision = Annotated[
    CallTools | Finish | Ask | Operate | UpdatePlan | Sleep | GiveUp, Field(discriminator="kind")
]
