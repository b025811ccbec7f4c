"""Threads: their messages, and that their runs take turns."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.holding import Holding, holdings, told_otherwise
from perdure.ops.verify.load import LOOKS_MAX, PAGE, pages
from perdure.protocol.records import (
    BaseKind,
    MessageRow,
    ThreadBase,
    ThreadRow,
)
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState
from perdure.protocol.topics import SubscriptionRow
from perdure.store.beginning import takes_no_turn
from perdure.store.reader import Reader, RunFilter


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a thread's checks keep of one of its runs."""

    run_id: str
    is_root: bool
    beside: bool
    """It works beside the active run (`optimistic`)."""
    state: RunState
    started_at: datetime | None
    finished_at: datetime | None
    terminal_seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a thread's checks keep of one of its messages."""

    message_id: str
    tenant_id: str
    position: int
    run_id: str | None
    seq: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A subscription to a topic of the thread, and whether its inbox is there."""

    row: SubscriptionRow
    has_inbox: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadRecord:
    """A thread with its runs and its messages in order."""

    thread: ThreadRow
    runs: list[Turn]
    messages: list[Mark]
    subscriptions: list[Subscription]
    bases: list[ThreadBase]
    fields: list[Holding]
    """What its fields hold."""
    sources: dict[str, ThreadRow]
    """The threads of its tenant that the thread is based on."""


async def settled_thread(reader: Reader, tenant_id: str, thread_id: str) -> ThreadRecord | None:
    """Return a thread as of one moment; None when there is none or it moved at every look."""
    for _ in range(LOOKS_MAX):
        thread = await reader.find_thread(tenant_id, thread_id)
        if thread is None:
            return None
        record = ThreadRecord(
            thread=thread,
            messages=await _messages(reader, thread_id),
            runs=await _runs(reader, tenant_id, thread_id),
            subscriptions=await _subscriptions(reader, tenant_id, thread_id),
            bases=await reader.thread_bases(thread_id),
            fields=await holdings(reader, tenant_id, "thread", thread_id),
            sources=await _sources(reader, tenant_id, thread_id),
        )
        again = await reader.find_thread(tenant_id, thread_id)
        if again == thread:
            return record
    return None


async def _subscriptions(reader: Reader, tenant_id: str, thread_id: str) -> list[Subscription]:
    rows = await reader.list_subscriptions(tenant_id, thread_id)
    inboxes = [await reader.find_thread(tenant_id, row.inbox_thread_id) for row in rows]
    return [
        Subscription(row=row, has_inbox=inbox is not None)
        for row, inbox in zip(rows, inboxes, strict=True)
    ]


async def _sources(reader: Reader, tenant_id: str, thread_id: str) -> dict[str, ThreadRow]:
    found: dict[str, ThreadRow] = {}
    for base in await reader.thread_bases(thread_id):
        source = await reader.find_thread(tenant_id, base.base_thread_id)
        if source is not None:
            found[base.base_thread_id] = source
    return found


async def _messages(reader: Reader, thread_id: str) -> list[Mark]:
    async def read(after: int) -> list[MessageRow]:
        return await reader.list_messages(thread_id, after=after, limit=PAGE)

    return [
        Mark(
            message_id=row.message_id,
            tenant_id=row.tenant_id,
            position=row.position,
            run_id=row.run_id,
            seq=row.seq,
        )
        async for row in pages(read, -1, lambda row: row.position)
    ]


async def _runs(reader: Reader, tenant_id: str, thread_id: str) -> list[Turn]:
    async def read(after: str | None) -> list[RunRow]:
        where = RunFilter(thread_id=thread_id)
        return await reader.list_runs(tenant_id, where, after=after, limit=PAGE)

    return [
        Turn(
            run_id=row.facts.run_id,
            is_root=row.facts.parent_run_id is None,
            beside=takes_no_turn(row.facts.options),
            state=row.hot.state,
            started_at=row.hot.started_at,
            finished_at=row.hot.finished_at,
            terminal_seq=row.hot.terminal_seq,
        )
        async for row in pages(read, None, lambda row: str(row.facts.run_id))
    ]


@rule(
    "I37",
    "The root runs of a thread do not overlap in time, but for optimistic ones.",
    scope="thread",
)
def runs_take_turns(record: ThreadRecord) -> Found:
    started = [
        (run.started_at, run)
        for run in record.runs
        if run.is_root and not run.beside and run.started_at is not None
    ]
    started.sort(key=lambda item: item[0])
    before: Turn | None = None
    for at, run in started:
        if before is not None and (before.finished_at is None or at < before.finished_at):
            yield run.run_id, f"it began before {before.run_id} was over"
        if before is None or before.finished_at is not None:
            before = run


@rule(
    "M1",
    "A thread's messages are of its tenant and numbered without gap up to its last position, from "
    "1 or from behind a base; each run has one input message and, when it succeeded, one answer at "
    "its end. Of a deleted thread only what is left is looked at.",
    scope="thread",
)
def messages_in_order(record: ThreadRecord) -> Found:
    thread = record.thread
    jumps, last = {base.from_position for base in record.bases}, 0
    for message in record.messages:
        before = message.position - 1
        if before != last and not (before in jumps and before > last):
            yield message.message_id, f"it stands at {message.position}, {last + 1} was to come"
            break
        last = message.position
        if message.tenant_id != thread.tenant_id:
            yield message.message_id, f"it is of {message.tenant_id}"
    last = max([last, *jumps])
    if last != thread.last_position and (record.messages or record.bases):
        yield thread.thread_id, f"its last position is {thread.last_position}, its messages' {last}"
    if thread.deleted_at is None:
        yield from _messages_of_runs(record)


def _messages_of_runs(record: ThreadRecord) -> Found:
    inputs = Counter(message.run_id for message in record.messages if message.seq is None)
    answers = {(message.run_id, message.seq) for message in record.messages}
    for run in record.runs:
        if inputs[run.run_id] != 1:
            yield run.run_id, f"it has {inputs[run.run_id]} input messages"
        answered = run.state is not RunState.SUCCEEDED or (run.run_id, run.terminal_seq) in answers
        if not answered:
            yield run.run_id, "it succeeded, and its answer is no message of the thread"


@rule(
    "M2",
    "The inbox of each subscription to a topic of a thread is a thread of its tenant, and nobody "
    "else's inbox.",
    scope="thread",
)
def inboxes_are_there(record: ThreadRecord) -> Found:
    seen: set[str] = set()
    for one in record.subscriptions:
        name = f"{one.row.agent_id} on {one.row.topic}"
        if not one.has_inbox:
            yield name, f"its inbox {one.row.inbox_thread_id} is not there"
        if one.row.inbox_thread_id in seen:
            yield name, f"its inbox {one.row.inbox_thread_id} is another's too"
        seen.add(one.row.inbox_thread_id)


@rule(
    "M3",
    "What a thread says of another is said by a thread of its tenant that has come so far; a fork "
    "goes on at the place that it begins at, an adoption at one that neither thread had come to.",
    scope="thread",
)
def bases_are_said(record: ThreadRecord) -> Found:
    for base in record.bases:
        source = record.sources.get(base.base_thread_id)
        name = f"its base at {base.from_position}"
        if source is None:
            yield name, f"there is no thread {base.base_thread_id}"
        elif base.base_position > source.last_position:
            yield name, f"it says {base.base_position}, there is {source.last_position}"
        if base.kind is BaseKind.FORK and base.base_position != base.from_position:
            yield name, f"the fork goes on behind {base.base_position}"
        if base.kind is BaseKind.ADOPT and base.base_position >= base.from_position:
            yield name, f"it adopts what stands behind it, up to {base.base_position}"


@rule(
    "M4",
    "What a thread's field holds is what the event says by which its run left it, at that version "
    "(a later one, or nothing, when the thread has adopted a branch) and at a position that the "
    "thread has come to.",
    scope="thread",
)
def fields_are_told(record: ThreadRecord) -> Found:
    adopts = any(base.kind is BaseKind.ADOPT for base in record.bases)
    for holding in record.fields:
        row = holding.row
        if row.position > record.thread.last_position:
            yield row.name, f"it was written at {row.position}, the thread has not come so far"
        yield from told_otherwise(holding, moves=adopts)


RULES = (runs_take_turns, messages_in_order, inboxes_are_there, bases_are_said, fields_are_told)
