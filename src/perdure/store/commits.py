"""What writers hand to a store: one `Commit` is one fenced, atomic advance of one run.

The guard is checked first, then the legality of the state pair; a commit whose guard fails
writes nothing and the others of its batch are written (decisions 1, 4, 6, 9). `seq` numbers are
known to the writer because the guard names the last seq: the event at place i gets
`expected_seq + 1 + i`, and rows refer to events by these numbers.

Durations, not instants, cross this port: the store's own clock decides when something is due.
But for `NewRun.start_at`, which a caller may name as a time; it is made by the store's clock.

What a step makes twice is not `frozen`, though nobody changes it: a frozen dataclass sets each
field through `object.__setattr__`, which made building a commit four times as slow.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from pydantic import JsonValue

from perdure.protocol.base import from_micros
from perdure.protocol.events import NewEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.messages import Role
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import Caller, Counters, RunContext, RunOptions, RunRow
from perdure.protocol.states import (
    ArtifactStatus,
    AttemptEnd,
    CancelAction,
    CancelOption,
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    ParkedOn,
    RunState,
    StepStatus,
    ToolCallStatus,
)
from perdure.protocol.values import BlobRef, Value


@dataclass(slots=True, kw_only=True)
class Guard:
    """What must be true of the run's row for a commit to be written.

    A holder names its `token`. A writer without the lease leaves it None: then the row must have
    no holder, unless `any_holder` lets it write beside one (an answer while siblings run; the
    holder learns of it as `Behind`). The epoch, state and last seq must be as last seen.
    """

    token: int | None
    epoch: int
    from_state: RunState
    expected_seq: int
    any_holder: bool = False


@dataclass(slots=True, kw_only=True)
class HotUpdate:
    """The new values of the hot row. The store itself keeps seq, lease, times and last commit."""

    state: RunState
    step_index: int
    faults: int
    parked_on: ParkedOn | None = None
    waiting_kind: InterruptKind | None = None
    code: FailureCode | None = None
    open_calls: int = 0
    open_interrupts: int = 0
    open_children: int = 0
    counters: Counters = Counters()
    checkpoint_seq: int | None = None


@dataclass(slots=True, kw_only=True)
class StepChange:
    """A step opened (new index) or moved on."""

    index: int
    status: StepStatus
    first_seq: int
    last_seq: int | None = None


@dataclass(slots=True, kw_only=True)
class CallUpdate:
    """New values of a tool call's row; None keeps the old value."""

    tool_call_id: str
    status: ToolCallStatus
    effective_digest: str | None = None
    external_ref: str | None = None
    result_seq: int | None = None


@dataclass(slots=True, kw_only=True)
class NewExecution:
    """A call is about to be handed to its tool. `approval_id`: the approval this spends, which
    nothing can spend again.
    """

    tool_call_id: str
    number: int
    args_digest: str
    approval_id: str | None = None


@dataclass(slots=True, kw_only=True)
class ExecutionEnd:
    """An execution came to an end."""

    tool_call_id: str
    number: int
    outcome: ToolCallStatus


@dataclass(slots=True, kw_only=True)
class NewCheckpoint:
    """A checkpoint at the commit's last event."""

    seq: int
    parent_seq: int | None
    step_index: int
    agent_state: JsonValue
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewInterrupt:
    """An interrupt opened by the event at `opened_seq`."""

    interrupt_id: str
    kind: InterruptKind
    opened_seq: int
    key: str | None = None
    tool_call_id: str | None = None
    args_digest: str | None = None
    definition_digest: str | None = None
    expires_in_s: float | None = None
    on_expiry: OnExpiry = OnExpiry.FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptClose:
    """A pending interrupt is closed by the event at `closed_seq`; its expiry timer goes."""

    interrupt_id: str
    status: InterruptStatus
    closed_seq: int
    answer: str | None = None
    answer_digest: str | None = None
    answered_by: str | None = None
    effective_digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCallback:
    """A call of the run waits for its callback, for so long."""

    tool_call_id: str
    expires_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeDue:
    """The approvers of an open approval are to be told, or others asked, after so long; None:
    nothing more is due.
    """

    interrupt_id: str
    due_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewMessage:
    """A message of the run's thread; its content is the event at `seq`."""

    message_id: str
    seq: int
    role: Role
    author: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NewArtifact:
    """An artifact committed by the event at `seq`."""

    artifact_id: str
    name: str
    version: int
    media_type: str
    digest: str
    size: int
    status: ArtifactStatus
    step_index: int
    tool_call_id: str | None
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBlob:
    """Content kept once by (tenant, digest); a digest that is there is only touched."""

    digest: str
    media_type: str
    data: bytes


