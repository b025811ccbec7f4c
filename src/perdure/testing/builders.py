"""Short ways to the values that stores take: runs, claims, commits and their rows.

Ids are increasing and unique in the process. What a test does not name has a plain default.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import count
from uuid import UUID

from pydantic import JsonValue

from perdure.protocol import ids
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.codec import digest
from perdure.protocol.events import (
    ActionEvent,
    CustomEvent,
    InterruptEvent,
    ResultEvent,
    ResumeEvent,
    StateEvent,
)
from perdure.protocol.log import EventData, NewEvent
from perdure.protocol.messages import Role
from perdure.protocol.policies import Timeouts
from perdure.protocol.records import MessageRow, ThreadRow, ToolCallRow
from perdure.protocol.runs import Caller, RunContext, RunHot, RunOptions, RunRow
from perdure.protocol.states import (
    TERMINAL,
    AttemptEnd,
    CancelAction,
    InterruptKind,
    InterruptStatus,
    RunState,
    SideEffect,
    ToolCallStatus,
)
from perdure.protocol.values import Value
from perdure.store.commits import Commit, Committed, Guard, HotUpdate, InterruptClose, NewInterrupt
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import (
    CancelWish,
    Claimed,
    ClaimWant,
    LateResult,
    LeaseKey,
    NewBlob,
    NewRun,
)
from perdure.testing.clock import START

AGENT = "helper"
VERSION = "1"
WORKER = "worker-a"
TTL_S = 30.0
BACKOFF_S = 0.5
"""At most so long a run waits after its first fault."""

PLANNING, EXECUTING = RunState.PLANNING, RunState.EXECUTING
WAITING, SUCCEEDED, FAILED = RunState.WAITING_HUMAN, RunState.SUCCEEDED, RunState.FAILED
TO_EXECUTING = (PLANNING, EXECUTING)
TO_WAITING = (PLANNING, EXECUTING, WAITING)
TO_SUCCEEDED = (PLANNING, EXECUTING, SUCCEEDED)

_numbers = count(1)


def new_id(prefix: str) -> str:
    """Return a fresh id of a kind, larger than every one before."""
    return ids.make_id(prefix, UUID(int=(0x0194 << 112) | (7 << 76) | (1 << 63) | next(_numbers)))


# ---------------------------------------------------------------- runs and threads


def new_run(
    *,
    thread_id: str | None = None,
    key: str | None = None,
    fingerprint: str = "print-a",
    tenant_id: str = TENANT_DEFAULT,
    agent_id: str = AGENT,
    agent_version: str = VERSION,
    queue: str = "default",
    priority: int = 0,
    start_at: datetime | None = None,
    required_runtime: int = 1,
    input: JsonValue = "do it",
    max_attempts: int = 3,
    run_s: float | None = None,
    strategy: str = "enqueue",
    blobs: tuple[NewBlob, ...] = (),
) -> NewRun:
    """Return a run to insert. Without a `thread_id` it makes a thread of its own."""
    options = RunOptions(
        idempotency_key=key,
        max_attempts=max_attempts,
        timeouts=Timeouts(run_s=run_s),
        multitask_strategy=strategy,
        loop_limit=5,
    )
    return NewRun(
        run_id=new_id(ids.RUN),
        tenant_id=tenant_id,
        agent_id=agent_id,
        agent_version=agent_version,
        thread_id=thread_id or new_id(ids.THREAD),
        creates_thread=thread_id is None,
        message_id=new_id(ids.MESSAGE),
        input=Value(inline=input),
        context=RunContext(),
        options=options,
        caller=Caller(tenant_id=tenant_id, principal="local"),
        trace_id="0af7651916cd43dd8448eb211c80319c",
        required_runtime=required_runtime,
        idempotency_key=key,
        fingerprint=fingerprint,
        event=NewEvent(data=StateEvent(state=RunState.PENDING, start_at=start_at), step_index=0),
        blobs=blobs,
        queue=queue,
        priority=priority,
        start_at=start_at,
    )


def new_thread(*, thread_id: str | None = None, tenant_id: str = TENANT_DEFAULT) -> ThreadRow:
    """Return a thread to create."""
    return ThreadRow(
        thread_id=thread_id or new_id(ids.THREAD),
        tenant_id=tenant_id,
        title="a talk",
        metadata={"topic": "tests"},
        participants=[{"id": "local"}],
        capabilities=["files"],
        active_run_id=None,
        last_position=0,
        created_at=START,
        updated_at=START,
    )


async def append(
    store: Store,
    thread_id: str,
    body: JsonValue = "hello",
    *,
    message_id: str | None = None,
    tenant_id: str = TENANT_DEFAULT,
    role: Role = Role.USER,
    author: str = "local",
) -> MessageRow:
    """Append a message without a key and return it."""
    message = await store.append_message(
        tenant_id=tenant_id,
        thread_id=thread_id,
        message_id=message_id or new_id(ids.MESSAGE),
        role=role,
        author=author,
        body=body,
    )
    assert isinstance(message, MessageRow)
    return message


def want(
    *,
    worker_id: str = WORKER,
    limit: int = 10,
    ttl_s: float = TTL_S,
    serves: tuple[tuple[str, str], ...] = ((AGENT, VERSION),),
    queues: tuple[str, ...] = ("default",),
    runtime_version: int = 1,
    suspects_max: int = 1,
) -> ClaimWant:
    """Return what a worker can take."""
    return ClaimWant(
        worker_id=worker_id,
        limit=limit,
        lease_ttl_s=ttl_s,
        serves=serves,
        queues=queues,
        runtime_version=runtime_version,
        suspects_max=suspects_max,
    )


async def claim_one(store: Store, *, worker_id: str = WORKER) -> Claimed:
    """Claim the one run that is claimable."""
    [found] = await store.claim_runs(want(worker_id=worker_id))
    return found


async def claimed(store: Store, new: NewRun | None = None, *, worker_id: str = WORKER) -> Claimed:
    """Insert a run and claim it; nothing else may be claimable."""
    await store.insert_run(new or new_run())
    return await claim_one(store, worker_id=worker_id)


async def look(reader: Reader, run_id: str) -> RunRow:
    """Return a run that must be there."""
    row = await reader.find_run(None, run_id)
    assert row is not None
    return row


def lease_of(held: Claimed) -> LeaseKey:
    """Return the lease of a claimed run."""
    return LeaseKey(run_id=held.row.facts.run_id, token=held.token)


def cancel_wish(action: CancelAction = CancelAction.INTERRUPT) -> CancelWish:
    """Return a cancel as an API caller asks for it."""
    return CancelWish(action=action, by="local", source="api", reason="enough")


# ---------------------------------------------------------------- commits


def note(name: str = "note", value: JsonValue = None, *, step_index: int = 0) -> NewEvent:
    """Return an event that means nothing to the store."""
    return NewEvent(data=CustomEvent(name=name, value=value), step_index=step_index)


def event(data: EventData, *, step_index: int = 0) -> NewEvent:
    """Return an event of given data."""
    return NewEvent(data=data, step_index=step_index)


def state_events(start: RunState, path: Sequence[RunState], *, step_index: int) -> list[NewEvent]:
    """Return the state events that lead from a state along a path."""
    found: list[NewEvent] = []
    for state in path:
        found.append(event(StateEvent(state=state, from_state=start), step_index=step_index))
        start = state
    return found


def hot_of(hot: RunHot, state: RunState) -> HotUpdate:
    """Return an update that moves to a state and keeps all else."""
    return HotUpdate(
        state=state,
        step_index=hot.step_index,
        faults=hot.faults,
        parked_on=hot.parked_on,
        waiting_kind=hot.waiting_kind,
        code=hot.code,
        open_calls=hot.open_calls,
        open_interrupts=hot.open_interrupts,
        open_children=hot.open_children,
        counters=hot.counters,
        checkpoint_seq=hot.checkpoint_seq,
    )


def commit_of(
    row: RunRow,
    *events: NewEvent,
    path: Sequence[RunState] = (),
    any_holder: bool = False,
) -> Commit:
    """Return a commit by the run's holder, or by a writer without lease when nobody holds it.

    The events come first, then those of the path. A path to a terminal state ends a holder's
    attempt. Change what else is needed with `dataclasses.replace`.
    """
    hot = row.hot
    held = hot.lease_owner is not None and not any_holder
    state = path[-1] if path else hot.state
    ends = held and state in TERMINAL
    return Commit(
        run_id=row.facts.run_id,
        commit_id=new_id(ids.COMMIT),
        guard=Guard(
            token=hot.lease_token if held else None,
            epoch=hot.cancel_epoch,
            from_state=hot.state,
            expected_seq=hot.last_seq,
            any_holder=any_holder,
        ),
        hot=hot_of(hot, state),
        events=(*events, *state_events(hot.state, path, step_index=hot.step_index)),
        attempt_end=AttemptEnd.FINISHED if ends else None,
    )


def parked(commit: Commit, *, ready_in_s: float | None = None) -> Commit:
    """Return the commit with the lease given up: the run is parked."""
    return replace(commit, attempt_end=AttemptEnd.PARKED, ready_in_s=ready_in_s)


async def write(store: Store, commit: Commit) -> Committed:
    """Commit alone; it must be written."""
    [result] = await store.commit([commit])
    assert isinstance(result, Committed), result
    return result


async def advanced(store: Store, reader: Reader, commit: Commit) -> RunRow:
    """Commit alone and return the run as it stands then."""
    await write(store, commit)
    return await look(reader, commit.run_id)


async def finish(
    store: Store, reader: Reader, run_id: str, *, blobs: tuple[NewBlob, ...] = ()
) -> RunRow:
    """Bring a run from pending to its success, by its holder or without one."""
    row = await look(reader, run_id)
    commit = replace(commit_of(row, path=TO_SUCCEEDED), blobs=blobs)
    return await advanced(store, reader, commit)


# ---------------------------------------------------------------- rows beside a run


def new_call(row: RunRow, *, action_seq: int, ordinal: int = 0, step_index: int = 0) -> ToolCallRow:
    """Return a tool call that the event at `action_seq` decides."""
    call_id = new_id(ids.TOOL_CALL)
    return ToolCallRow(
        tool_call_id=call_id,
        run_id=row.facts.run_id,
        step_index=step_index,
        ordinal=ordinal,
        tool="fetch",
        version="1",
        side_effect=SideEffect.READ,
        repeatable=True,
        needs_approval=False,
        status=ToolCallStatus.PROPOSED,
        args_digest=digest({"n": ordinal}),
        effective_digest=digest({"n": ordinal}),
        effect_key=f"key-{call_id}",
        action_seq=action_seq,
    )


def action_of(call: ToolCallRow, args: JsonValue = None) -> NewEvent:
    """Return the event that decides a call."""
    data = ActionEvent(
        tool_call_id=call.tool_call_id,
        ordinal=call.ordinal,
        tool=call.tool,
        version=call.version,
        args=args,
        effect_key=call.effect_key,
    )
    return event(data, step_index=call.step_index)


def result_of(call: ToolCallRow, output: JsonValue = None) -> NewEvent:
    """Return the event of a call's success."""
    status = ToolCallStatus.SUCCEEDED
    data = ResultEvent(tool_call_id=call.tool_call_id, status=status, output=output, executions=1)
    return event(data, step_index=call.step_index)


