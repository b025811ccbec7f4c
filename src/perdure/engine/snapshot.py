"""What the log of a run comes to: the state that the fold of its events makes, and its digest."""

import hashlib
from dataclasses import dataclass, field

from pydantic import JsonValue

from perdure.protocol.breakpoints import Breakpoint
from perdure.protocol.events import (
    ChildUse,
    PlanItem,
)
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.fields import Slot
from perdure.protocol.folding import FoldedField
from perdure.protocol.plain import no_entries
from perdure.protocol.states import (
    CancelAction,
    CancelOption,
    InterruptKind,
    OnExpiry,
    RunState,
    SideEffect,
    ToolCallStatus,
)
from perdure.protocol.values import BlobRef

STATE_UPDATE_EVENT_NAME = "perdure.state_update"
"""Name of the custom event that says who replaced the agent's own state by hand, and why."""

STATE_EVENT_NAME = "perdure.state"
"""Name of the custom event that carries a new value of the agent's own state."""


PENDING_EVENT_NAME = "perdure.pending"
"""Name of the custom event that says of a call that its result comes by callback, and until when."""


APPROVAL_EVENT_NAME = "perdure.approval"
"""Name of the custom event that says what happened to an open approval."""


CORRECTABLE = frozenset(
    {
        FailureCode.TOOL_ARGUMENT_INVALID,
        FailureCode.TOOL_NOT_FOUND,
        FailureCode.OUTPUT_INVALID,
    }
)


FAILED_CALLS = frozenset({ToolCallStatus.FAILED, ToolCallStatus.TIMED_OUT, ToolCallStatus.DENIED})
"""Outcomes of calls that a redrive makes anew."""


@dataclass(slots=True, kw_only=True)
class OpenCall:
    """A tool call without a result. `args` are the effective ones (edited or as requested)."""

    tool_call_id: str
    planner_call_id: str | None
    step_index: int
    ordinal: int
    tool: str
    version: str | None
    args: JsonValue
    args_ref: BlobRef | None
    args_digest: str
    effect_key: str
    side_effect: SideEffect | None
    repeatable: bool
    status: ToolCallStatus
    approval_id: str | None = None
    may_have_happened: bool = False
    approved_definition: str | None = None
    failed_executions: int = 0
    outcome_retry_id: str | None = None
    position: str | None = None
    by_callback: bool = False
    """It waits for its callback. (A call whose child runs is `pending` too.)"""
    overdue: bool = False
    """Its callback did not come in time: what became of it is to be found out (R-5.7)."""
    external_ref: str | None = None
    wait_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class OpenInterrupt:
    """A question without an answer."""

    interrupt_id: str
    kind: InterruptKind
    tool_call_id: str | None
    key: str | None
    on_expiry: OnExpiry
    answer_schema: dict[str, JsonValue] | None = None
    approvers: tuple[str, ...] = ()
    position: str | None = None
    notifies: bool = False
    escalate_after_s: float | None = None
    """None also once it was escalated."""
    escalate_to: tuple[str, ...] = ()
    told: bool = False
    """Those who may decide now were told."""
    not_told: int = 0
    """How often in a row that has failed."""


@dataclass(slots=True, kw_only=True)
class OpenChild:
    """A child that is not detached and whose result is not in the log. `use` is kept for it."""

    child_run_id: str
    awaited: bool
    tool_call_id: str | None
    use: ChildUse


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """An update of the agent's own state by hand: where it stands, and what was wanted."""

    seq: int
    fingerprint: str


