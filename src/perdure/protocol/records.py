"""The objects beside a run as they are kept and shown: attempts, steps, calls, interrupts, …

Rows are plain frozen dataclasses, the same for every store. Payloads stand in the event named by
a `…_seq`; a view for clients is made in `perdure.service`.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import JsonValue

from perdure.protocol.ids import checkpoint_id
from perdure.protocol.messages import Role
from perdure.protocol.states import (
    ArtifactStatus,
    AttemptEnd,
    InterruptKind,
    InterruptStatus,
    OnExpiry,
    SideEffect,
    StepStatus,
    ToolCallStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One worker's hold on a run."""

    run_id: str
    attempt: int
    token: int
    worker_id: str
    started_at: datetime
    ended_at: datetime | None = None
    end_reason: AttemptEnd | None = None
    last_commit_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One round of the planner's decision."""

    run_id: str
    index: int
    status: StepStatus
    first_seq: int
    last_seq: int | None = None
    started_at: datetime
    ended_at: datetime | None = None


@dataclass(slots=True, kw_only=True)
class ToolCallRow:
    """One side effect. Arguments stand in the event at `action_seq`, the result at `result_seq`."""

    tool_call_id: str
    run_id: str
    step_index: int
    ordinal: int
    tool: str
    version: str | None
    side_effect: SideEffect | None
    repeatable: bool
    needs_approval: bool
    status: ToolCallStatus
    args_digest: str
    effective_digest: str
    effect_key: str
    external_ref: str | None = None
    action_seq: int
    result_seq: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionRow:
    """One time a tool call was handed to its tool. `outcome` is None while it runs or is lost."""

    tool_call_id: str
    number: int
    run_id: str
    attempt: int
    args_digest: str
    started_at: datetime
    ended_at: datetime | None = None
    outcome: ToolCallStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """A position in the log from which a run can be rebuilt, with a digest to prove it."""

    run_id: str
    seq: int
    parent_seq: int | None
    step_index: int
    attempt: int
    epoch: int
    schema_version: int
    agent_state: JsonValue
    digest: str
    created_at: datetime

    @property
    def checkpoint_id(self) -> str:
        """Return the id derived from run and seq."""
        return checkpoint_id(self.run_id, self.seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptRow:
    """A question to a person. What was asked stands at `opened_seq`, the answer at `closed_seq`."""

    interrupt_id: str
    run_id: str
    tenant_id: str
    kind: InterruptKind
    status: InterruptStatus
    key: str | None = None
    tool_call_id: str | None = None
    args_digest: str | None = None
    definition_digest: str | None = None
    opened_seq: int
    closed_seq: int | None = None
    expires_at: datetime | None = None
    on_expiry: OnExpiry = OnExpiry.FAIL
    answer: str | None = None
    answer_digest: str | None = None
    answered_by: str | None = None
    answered_at: datetime | None = None
    consumed_by: int | None = None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRow:
    """A formal product of a run; the content is a blob."""

    artifact_id: str
    run_id: str
    tenant_id: str
    thread_id: str
    name: str
    version: int
    media_type: str
    digest: str
    size: int
    status: ArtifactStatus
    step_index: int
    tool_call_id: str | None
    seq: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRow:
    """A conversation: a context boundary, never a lock."""

    thread_id: str
    tenant_id: str
    title: str
    metadata: dict[str, JsonValue]
    participants: list[JsonValue]
    capabilities: list[str]
    active_run_id: str | None
    last_position: int
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = None
    """Set: only this tombstone is left, with what branches of the thread still say."""


class BaseKind(StrEnum):
    """How a thread came to say what another one says: it was forked, or it adopted a branch."""

    FORK = "fork"
    ADOPT = "adopt"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadBase:
    """What another thread says up to a position, which a thread says before its own messages.

    It holds for a reader of positions from `from_position` on: own messages behind it follow what
    `base_thread_id` says up to `base_position`, and no position stands twice in that (R-7.5).
    `run_id` is the run whose place in the thread was branched from.
    """

    thread_id: str
    from_position: int
    base_thread_id: str
    base_position: int
    kind: BaseKind
    author: str
    run_id: str | None = None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRow:
    """A message of a thread. Its content is `body`, else the run's input (`seq` None) or event."""

    message_id: str
    thread_id: str
    tenant_id: str
    position: int
    run_id: str | None
    seq: int | None
    role: Role
    author: str
    body: JsonValue
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LateRow:
    """A result that came after its worker had lost the run."""

    tool_call_id: str
    execution: int
    run_id: str
    attempt: int
    epoch: int
    seq: int
    status: ToolCallStatus
    external_ref: str | None
    recorded_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StateValueRow:
    """What a declared field that outlives its runs holds, by whose commit.

    `position` is how far the thread had come then (0 for an agent's field); the value was merged in
    event `seq` of the run. An `empty` one was taken back by an adoption: nothing is written, but its
    versions go on.
    """

    tenant_id: str
    scope: Literal["thread", "agent"]
    scope_id: str
    name: str
    rule: str
    version: int
    value: JsonValue
    position: int
    run_id: str
    seq: int
    updated_at: datetime
    empty: bool = False
