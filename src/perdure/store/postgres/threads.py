"""Threads and messages that callers make, once per idempotency key; forks, adoptions, deletions.

The key is taken first: a second request under it waits for the first one's transaction, and then
finds what stands under it. A call that is sent again because its answer was lost finds its own.
"""

from dataclasses import replace
from datetime import datetime

from perdure.protocol.codec import encode
from perdure.protocol.errors import Conflict, Gone, Invalid, NotFound, ThreadBusy
from perdure.protocol.ids import RUN, THREAD, hex_of
from perdure.protocol.records import BaseKind, MessageRow, ThreadBase, ThreadRow
from perdure.store.keeping import is_same_message, is_same_thread
from perdure.store.lineage import adopted_base, check_adoption, tags_of
from perdure.store.postgres import state_values
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.retention import drop_unshared
from perdure.store.postgres.rows import base_of, message_of, thread_of
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import digest_in, digest_out, id_in, id_out, text_out
from perdure.store.requests import Replayed, RequestKey, Swept
from perdure.store.rules import BEFORE_ALL_THREADS, place_after


async def create_thread(
    connection: Connection,
    row: ThreadRow,
    key: RequestKey | None,
    base: ThreadBase | None,
    now: datetime | None,
) -> Replayed | None:
    """Create a thread, unless its id or its key exists."""
    source = None
    if base is not None:
        (source,) = await _lock(connection, row.tenant_id, [base.base_thread_id], now)
    known = await _take_key(connection, row.tenant_id, key, row.thread_id, now)
    if known is not None:
        return known
    arguments = (
        hex_of(row.thread_id),
        row.tenant_id,
        row.title.encode(),
        encode(row.metadata),
        encode(row.participants),
        encode([*row.capabilities]),
        id_out(row.active_run_id),
        row.last_position,
        row.created_at,
        row.updated_at,
    )
    if not await connection.fetch(SQL["insert_thread"], *arguments):
        found = await connection.fetch(SQL["find_thread"], hex_of(row.thread_id), row.tenant_id)
        if not found or not is_same_thread(thread_of(found[0]), row):
            raise Conflict("the thread exists")
        return None
    if row.metadata:
        tags = [digest_out(tag) for tag in sorted(tags_of(row.metadata))]
        thread = hex_of(row.thread_id)
        await connection.execute(SQL["insert_thread_tag"], thread, row.tenant_id, tags)
    if base is not None and source is not None:
        if base.base_position > source.last_position:
            raise Invalid("the thread has not come to this position", field="/position")
        await insert_base(connection, base, now)
    return None


async def insert_base(
    connection: Connection, base: ThreadBase, clock: datetime | None
) -> ThreadBase:
    """Write what a thread says of another one; return it with its time."""
    (row,) = await connection.fetch(
        SQL["insert_thread_base"],
        hex_of(base.thread_id),
        hex_of(base.base_thread_id),
        id_out(base.run_id),
        clock,
        base.from_position,
        base.base_position,
        base.kind,
        base.author.encode(),
    )
    if base.kind is BaseKind.FORK:
        place = (base.thread_id, base.base_thread_id, base.base_position)
        await connection.execute(SQL["copy_state_values"], *place)
    return replace(base, created_at=row["created_at"])


async def _lock(
    connection: Connection, tenant_id: str, thread_ids: list[str], clock: datetime | None
) -> list[ThreadRow]:
    """Lock threads of the tenant and return them in the order asked for. Raises NotFound, Gone."""
    found = await connection.fetch(
        SQL["lock_threads"], [hex_of(thread_id) for thread_id in thread_ids], clock
    )
    threads = {thread.thread_id: thread for thread in map(thread_of, found)}
    for thread_id in thread_ids:
        thread = threads.get(thread_id)
        if thread is None or thread.tenant_id != tenant_id:
            raise NotFound("no such thread")
        if thread.deleted_at is not None:
            raise Gone("the thread was deleted")
    return [threads[thread_id] for thread_id in thread_ids]


async def adopt_branch(
    connection: Connection,
    tenant_id: str,
    thread_id: str,
    branch_id: str,
    author: str,
    clock: datetime | None,
) -> ThreadBase:
    """Let a thread say what a branch of it says."""
    thread, branch = await _lock(connection, tenant_id, [thread_id, branch_id], clock)
    bases = [
        [base_of(row) for row in await connection.fetch(SQL["thread_bases"], hex_of(one))]
        for one in (thread_id, branch_id)
    ]
    known = check_adoption(thread, branch, *bases)
    if known is not None:
        return known
    base = adopted_base(thread, branch, author, thread.updated_at)
    base = await insert_base(connection, base, clock)
    await connection.execute(SQL["set_last_position"], hex_of(thread_id), base.from_position, clock)
    await connection.execute(SQL["adopt_artifacts"], hex_of(branch_id))
    await state_values.adopt(connection, base, bases[1], tenant_id)
    return base