@dataclass(slots=True, kw_only=True)
class RunSnapshot:
    """What a run's log says of the run. Changed in place by `fold`, one event at a time.

    `step_calls` are all calls of the open step, each with where it stands. `inherited` are calls
    that a run with an origin has to make anew before its planner is asked; `first_step` is the
    first step of its own.
    """

    state: RunState = RunState.PENDING
    code: FailureCode | None = None
    step_index: int = 0
    first_step: int = 0
    step_open: bool = False
    step_first_seq: int | None = None
    last_seq: int = 0
    attempt: int = 0
    cancel_epoch: int = 0
    cancelled_by: str | None = None
    cancel_reason: str | None = None
    cancel_action: CancelAction | None = None
    cancel_options: CancelOption = CancelOption.NONE
    open_calls: dict[str, OpenCall] = field(default_factory=no_entries)
    open_interrupts: dict[str, OpenInterrupt] = field(default_factory=no_entries)
    step_calls: dict[str, OpenCall] = field(default_factory=no_entries)
    answered_in_step: bool = False
    inherited: dict[str, OpenCall] = field(default_factory=no_entries)
    open_children: dict[str, OpenChild] = field(default_factory=no_entries)
    children_use: ChildUse | None = None
    detached_children: int = 0
    """How many detached children the run has started; those of an origin do not count."""
    writes: dict[str, JsonValue] = field(default_factory=no_entries)
    """Writes of declared state fields, by place."""
    folded: dict[Slot, FoldedField] = field(default_factory=no_entries, compare=False, repr=False)
    """What `writes` come to, over what was read: kept up as they come, no part of the digest."""
    fields_read: dict[Slot, JsonValue] = field(default_factory=no_entries)
    """What the run sees of fields that outlive it, as their `perdure.field_read` says it."""
    knows_settled: bool = False
    """It was recorded which of the shared writes their own run has kept."""
    settled: frozenset[str] = frozenset()
    """Places of shared writes that the run of theirs has kept: this one does not keep them."""
    participants: dict[str, str] = field(default_factory=no_entries)
    """The thread of each participant, by name."""
    agent: tuple[str, str] | None = None
    ending: Failure | None = None
    finished_calls: int = 0
    history: str = ""
    plan: tuple[PlanItem, ...] = ()
    plan_revision: int = 0
    model_calls: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    cost: float = 0.0
    retries: int = 0
    model_failures: int = 0
    corrections: int = 0
    invalid_in_step: bool = False
    valid_in_step: bool = False
    repeats: dict[str, int] = field(default_factory=no_entries)
    rejected: str | None = None
    rejected_by: str | None = None
    rejected_reason: str | None = None
    artifacts: dict[str, int] = field(default_factory=no_entries)
    agent_state: JsonValue = None
    agent_state_digest: str = ""
    state_updates: dict[str, StateUpdate] = field(default_factory=no_entries)
    """Updates of the agent's own state by hand that had an idempotency key, by key."""
    history_position: int | None = None
    breakpoints: tuple[Breakpoint, ...] | None = None
    passed: set[str] = field(default_factory=set[str])
    single_step: bool = False


def snapshot_digest(snapshot: RunSnapshot) -> str:
    """Return the SHA-256 that a checkpoint at this place of the log carries."""
    head = (
        f"{snapshot.last_seq}\x1f{snapshot.state}\x1f{snapshot.code}\x1f{snapshot.step_index}"
        f"\x1f{snapshot.step_open}\x1f{snapshot.attempt}\x1f{snapshot.cancel_epoch}"
        f"\x1f{snapshot.finished_calls}\x1f{snapshot.history}\x1f{snapshot.plan_revision}"
        f"\x1f{snapshot.model_calls}\x1f{snapshot.tool_calls}\x1f{snapshot.input_tokens}"
        f"\x1f{snapshot.output_tokens}\x1f{snapshot.cost!r}\x1f{snapshot.retries}"
        f"\x1f{snapshot.agent_state_digest}"
    )
    parts = _open_parts(snapshot)
    if parts:
        head = "\x1f".join((head, *map(str, parts)))
    return hashlib.sha256(head.encode()).hexdigest()


def _open_parts(snapshot: RunSnapshot) -> list[object]:
    """Return what a digest says of the plan, of what is open, and of the agent and end of a run."""
    parts: list[object] = []
    for item in snapshot.plan:
        parts += ("plan", item.status, item.text)
    for call in snapshot.open_calls.values():
        parts += ("call", call.tool_call_id, call.status, call.args_digest, call.effect_key)
    for question in snapshot.open_interrupts.values():
        parts += ("interrupt", question.interrupt_id, question.kind)
    for name, version in snapshot.artifacts.items():
        parts += ("artifact", name, version)
    for call in snapshot.inherited.values():
        parts += ("inherited", call.tool_call_id, call.args_digest, call.effect_key)
    for child in snapshot.open_children.values():
        parts += ("child", child.child_run_id, child.awaited, child.use.model_dump_json())
    if snapshot.children_use is not None:
        parts += ("children_use", snapshot.children_use.model_dump_json())
    if snapshot.agent is not None:
        parts += ("agent", *snapshot.agent)
    if snapshot.ending is not None:
        parts += ("ending", snapshot.ending.code)
    return parts


def is_side_effect(effect: SideEffect | None) -> bool:
    """Tell whether a tool of this class leaves something in the world."""
    return effect is not None and effect is not SideEffect.READ


def chain(snapshot: RunSnapshot, *parts: str | None) -> None:
    """Enter what no field keeps any more into the running hash of the history."""
    text = "\x1f".join([snapshot.history, *[part or "" for part in parts]])
    snapshot.history = hashlib.sha256(text.encode()).hexdigest()
