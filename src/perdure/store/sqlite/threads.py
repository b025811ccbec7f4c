"""Threads and the messages that callers append; forks, adoptions and deletions.

Each function is one job of the writer: it looks for what it must refuse before it writes anything,
because other jobs share its transaction.
"""

from perdure.protocol.base import to_micros
from perdure.protocol.codec import encode
from perdure.protocol.errors import Conflict, Gone, Invalid, NotFound, ThreadBusy
from perdure.protocol.ids import THREAD
from perdure.protocol.records import BaseKind, MessageRow, ThreadBase, ThreadRow
from perdure.store.keeping import is_same_message, is_same_thread
from perdure.store.lineage import adopted_base, check_adoption, tags_of
from perdure.store.requests import Replayed, RequestKey, Swept
from perdure.store.rules import place_after
from perdure.store.sqlite import state_values
from perdure.store.sqlite.connection import read_row
from perdure.store.sqlite.retention import drop
from perdure.store.sqlite.rows import (
    maybe,
    pack_digest,
    pack_id,
    read_base,
    read_message,
    read_thread,
    unpack_digest,
)
from perdure.store.sqlite.transaction import Transaction


def insert_thread(tx: Transaction, row: ThreadRow) -> None:
    """Write a thread whose id is free."""
    tx.run(
        "insert_thread",
        pack_id(row.thread_id),
        row.tenant_id,
        row.title,
        encode(row.metadata),
        encode(row.participants),
        encode(list(row.capabilities)),
        maybe(pack_id, row.active_run_id),
        row.last_position,
        to_micros(row.created_at),
        to_micros(row.updated_at),
    )
    for tag in tags_of(row.metadata):
        tx.run("insert_thread_tag", row.tenant_id, pack_digest(tag), pack_id(row.thread_id))


def insert_base(tx: Transaction, base: ThreadBase) -> None:
    """Write what a thread says of another one."""
    tx.run(
        "insert_thread_base",
        pack_id(base.thread_id),
        base.from_position,
        pack_id(base.base_thread_id),
        base.base_position,
        base.kind.value,
        base.author,
        maybe(pack_id, base.run_id),
        to_micros(base.created_at),
    )
    if base.kind is BaseKind.FORK:
        tx.run("copy_state_values", base.thread_id, base.base_thread_id, base.base_position)


def find_live(tx: Transaction, tenant_id: str, thread_id: str) -> ThreadRow:
    """Return a thread of the tenant. Raises NotFound, Gone."""
    row = tx.one("find_thread", pack_id(thread_id), tenant_id)
    if row is None:
        raise NotFound("no such thread")
    thread = read_row(read_thread, row)
    if thread.deleted_at is not None:
        raise Gone("the thread was deleted")
    return thread


def create_thread(
    tx: Transaction, row: ThreadRow, key: RequestKey | None, base: ThreadBase | None
) -> Replayed | None:
    """Create a thread, unless its id or its key exists."""
    found = maybe(read_thread, tx.one("find_thread", pack_id(row.thread_id), row.tenant_id))
    if found is None and tx.one("find_active_run", pack_id(row.thread_id)) is not None:
        raise Conflict("the thread exists")
    if found is not None and not is_same_thread(found, row):
        raise Conflict("the thread exists")
    if found is None and base is not None:
        source = find_live(tx, row.tenant_id, base.base_thread_id)
        if base.base_position > source.last_position:
            raise Invalid("the thread has not come to this position", field="/position")
    known = _take_key(tx, row.tenant_id, key, row.thread_id)
    if known is None and found is None:
        insert_thread(tx, row)
        if base is not None:
            insert_base(tx, base)
    return known


def adopt_branch(
    tx: Transaction, tenant_id: str, thread_id: str, branch_id: str, author: str
) -> ThreadBase:
    """Let a thread say what a branch of it says."""
    thread, branch = find_live(tx, tenant_id, thread_id), find_live(tx, tenant_id, branch_id)
    of_branch = _bases(tx, branch_id)
    known = check_adoption(thread, branch, _bases(tx, thread_id), of_branch)
    if known is not None:
        return known
    base = adopted_base(thread, branch, author, tx.now)
    insert_base(tx, base)
    tx.run("set_last_position", pack_id(thread_id), base.from_position, tx.now_micros)
    tx.run("adopt_artifacts", pack_id(branch_id))
    state_values.adopt(tx, base, of_branch, tenant_id)
    return base


