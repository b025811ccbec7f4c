"""Runs as they are asked for, kept and shown, and the projections of their row.

`status_of`, `waiting_on` and `next_actions` are pure functions of the row; nothing stores what
they return (R-2.3). Each protocol binding has another such table of its own beside this one.
"""

import math
import re
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue

from perdure.protocol.base import Model, Stored, Time
from perdure.protocol.breakpoints import BREAKPOINTS_MAX, Breakpoint
from perdure.protocol.codec import encode
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.plain import value
from perdure.protocol.policies import (
    MAX_ATTEMPTS_DEFAULT,
    MAX_STEPS_DEFAULT,
    Budget,
    Timeouts,
)
from perdure.protocol.states import (
    TERMINAL,
    CancelAction,
    CancelOption,
    InterruptKind,
    NextAction,
    ParkedOn,
    RunState,
    RunStatus,
    WaitingOn,
)
from perdure.protocol.values import (
    IDEMPOTENCY_KEY_BYTES_MAX,
    METADATA_BYTES_MAX,
    METADATA_KEYS_MAX,
    BlobRef,
    Value,
)

START_AFTER_MAX_S = 31_536_000
"""How far ahead a delayed start may lie: a year."""
QUEUE_PATTERN = r"^[a-z0-9][a-z0-9._-]*$"
QUEUE_DEFAULT = "default"
PRIORITY_MAX = 100
"""The largest priority; the smallest is as far below 0."""


