"""Rows as they come from the driver, turned into the protocol's records.

The driver answers enumerations as text and JSON as our own bytes; each function here names the
columns it needs, and a missing one is a KeyError in the tests.
"""

from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import ParamSpec, TypeVar

from perdure.protocol.codec import decode
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import (
    ARTIFACT,
    COMMIT,
    INTERRUPT,
    MESSAGE,
    RUN,
    THREAD,
    TOOL_CALL,
)
from perdure.protocol.log import TYPE_NAME, RecordedEvent
from perdure.protocol.messages import Role
from perdure.protocol.records import (
    ArtifactRow,
    AttemptRow,
    BaseKind,
    CheckpointRow,
    ExecutionRow,
    InterruptRow,
    LateRow,
    MessageRow,
    StepRow,
    ThreadBase,
    ThreadRow,
    ToolCallRow,
)
from perdure.protocol.runs import (
    Caller,
    Counters,
    RunContext,
    RunFacts,
    RunHot,
    RunOptions,
    RunRow,
)
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
    SideEffect,
    StepStatus,
    ToolCallStatus,
)
from perdure.protocol.values import Value
from perdure.store.postgres.driver import Row
from perdure.store.postgres.wire import (
    data_in,
    digest_in,
    digest_in_or_none,
    id_in,
    id_in_or_none,
    text_in,
    time_in,
)
from perdure.store.reader import RegisteredAgent, RegisteredTool
from perdure.store.reading import BROKEN, FIRST_TIME, unreadable
from perdure.store.requests import DueTimer, Inserted, TimerKind

_NO_COUNTERS = Counters()
_Given = ParamSpec("_Given")
_T = TypeVar("_T")


def readable(convert: Callable[_Given, _T]) -> Callable[_Given, _T]:
    """Make a conversion raise Unreadable for a damaged row."""

    @wraps(convert)
    def converted(*args: _Given.args, **kwargs: _Given.kwargs) -> _T:
        try:
            return convert(*args, **kwargs)
        except BROKEN as error:
            raise unreadable(error) from error

    return converted


@readable
def facts_of(row: Row) -> RunFacts:
    """Return the cold half of a run."""
    return RunFacts(
        run_id=id_in(RUN, row["run_id"]),
        tenant_id=row["tenant_id"],
        agent_id=row["agent_id"],
        agent_version=row["agent_version"],
        thread_id=id_in(THREAD, row["thread_id"]),
        root_run_id=id_in(RUN, row["root_run_id"]),
        parent_run_id=id_in_or_none(RUN, row["parent_run_id"]),
        retry_of=id_in_or_none(RUN, row["retry_of"]),
        forked_from=id_in_or_none(RUN, row["forked_from"]),
        origin_run_id=id_in_or_none(RUN, row["origin_run_id"]),
        origin_seq=row["origin_seq"],
        depth=row["depth"],
        detached=row["detached"],
        active_agent=_active_agent(row),
        input=Value.model_validate_json(row["input"]),
        context=RunContext.model_validate_json(row["context"]),
        options=RunOptions.model_validate_json(row["options"]),
        caller=Caller.model_validate_json(row["caller"]),
        trace_id=row["trace_id"],
        created_at=time_in(row["created_at"]),
        required_runtime=row["required_runtime"],
        schema_version=row["schema_version"],
    )


def _active_agent(row: Row) -> tuple[str, str] | None:
    agent: str | None = row["active_agent_id"]
    return None if agent is None else (agent, row["active_agent_version"])


def counters_of(stored: bytes) -> Counters:
    """Return a run's counters."""
    return _NO_COUNTERS if stored == b"{}" else Counters.model_validate_json(stored)


@readable
def hot_of(row: Row) -> RunHot:
    """Return the hot half of a run."""
    return RunHot(
        state=RunState(row["state"]),
        step_index=row["step_index"],
        last_seq=row["last_seq"],
        retained_from_seq=row["retained_from_seq"],
        attempt=row["attempt"],
        faults=row["faults"],
        lease_owner=row["lease_owner"],
        lease_token=row["lease_token"],
        lease_expires_at=time_in(row["lease_expires_at"]),
        cancel_epoch=row["cancel_epoch"],
        cancel_action=None if row["cancel_action"] is None else CancelAction(row["cancel_action"]),
        cancel_options=CancelOption(row["cancel_options"]),
        parked_on=None if row["parked_on"] is None else ParkedOn(row["parked_on"]),
        waiting_kind=None if row["waiting_kind"] is None else InterruptKind(row["waiting_kind"]),
        waiting_since=time_in(row["waiting_since"]),
        wake_at=time_in(row["wake_at"]),
        deadline_at=time_in(row["deadline_at"]),
        code=None if row["code"] is None else FailureCode(row["code"]),
        open_calls=row["open_calls"],
        open_interrupts=row["open_interrupts"],
        open_children=row["open_children"],
        counters=counters_of(row["counters"]),
        checkpoint_seq=row["checkpoint_seq"],
        terminal_seq=row["terminal_seq"],
        started_at=time_in(row["started_at"]),
        finished_at=time_in(row["finished_at"]),
        updated_at=time_in(row["updated_at"]),
        last_commit_id=id_in_or_none(COMMIT, row["last_commit_id"]),
    )


