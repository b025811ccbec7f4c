"""The event log of a run: a closed, discriminated union of what can be recorded (decision 19).

A payload stands once, in its event; steps, calls, messages and checkpoints refer to it by seq and
digest. `NewEvent` is what a writer hands in, `RecordedEvent` what the store gives back: its `seq`
starts at 1, has no gaps, and was assigned in the transaction of the fact it reports (R-6.1).
Readers accept types they do not know as `Unknown`, so that an older release passes them through.
"""

from typing import Literal

from pydantic import Field

from perdure.protocol.base import Stored, StoredValue, Time
from perdure.protocol.codec import digest
from perdure.protocol.failures import Failure
from perdure.protocol.states import (
    CancelAction,
    CancelOption,
    InterruptKind,
    OnExpiry,
    RunState,
    SideEffect,
    ToolCallStatus,
    Transition,
)
from perdure.protocol.values import BlobRef


class Origin(Stored):
    """The history a run shares with another: that run's log up to `seq`, by reference (R-10.3).

    `retry` asks the planner to go on, `redrive` also runs the calls again that had failed, `return`
    goes on from the last consistent checkpoint of a damaged run, `fork` is a way of its own. `state` replaces the agent's own state when `edits_state` says so.
    """

    run_id: str
    seq: int
    mode: Literal["retry", "redrive", "return", "fork"]
    by: str = ""
    reason: str | None = None
    edits_state: bool = False
    state: StoredValue = None


class Branch(Stored):
    """The thread that a run branched off: what it says up to `position`, as it was before `run_id`."""

    thread_id: str
    position: int
    run_id: str


class StateEvent(Stored):
    """The run moved. The first event of every run is its creation, `state` pending.

    `answer` stands in the terminal event of a success, `failure` in that of a failure,
    `effects` in that of a cancelled run: what cannot be undone and what was in flight.
    `history_position` (start) tells how much of the thread the planner sees. `origin` (creation)
    names the history that the run begins with; then its own events follow from seq 1.
    `supersedes` (creation) names the thread's active run that was cancelled for this one.
    `branch` (creation) names the thread that the run's own one was branched from for it.
    `start_at` (creation) is when a delayed run starts.
    """

    type: Literal["state"] = "state"
    state: RunState
    from_state: RunState | None = None
    why: Transition | None = None
    answer: StoredValue = None
    answer_ref: BlobRef | None = None
    failure: Failure | None = None
    effects: list[dict[str, StoredValue]] | None = None
    history_position: int | None = None
    origin: Origin | None = None
    supersedes: str | None = None
    branch: Branch | None = None
    start_at: Time | None = None


class ActionEvent(Stored):
    """A tool call was decided; durable before anything runs. Carries the policy's decision."""

    type: Literal["action"] = "action"
    tool_call_id: str
    ordinal: int = 0
    tool: str
    version: str | None = None
    args: StoredValue = None
    args_ref: BlobRef | None = None
    effect_key: str
    side_effect: SideEffect | None = SideEffect.READ
    repeatable: bool = True
    status: ToolCallStatus = ToolCallStatus.PROPOSED
    policy_effect: Literal["allow", "ask", "deny"] = "allow"
    policy_rule: str = ""
    policy_version: str = ""
    planner_call_id: str | None = None
    position: str | None = None

    @property
    def args_digest(self) -> str:
        """Return the SHA-256 that approvals and executions bind; computed, to be stored once."""
        return digest(self.args) if self.args_ref is None else self.args_ref.digest


class ResultEvent(Stored):
    """The one result of a tool call. `by` tells who knew it when it was not the tool itself."""

    type: Literal["result"] = "result"
    tool_call_id: str
    status: ToolCallStatus
    output: StoredValue = None
    output_ref: BlobRef | None = None
    error: Failure | None = None
    external_ref: str | None = None
    done: str | None = None
    not_done: str | None = None
    executions: int = 0
    by: Literal["tool", "lookup", "person", "runtime", "policy", "callback", "child"] = "tool"

    @property
    def output_digest(self) -> str:
        """Return the SHA-256 of the output; computed, not stored."""
        return digest(self.output) if self.output_ref is None else self.output_ref.digest


class ApprovalRequestEvent(Stored):
    """Opens an approval: names what is asked, for which call, until when.

    `notifies`: the approvers are told. After `escalate_after_s` those of `escalate_to` may decide.
    """

    type: Literal["approval_request"] = "approval_request"
    approval_id: str
    tool_call_id: str
    title: str
    artifact_ref: str | None = None
    requested_actions: tuple[dict[str, StoredValue], ...] = ()
    risk: str = "low"
    reason: str = ""
    args_digest: str
    definition_digest: str
    approvers: tuple[str, ...] = ()
    expires_at: Time | None = None
    on_expiry: OnExpiry = OnExpiry.FAIL
    notifies: bool = False
    escalate_after_s: float | None = None
    escalate_to: tuple[str, ...] = ()