async def with_call(store: Store, reader: Reader, row: RunRow) -> tuple[RunRow, ToolCallRow]:
    """Decide one call in a run that is claimed and pending; return the run and the call."""
    call = new_call(row, action_seq=row.hot.last_seq + 1)
    first = commit_of(row, action_of(call), path=TO_EXECUTING)
    return await advanced(store, reader, replace(first, new_calls=(call,))), call


def asking(
    row: RunRow,
    *,
    path: Sequence[RunState] = TO_WAITING,
    key: str | None = None,
    expires_in_s: float | None = None,
) -> Commit:
    """Return a commit that opens an input interrupt and parks the run until it is answered."""
    interrupt_id = new_id(ids.INTERRUPT)
    opening = InterruptEvent(interrupt_id=interrupt_id, kind=InterruptKind.INPUT, key=key)
    commit = commit_of(row, event(opening), path=path)
    new = NewInterrupt(
        interrupt_id=interrupt_id,
        kind=InterruptKind.INPUT,
        opened_seq=row.hot.last_seq + 1,
        key=key,
        expires_in_s=expires_in_s,
    )
    hot = replace(
        commit.hot,
        open_interrupts=row.hot.open_interrupts + 1,
        waiting_kind=InterruptKind.INPUT,
    )
    return parked(replace(commit, new_interrupts=(new,), hot=hot))


