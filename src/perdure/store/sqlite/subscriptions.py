"""Who subscribes to what, in SQLite. Each function is one job of the writer."""

from perdure.protocol.base import from_micros, to_micros
from perdure.protocol.errors import Conflict
from perdure.protocol.records import ThreadRow
from perdure.protocol.runs import Caller
from perdure.protocol.topics import SUBSCRIPTIONS_MAX, SubscriptionRow, SubscriptionTerms
from perdure.store.sqlite.connection import read_row
from perdure.store.sqlite.rows import Row, pack_id
from perdure.store.sqlite.threads import find_live, insert_thread
from perdure.store.sqlite.transaction import Transaction


def put_subscription(tx: Transaction, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
    """Make a subscription with its inbox, or give the one that is there new terms."""
    thread = pack_id(row.thread_id)
    find_live(tx, row.tenant_id, row.thread_id)
    known = tx.all("list_subscriptions", row.tenant_id, thread, None)
    found = next((one for one in known if one[2:4] == (row.topic, row.agent_id)), None)
    if found is None:
        if len(known) >= SUBSCRIPTIONS_MAX:
            raise Conflict(f"a thread has at most {SUBSCRIPTIONS_MAX} subscriptions")
        insert_thread(tx, inbox)
    tx.run(
        "put_subscription",
        thread,
        row.topic,
        row.agent_id,
        row.tenant_id,
        pack_id(row.inbox_thread_id),
        to_micros(row.created_at),
        row.terms.model_dump_json(exclude_defaults=True).encode(),
        row.caller.model_dump_json(exclude_defaults=True).encode(),
    )
    rows = tx.all("list_subscriptions", row.tenant_id, thread, row.topic)
    return next(read_row(read_subscription, one) for one in rows if one[3] == row.agent_id)


def delete_subscription(tx: Transaction, tenant_id: str, key: tuple[str, str, str]) -> bool:
    """Take a subscription away; False when there is none."""
    thread_id, topic, agent_id = key
    return tx.run("delete_subscription", pack_id(thread_id), topic, agent_id, tenant_id) > 0


def read_subscription(row: Row) -> SubscriptionRow:
    """Return a subscription."""
    return SubscriptionRow(
        thread_id=f"thr_{row[0].hex()}",
        tenant_id=row[1],
        topic=row[2],
        agent_id=row[3],
        inbox_thread_id=f"thr_{row[4].hex()}",
        created_at=from_micros(row[5]),
        terms=SubscriptionTerms.model_validate_json(row[6]),
        caller=Caller.model_validate_json(row[7]),
    )