@readable
def run_of(row: Row) -> RunRow:
    """Return a whole run."""
    return RunRow(facts=facts_of(row), hot=hot_of(row))


@readable
def event_of(run_id: str, row: Row) -> RecordedEvent:
    """Return an event; a type number of a later release keeps a name of its own."""
    number: int = row["type"]
    return RecordedEvent(
        run_id=run_id,
        seq=row["seq"],
        type=TYPE_NAME.get(number, f"type_{number}"),
        step_index=row["step_index"],
        at=time_in(row["at"]),
        attempt=row["attempt"],
        epoch=row["epoch"],
        raw=data_in(row["data"]),
        schema_version=row["schema_version"],
    )


@readable
def attempt_of(row: Row) -> AttemptRow:
    """Return an attempt."""
    return AttemptRow(
        run_id=id_in(RUN, row["run_id"]),
        attempt=row["attempt"],
        token=row["token"],
        worker_id=row["worker_id"],
        started_at=time_in(row["started_at"]),
        ended_at=time_in(row["ended_at"]),
        end_reason=None if row["end_reason"] is None else AttemptEnd(row["end_reason"]),
        last_commit_id=id_in_or_none(COMMIT, row["last_commit_id"]),
    )


@readable
def step_of(run_id: str, row: Row) -> StepRow:
    """Return a step."""
    return StepRow(
        run_id=run_id,
        index=row["step_index"],
        status=StepStatus(row["status"]),
        first_seq=row["first_seq"],
        last_seq=row["last_seq"],
        started_at=time_in(row["started_at"]),
        ended_at=time_in(row["ended_at"]),
    )


@readable
def call_of(row: Row) -> ToolCallRow:
    """Return a tool call."""
    args_digest = digest_in(row["args_digest"])
    return ToolCallRow(
        tool_call_id=id_in(TOOL_CALL, row["tool_call_id"]),
        run_id=id_in(RUN, row["run_id"]),
        step_index=row["step_index"],
        ordinal=row["ordinal"],
        tool=text_in(row["tool"]) or "",
        version=row["version"],
        side_effect=None if row["side_effect"] is None else SideEffect(row["side_effect"]),
        repeatable=row["repeatable"],
        needs_approval=row["needs_approval"],
        status=ToolCallStatus(row["status"]),
        args_digest=args_digest,
        effective_digest=digest_in_or_none(row["effective_digest"]) or args_digest,
        effect_key=row["effect_key"],
        external_ref=text_in(row["external_ref"]),
        action_seq=row["action_seq"],
        result_seq=row["result_seq"],
    )


@readable
def execution_of(run_id: str, row: Row) -> ExecutionRow:
    """Return an execution."""
    return ExecutionRow(
        tool_call_id=id_in(TOOL_CALL, row["tool_call_id"]),
        number=row["number"],
        run_id=run_id,
        attempt=row["attempt"],
        args_digest=digest_in(row["args_digest"]),
        started_at=time_in(row["started_at"]),
        ended_at=time_in(row["ended_at"]),
        outcome=None if row["outcome"] is None else ToolCallStatus(row["outcome"]),
    )


@readable
def checkpoint_of(row: Row) -> CheckpointRow:
    """Return a checkpoint."""
    return CheckpointRow(
        run_id=id_in(RUN, row["run_id"]),
        seq=row["seq"],
        parent_seq=row["parent_seq"],
        step_index=row["step_index"],
        attempt=row["attempt"],
        epoch=row["epoch"],
        schema_version=row["schema_version"],
        agent_state=decode(row["agent_state"]),
        digest=digest_in(row["digest"]),
        created_at=time_in(row["created_at"]),
    )


@readable
def interrupt_of(row: Row) -> InterruptRow:
    """Return an interrupt."""
    return InterruptRow(
        interrupt_id=id_in(INTERRUPT, row["interrupt_id"]),
        run_id=id_in(RUN, row["run_id"]),
        tenant_id=row["tenant_id"],
        kind=InterruptKind(row["kind"]),
        status=InterruptStatus(row["status"]),
        key=text_in(row["key"]),
        tool_call_id=id_in_or_none(TOOL_CALL, row["tool_call_id"]),
        args_digest=digest_in_or_none(row["args_digest"]),
        definition_digest=digest_in_or_none(row["definition_digest"]),
        opened_seq=row["opened_seq"],
        closed_seq=row["closed_seq"],
        expires_at=time_in(row["expires_at"]),
        on_expiry=OnExpiry(row["on_expiry"]),
        answer=row["answer"],
        answer_digest=digest_in_or_none(row["answer_digest"]),
        answered_by=text_in(row["answered_by"]),
        answered_at=time_in(row["answered_at"]),
        consumed_by=row["consumed_by"],
        created_at=time_in(row["created_at"]),
    )