def answering(row: RunRow, interrupt_id: str) -> Commit:
    """Return a commit that answers the last open interrupt of a run that nobody holds."""
    data = ResumeEvent(interrupt_id=interrupt_id, outcome="answered", answer="respond", value=1)
    leaves = (EXECUTING,) if row.hot.state is WAITING else ()
    commit = commit_of(row, event(data), path=leaves, any_holder=row.hot.lease_owner is not None)
    close = InterruptClose(
        interrupt_id=interrupt_id,
        status=InterruptStatus.ANSWERED,
        closed_seq=row.hot.last_seq + 1,
        answer="respond",
        answer_digest=digest(1),
        answered_by="local",
    )
    hot = replace(commit.hot, open_interrupts=0, waiting_kind=None)
    return replace(commit, interrupt_closes=(close,), hot=hot, ready_in_s=0.0)


def late_result(call: ToolCallRow, *, execution: int = 1, output: JsonValue = "late") -> LateResult:
    """Return a result that comes after its worker lost the run."""
    return LateResult(
        run_id=call.run_id,
        tool_call_id=call.tool_call_id,
        execution=execution,
        attempt=1,
        epoch=0,
        status=ToolCallStatus.SUCCEEDED,
        output=output,
        external_ref="ref-9",
        step_index=call.step_index,
    )
