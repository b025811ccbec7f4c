"""What a planner may decide (R-4.1). It decides and never executes.

A decision may carry the model requests that led to it and a new value of the agent's own small
state; both become durable in the commit that records the decision.
"""

from datetime import timedelta
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, JsonValue, model_validator

from perdure.protocol.base import Model
from perdure.protocol.durations import WAIT_MAX
from perdure.protocol.events import PlanItem, Usage
from perdure.protocol.failures import FailureCode
from perdure.protocol.policies import Budget, Timeouts
from perdure.protocol.runs import Metadata
from perdure.protocol.states import InterruptKind, OnExpiry
from perdure.protocol.topics import Topic
from perdure.protocol.values import BLOB_BYTES_MAX, CALLS_PER_STEP_MAX

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
    data: bytes = Field(max_length=BLOB_BYTES_MAX)


class Revision(Model):
    """The plan as code revised it: a `plan` event at its position."""

    position: Position
    items: tuple[PlanItem, ...]


class Publish(Model):
    """Something to publish to a topic of the root's thread, to all who subscribe to it (R-4.8).

    Beside a `Finish` that does not stand yet (children are open, the answer does not fit) it is
    left out: the planner decides again.
    """

    topic: Topic
    value: JsonValue = None
    position: Position | None = None


class WriteField(Model):
    """A write to a declared field of the agent's state, by the field's rule (R-1.5).

    Beside a `Finish` that does not stand yet it is left out: the planner decides again.
    """

    field: str = Field(max_length=100)
    value: JsonValue = None
    position: None = None


Record = Note | Product | Revision | Publish | WriteField
"""What a decision puts on record beside what it asks for."""


class DecisionBase(Model):
    """What every decision carries."""

    model_uses: tuple[ModelUse, ...] = ()
    records: tuple[Record, ...] = ()
    state: JsonValue = Field(default=None, description="new agent state; None keeps the old one")
    plan: tuple[PlanItem, ...] | None = Field(default=None, description="the whole revised plan")


class CallTools(DecisionBase):
    """Run these calls, in parallel where the tools allow it."""

    kind: Literal["call_tools"] = "call_tools"
    calls: tuple[ToolRequest, ...] = Field(min_length=1, max_length=CALLS_PER_STEP_MAX)
    text: str = ""


class Finish(DecisionBase):
    """The task is done; the runtime checks and ends the run.

    While children are open the run waits for them first, and the planner decides again.
    """

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
    expires_in: timedelta | None = Field(default=None, gt=timedelta(0), le=WAIT_MAX)
    on_expiry: OnExpiry = OnExpiry.FAIL
    position: Position | None = None


class UpdatePlan(DecisionBase):
    """Only revise the plan (`plan` is required). It makes no turn: `context.plan` shows it."""

    kind: Literal["update_plan"] = "update_plan"


class Sleep(DecisionBase):
    """Go on after a while, without holding a worker.

    It makes no turn: a planner that is to sleep once notes in `state` that it has, and looks at
    `context.state`.
    """

    kind: Literal["sleep"] = "sleep"
    duration: timedelta = Field(ge=timedelta(0), le=WAIT_MAX)


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


class ChildRequest(Model):
    """A wish to run another agent as a child (R-13.1).

    `key` is the planner's own name for it, unique in the step; by default the child's place in
    it. A detached child goes its own way: the run neither waits for it nor is told its result, and
    a cancel does not reach it. What `budget` leaves open is an equal share of what the run has
    left; no child gets more than that.

    `participant` names somebody who lasts: all children of the run under that name share one
    thread, so that each sees what the ones before it were asked and answered. They run one after
    the other.
    """

    agent_id: str = Field(min_length=1, max_length=100)
    version: str | None = Field(default=None, min_length=1, max_length=50)
    input: JsonValue = None
    key: str | None = Field(default=None, min_length=1, max_length=200)
    participant: str | None = Field(default=None, min_length=1, max_length=200)
    detach: bool = False
    budget: Budget = Budget()
    timeouts: Timeouts = Timeouts()
    max_steps: int | None = Field(default=None, ge=1, le=100_000)
    max_attempts: int | None = Field(default=None, ge=1, le=100)
    output_schema: dict[str, JsonValue] | None = None
    metadata: Metadata = Field(default_factory=dict[str, JsonValue])
    tags: tuple[Annotated[str, Field(max_length=200)], ...] = Field(default=(), max_length=50)
    position: Position | None = None


class Operate(DecisionBase):
    """Everything that the branches of a code agent wait for: calls, children and questions.

    A question does not hold the step open: it is over when its calls and children have results. With
    `for_person` nothing can go on before an answer, and the run waits; with neither calls nor
    questions `wake_in` lets it sleep without a worker.
    """

    kind: Literal["operate"] = "operate"
    calls: tuple[ToolRequest, ...] = Field(default=(), max_length=CALLS_PER_STEP_MAX)
    asks: tuple[Ask, ...] = Field(default=(), max_length=CALLS_PER_STEP_MAX)
    children: tuple[ChildRequest, ...] = Field(default=(), max_length=CALLS_PER_STEP_MAX)
    for_person: bool = False
    wake_in: timedelta | None = Field(default=None, ge=timedelta(0), le=WAIT_MAX)


class Spawn(DecisionBase):
    """Start child runs, and wait for all that are open, without holding a worker.

    With `wait` False the planner goes on at once; a later `Spawn` without children waits for what
    is still open. A child that cannot be started (unknown agent, input that does not fit, limits of
    depth, width or budget) is refused, and the planner told; the others start.
    """

    kind: Literal["spawn"] = "spawn"
    children: tuple[ChildRequest, ...] = Field(default=(), max_length=CALLS_PER_STEP_MAX)
    wait: bool = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = [child.key for child in self.children if child.key is not None]
        if len(set(keys)) != len(keys):
            raise ValueError("a key is used twice in one step")
        if not self.children and not self.wait:
            raise ValueError("it neither starts nor waits for children")
        return self


class Handoff(DecisionBase):
    """Let another agent carry the run on: its planner, tools and permissions count from now on.

    `view` says what the new agent sees of the steps before: `all` of them, or `none`, then only
    the run's input, the thread and `reason`. An agent that is not known is an error the planner is
    told of.
    """

    kind: Literal["handoff"] = "handoff"
    agent_id: str = Field(min_length=1, max_length=100)
    version: str | None = Field(default=None, min_length=1, max_length=50)
    reason: str = Field(default="", max_length=5000)
    view: Literal["all", "none"] = "all"


Decision = Annotated[
    CallTools | Finish | Ask | Operate | UpdatePlan | Sleep | GiveUp | Spawn | Handoff,
    Field(discriminator="kind"),
]
