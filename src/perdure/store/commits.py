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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from perdure.protocol.failures import FailureCode
from perdure.protocol.log import NewEvent
from perdure.protocol.messages import Role
from perdure.protocol.plain import value
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import Counters
from perdure.protocol.states import (
    ArtifactStatus,
    AttemptEnd,
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    ParkedOn,
    RunState,
    StepStatus,
    ToolCallStatus,
)
from perdure.store.requests import NewBlob, NewRun


@dataclass(slots=True, kw_only=True)
class Guard:
    """What must be true of the run's row for a commit to be written.

    A holder names its `token`. A writer without the lease leaves it None: then the row must have
    no holder, or with `any_holder` it must have one, whoever it is: an answer while siblings run.
    The holder learns of it as `Behind`. Once the run was handed back the writer is `Behind` instead,
    for what it says of waking the run is wrong then. The epoch, state and last seq must be as last
    seen.
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
class NewStateValue:
    """What a field that outlives the run holds from the event at `seq` on.

    `scope_id` is the run's thread, or an agent. `expected` is the version that its row must have
    (0: there is none), `version` the new one.
    """

    scope: Literal["thread", "agent"]
    scope_id: str
    name: str
    rule: str
    expected: int
    version: int
    value: JsonValue
    seq: int


@dataclass(slots=True, kw_only=True)
class Commit:
    """One atomic advance of a run. Nobody changes it, or a list in it, once it is built."""

    run_id: str
    commit_id: str
    guard: Guard
    hot: HotUpdate
    events: Sequence[NewEvent] = ()
    steps: Sequence[StepChange] = ()
    new_calls: Sequence[ToolCallRow] = ()
    call_updates: Sequence[CallUpdate] = ()
    new_executions: Sequence[NewExecution] = ()
    execution_ends: Sequence[ExecutionEnd] = ()
    checkpoint: NewCheckpoint | None = None
    new_interrupts: Sequence[NewInterrupt] = ()
    interrupt_closes: Sequence[InterruptClose] = ()
    messages: Sequence[NewMessage] = ()
    artifacts: Sequence[NewArtifact] = ()
    blobs: Sequence[NewBlob] = ()
    attempt_end: AttemptEnd | None = field(default=None)
    """Set: the lease is given up in this commit and the attempt ends so (holders only)."""
    ready_in_s: float | None = None
    """Set: the run may be claimed after this many seconds. None: no entry in `ready`."""
    close_in_s: float | None = None
    """Set: a closing timer is left, for a closing that another commit is to finish."""
    new_children: Sequence["NewRun"] = ()
    """Child runs, created with this commit or not at all."""
    reports_to: str | None = None
    """Set with a terminal state: this parent is to be told; a child's report is left for it."""
    reported: Sequence[str] = ()
    """Children whose reports this commit writes into the run's log; these reports go."""
    handed_to: tuple[str, str] | None = None
    """Set: from now on this agent and version carry the run out."""
    new_callbacks: Sequence[NewCallback] = ()
    """Calls that wait for their callback from here on; a timer is set for each, or moved."""
    callbacks_over: Sequence[str] = ()
    """Calls that no longer wait for one: their timers go."""
    unmoved_since: int | None = None
    """Set: the commit is Behind when the thread says something of others behind this position."""
    notices: Sequence[NoticeDue] = ()
    """Approvals whose notice timers are set, moved or taken away. Closing one takes it away too."""
    discards: frozenset[str] | None = None
    """Set: the run's artifacts become `discarded`, those of this commit too, and the run no longer
    uses this content (digests). Adopted ones stay."""
    state_values: tuple[NewStateValue, ...] = ()
    """Values of fields that outlive the run. The commit is Behind when a row has another version."""


@value
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
class SweptContent:
    """How much content a sweep deleted. `after` is where the next one goes on; None at the end.

    The place is the store's own: only the same store reads it.
    """

    deleted: int
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmoved:
    """Runs of one page that nothing moves, each with its last seq. `after` is where the next page
    begins; None at the end of all runs that go on."""

    seqs: Mapping[str, int]
    after: str | None
