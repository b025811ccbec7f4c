"""Who subscribes to the topics of a thread (R-4.8)."""

import re
from dataclasses import dataclass

from perdure.protocol.errors import Invalid, NotFound
from perdure.protocol.ids import THREAD
from perdure.protocol.records import ThreadRow
from perdure.protocol.topics import TOPIC_PATTERN, SubscriptionRow, SubscriptionTerms
from perdure.service.base import Service, check_storable
from perdure.service.principal import Principal
from perdure.service.threads import own_thread
from perdure.service.views import SubscriptionView


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscribed:
    """The subscription as it stands; `created` False when it was there and got new terms."""

    subscription: SubscriptionView
    created: bool


async def subscribe(
    service: Service,
    principal: Principal,
    thread_id: str,
    topic: str,
    agent_id: str,
    terms: SubscriptionTerms,
) -> Subscribed:
    """Subscribe an agent to a topic of a thread, or give its subscription new terms.

    Its runs are the principal's. Raises NotFound (thread, or an agent or version that is not
    registered), Conflict when the thread has as many subscriptions as it may.
    """
    await own_thread(service, principal, thread_id)
    _check(topic, agent_id)
    if await service.core.directory.find(agent_id, terms.agent_version) is None:
        raise NotFound("there is no such agent of that version", field="agent_id")
    now = service.core.clock.now()
    inbox = service.core.ids.new(THREAD)
    row = SubscriptionRow(
        tenant_id=principal.tenant_id,
        thread_id=thread_id,
        topic=topic,
        agent_id=agent_id,
        inbox_thread_id=inbox,
        terms=terms,
        caller=principal.as_caller(),
        created_at=now,
    )
    thread = ThreadRow(
        thread_id=inbox,
        tenant_id=principal.tenant_id,
        title=f"{agent_id} on {topic}",
        metadata={"topic": topic, "thread_id": thread_id},
        participants=[],
        capabilities=[],
        active_run_id=None,
        last_position=0,
        created_at=now,
        updated_at=now,
    )
    made = await service.core.store.put_subscription(row, thread)
    return Subscribed(subscription=_view(made), created=made.inbox_thread_id == inbox)


async def unsubscribe(
    service: Service, principal: Principal, thread_id: str, topic: str, agent_id: str
) -> None:
    """End a subscription; what was delivered is carried out. It may be ended already.

    Raises NotFound for the thread.
    """
    await own_thread(service, principal, thread_id)
    _check(topic, agent_id)
    await service.core.store.delete_subscription(principal.tenant_id, thread_id, topic, agent_id)


async def list_subscriptions(
    service: Service, principal: Principal, thread_id: str, *, topic: str | None = None
) -> list[SubscriptionView]:
    """Return the subscriptions to a thread, by topic and agent. Raises NotFound."""
    await own_thread(service, principal, thread_id)
    rows = await service.reader.list_subscriptions(principal.tenant_id, thread_id, topic)
    return [_view(row) for row in rows]


def _check(topic: str, agent_id: str) -> None:
    if re.fullmatch(TOPIC_PATTERN, topic) is None:
        raise Invalid("a topic is 1 to 200 letters, digits and . _ : -", field="topic")
    check_storable(agent_id, "agent_id")


def _view(row: SubscriptionRow) -> SubscriptionView:
    return SubscriptionView(
        thread_id=row.thread_id,
        tenant_id=row.tenant_id,
        topic=row.topic,
        agent_id=row.agent_id,
        inbox_thread_id=row.inbox_thread_id,
        terms=row.terms,
        created_by=row.caller.principal,
        created_at=row.created_at,
    )