@readable
def artifact_of(row: Row) -> ArtifactRow:
    """Return an artifact."""
    return ArtifactRow(
        artifact_id=id_in(ARTIFACT, row["artifact_id"]),
        run_id=id_in(RUN, row["run_id"]),
        tenant_id=row["tenant_id"],
        thread_id=id_in(THREAD, row["thread_id"]),
        name=text_in(row["name"]) or "",
        version=row["version"],
        media_type=text_in(row["media_type"]) or "",
        digest=digest_in(row["digest"]),
        size=row["size"],
        status=ArtifactStatus(row["status"]),
        step_index=row["step_index"],
        tool_call_id=id_in_or_none(TOOL_CALL, row["tool_call_id"]),
        seq=row["seq"],
        created_at=time_in(row["created_at"]),
    )


@readable
def thread_of(row: Row) -> ThreadRow:
    """Return a thread."""
    metadata, participants = decode(row["metadata"]), decode(row["participants"])
    capabilities = decode(row["capabilities"])
    return ThreadRow(
        thread_id=id_in(THREAD, row["thread_id"]),
        tenant_id=row["tenant_id"],
        title=text_in(row["title"]) or "",
        metadata=metadata if isinstance(metadata, dict) else {},
        participants=participants if isinstance(participants, list) else [],
        capabilities=[str(item) for item in capabilities] if isinstance(capabilities, list) else [],
        active_run_id=id_in_or_none(RUN, row["active_run_id"]),
        last_position=row["last_position"],
        created_at=time_in(row["created_at"]),
        updated_at=time_in(row["updated_at"]),
        deleted_at=time_in(row["deleted_at"]),
    )


@readable
def base_of(row: Row) -> ThreadBase:
    """Return what a thread says of another."""
    return ThreadBase(
        thread_id=id_in(THREAD, row["thread_id"]),
        from_position=row["from_position"],
        base_thread_id=id_in(THREAD, row["base_thread_id"]),
        base_position=row["base_position"],
        kind=BaseKind(row["kind"]),
        author=text_in(row["author"]) or "",
        run_id=id_in_or_none(RUN, row["run_id"]),
        created_at=time_in(row["created_at"]),
    )


@readable
def message_of(row: Row) -> MessageRow:
    """Return a message."""
    return MessageRow(
        message_id=id_in(MESSAGE, row["message_id"]),
        thread_id=id_in(THREAD, row["thread_id"]),
        tenant_id=row["tenant_id"],
        position=row["position"],
        run_id=id_in_or_none(RUN, row["run_id"]),
        seq=row["seq"],
        role=Role(row["role"]),
        author=text_in(row["author"]) or "",
        body=None if row["body"] is None else decode(row["body"]),
        created_at=time_in(row["created_at"]),
    )


@readable
def late_of(row: Row) -> LateRow:
    """Return a late result."""
    return LateRow(
        tool_call_id=id_in(TOOL_CALL, row["tool_call_id"]),
        execution=row["execution"],
        run_id=id_in(RUN, row["run_id"]),
        attempt=row["attempt"],
        epoch=row["epoch"],
        seq=row["seq"],
        status=ToolCallStatus(row["status"]),
        external_ref=text_in(row["external_ref"]),
        recorded_at=time_in(row["recorded_at"]),
    )


_REFS = {
    TimerKind.EXPIRY: INTERRUPT,
    TimerKind.NOTICE: INTERRUPT,
    TimerKind.CHILD: RUN,
    TimerKind.CALLBACK: TOOL_CALL,
}


@readable
def timer_of(row: Row) -> DueTimer:
    """Return a timer; only an expiry has an interrupt, a report a child, a callback a call."""
    kind = TimerKind(row["kind"])
    prefix = _REFS.get(kind)
    ref = None if prefix is None else id_in(prefix, row["ref"])
    run_id = id_in(RUN, row["run_id"])
    return DueTimer(run_id=run_id, kind=kind, ref=ref, due_at=_due_in(row["due_at"]))


def _due_in(told: datetime | int) -> datetime:
    return FIRST_TIME if isinstance(told, int) and told < 0 else time_in(told)


@readable
def keyed_run_of(row: Row) -> Inserted:
    """Return the run that was found under a key."""
    fingerprint = text_in(row["fingerprint"]) or ""
    return Inserted(row=run_of(row), created=False, fingerprint=fingerprint)


@readable
def agent_of(row: Row) -> RegisteredAgent:
    """Return a registered agent."""
    return RegisteredAgent(
        agent_id=row["agent_id"],
        version=row["version"],
        card=decode(row["card"]),
        registered_at=time_in(row["registered_at"]),
    )


@readable
def tool_of(row: Row) -> RegisteredTool:
    """Return a registered tool."""
    return RegisteredTool(
        name=row["name"],
        version=row["version"],
        spec=decode(row["spec"]),
        registered_at=time_in(row["registered_at"]),
    )
