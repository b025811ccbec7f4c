"""What callers see of each object: stable JSON shapes with published schemas (R-1.1).

The run itself is `perdure.protocol.runs.Run`, an event `perdure.protocol.event_views.EventView`, a
message `perdure.protocol.messages.Message`. Readers should let unknown fields pass by.
"""

from typing import Generic, Literal, TypeVar

from pydantic import JsonValue

from perdure.protocol.base import Stored, StoredValue, Time
from perdure.protocol.event_views import EventView
from perdure.protocol.failures import Failure
from perdure.protocol.records import BaseKind
from perdure.protocol.runs import Run
from perdure.protocol.states import (
    Answer,
    ArtifactStatus,
    AttemptEnd,
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    SideEffect,
    StepStatus,
    ToolCallStatus,
)
from perdure.protocol.topics import SubscriptionTerms
from perdure.protocol.values import BlobRef

ItemT = TypeVar("ItemT")


class Page(Stored, Generic[ItemT]):
    """A page of a list. Pass `next` as `after` for the next page; null at the end."""

    items: list[ItemT]
    next: str | None


class AttemptView(Stored):
    """One worker's hold on a run."""

    run_id: str
    tenant_id: str
    attempt: int
    worker_id: str
    started_at: Time
    ended_at: Time | None
    end_reason: AttemptEnd | None


class RepairView(Stored):
    """How far the log of a run that is put aside can be trusted (R-7.7)."""

    run_id: str
    damage: str | None
    """The first place where log and checkpoints do not agree; null: they agree throughout."""
    checkpoint_id: str | None
    """The last checkpoint before it that the log folds to."""
    seq: int | None
    can_return: bool
    """The run may go on from that checkpoint."""
    obstacles: list[str]
    """Why not: each effect that lies behind the checkpoint, and what else is against it."""


class StepItem(Stored):
    """One part of a step, in the order of the log. `ref` is the id of the object it stands for."""

    id: str
    kind: Literal[
        "model", "tool", "handoff", "guardrail", "subtask", "interrupt", "plan", "message"
    ]
    name: str
    status: str
    ref: str | None = None
    seq: int
    end_seq: int | None
    span_id: str
    started_at: Time
    ended_at: Time | None


class StepView(Stored):
    """One round of the planner's decision with its ordered, typed items (R-1.3)."""

    step_id: str
    run_id: str
    tenant_id: str
    index: int
    status: StepStatus
    first_seq: int
    last_seq: int | None
    span_id: str
    started_at: Time
    ended_at: Time | None
    items: list[StepItem]


class ExecutionView(Stored):
    """One time a call was handed to its tool."""

    number: int
    attempt: int
    started_at: Time
    ended_at: Time | None
    outcome: ToolCallStatus | None


class ToolCallView(Stored):
    """One side effect with its arguments and result.

    `args` are those that were decided, `effective_args` those that an approver edited. A value
    with a reference beside it is held by reference; a list shows only the reference.
    """

    tool_call_id: str
    run_id: str
    tenant_id: str
    step_id: str
    step_index: int
    ordinal: int
    tool: str
    version: str | None
    planner_call_id: str | None
    """The planner's own name for the call; of a code agent's step the name of the step."""
    side_effect: SideEffect | None
    repeatable: bool
    needs_approval: bool
    status: ToolCallStatus
    args: JsonValue
    args_ref: BlobRef | None
    args_digest: str
    effective_args: JsonValue
    effective_digest: str
    effect_key: str
    external_ref: str | None
    output: JsonValue
    output_ref: BlobRef | None
    error: Failure | None
    done: str | None
    not_done: str | None
    resolved_by: str | None
    policy_effect: str | None
    policy_rule: str | None
    policy_version: str | None
    action_seq: int
    result_seq: int | None
    executions: list[ExecutionView]
    created_at: Time | None
    finished_at: Time | None


class CheckpointView(Stored):
    """A position in the log from which the run can be rebuilt.

    The parent of a run's first checkpoint is in the run whose history it shares, if it does.
    `author` and `reason` are those of a state that was updated by hand here.
    """

    checkpoint_id: str
    run_id: str
    tenant_id: str
    seq: int
    parent_run_id: str | None
    parent_seq: int | None
    step_index: int
    attempt: int
    cancel_epoch: int
    schema_version: int
    agent_state: JsonValue
    author: str | None
    reason: str | None
    digest: str
    created_at: Time


class CheckpointState(Stored):
    """What a run's log says of it at a checkpoint, the shared history of an origin included."""

    checkpoint_id: str
    run_id: str
    seq: int
    values: dict[str, JsonValue]


class CheckpointDiff(Stored):
    """How the state at `first` becomes the state at `second`: a JSON Patch (RFC 6902)."""

    first: str
    second: str
    patch: list[dict[str, JsonValue]]


class AskedAction(Stored):
    """The call an interrupt is about, with its canonical arguments, never the model's prose."""

    tool_call_id: str
    tool: str
    version: str | None
    args: JsonValue
    args_ref: BlobRef | None
    args_digest: str
    side_effect: SideEffect | None


