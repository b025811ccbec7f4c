"""Gathering the rows of one run through the `Reader` port, page by page.

A database may be at work meanwhile: a run whose row has changed while its other rows were read
is read again, and given up for this time when it never stands still.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Literal, TypeVar

from pydantic import JsonValue

from perdure.engine.origin import fold_origins
from perdure.engine.snapshot import RunSnapshot
from perdure.ops.verify.record import BlobFacts, Foreign, LogLine, RunRecord, Sharing
from perdure.ops.verify.replay import Replayer, problem_of_bytes
from perdure.protocol.codec import digest_bytes
from perdure.protocol.events import (
    ActionEvent,
    ApprovalRequestEvent,
    ArtifactEvent,
    CompensationEvent,
    CustomEvent,
    InterruptEvent,
    LateEvent,
    ResultEvent,
    ResumeEvent,
    StateEvent,
)
from perdure.protocol.fields import KEPT_EVENT_NAME, Slot
from perdure.protocol.log import ref_of
from perdure.protocol.records import (
    ArtifactRow,
    CheckpointRow,
    InterruptRow,
    StateValueRow,
    StepRow,
    ThreadBase,
    ToolCallRow,
)
from perdure.protocol.runs import RunContext, RunRow
from perdure.protocol.values import Value
from perdure.store.reader import InterruptFilter, Reader, RunFilter

PAGE = 1000
SWEEP_PAGE = 50
LOOKS_MAX = 5
FOREIGN_MAX = 100

Row = TypeVar("Row")
After = TypeVar("After")


async def settled_record(
    reader: Reader, row: RunRow, *, looks_max: int = LOOKS_MAX, sweeping: bool = False
) -> RunRecord | None:
    """Return the record of a run as of one moment; None when it moved at every look.

    `sweeping` is for a process that does other work: content is not read, and the log in pages so
    small that the loop is never held for long.
    """
    for _ in range(looks_max):
        record = await gather(reader, row, sweeping=sweeping)
        again = await reader.find_run(None, row.facts.run_id)
        if again is None:
            return None
        if _still(row) == _still(again):
            return record
        row = again
    return None


def _still(row: RunRow) -> RunRow:
    """Return the row without what a renewal moves: every other write shows on it."""
    return replace(row, hot=replace(row.hot, lease_expires_at=None))


async def gather(reader: Reader, row: RunRow, *, sweeping: bool = False) -> RunRecord:
    """Return all rows of a run, as they are found; without content when `sweeping`."""
    run_id, tenant = row.facts.run_id, row.facts.tenant_id
    base, sharing = await _sharing(reader, row)
    replayer = Replayer(base, from_start=row.hot.retained_from_seq == 1)
    log, checkpoints = await _read_log(reader, row, replayer, page=SWEEP_PAGE if sweeping else PAGE)
    _note_documents(replayer, row, checkpoints)
    kept = row.hot.retained_from_seq  # a row whose event is gone cannot be compared with it
    every = await _calls(reader, run_id)
    calls = [call for call in every if call.action_seq >= kept]
    asked = await _interrupts(reader, tenant, run_id)
    interrupts = [question for question in asked if question.opened_seq >= kept]
    made = await _artifacts(reader, tenant, run_id)
    artifacts = [artifact for artifact in made if artifact.seq >= kept]
    known = {call.tool_call_id for call in calls}
    foreign, more = await _strangers(reader, row, log, (every, asked, made))
    thread = await reader.find_thread(tenant, row.facts.thread_id)
    parent_id = row.facts.parent_run_id
    return RunRecord(
        row=row,
        log=log,
        replay=replayer.replay,
        attempts=await reader.list_attempts(run_id),
        steps=await _steps(reader, run_id),
        calls=calls,
        calls_before=[call for call in every if call.action_seq < kept],
        executions=[
            item
            for item in await reader.list_executions(run_id)
            if kept == 1 or item.tool_call_id in known
        ],
        checkpoints=[replace(item, agent_state=None) for item in checkpoints],
        interrupts=[*interrupts, *more],
        artifacts=artifacts,
        late=await reader.list_late(run_id),
        timers=await reader.timers_of(run_id),
        is_ready=await reader.is_ready(run_id),
        thread=thread,
        sharing=replace(
            sharing,
            superseded=await _superseded(reader, log),
            bases=await _bases(reader, row, log),
        ),
        blobs={} if sweeping else await _blobs(reader, row, log, artifacts, replayer),
        foreign=foreign,
        parent=await reader.find_run(None, parent_id) if parent_id is not None else None,
        children=await _children(reader, run_id),
        state_values=await _state_values(reader, row, log),
    )


# ---------------------------------------------------------------- the shared history


async def _sharing(reader: Reader, row: RunRow) -> tuple[RunSnapshot | None, Sharing]:
    """Fold what the run shares; None when that cannot be done."""
    facts = row.facts
    origin = await _other(reader, facts.origin_run_id)
    retried = await _other(reader, facts.retry_of)
    try:
        base = await fold_origins(reader, facts)
    except (LookupError, ValueError, TypeError) as error:
        return None, Sharing(problem=str(error)[:300], origin=origin, retried=retried)
    return base, Sharing(artifacts=dict(base.artifacts), origin=origin, retried=retried)


async def _superseded(reader: Reader, log: list[LogLine]) -> RunRow | None:
    """Return the run that was cancelled for this one, as its first event names it."""
    first = log[0].data if log else None
    return await _other(reader, first.supersedes if isinstance(first, StateEvent) else None)


async def _bases(reader: Reader, row: RunRow, log: list[LogLine]) -> list[ThreadBase]:
    """Return what the run's thread says of others, when one of its events tells of it."""
    told = [line for line in log if isinstance(line.data, StateEvent) and line.data.branch]
    return await reader.thread_bases(row.facts.thread_id) if told else []


