"""Rows to objects and back: ids as 16 bytes, digests as 32, times as microseconds since 1970."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar

from perdure.protocol.base import from_micros, to_micros
from perdure.protocol.codec import decode
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import INTERRUPT, RUN, TOOL_CALL
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
from perdure.store.reader import PlacedRun, RegisteredAgent, RegisteredTool
from perdure.store.reading import FIRST_TIME
from perdure.store.requests import DueTimer, Inserted, LeaseKey, TimerKind
from perdure.store.rules import Kept

Row = Sequence[Any]
_T = TypeVar("_T")
_U = TypeVar("_U")

FACTS_WIDTH: Final = 19
HOT_WIDTH: Final = 35
FINGERPRINT: Final = FACTS_WIDTH + HOT_WIDTH
INPUT_POSITION: Final = FINGERPRINT + 1
_RELATIONS: Final = FINGERPRINT + 3  # behind the bound on attempts


def pack_id(identifier: str) -> bytes:
    """Return the 16 bytes of an id; ValueError when it is none."""
    return bytes.fromhex(identifier[-32:])


def maybe(convert: Callable[[_T], _U], value: _T | None) -> _U | None:
    """Return the converted value, or None for None."""
    return None if value is None else convert(value)


def plain(word: StrEnum | None) -> str | None:
    """Return the bare text of a word: the driver binds subclasses of str by a slower way."""
    return None if word is None else str(word)


def pack_digest(digest: str) -> bytes | str:
    """Return the 32 bytes of a SHA-256; a text of another form stays what it is."""
    if len(digest) == 64:
        try:
            data = bytes.fromhex(digest)
        except ValueError:
            return digest
        if data.hex() == digest:
            return data
    return digest


def unpack_digest(value: bytes | str) -> str:
    """Return the text that `pack_digest` was given."""
    return value if isinstance(value, str) else value.hex()


def micros_left(left: timedelta) -> int:
    """Return whole microseconds of a duration."""
    return left // timedelta(microseconds=1)


def pack_hot(kept: Kept) -> tuple[Any, ...]:
    """Return the columns of a hot row in the order of `load_hot`."""
    hot, used = kept.hot, kept.hot.counters
    return (
        hot.state.value,
        hot.step_index,
        hot.last_seq,
        hot.retained_from_seq,
        hot.attempt,
        hot.faults,
        hot.lease_owner,
        hot.lease_token,
        maybe(to_micros, hot.lease_expires_at),
        hot.cancel_epoch,
        plain(hot.cancel_action),
        plain(hot.parked_on),
        plain(hot.waiting_kind),
        maybe(to_micros, hot.waiting_since),
        maybe(to_micros, hot.wake_at),
        maybe(to_micros, hot.deadline_at),
        plain(hot.code),
        hot.open_calls,
        hot.open_interrupts,
        hot.open_children,
        used.model_calls,
        used.tool_calls,
        used.input_tokens,
        used.output_tokens,
        used.cost,
        used.waiting_ms,
        used.retries,
        hot.checkpoint_seq,
        hot.terminal_seq,
        maybe(to_micros, hot.started_at),
        maybe(to_micros, hot.finished_at),
        to_micros(hot.updated_at),
        maybe(pack_id, hot.last_commit_id),
        maybe(micros_left, kept.deadline_left),
        int(hot.cancel_options),
    )


def read_hot(row: Row) -> RunHot:
    """Return the hot row of columns in the order of `load_hot`."""
    return RunHot(
        state=RunState(row[0]),
        step_index=row[1],
        last_seq=row[2],
        retained_from_seq=row[3],
        attempt=row[4],
        faults=row[5],
        lease_owner=row[6],
        lease_token=row[7],
        lease_expires_at=maybe(from_micros, row[8]),
        cancel_epoch=row[9],
        cancel_action=maybe(CancelAction, row[10]),
        cancel_options=CancelOption(row[34]),
        parked_on=maybe(ParkedOn, row[11]),
        waiting_kind=maybe(InterruptKind, row[12]),
        waiting_since=maybe(from_micros, row[13]),
        wake_at=maybe(from_micros, row[14]),
        deadline_at=maybe(from_micros, row[15]),
        code=maybe(FailureCode, row[16]),
        open_calls=row[17],
        open_interrupts=row[18],
        open_children=row[19],
        counters=_counters(row),
        checkpoint_seq=row[27],
        terminal_seq=row[28],
        started_at=maybe(from_micros, row[29]),
        finished_at=maybe(from_micros, row[30]),
        updated_at=from_micros(row[31]),
        last_commit_id=None if row[32] is None else f"cmt_{row[32].hex()}",
    )


def _counters(row: Row) -> Counters:
    return Counters(
        model_calls=row[20],
        tool_calls=row[21],
        input_tokens=row[22],
        output_tokens=row[23],
        cost=row[24],
        waiting_ms=row[25],
        retries=row[26],
    )


def read_kept(row: Row) -> Kept:
    """Return the hot row with what only stores see."""
    left = None if row[33] is None else timedelta(microseconds=row[33])
    return Kept(hot=read_hot(row), deadline_left=left)


def read_facts(row: Row) -> RunFacts:
    """Return the cold row from a row of `run_rows`."""
    depth, detached, agent, version = row[_RELATIONS : _RELATIONS + 4]
    return RunFacts(
        run_id=f"run_{row[0].hex()}",
        tenant_id=row[1],
        agent_id=row[2],
        agent_version=row[3],
        thread_id=f"thr_{row[4].hex()}",
        root_run_id=f"run_{row[5].hex()}",
        parent_run_id=None if row[6] is None else f"run_{row[6].hex()}",
        retry_of=None if row[7] is None else f"run_{row[7].hex()}",
        depth=depth,
        detached=bool(detached),
        active_agent=None if agent is None else (agent, version),
        forked_from=None if row[8] is None else f"run_{row[8].hex()}",
        origin_run_id=None if row[9] is None else f"run_{row[9].hex()}",
        origin_seq=row[10],
        input=Value.model_validate_json(row[11]),
        context=RunContext.model_validate_json(row[12]),
        options=RunOptions.model_validate_json(row[13]),
        caller=Caller.model_validate_json(row[14]),
        trace_id=row[15],
        created_at=from_micros(row[16]),
        required_runtime=row[17],
        schema_version=row[18],
    )


def read_run(row: Row) -> RunRow:
    """Return a run from a row of `run_rows`."""
    return RunRow(facts=read_facts(row), hot=read_hot(row[FACTS_WIDTH:]))


def read_placed_run(row: Row) -> PlacedRun:
    """Return a run behind the place of its input."""
    return PlacedRun(position=row[0], row=read_run(row[1:]))


def read_event(run_id: str, row: Row) -> RecordedEvent:
    """Return an event; a type number of a later release is named by it."""
    return RecordedEvent(
        run_id=run_id,
        seq=row[0],
        type=TYPE_NAME.get(row[1]) or f"type_{row[1]}",
        step_index=row[2],
        at=from_micros(row[3]),
        attempt=row[4],
        epoch=row[5],
        schema_version=row[6],
        raw=row[7],
    )


def read_attempt(row: Row) -> AttemptRow:
    """Return an attempt."""
    return AttemptRow(
        run_id=f"run_{row[0].hex()}",
        attempt=row[1],
        token=row[2],
        worker_id=row[3],
        started_at=from_micros(row[4]),
        ended_at=maybe(from_micros, row[5]),
        end_reason=maybe(AttemptEnd, row[6]),
        last_commit_id=None if row[7] is None else f"cmt_{row[7].hex()}",
    )


def read_step(run_id: str, row: Row) -> StepRow:
    """Return a step."""
    return StepRow(
        run_id=run_id,
        index=row[0],
        status=StepStatus(row[1]),
        first_seq=row[2],
        last_seq=row[3],
        started_at=from_micros(row[4]),
        ended_at=maybe(from_micros, row[5]),
    )


def pack_call(run: bytes, call: ToolCallRow) -> tuple[Any, ...]:
    """Return the columns of a tool call in the order of `insert_tool_call`."""
    return (
        pack_id(call.tool_call_id),
        run,
        call.step_index,
        call.ordinal,
        call.tool,
        call.version,
        plain(call.side_effect),
        int(call.repeatable),
        int(call.needs_approval),
        str(call.status),
        pack_digest(call.args_digest),
        # mostly equal: kept once
        None if call.effective_digest == call.args_digest else pack_digest(call.effective_digest),
        pack_digest(call.effect_key),
        call.external_ref,
        call.action_seq,
        call.result_seq,
    )


def read_call(row: Row) -> ToolCallRow:
    """Return a tool call."""
    return ToolCallRow(
        tool_call_id=f"tc_{row[0].hex()}",
        run_id=f"run_{row[1].hex()}",
        step_index=row[2],
        ordinal=row[3],
        tool=row[4],
        version=row[5],
        side_effect=maybe(SideEffect, row[6]),
        repeatable=bool(row[7]),
        needs_approval=bool(row[8]),
        status=ToolCallStatus(row[9]),
        args_digest=unpack_digest(row[10]),
        effective_digest=unpack_digest(row[10] if row[11] is None else row[11]),
        effect_key=unpack_digest(row[12]),
        external_ref=row[13],
        action_seq=row[14],
        result_seq=row[15],
    )


def read_execution(run_id: str, row: Row) -> ExecutionRow:
    """Return an execution."""
    return ExecutionRow(
        tool_call_id=f"tc_{row[0].hex()}",
        number=row[1],
        run_id=run_id,
        attempt=row[2],
        args_digest=unpack_digest(row[3]),
        started_at=from_micros(row[4]),
        ended_at=maybe(from_micros, row[5]),
        outcome=maybe(ToolCallStatus, row[6]),
    )


def read_checkpoint(row: Row) -> CheckpointRow:
    """Return a checkpoint."""
    return CheckpointRow(
        run_id=f"run_{row[0].hex()}",
        seq=row[1],
        parent_seq=row[2],
        step_index=row[3],
        attempt=row[4],
        epoch=row[5],
        schema_version=row[6],
        digest=unpack_digest(row[7]),
        created_at=from_micros(row[8]),
        agent_state=decode(row[9]),
    )


def read_interrupt(row: Row) -> InterruptRow:
    """Return an interrupt."""
    return InterruptRow(
        interrupt_id=f"int_{row[0].hex()}",
        run_id=f"run_{row[1].hex()}",
        tenant_id=row[2],
        kind=InterruptKind(row[3]),
        status=InterruptStatus(row[4]),
        key=row[5],
        tool_call_id=None if row[6] is None else f"tc_{row[6].hex()}",
        args_digest=maybe(unpack_digest, row[7]),
        definition_digest=maybe(unpack_digest, row[8]),
        opened_seq=row[9],
        closed_seq=row[10],
        expires_at=maybe(from_micros, row[11]),
        on_expiry=OnExpiry(row[12]),
        answer=row[13],
        answer_digest=maybe(unpack_digest, row[14]),
        answered_by=row[15],
        answered_at=maybe(from_micros, row[16]),
        consumed_by=row[17],
        created_at=from_micros(row[18]),
    )


def read_artifact(row: Row) -> ArtifactRow:
    """Return an artifact."""
    return ArtifactRow(
        artifact_id=f"art_{row[0].hex()}",
        run_id=f"run_{row[1].hex()}",
        tenant_id=row[2],
        thread_id=f"thr_{row[3].hex()}",
        name=row[4],
        version=row[5],
        media_type=row[6],
        digest=unpack_digest(row[7]),
        size=row[8],
        status=ArtifactStatus(row[9]),
        step_index=row[10],
        tool_call_id=None if row[11] is None else f"tc_{row[11].hex()}",
        seq=row[12],
        created_at=from_micros(row[13]),
    )


def read_thread(row: Row) -> ThreadRow:
    """Return a thread."""
    return ThreadRow(
        thread_id=f"thr_{row[0].hex()}",
        tenant_id=row[1],
        title=row[2],
        metadata=_decoded(row[3]),
        participants=_decoded(row[4]),
        capabilities=_decoded(row[5]),
        active_run_id=None if row[6] is None else f"run_{row[6].hex()}",
        last_position=row[7],
        created_at=from_micros(row[8]),
        updated_at=from_micros(row[9]),
        deleted_at=maybe(from_micros, row[10]),
    )


def read_base(row: Row) -> ThreadBase:
    """Return what a thread says of another."""
    return ThreadBase(
        thread_id=f"thr_{row[0].hex()}",
        from_position=row[1],
        base_thread_id=f"thr_{row[2].hex()}",
        base_position=row[3],
        kind=BaseKind(row[4]),
        author=row[5],
        run_id=None if row[6] is None else f"run_{row[6].hex()}",
        created_at=from_micros(row[7]),
    )


def _decoded(data: bytes) -> Any:
    return decode(data)


def read_message(row: Row) -> MessageRow:
    """Return a message."""
    return MessageRow(
        message_id=f"msg_{row[0].hex()}",
        thread_id=f"thr_{row[1].hex()}",
        tenant_id=row[2],
        position=row[3],
        run_id=None if row[4] is None else f"run_{row[4].hex()}",
        seq=row[5],
        role=Role(row[6]),
        author=row[7],
        body=maybe(decode, row[8]),
        created_at=from_micros(row[9]),
    )


def read_late(row: Row) -> LateRow:
    """Return a late result."""
    return LateRow(
        tool_call_id=f"tc_{row[0].hex()}",
        execution=row[1],
        run_id=f"run_{row[2].hex()}",
        attempt=row[3],
        epoch=row[4],
        seq=row[5],
        status=ToolCallStatus(row[6]),
        external_ref=row[7],
        recorded_at=from_micros(row[8]),
    )


def read_timer(row: Row) -> DueTimer:
    """Return a timer."""
    kind = TimerKind(row[1])
    prefix = {TimerKind.CHILD: RUN, TimerKind.CALLBACK: TOOL_CALL}.get(kind, INTERRUPT)
    return DueTimer(
        run_id=f"run_{row[0].hex()}",
        kind=kind,
        ref=f"{prefix}_{row[2].hex()}" if row[2] else None,
        due_at=from_micros(max(row[3], to_micros(FIRST_TIME))),
    )


def read_keyed_run(row: Row) -> Inserted:
    """Return the run that was found under a key."""
    return Inserted(row=read_run(row), created=False, fingerprint=row[FINGERPRINT])


def read_lease(row: Row) -> LeaseKey:
    """Return a held lease."""
    return LeaseKey(run_id=f"run_{row[0].hex()}", token=row[1])


def read_agent(row: Row) -> RegisteredAgent:
    """Return a registered agent version."""
    return RegisteredAgent(
        agent_id=row[0], version=row[1], card=decode(row[2]), registered_at=from_micros(row[3])
    )


def read_tool(row: Row) -> RegisteredTool:
    """Return a registered tool version."""
    return RegisteredTool(
        name=row[0], version=row[1], spec=decode(row[2]), registered_at=from_micros(row[3])
    )
