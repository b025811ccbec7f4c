"""Threads in the memory store: forks, adoptions and deletions."""

from dataclasses import replace

from perdure.protocol.errors import Conflict, Gone, Invalid, NotFound, ThreadBusy
from perdure.protocol.records import BaseKind, ThreadBase, ThreadRow
from perdure.protocol.states import TERMINAL, ArtifactStatus
from perdure.store import keeping, rules
from perdure.store.lasting import adopted_values
from perdure.store.lineage import adopted_base, check_adoption
from perdure.store.memory.retention import drop_if_free
from perdure.store.memory.state_values import copy, drop, listed, put
from perdure.store.memory.tables import Tables
from perdure.store.requests import Replayed, RequestKey, Swept

_NOT_ADOPTED = frozenset({ArtifactStatus.CANCELLED, ArtifactStatus.DISCARDED})


def find_live(tables: Tables, tenant_id: str, thread_id: str) -> ThreadRow:
    """Return a thread of the tenant. Raises NotFound, Gone."""
    thread = tables.threads.get(thread_id)
    if thread is None or thread.tenant_id != tenant_id:
        raise NotFound("no such thread")
    if thread.deleted_at is not None:
        raise Gone("the thread was deleted")
    return thread


def create(
    tables: Tables, row: ThreadRow, key: RequestKey | None, base: ThreadBase | None
) -> Replayed | None:
    """Create a thread, unless its id or its key exists."""
    found = tables.threads.get(row.thread_id)
    if found is not None and not keeping.is_same_thread(found, row):
        raise Conflict("the thread exists")
    if found is None and base is not None:
        source = find_live(tables, row.tenant_id, base.base_thread_id)
        if base.base_position > source.last_position:
            raise Invalid("the thread has not come to this position", field="/position")
    known = tables.take_key(row.tenant_id, key, row.thread_id)
    if known is None and found is None:
        tables.threads[row.thread_id] = row
        if base is not None:
            tables.bases.append(base)
            copy(tables, base)
    return known


def adopt(
    tables: Tables, tenant_id: str, thread_id: str, branch_id: str, author: str
) -> ThreadBase:
    """Let a thread say what a branch of it says."""
    thread = find_live(tables, tenant_id, thread_id)
    branch = find_live(tables, tenant_id, branch_id)
    of_branch = bases_of(tables, branch_id)
    known = check_adoption(thread, branch, bases_of(tables, thread_id), of_branch)
    if known is not None:
        return known
    now = tables.clock()
    base = adopted_base(thread, branch, author, now)
    tables.bases.append(base)
    mine, theirs = (listed(tables, tenant_id, "thread", one) for one in (thread_id, branch_id))
    for value in adopted_values(base, of_branch, mine, theirs):
        put(tables, value)
    tables.threads[thread_id] = replace(
        thread, last_position=base.from_position, updated_at=max(thread.updated_at, now)
    )
    for artifact in list(tables.artifacts.values()):
        if artifact.thread_id == branch_id and artifact.status not in _NOT_ADOPTED:
            adopted = replace(artifact, status=ArtifactStatus.ADOPTED)
            tables.artifacts[artifact.artifact_id] = adopted
    return base


def bases_of(tables: Tables, thread_id: str) -> list[ThreadBase]:
    """Return a thread's bases, in order of position."""
    mine = [base for base in tables.bases if base.thread_id == thread_id]
    return sorted(mine, key=lambda base: base.from_position)


def moved_at(tables: Tables, thread_id: str, since: int, run_id: str) -> int | None:
    """Return the first position at which a thread says something of others than the run."""
    said = [
        message.position
        for message in tables.messages.values()
        if message.thread_id == thread_id
        and (message.run_id is None or (message.run_id != run_id and message.seq is not None))
    ]
    said += [base.from_position for base in bases_of(tables, thread_id)]
    return min((position for position in said if position > since), default=None)


def branches_of(tables: Tables, thread_id: str) -> list[ThreadBase]:
    """Return the forks of a thread, oldest first."""
    found = [
        base
        for base in tables.bases
        if base.base_thread_id == thread_id and base.kind is BaseKind.FORK
    ]
    return sorted(found, key=lambda base: base.thread_id)


def delete(tables: Tables, tenant_id: str, thread_id: str) -> bool:
    """Leave the tombstone of a thread."""
    thread = tables.threads.get(thread_id)
    if thread is None or thread.tenant_id != tenant_id:
        raise NotFound("no such thread")
    if thread.deleted_at is not None:
        return False
    for run in tables.runs.values():
        if run.facts.thread_id != thread_id:
            continue
        parent = None if run.facts.detached else tables.runs.get(run.facts.parent_run_id or "")
        for one in (run, parent):
            if one is not None and one.hot.state not in TERMINAL:
                raise ThreadBusy(
                    "a run of the thread, or one above it, has not ended",
                    details={"run_id": one.facts.run_id},
                )
    now = tables.clock()
    tables.threads[thread_id] = replace(
        thread,
        title="",
        metadata={},
        participants=[],
        capabilities=[],
        updated_at=max(thread.updated_at, now),
        deleted_at=now,
    )
    drop(tables, tenant_id, thread_id)
    for key, subscription in list(tables.subscriptions.items()):
        if thread_id in {subscription.thread_id, subscription.inbox_thread_id}:
            del tables.subscriptions[key]
    _trim(tables, thread_id)
    return True


def _trim(tables: Tables, thread_id: str) -> None:
    """Drop what a deleted thread says and no branch of it, and then what only it said of others."""
    places = [base.base_position for base in tables.bases if base.base_thread_id == thread_id]
    needed = max(places, default=0)
    for message in list(tables.messages.values()):
        if message.thread_id == thread_id and message.position > needed:
            del tables.messages[message.message_id]
    gone = [base for base in bases_of(tables, thread_id) if base.from_position > needed]
    tables.bases = [base for base in tables.bases if base not in gone]
    if needed:
        tables.bases += [
            replace(base, from_position=needed, base_position=needed)
            for base in gone
            if base.kind is BaseKind.FORK
        ]
    tables.threads[thread_id] = replace(tables.threads[thread_id], last_position=needed)
    for base in gone:
        if tables.threads[base.base_thread_id].deleted_at is not None:
            _trim(tables, base.base_thread_id)


def expire_deleted(tables: Tables, thread_id: str | None, after: str | None, limit: int) -> Swept:
    """Drop the history of runs of the next deleted threads."""
    page = sorted(
        thread.thread_id
        for thread in tables.threads.values()
        if thread.deleted_at is not None
        and thread_id in {None, thread.thread_id}
        and (after is None or thread.thread_id > after)
    )[:limit]
    found = [run for run in tables.runs.values() if run.facts.thread_id in page]
    count = 0
    for run in found:
        count += count < limit and drop_if_free(tables, run)
    return Swept(runs=count, after=rules.place_after(page, after, count, limit))