class HandlingView(Stored):
    """What happened to an approval before it was answered: who was told, who may decide now."""

    phase: Literal["delegated", "escalated", "undecidable", "notified", "not_notified"]
    approvers: list[str]
    at: Time
    by: str | None = None
    reason: str | None = None
    number: int | None = None
    error: str | None = None


class InterruptView(Stored):
    """A question to a person, and its answer once there is one."""

    interrupt_id: str
    run_id: str
    thread_id: str
    agent_id: str
    tenant_id: str
    kind: InterruptKind
    status: InterruptStatus
    key: str | None
    title: str
    reason: str
    risk: str | None
    payload: JsonValue
    payload_ref: BlobRef | None
    answer_schema: dict[str, JsonValue] | None
    artifact_ref: str | None
    requested_actions: list[dict[str, JsonValue]]
    approvers: list[str]
    """Who may decide by now; nobody named: whoever may answer."""
    handling: list[HandlingView]
    action: AskedAction | None
    definition_digest: str | None
    answers: list[Answer]
    expires_at: Time | None
    on_expiry: OnExpiry
    answer: str | None
    value: JsonValue
    effective_args: JsonValue
    answer_reason: str | None
    answered_by: str | None
    answered_at: Time | None
    created_at: Time


class ArtifactView(Stored):
    """A formal product of a run. The content is at `/v1/artifacts/{id}/content`."""

    artifact_id: str
    run_id: str
    thread_id: str
    tenant_id: str
    step_index: int
    tool_call_id: str | None
    name: str
    version: int
    media_type: str
    digest: str
    size: int
    status: ArtifactStatus
    seq: int
    created_at: Time


class LateView(Stored):
    """The result of an execution whose worker had lost the run: evidence, never merged."""

    run_id: str
    tenant_id: str
    tool_call_id: str
    execution: int
    attempt: int
    cancel_epoch: int
    seq: int
    status: ToolCallStatus
    output: JsonValue
    output_ref: BlobRef | None
    external_ref: str | None
    recorded_at: Time


class ThreadBaseView(Stored):
    """What a thread says of another: that thread's messages up to `position`, before its own ones
    behind `from_position`. `run_id` is the run that was branched from.
    """

    kind: BaseKind
    thread_id: str
    position: int
    from_position: int
    run_id: str | None
    author: str
    created_at: Time


class BranchView(Stored):
    """A branch of a thread: it says what the thread says up to `position`, and goes on by itself."""

    thread_id: str
    position: int
    run_id: str | None
    author: str
    created_at: Time
    adopted_at: Time | None
    adopted_by: str | None


class ThreadView(Stored):
    """A conversation: a context boundary, never a lock."""

    thread_id: str
    tenant_id: str
    title: str
    metadata: dict[str, JsonValue]
    participants: list[JsonValue]
    capabilities: list[str]
    active_run_id: str | None
    last_position: int
    bases: list[ThreadBaseView]
    created_at: Time
    updated_at: Time


class ToolView(Stored):
    """A tool as it is listed: its newest version and all that are registered."""

    name: str
    version: str
    versions: list[str]
    description: str
    input_schema: dict[str, JsonValue]
    output_schema: dict[str, JsonValue] | None
    side_effect: SideEffect
    idempotent: bool | None
    has_lookup: bool
    has_compensate: bool
    risk: str
    permission: str | None
    timeout_s: float | None
    compensation: str | None
    sandbox_only: bool
    definition_digest: str
    registered_at: Time


class Snapshot(Stored):
    """What a stream sends instead of events that are no longer kept."""

    kept_from: int
    run: Run


class ThreadEventPage(Stored):
    """Events of all runs of a thread: in order within each run.

    `place` goes on behind them, also as a stream; `next` is the same when more is there at once.
    """

    items: list[EventView]
    next: str | None
    place: str


class EventPage(Stored):
    """Events of a run in order.

    `next` is the seq to go on after, null when the end of the log was reached. `gap` stands for
    events before its `kept_from` that were asked for and are no longer kept.
    """

    items: list[EventView]
    gap: Snapshot | None
    next: int | None
    last_seq: int


class SubscriptionView(Stored):
    """An agent that subscribes to a topic of a thread; its runs stand in its inbox."""

    thread_id: str
    tenant_id: str
    topic: str
    agent_id: str
    inbox_thread_id: str
    terms: SubscriptionTerms
    created_by: str
    created_at: Time


class StateFieldView(Stored):
    """What a declared field of scope thread or agent holds, and the event of the run that left it.

    `version` grows with each run that leaves something there, and when the thread adopts a branch.
    An `empty` field was written, and then taken back when the thread adopted a branch: the next run
    finds nothing there.
    """

    name: str
    tenant_id: str
    scope: Literal["thread", "agent"]
    scope_id: str
    rule: str
    version: int
    empty: bool
    value: StoredValue
    run_id: str
    seq: int
    updated_at: Time
