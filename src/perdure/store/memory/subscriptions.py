"""Who subscribes to what, in the memory store."""

from dataclasses import replace

from perdure.protocol.errors import Conflict
from perdure.protocol.records import ThreadRow
from perdure.protocol.topics import SUBSCRIPTIONS_MAX, SubscriptionRow
from perdure.store.memory.tables import Tables
from perdure.store.memory.threads import find_live


def put(tables: Tables, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
    """Make a subscription with its inbox, or give the one that is there new terms."""
    find_live(tables, row.tenant_id, row.thread_id)
    key = (row.thread_id, row.topic, row.agent_id)
    known = tables.subscriptions.get(key)
    if known is not None:
        row = replace(known, terms=row.terms, caller=row.caller)
    else:
        if sum(one[0] == row.thread_id for one in tables.subscriptions) >= SUBSCRIPTIONS_MAX:
            raise Conflict(f"a thread has at most {SUBSCRIPTIONS_MAX} subscriptions")
        tables.threads[inbox.thread_id] = inbox
    tables.subscriptions[key] = row
    return row


def remove(tables: Tables, tenant_id: str, key: tuple[str, str, str]) -> bool:
    """Take a subscription away; False when there is none."""
    known = tables.subscriptions.get(key)
    if known is None or known.tenant_id != tenant_id:
        return False
    del tables.subscriptions[key]
    return True


def listed(
    tables: Tables, tenant_id: str, thread_id: str, topic: str | None
) -> list[SubscriptionRow]:
    """Return a thread's subscriptions by topic and agent."""
    return [
        row
        for key, row in sorted(tables.subscriptions.items())
        if (row.tenant_id, row.thread_id) == (tenant_id, thread_id) and topic in {None, key[1]}
    ]
