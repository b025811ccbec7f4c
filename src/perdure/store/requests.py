"""What a store is asked beside commits, and what it answers."""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from pydantic import JsonValue

from perdure.protocol.base import from_micros
from perdure.protocol.log import NewEvent
from perdure.protocol.plain import value
from perdure.protocol.runs import Caller, RunContext, RunOptions, RunRow
from perdure.protocol.states import (
    CancelAction,
    CancelOption,
    RunState,
    ToolCallStatus,
)
from perdure.protocol.values import BlobRef, Value


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


@value
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


@value
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


@value
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


class LateKept(StrEnum):
    """What became of a late result."""

    RECORDED = "recorded"
    KNOWN = "known"
    """The same result of that execution was recorded before."""
    LEFT_OUT = "left_out"
    """`keeping.LATE_PER_EXECUTION_MAX` others of that execution are kept."""


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
