"""Threads and messages that callers make, once per idempotency key.

The key is taken first: a second request under it waits for the first one's transaction, and then
finds what stands under it. A call that is sent again because its answer was lost finds its own.
"""

from dataclasses import replace
from datetime import datetime

from perdure.protocol.codec import encode
from perdure.protocol.errors import Conflict, NotFound
from perdure.protocol.ids import hex_of
from perdure.protocol.records import MessageRow, ThreadRow
from perdure.store.commits import Replayed, RequestKey
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.rows import message_of, thread_of
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import digest_in, digest_out, id_out, text_out
from perdure.store.rules import is_same_message, is_same_thread


async def create_thread(
    connection: Connection, row: ThreadRow, key: RequestKey | None, now: datetime | None
) -> Replayed | None:
    """Create a thread, unless its id or its key exists."""
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
    rows = await connection.fetch(SQL["next_position"], thread, tenant_id, now)
    if not rows:
        raise NotFound("no such thread")
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
