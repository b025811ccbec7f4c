"""Who subscribes to what, in PostgreSQL."""

from perdure.protocol.errors import Conflict, Gone, NotFound
from perdure.protocol.ids import THREAD, hex_of
from perdure.protocol.records import ThreadRow
from perdure.protocol.runs import Caller
from perdure.protocol.topics import SUBSCRIPTIONS_MAX, SubscriptionRow, SubscriptionTerms
from perdure.store.postgres.driver import Connection, Row
from perdure.store.postgres.rows import readable
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.threads import create_thread
from perdure.store.postgres.wire import id_in, time_in


async def put_subscription(
    connection: Connection, row: SubscriptionRow, inbox: ThreadRow
) -> SubscriptionRow:
    """Make a subscription with its inbox, or give the one that is there new terms.

    The thread's row is locked, so that two at once are one after the other.
    """
    thread = hex_of(row.thread_id)
    locked = await connection.fetch(SQL["lock_thread"], thread)
    if not locked or locked[0]["tenant_id"] != row.tenant_id:
        raise NotFound("no such thread")
    if locked[0]["deleted_at"] is not None:
        raise Gone("the thread was deleted")
    known = await connection.fetch(SQL["list_subscriptions"], row.tenant_id, thread, None)
    if not any((one["topic"], one["agent_id"]) == (row.topic, row.agent_id) for one in known):
        if len(known) >= SUBSCRIPTIONS_MAX:
            raise Conflict(f"a thread has at most {SUBSCRIPTIONS_MAX} subscriptions")
        await create_thread(connection, inbox, None, None, None)
    (made,) = await connection.fetch(
        SQL["put_subscription"],
        thread,
        row.topic,
        row.agent_id,
        row.tenant_id,
        hex_of(row.inbox_thread_id),
        row.created_at,
        row.terms.model_dump_json(exclude_defaults=True).encode(),
        row.caller.model_dump_json(exclude_defaults=True).encode(),
    )
    return subscription_of(made)


async def delete_subscription(
    connection: Connection, tenant_id: str, key: tuple[str, str, str]
) -> bool:
    """Take a subscription away; False when there is none."""
    thread_id, topic, agent_id = key
    where = (hex_of(thread_id), topic, agent_id, tenant_id)
    return bool(await connection.fetch(SQL["delete_subscription"], *where))


@readable
def subscription_of(row: Row) -> SubscriptionRow:
    """Return a subscription."""
    return SubscriptionRow(
        thread_id=id_in(THREAD, row["thread_id"]),
        tenant_id=row["tenant_id"],
        topic=row["topic"],
        agent_id=row["agent_id"],
        inbox_thread_id=id_in(THREAD, row["inbox_thread_id"]),
        created_at=time_in(row["created_at"]),
        terms=SubscriptionTerms.model_validate_json(row["terms"]),
        caller=Caller.model_validate_json(row["caller"]),
    )