class InterruptEvent(Stored):
    """Opens an interrupt that is not an approval."""

    type: Literal["interrupt"] = "interrupt"
    interrupt_id: str
    kind: InterruptKind
    key: str | None = None
    title: str = ""
    payload: StoredValue = None
    payload_ref: BlobRef | None = None
    answer_schema: dict[str, StoredValue] | None = None
    tool_call_id: str | None = None
    expires_at: Time | None = None
    on_expiry: OnExpiry = OnExpiry.FAIL
    position: str | None = None


class ResumeEvent(Stored):
    """Closes an interrupt: answered, expired or cancelled; by whom and why."""

    type: Literal["resume"] = "resume"
    interrupt_id: str
    outcome: Literal["answered", "expired", "cancelled"]
    answer: str | None = None
    value: StoredValue = None
    by: str | None = None
    reason: str | None = None
    tool_call_id: str | None = None
    effective_args: StoredValue = None
    effective_digest: str | None = None
    policy_version: str | None = None


class CancelEvent(Stored):
    """A cancel was accepted; its place in the log shows which effects came before it.

    `compensate` asks that what the run's tools did is undone where they can, `discard_artifacts`
    that its artifacts are discarded when it ends. What an earlier cancel asked for stays asked for.
    """

    type: Literal["cancel"] = "cancel"
    action: CancelAction
    epoch: int
    by: str
    source: str = "api"
    reason: str | None = None
    compensate: bool = False
    discard_artifacts: bool = False

    @property
    def options(self) -> CancelOption:
        """Return what is asked for besides the action."""
        return CancelOption.of(compensate=self.compensate, discard_artifacts=self.discard_artifacts)


class AttemptEvent(Stored):
    """A worker took the run (`claimed`, `recovered`) or lost it (`lost`)."""

    type: Literal["attempt"] = "attempt"
    phase: Literal["claimed", "recovered", "lost"]
    attempt: int
    worker: str
    reason: str | None = None


class StepEvent(Stored):
    """A step is over; `succeeded` means that all of its calls have results."""

    type: Literal["step"] = "step"
    index: int
    status: Literal["succeeded", "failed", "cancelled"] = "succeeded"