async def _other(reader: Reader, run_id: str | None) -> RunRow | None:
    return None if run_id is None else await reader.find_run(None, run_id)


# ---------------------------------------------------------------- log and checkpoints


async def _read_log(
    reader: Reader, row: RunRow, replayer: Replayer, *, page: int
) -> tuple[list[LogLine], list[CheckpointRow]]:
    """Read events and checkpoints side by side, a page of each at a time."""
    run_id = row.facts.run_id
    log: list[LogLine] = []
    kept: list[CheckpointRow] = []
    seq = 0
    while True:
        events = await reader.events_after(run_id, seq, limit=page)
        full = len(events) == page
        before = events[-1].seq + 1 if full else None
        rows = await _checkpoints(reader, run_id, seq, before)
        kept += rows
        at = {item.seq: item for item in rows}
        log += [replayer.feed(event, at.get(event.seq)) for event in events]
        if not full:
            return log, kept
        seq = events[-1].seq


async def _checkpoints(
    reader: Reader, run_id: str, after: int, before: int | None
) -> list[CheckpointRow]:
    """Return the checkpoints between two seqs, in order; also those behind the log's end."""
    found: list[CheckpointRow] = []
    while True:
        page = await reader.list_checkpoints(run_id, before=before, limit=PAGE)
        mine = [item for item in page if item.seq > after]
        found += mine
        if len(page) < PAGE or len(mine) < len(page):
            return found[::-1]
        before = page[-1].seq


def _note_documents(replayer: Replayer, row: RunRow, checkpoints: list[CheckpointRow]) -> None:
    facts = row.facts
    documents: dict[str, JsonValue] = {
        "input": facts.input.model_dump(mode="python"),
        "context": facts.context.model_dump(mode="python"),
        "options": facts.options.model_dump(mode="python"),
        "caller": facts.caller.model_dump(mode="python"),
    }
    for name, value in documents.items():
        replayer.note_value(name, value)
    for item in checkpoints:
        if item.agent_state is not None:
            replayer.note_value(f"checkpoint {item.seq}", item.agent_state)


# ---------------------------------------------------------------- pages


async def pages(
    read: Callable[[After], Awaitable[list[Row]]], start: After, key: Callable[[Row], After]
) -> AsyncIterator[Row]:
    """Yield the rows of all pages; each page begins after the key of the last row."""
    after = start
    while True:
        page = await read(after)
        for item in page:
            yield item
        if len(page) < PAGE:
            return
        after = key(page[-1])


async def _steps(reader: Reader, run_id: str) -> list[StepRow]:
    async def read(after: int) -> list[StepRow]:
        return await reader.list_steps(run_id, after=after, limit=PAGE)

    return [row async for row in pages(read, -(2**31), lambda row: row.index)]


async def _calls(reader: Reader, run_id: str) -> list[ToolCallRow]:
    async def read(after: tuple[int, int] | None) -> list[ToolCallRow]:
        return await reader.list_tool_calls(run_id, after=after, limit=PAGE)

    return [row async for row in pages(read, None, _call_key)]


async def _children(reader: Reader, run_id: str) -> list[RunRow]:
    where = RunFilter(parent_run_id=run_id)

    async def read(after: str | None) -> list[RunRow]:
        return await reader.list_runs(None, where, after=after, limit=PAGE)

    return [_slim(row) async for row in pages(read, None, lambda row: str(row.facts.run_id))]


def _slim(row: RunRow) -> RunRow:
    """Return another run's row without what it was told: a run may have thousands of children."""
    return replace(row, facts=replace(row.facts, input=Value(), context=RunContext()))


def _call_key(row: ToolCallRow) -> tuple[int, int] | None:
    return row.step_index, row.ordinal