def _bases(tx: Transaction, thread_id: str) -> list[ThreadBase]:
    return [read_row(read_base, row) for row in tx.all("thread_bases", pack_id(thread_id))]


def delete_thread(tx: Transaction, tenant_id: str, thread_id: str) -> bool:
    """Leave the tombstone of a thread."""
    thread = pack_id(thread_id)
    row = tx.one("find_thread", thread, tenant_id)
    if row is None:
        raise NotFound("no such thread")
    found = read_row(read_thread, row)
    if found.deleted_at is not None:
        return False
    busy = tx.one("find_unfinished_run", thread)
    if busy is not None:
        raise ThreadBusy(
            "a run of the thread, or one above it, has not ended",
            details={"run_id": f"run_{busy[0].hex()}"},
        )
    for tag in tags_of(found.metadata):
        tx.run("delete_thread_tags", tenant_id, pack_digest(tag), thread)
    tx.run("bury_thread", thread, tx.now_micros, encode({}), encode([]))
    tx.run("end_subscriptions", thread)
    tx.run("delete_state_values", thread_id)
    _trim(tx, thread)
    return True


def _trim(tx: Transaction, thread: bytes) -> None:
    """Drop what a deleted thread says and no branch of it, and then what only it said of others."""
    needed = (tx.one("place_needed", thread) or (None,))[0] or 0
    tx.run("delete_messages", thread, needed)
    gone = [*tx.all("delete_bases", thread, needed), *tx.all("cut_bases", thread, needed)]
    tx.run("cut_thread", thread, needed)
    for (base,) in gone:
        if tx.one("find_deleted", base) is not None:
            _trim(tx, base)


def expire_deleted(tx: Transaction, thread_id: str | None, after: str | None, limit: int) -> Swept:
    """Drop the history of runs of the next deleted threads."""
    only = maybe(pack_id, thread_id)
    start = b"" if after is None else pack_id(after)
    page = [row[0] for row in tx.all("page_of_deleted", start, only, limit)]
    if not page:
        return Swept(runs=0, after=None)
    due = tx.all("deleted_runs", page[0], page[-1], only, limit)
    for run, seq in due:
        drop(tx, run, seq)
    names = [f"{THREAD}_{thread.hex()}" for thread in page]
    return Swept(runs=len(due), after=place_after(names, after, len(due), limit))


def _take_key(
    tx: Transaction, tenant_id: str, key: RequestKey | None, object_id: str
) -> Replayed | None:
    """Record that an object stands under a key, or return another that does."""
    if key is None:
        return None
    mine = pack_id(object_id)
    known = tx.one("find_request_key", tenant_id, key.scope, key.key)
    if known is None:
        fingerprint = pack_digest(key.fingerprint)
        tx.run(
            "insert_request_key", tenant_id, key.scope, key.key, fingerprint, mine, tx.now_micros
        )
        return None
    if known[0] == mine:
        return None
    prefix = object_id.partition("_")[0]
    return Replayed(object_id=f"{prefix}_{known[0].hex()}", fingerprint=unpack_digest(known[1]))


def append_message(
    tx: Transaction, message: MessageRow, key: RequestKey | None
) -> MessageRow | Replayed:
    """Append a message that belongs to no run; its position and time are given here."""
    found = maybe(read_message, tx.one("find_message", pack_id(message.message_id), None))
    if found is not None and not is_same_message(found, message):
        raise Conflict("the message exists")
    find_live(tx, message.tenant_id, message.thread_id)
    known = _take_key(tx, message.tenant_id, key, message.message_id)
    return known or found or _insert_message(tx, message)


def _insert_message(tx: Transaction, message: MessageRow) -> MessageRow:
    thread, identity = pack_id(message.thread_id), pack_id(message.message_id)
    place = tx.one("next_position", tx.now_micros, thread, message.tenant_id)
    assert place is not None, "the thread was found"
    tx.run(
        "insert_message",
        thread,
        place[0],
        identity,
        message.tenant_id,
        None,
        None,
        message.role.value,
        message.author,
        tx.now_micros,
        encode(message.body),
    )
    return MessageRow(
        message_id=message.message_id,
        thread_id=message.thread_id,
        tenant_id=message.tenant_id,
        position=place[0],
        run_id=None,
        seq=None,
        role=message.role,
        author=message.author,
        body=message.body,
        created_at=tx.now,
    )