async def delete_thread(
    connection: Connection, tenant_id: str, thread_id: str, clock: datetime | None
) -> bool:
    """Leave the tombstone of a thread."""
    thread = hex_of(thread_id)
    rows = await connection.fetch(SQL["lock_threads"], [thread], clock)
    if not rows or rows[0]["tenant_id"] != tenant_id:
        raise NotFound("no such thread")
    found = thread_of(rows[0])
    if found.deleted_at is not None:
        return False
    busy = await connection.fetch(SQL["find_unfinished_run"], thread)
    if busy:
        raise ThreadBusy(
            "a run of the thread, or one above it, has not ended",
            details={"run_id": id_in(RUN, busy[0]["run_id"])},
        )
    if found.metadata:
        tags = [digest_out(tag) for tag in sorted(tags_of(found.metadata))]
        await connection.execute(SQL["delete_thread_tags"], tenant_id, tags, thread)
    await connection.execute(SQL["bury_thread"], thread, clock, encode({}), encode([]))
    await connection.execute(SQL["end_subscriptions"], thread)
    await connection.execute(SQL["delete_state_values"], thread_id)
    await _trim(connection, thread)
    return True


async def _trim(connection: Connection, thread: str) -> None:
    """Drop what a deleted thread says and no branch of it, and then what only it said of others."""
    (row,) = await connection.fetch(SQL["place_needed"], thread)
    needed: int = row["place"] or 0
    await connection.execute(SQL["delete_messages"], thread, needed)
    gone = [
        row
        for name in ("delete_bases", "cut_bases")
        for row in await connection.fetch(SQL[name], thread, needed)
    ]
    await connection.execute(SQL["cut_thread"], thread, needed)
    for base in gone:
        parent = base["base_thread_id"].hex
        if await connection.fetch(SQL["find_deleted"], parent):
            await _trim(connection, parent)


async def expire_deleted(
    connection: Connection,
    thread_id: str | None,
    after: str | None,
    limit: int,
    clock: datetime | None,
) -> Swept:
    """Drop the history of runs of the next deleted threads."""
    only, start = id_out(thread_id), hex_of(after or BEFORE_ALL_THREADS)
    page = [
        row["thread_id"]
        for row in await connection.fetch(SQL["page_of_deleted"], start, only, limit)
    ]
    found = await connection.fetch(SQL["deleted_runs"], page, limit)
    dropped = len(await drop_unshared(connection, [row["run_id"] for row in found], clock))
    names = [f"{THREAD}_{thread.hex}" for thread in page]
    return Swept(runs=dropped, after=place_after(names, after, dropped, limit))


async def append_message(
    connection: Connection, message: MessageRow, key: RequestKey | None, now: datetime | None
) -> MessageRow | Replayed:
    """Append a message that belongs to no run; its position and time are given here."""
    tenant_id = message.tenant_id
    known = await _take_key(connection, tenant_id, key, message.message_id, now)
    if known is not None:
        return known
    thread, identity = hex_of(message.thread_id), hex_of(message.message_id)
    rows = await connection.fetch(SQL["find_message"], identity, None)
    if rows:
        found = message_of(rows[0])
        if not is_same_message(found, message):
            raise Conflict("the message exists")
        return found
    await _lock(connection, tenant_id, [message.thread_id], now)
    rows = await connection.fetch(SQL["next_position"], thread, tenant_id, now)
    position: int = rows[0]["last_position"]
    author, body = message.author.encode(), encode(message.body)
    written = (identity, now, position, tenant_id, message.role, author, body)
    (row,) = await connection.fetch(SQL["insert_message"], thread, *written)
    return replace(message, position=position, created_at=row["created_at"])


async def _take_key(
    connection: Connection,
    tenant_id: str,
    key: RequestKey | None,
    object_id: str,
    now: datetime | None,
) -> Replayed | None:
    """Record that an object stands under a key, or return another that does."""
    if key is None:
        return None
    place = (tenant_id, key.scope, text_out(key.key))
    mine = (hex_of(object_id), now, *place, digest_out(key.fingerprint))
    if await connection.fetch(SQL["insert_request_key"], *mine):
        return None
    (known,) = await connection.fetch(SQL["find_request_key"], *place)
    if known["object_id"].hex == hex_of(object_id):
        return None
    prefix = object_id.partition("_")[0]
    return Replayed(
        object_id=f"{prefix}_{known['object_id'].hex}",
        fingerprint=digest_in(known["fingerprint"]),
    )