def _bounded_metadata(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if len(value) > METADATA_KEYS_MAX:
        raise ValueError(f"at most {METADATA_KEYS_MAX} keys")
    if any(len(key) > 200 for key in value):
        raise ValueError("a key is longer than 200 characters")
    return value


def _bounded_size(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if len(encode(value)) > METADATA_BYTES_MAX:
        raise ValueError(f"at most {METADATA_BYTES_MAX} bytes of JSON")
    return value


def _bounded_key(value: str | None) -> str | None:
    if value is not None and not 0 < len(value.encode()) <= IDEMPOTENCY_KEY_BYTES_MAX:
        raise ValueError(f"1 to {IDEMPOTENCY_KEY_BYTES_MAX} bytes")
    return value


_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


def _start_time(value: object) -> object:
    """Return seconds as a number and a time in UTC; nothing else is a start."""
    wrong = "an RFC 3339 time with its zone, or seconds"
    if isinstance(value, datetime):
        return value
    if isinstance(value, str):
        if _RFC_3339.fullmatch(value.upper()) is None:
            raise ValueError(wrong)
        try:
            return datetime.fromisoformat(value.upper()).astimezone(UTC)
        except OverflowError:
            raise ValueError("the time is out of range") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(wrong)
    if not (math.isfinite(value) and 0 <= value <= START_AFTER_MAX_S):
        raise ValueError(f"0 to {START_AFTER_MAX_S} seconds")
    return float(value)


def _scope_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Metadata = Annotated[
    dict[str, JsonValue], AfterValidator(_bounded_metadata), AfterValidator(_bounded_size)
]
StartAfter = Annotated[
    Annotated[float, Field(ge=0, le=START_AFTER_MAX_S)] | Time, BeforeValidator(_start_time)
]
QueueName = Annotated[str, Field(pattern=QUEUE_PATTERN, max_length=64)]
IdempotencyKey = Annotated[str | None, AfterValidator(_bounded_key)]


class RunContext(Stored):
    """Who and what a run is for; reaches policy, planner and tools unchanged (R-3.3)."""

    model_config = ConfigDict(frozen=True, extra="allow")

    user_id: str | None = Field(default=None, max_length=200)
    tenant_id: str | None = Field(default=None, max_length=200)
    scope: Annotated[tuple[str, ...], BeforeValidator(_scope_list)] = Field(
        default=(), max_length=100
    )


class RunOptions(Model):
    """How a run is to be carried out (R-3.4)."""

    idempotency_key: IdempotencyKey = None
    max_steps: int = Field(default=MAX_STEPS_DEFAULT, ge=1, le=100_000)
    max_attempts: int = Field(
        default=MAX_ATTEMPTS_DEFAULT,
        ge=1,
        le=100,
        description="how many attempts may fail or be lost since the last committed step; waiting, "
        "approvals and claims do not count",
    )
    timeouts: Timeouts = Timeouts()
    budget: Budget = Budget()
    estimated_cost: float | None = Field(default=None, ge=0)
    risk: str | None = Field(default=None, pattern="^(low|medium|high)$")
    after: StartAfter | None = Field(
        default=None,
        description="the run starts no earlier: an RFC 3339 time, or seconds from now",
    )
    queue: QueueName = Field(
        default=QUEUE_DEFAULT, description="only workers that serve this queue take the run"
    )
    priority: int = Field(
        default=0,
        ge=-PRIORITY_MAX,
        le=PRIORITY_MAX,
        description="of what a worker can take, the larger priority comes first",
    )
    recovery_mode: str = Field(
        default="resume",
        pattern="^(resume|fail)$",
        description="`fail`: an attempt that is lost or fails ends the run, whatever "
        "`max_attempts` says",
    )
    output_schema: dict[str, JsonValue] | None = None
    required_artifacts: tuple[str, ...] = Field(default=(), max_length=50)
    multitask_strategy: str = Field(
        default="enqueue",
        pattern="^(enqueue|reject|interrupt|rollback|fork|optimistic)$",
        description="when the thread has an active run: wait behind it, be refused, cancel it "
        "with this action and wait behind the runs that wait already, start at once on a branch of "
        "the thread that says what the thread said before that run, or start at once beside it and "
        "end with CONFLICT when the thread says more by the time it has its answer",
    )
    cancel_policy: CancelAction = Field(
        default=CancelAction.INTERRUPT, description="the action of a cancel that names none"
    )
    agent_version: str | None = Field(default=None, min_length=1, max_length=50)
    loop_limit: int = Field(
        default=5,
        ge=1,
        le=1000,
        description="so often a tool may be called with the same arguments, in a row or not",
    )
    corrections_max: int = Field(default=3, ge=0, le=100, description="invalid calls in a row")
    breakpoints: tuple[Breakpoint, ...] = Field(
        default=(), max_length=BREAKPOINTS_MAX, description="where the run pauses for debugging"
    )
    stream: bool = Field(
        default=False,
        description="show the text of model replies as it comes, in `delta` events and live frames",
    )
    metadata: Metadata = Field(default_factory=dict[str, JsonValue])
    tags: tuple[Annotated[str, Field(max_length=200)], ...] = Field(default=(), max_length=50)

    @property
    def faults_max(self) -> int:
        """Return how many attempts may end by a fault between two steps (decision 11)."""
        return 1 if self.recovery_mode == "fail" else self.max_attempts


class Caller(Stored):
    """Who asked for the run, as known at its creation (R-3.3)."""

    tenant_id: str
    principal: str
    organisation: str | None = None
    project: str | None = None
    roles: tuple[str, ...] = ()
    policy_version: str = ""
    data_scope: tuple[str, ...] = ()


class Counters(Stored):
    """What a run has used so far, kept on its row."""

    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    waiting_ms: int = 0
    retries: int = 0


@value
class RunFacts:
    """The cold half of a run's row: written once, at creation.

    But for `active_agent`, the agent and version that carry the run on after a handoff.
    A run with an origin begins with the log of `origin_run_id` up to `origin_seq`, by reference.
    """

    run_id: str
    tenant_id: str
    agent_id: str
    agent_version: str
    thread_id: str
    root_run_id: str
    parent_run_id: str | None
    retry_of: str | None
    forked_from: str | None = None
    origin_run_id: str | None = None
    origin_seq: int | None = None
    depth: int = 0
    detached: bool = False
    active_agent: tuple[str, str] | None = None
    input: Value
    context: RunContext
    options: RunOptions
    caller: Caller
    trace_id: str
    created_at: datetime
    required_runtime: int
    schema_version: int

    @property
    def agent_now(self) -> tuple[str, str]:
        """Return the agent and version that carry the run out at present."""
        return self.active_agent or (self.agent_id, self.agent_version)


@value
class RunHot:
    """The hot half of a run's row: what moves. `lease_owner` is None when nobody holds it."""

    state: RunState
    step_index: int
    last_seq: int
    retained_from_seq: int = 1
    attempt: int = 0
    faults: int = 0
    lease_owner: str | None = None
    lease_token: int = 0
    lease_expires_at: datetime | None = None
    cancel_epoch: int = 0
    cancel_action: CancelAction | None = None
    cancel_options: CancelOption = CancelOption.NONE
    parked_on: ParkedOn | None = None
    waiting_kind: InterruptKind | None = None
    waiting_since: datetime | None = None
    wake_at: datetime | None = None
    deadline_at: datetime | None = None
    code: FailureCode | None = None
    open_calls: int = 0
    open_interrupts: int = 0
    open_children: int = 0
    counters: Counters = Counters()
    checkpoint_seq: int | None = None
    terminal_seq: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    updated_at: datetime
    last_commit_id: str | None = None


@value
class RunRow:
    """A run as it is stored."""

    facts: RunFacts
    hot: RunHot


def status_of(hot: RunHot) -> RunStatus:
    """Return the protocol status of a run (R-2.3); never stored."""
    if hot.state is RunState.FAILED:
        return _failed_status(hot)
    if hot.state is RunState.SUCCEEDED:
        return RunStatus.COMPLETED
    if hot.cancel_epoch > 0:
        return RunStatus.CANCEL_REQUESTED
    if hot.state is RunState.WAITING_HUMAN:
        auth = hot.waiting_kind is InterruptKind.AUTH
        return RunStatus.AUTH_REQUIRED if auth else RunStatus.INPUT_REQUIRED
    if hot.state is RunState.PENDING:
        return RunStatus.SUBMITTED if hot.parked_on is not None else RunStatus.QUEUED
    held_or_parked = hot.lease_owner is not None or hot.parked_on is not None
    return RunStatus.RUNNING if held_or_parked else RunStatus.QUEUED


def _failed_status(hot: RunHot) -> RunStatus:
    match hot.code:
        case FailureCode.RUN_TIMEOUT:
            return RunStatus.TIMED_OUT
        case FailureCode.RUN_CANCELLED:
            rollback = hot.cancel_action is CancelAction.ROLLBACK
            return RunStatus.CANCELED if rollback else RunStatus.INTERRUPTED
        case _:
            return RunStatus.FAILED


_PARKED_WAIT: dict[ParkedOn, WaitingOn] = {
    ParkedOn.THREAD: WaitingOn.QUEUE,
    ParkedOn.TIMER: WaitingOn.TIMER,
    ParkedOn.RETRY: WaitingOn.RETRY,
    ParkedOn.CHILD: WaitingOn.CHILD,
    ParkedOn.CALLBACK: WaitingOn.CALLBACK,
    ParkedOn.REPAIR: WaitingOn.REPAIR,
    ParkedOn.CLOSING: WaitingOn.RECOVERY,
}


def waiting_on(hot: RunHot) -> WaitingOn:
    """Return what the run waits for (R-2.7)."""
    if hot.state in TERMINAL:
        return WaitingOn.NOTHING
    if hot.parked_on is ParkedOn.REPAIR:
        return WaitingOn.REPAIR
    if hot.state is RunState.WAITING_HUMAN and hot.parked_on is not ParkedOn.CHILD:
        return WaitingOn.PERSON
    if hot.parked_on is not None:
        return _PARKED_WAIT[hot.parked_on]
    if hot.lease_owner is None:
        return WaitingOn.RECOVERY if hot.faults > 0 else WaitingOn.QUEUE
    return WaitingOn.MODEL if hot.state is RunState.PLANNING else WaitingOn.TOOL


def next_actions(hot: RunHot) -> list[NextAction]:
    """Return what may be done next with a run, before the caller's rights are applied."""
    status = status_of(hot)
    if hot.state in TERMINAL:
        if hot.cancel_action is CancelAction.ROLLBACK or hot.retained_from_seq > 1:
            return []
        undid = CancelOption.COMPENSATE in hot.cancel_options
        retry = [NextAction.RETRY] if hot.state is RunState.FAILED and not undid else []
        return [*retry, NextAction.FORK]
    if hot.parked_on is ParkedOn.REPAIR:
        return [NextAction.REPAIR, *([NextAction.CANCEL] if hot.cancel_epoch == 0 else [])]
    if status is RunStatus.AUTH_REQUIRED:
        return [NextAction.AUTHORISE, NextAction.CANCEL]
    if hot.waiting_kind is InterruptKind.BREAKPOINT and status is RunStatus.INPUT_REQUIRED:
        return [NextAction.CONTINUE, NextAction.CANCEL]
    if hot.open_interrupts > 0 and status is not RunStatus.CANCEL_REQUESTED:
        return [NextAction.ANSWER_INTERRUPT, NextAction.CANCEL]
    if status is RunStatus.CANCEL_REQUESTED:
        return [NextAction.WAIT]
    return [NextAction.WAIT, NextAction.CANCEL]


class RunBranch(Stored):
    """What a run's own thread was branched from for it: the thread, up to a position, and the run
    that it is beside.
    """

    thread_id: str
    position: int
    run_id: str


class Run(Stored):
    """A run as it is shown (R-1.1). `last_seq` makes following from this snapshot exact."""

    run_id: str
    tenant_id: str
    agent_id: str
    agent_version: str
    active_agent_id: str
    active_agent_version: str
    thread_id: str
    root_run_id: str
    parent_run_id: str | None
    depth: int
    detached: bool
    open_children: int
    retry_of: str | None
    forked_from: str | None
    origin_run_id: str | None
    origin_seq: int | None
    supersedes: str | None
    branch: RunBranch | None
    state: RunState
    status: RunStatus
    waiting_on: WaitingOn
    waiting_since: Time | None
    wake_at: Time | None
    step_index: int
    attempt: int
    cancel_epoch: int
    last_seq: int
    retained_from_seq: int
    input: JsonValue
    input_ref: BlobRef | None
    context: RunContext
    options: RunOptions
    caller: Caller
    answer: JsonValue
    answer_ref: BlobRef | None
    error: Failure | None
    usage: Counters
    open_interrupts: list[str]
    next_actions: list[NextAction]
    trace_id: str
    created_at: Time
    started_at: Time | None
    finished_at: Time | None
    updated_at: Time
    deadline_at: Time | None
    schema_version: int


_ANSWERS = {NextAction.ANSWER_INTERRUPT, NextAction.AUTHORISE, NextAction.CONTINUE}


def waits_for_person(run: Run) -> bool:
    """Tell whether only a person lets a run go on, or one of the runs that it waits for."""
    waits = run.waiting_on in {WaitingOn.PERSON, WaitingOn.CHILD}
    return waits and not _ANSWERS.isdisjoint(run.next_actions)