async def _interrupts(reader: Reader, tenant: str, run_id: str) -> list[InterruptRow]:
    where = InterruptFilter(run_id=run_id)

    async def read(after: str | None) -> list[InterruptRow]:
        return await reader.list_interrupts(tenant, where, after=after, limit=PAGE)

    return [row async for row in pages(read, None, lambda row: str(row.interrupt_id))]


async def _artifacts(reader: Reader, tenant: str, run_id: str) -> list[ArtifactRow]:
    async def read(after: str | None) -> list[ArtifactRow]:
        return await reader.list_artifacts(
            tenant, run_id=run_id, thread_id=None, after=after, limit=PAGE
        )

    return [row async for row in pages(read, None, lambda row: str(row.artifact_id))]


async def _state_values(
    reader: Reader, row: RunRow, log: list[LogLine]
) -> dict[Slot, StateValueRow]:
    """Return the rows of the fields of which the log says that the run has left a value there."""
    kept = [
        line.data.value
        for line in log
        if isinstance(line.data, CustomEvent) and line.data.name == KEPT_EVENT_NAME
    ]
    agents = {str(told.get("agent") or "") for told in kept if isinstance(told, dict)}
    found: dict[Slot, StateValueRow] = {}
    for agent in sorted(agents):
        scope: Literal["thread", "agent"] = "agent" if agent else "thread"
        where = row.facts.tenant_id, scope, agent or row.facts.thread_id

        async def read(
            after: str | None, where: tuple[str, Literal["thread", "agent"], str] = where
        ) -> list[StateValueRow]:
            return await reader.list_state_values(*where, after=after, limit=PAGE)

        async for value in pages(read, None, lambda one: str(one.name)):
            found[Slot(scope, agent, value.name)] = value
    return found


# ---------------------------------------------------------------- what events refer to


async def _strangers(
    reader: Reader,
    row: RunRow,
    log: list[LogLine],
    known: tuple[list[ToolCallRow], list[InterruptRow], list[ArtifactRow]],
) -> tuple[list[Foreign], list[InterruptRow]]:
    """Look up what events name and the run's rows lack; its own interrupts are returned apart."""
    calls, interrupts, artifacts = known
    names = {
        "tool call": {call.tool_call_id for call in calls},
        "interrupt": {question.interrupt_id for question in interrupts},
        "artifact": {artifact.artifact_id for artifact in artifacts},
    }
    foreign: list[Foreign] = []
    own: list[InterruptRow] = []
    for line in log:
        for kind, name in _named(line):
            if name in names[kind] or len(foreign) >= FOREIGN_MAX:
                continue
            names[kind].add(name)
            found = await _find(reader, row.facts.tenant_id, kind, name)
            if isinstance(found, InterruptRow) and found.run_id == row.facts.run_id:
                own.append(found)
                continue
            owner = found.run_id if found is not None else None
            foreign.append(Foreign(seq=line.seq, kind=kind, id=name, owner=owner))
    return foreign, own


def _named(line: LogLine) -> list[tuple[str, str]]:
    match line.data:
        case ActionEvent(tool_call_id=call) | ResultEvent(tool_call_id=call):
            return [("tool call", call)]
        case LateEvent(tool_call_id=call) | CompensationEvent(tool_call_id=call, run_id=None):
            return [("tool call", call)]
        case ApprovalRequestEvent(approval_id=question, tool_call_id=call):
            return [("interrupt", question), ("tool call", call)]
        case InterruptEvent(interrupt_id=question) | ResumeEvent(interrupt_id=question):
            return [("interrupt", question)]
        case ArtifactEvent(artifact_id=artifact):
            return [("artifact", artifact)]
        case _:
            return []


async def _find(
    reader: Reader, tenant: str, kind: str, name: str
) -> ToolCallRow | InterruptRow | ArtifactRow | None:
    match kind:
        case "tool call":
            return await reader.find_tool_call(tenant, name)
        case "interrupt":
            return await reader.find_interrupt(None, name)
        case _:
            return await reader.find_artifact(tenant, name)


async def _blobs(
    reader: Reader,
    row: RunRow,
    log: list[LogLine],
    artifacts: list[ArtifactRow],
    replayer: Replayer,
) -> dict[str, BlobFacts]:
    """Read what the run refers to, one content at a time; only the facts of it are kept."""
    refs = [row.facts.input.ref, *[ref_of(line.data) for line in log if line.data]]
    wanted = {ref.digest: ref.media_type for ref in refs if ref is not None}
    wanted.update({artifact.digest: "" for artifact in artifacts})
    found: dict[str, BlobFacts] = {}
    for digest, media_type in wanted.items():
        data = await reader.read_blob(row.facts.tenant_id, digest)
        is_sound = data is not None and digest_bytes(data) == digest
        found[digest] = BlobFacts(digest=digest, found=data is not None, is_sound=is_sound)
        problem = problem_of_bytes(data) if data and media_type == "application/json" else None
        if problem is not None:
            replayer.replay.not_strict.append((f"content {digest}", problem))
    return found