class Usage(Stored):
    """What one model request used."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0


class ModelEvent(Stored):
    """One model request of the planner and its reply.

    `calls` are those of a reply that code asked for: what follows from them is the code's choice.
    `message_id` names the streamed message that this text is; without it nothing was streamed,
    or what was is superseded.
    """

    type: Literal["model"] = "model"
    model: str
    text: str = ""
    text_ref: BlobRef | None = None
    finish: str = ""
    usage: Usage = Usage()
    request_digest: str | None = None
    session: str | None = None
    duration_ms: int = 0
    message_id: str | None = None
    position: str | None = None
    calls: tuple[dict[str, StoredValue], ...] | None = None


class MessageEvent(Stored):
    """A message of the run that is neither its input nor its answer."""

    type: Literal["message"] = "message"
    role: str
    parts: list[StoredValue]
    message_id: str | None = None


class DeltaEvent(Stored):
    """A coalesced fragment of streamed text, with its place in the whole.

    The text of a message counts once a `model` event names the message; until then it may be
    superseded. `offset` counts characters (Unicode code points).
    """

    type: Literal["delta"] = "delta"
    message_id: str
    offset: int
    text: str


class RetryEvent(Stored):
    """A call or an attempt failed and is tried again after `delay_ms`."""

    type: Literal["retry"] = "retry"
    subject: Literal["model", "tool", "attempt"]
    failed: int
    failure: Failure
    delay_ms: int = 0
    tool_call_id: str | None = None


class TimeoutEvent(Stored):
    """A limit of time was reached."""

    type: Literal["timeout"] = "timeout"
    subject: Literal["run", "tool", "model", "approval", "interrupt", "callback"]
    limit_ms: int
    tool_call_id: str | None = None
    interrupt_id: str | None = None


CompensationStatus = Literal["started", "succeeded", "failed", "unknown"]
"""Where a try to undo a call stands; the last three are ends."""


class CompensationEvent(Stored):
    """The effect of a call is being undone (`started`, durable before anything runs), or what came
    of it.

    `key` is the idempotency key of the compensation, the same for every try, `number` which try
    it is. `detail` is what the tool returned; of a `started`, who began it. `again`: it is tried
    once more. `run_id` is set when the call is that of a run below.
    A try whose `begun` is false ended before anything of the tool ran: it uses up none.
    """

    type: Literal["compensation"] = "compensation"
    tool_call_id: str
    status: CompensationStatus
    detail: StoredValue = None
    key: str = ""
    number: int = 1
    run_id: str | None = None
    external_ref: str | None = None
    error: Failure | None = None
    again: bool = False
    begun: bool = True


class GuardrailEvent(Stored):
    """A guardrail judged content."""

    type: Literal["guardrail"] = "guardrail"
    rule: str
    outcome: str
    action: str


class UsageEvent(Stored):
    """Use that no model event carries."""

    type: Literal["usage"] = "usage"
    subject: str
    usage: Usage


class PlanItem(Stored):
    """One item of the plan."""

    text: str = Field(max_length=1000)
    status: Literal["pending", "in_progress", "done", "dropped"] = "pending"


class PlanEvent(Stored):
    """The plan was revised; `items` are the whole plan."""

    type: Literal["plan"] = "plan"
    revision: int
    items: list[PlanItem]
    position: str | None = None


class ArtifactEvent(Stored):
    """An artifact was committed."""

    type: Literal["artifact"] = "artifact"
    artifact_id: str
    name: str
    version: int
    media_type: str
    digest: str
    size: int
    status: str = "draft"
    tool_call_id: str | None = None
    position: str | None = None


class HandoffEvent(Stored):
    """Another agent took over within the run. `view`: what it sees of the steps before."""

    type: Literal["handoff"] = "handoff"
    source: str
    target: str
    target_version: str = ""
    reason: str = ""
    view: Literal["all", "none"] = "all"


class ChildUse(Stored):
    """What a child and all below it used, or what it may use at most (None: no limit)."""

    model_calls: int | None = None
    tool_calls: int | None = None
    tokens: int | None = None
    output_tokens: int | None = None
    cost: float | None = None


class ChildEvent(Stored):
    """A child run was spawned, is waited for, was refused, or its result arrived.

    `use` is what a spawned child may use at most and is kept from its parent until its result,
    which carries what was used. `tool_call_id` is set when a tool call started the child; its
    result is then that call's result too. `participant` and `thread_id` are set when the child runs
    on a thread that lasts for several children. `topic` is set when the child is a subscriber's run
    for what the event at `published_seq` says.
    """

    type: Literal["child"] = "child"
    phase: Literal["spawned", "awaited", "refused", "result"]
    child_run_id: str | None = None
    key: str | None = None
    agent_id: str | None = None
    agent_version: str | None = None
    detached: bool = False
    awaited: bool = False
    tool_call_id: str | None = None
    state: RunState | None = None
    result: StoredValue = None
    result_ref: BlobRef | None = None
    failure: Failure | None = None
    use: ChildUse | None = None
    position: str | None = None
    request_digest: str | None = None
    participant: str | None = None
    thread_id: str | None = None
    topic: str | None = None
    published_seq: int | None = None


class TakeoverEvent(Stored):
    """A person took the run over, or gave it back."""

    type: Literal["takeover"] = "takeover"
    by: str
    phase: Literal["taken", "returned"]


class ErrorEvent(Stored):
    """Something failed. `final`: the run ends with it once its children have ended."""

    type: Literal["error"] = "error"
    failure: Failure
    final: bool = False


class CustomEvent(Stored):
    """What an agent reports of its own."""

    type: Literal["custom"] = "custom"
    name: str
    value: StoredValue = None
    position: str | None = None


class LateEvent(Stored):
    """The result of an execution whose worker had lost its right: evidence, never merged."""

    type: Literal["late"] = "late"
    tool_call_id: str
    execution: int
    attempt: int
    epoch: int
    status: ToolCallStatus
    output: StoredValue = None
    output_ref: BlobRef | None = None
    external_ref: str | None = None


ENDING_REPAIRS = frozenset({"return", "fail"})
"""Actions of `repair` events by which a damaged run ends: another goes on in its place, or none."""


class RepairEvent(Stored):
    """An operator, or the runtime's own check, put the run aside or repaired it.

    `action` is `quarantine`, `return` (`after` names the run that goes on, and the checkpoint) or
    `fail`.
    """

    type: Literal["repair"] = "repair"
    action: str
    by: str
    reason: str
    before: StoredValue = None
    after: StoredValue = None


class GapEvent(Stored):
    """Events before `kept_from` are no longer kept."""

    type: Literal["gap"] = "gap"
    kept_from: int