class TimerKind(StrEnum):
    """What is due: a run's total time, an interrupt's answer, a closing, a child's report, the
    callback of a call, telling the approvers of an approval.
    """

    DEADLINE = "deadline"
    EXPIRY = "expiry"
    CLOSE = "close"
    CHILD = "child"
    CALLBACK = "callback"
    NOTICE = "notice"


@dataclass(slots=True, kw_only=True)
class Commit:
    """One atomic advance of a run."""

    run_id: str
    commit_id: str
    guard: Guard
    hot: HotUpdate
    events: tuple[NewEvent, ...] = ()
    steps: tuple[StepChange, ...] = ()
    new_calls: tuple[ToolCallRow, ...] = ()
    call_updates: tuple[CallUpdate, ...] = ()
    new_executions: tuple[NewExecution, ...] = ()
    execution_ends: tuple[ExecutionEnd, ...] = ()
    checkpoint: NewCheckpoint | None = None
    new_interrupts: tuple[NewInterrupt, ...] = ()
    interrupt_closes: tuple[InterruptClose, ...] = ()
    messages: tuple[NewMessage, ...] = ()
    artifacts: tuple[NewArtifact, ...] = ()
    blobs: tuple[NewBlob, ...] = ()
    attempt_end: AttemptEnd | None = field(default=None)
    """Set: the lease is given up in this commit and the attempt ends so (holders only)."""
    ready_in_s: float | None = None
    """Set: the run may be claimed after this many seconds. None: no entry in `ready`."""
    close_in_s: float | None = None
    """Set: a closing timer is left, for a closing that another commit is to finish."""
    new_children: tuple["NewRun", ...] = ()
    """Child runs, created with this commit or not at all."""
    reports_to: str | None = None
    """Set with a terminal state: this parent is to be told; a child's report is left for it."""
    reported: tuple[str, ...] = ()
    """Children whose reports this commit writes into the run's log; these reports go."""
    handed_to: tuple[str, str] | None = None
    """Set: from now on this agent and version carry the run out."""
    new_callbacks: tuple[NewCallback, ...] = ()
    """Calls that wait for their callback from here on; a timer is set for each, or moved."""
    callbacks_over: tuple[str, ...] = ()
    """Calls that no longer wait for one: their timers go."""
    unmoved_since: int | None = None
    """Set: the commit is Behind when the thread says something of others behind this position."""
    notices: tuple[NoticeDue, ...] = ()
    """Approvals whose notice timers are set, moved or taken away. Closing one takes it away too."""
    discards: frozenset[str] | None = None
    """Set: the run's artifacts become `discarded`, those of this commit too, and the run no longer
    uses this content (digests). Adopted ones stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The commit is durable. `seq` is the run's last seq, `at` the time its events carry."""

    seq: int
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Somebody else wrote to the run first; read from the old seq, fold, build again."""

    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseLost:
    """The writer no longer holds the run (or, without a token: somebody holds it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """A cancel was accepted; the holder may send only its closing commit."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The data of this one commit cannot be stored (decision 7); the run must fail otherwise."""

    reason: str


CommitResult = Committed | Behind | LeaseLost | CancelRequested | Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Nothing is written: another writer has the row locked. Send the same commit again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRun:
    """A run to be created, with its first event, its thread and its input message."""

    run_id: str
    tenant_id: str
    agent_id: str
    agent_version: str
    thread_id: str
    creates_thread: bool
    message_id: str
    input: Value
    context: RunContext
    options: RunOptions
    caller: Caller
    trace_id: str
    required_runtime: int
    idempotency_key: str | None
    fingerprint: str
    event: NewEvent
    retry_of: str | None = None
    forked_from: str | None = None
    origin_run_id: str | None = None
    origin_seq: int | None = None
    blobs: tuple[NewBlob, ...] = ()
    branches_from: str | None = None
    """A run: the thread that this one makes begins with what that run's thread said before it."""
    branch_thread_id: str | None = None
    """The thread to make when the options say `fork` and the thread has an active run."""
    queue: str = "default"
    priority: int = 0
    start_at: datetime | None = None
    """None, or past: it can be claimed at once."""
    parent_run_id: str | None = None
    root_run_id: str | None = None
    """None: the run is a root."""
    depth: int = 0
    detached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Inserted:
    """The run that stands under the request: created by it, or found under its key.

    `superseded` names the run that this call cancelled to make room for the new one.
    """

    row: RunRow
    created: bool
    fingerprint: str
    superseded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """A caller's idempotency key for a request that makes an object, unique in tenant and scope.

    `scope` is what the request is made to: `threads`, or the thread that a message goes to.
    """

    scope: str
    key: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A key was known: the object made under it, and the fingerprint of that request."""

    object_id: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWant:
    """What a worker can take. `serves` are the (agent_id, version) pairs it runs, `suspects_max`
    how many of the runs that may have killed their last worker.
    """

    worker_id: str
    limit: int
    lease_ttl_s: float
    serves: tuple[tuple[str, str], ...]
    queues: tuple[str, ...] = ("default",)
    runtime_version: int = 1
    suspects_max: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A run that a worker holds from now on. Its `attempt` event is already in the log.

    `input_position` is the place of the run's input in its thread, `deadline_in_s` what is left
    of its total time.
    """

    row: RunRow
    token: int
    input_position: int
    deadline_in_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseKey:
    """A held lease, as it is renewed."""

    run_id: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What became of one lease: `held` False means it is lost.

    `busy`: the row is locked by somebody else. The lease is held still, and was not prolonged.
    """

    run_id: str
    held: bool
    cancel_epoch: int
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWish:
    """A cancel as it is asked for."""

    action: CancelAction
    by: str
    source: str
    reason: str | None = None
    options: CancelOption = CancelOption.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class LateResult:
    """The result of an execution whose worker lost the run (decision 27)."""

    run_id: str
    tool_call_id: str
    execution: int
    attempt: int
    epoch: int
    status: ToolCallStatus
    output: JsonValue = None
    output_ref: BlobRef | None = None
    external_ref: str | None = None
    step_index: int = 0
    blobs: tuple[NewBlob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued:
    """A run whose lease had expired. `exhausted`: its bound on attempts is reached."""

    run_id: str
    exhausted: bool
    cancel_requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTimer:
    """A timer that is due. `ref` is the interrupt of an expiry or a notice, the child of a report,
    the call of a callback. `due_at` says where a page of timers ends; it makes no other timer.
    """

    run_id: str
    kind: TimerKind
    ref: str | None
    due_at: datetime = field(default=from_micros(0), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """How long the history of ended runs is kept; None: for ever.

    A tenant's own rule goes before the general one.
    """

    state: RunState
    older_than_s: float | None
    tenant_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What one sweep did. `after` is where the next one goes on; None at the end of all runs."""

    runs: int
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptContent:
    """How much content a sweep deleted. `after` is where the next one goes on; None at the end.

    The place is the store's own: only the same store reads it.
    """

    deleted: int
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """Runs of one page that nothing moves. `after` is where the next page begins; None at the end of
    all runs that go on."""

    run_ids: tuple[str, ...]
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRegistration:
    """An agent version a worker serves: its card as JSON, with a digest of it."""

    agent_id: str
    version: str
    card: JsonValue
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRegistration:
    """A tool version a worker offers: its declaration as JSON, with a digest of it."""

    name: str
    version: str
    spec: JsonValue
    digest: str
