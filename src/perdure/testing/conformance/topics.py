"""What a store promises of subscriptions to the topics of a thread (R-4.8)."""

from dataclasses import replace

import anyio
import pytest

from perdure.protocol import ids
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.errors import Conflict, NotFound
from perdure.protocol.policies import Budget
from perdure.protocol.records import ThreadRow
from perdure.protocol.runs import Caller
from perdure.protocol.topics import SUBSCRIPTIONS_MAX, SubscriptionRow, SubscriptionTerms
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.testing.builders import new_id, new_thread
from perdure.testing.clock import START
from perdure.testing.conformance.base import Contract


def subscription(
    thread_id: str,
    *,
    topic: str = "news",
    agent_id: str = "reader",
    tenant_id: str = TENANT_DEFAULT,
) -> SubscriptionRow:
    """Return a subscription with an inbox of its own."""
    return SubscriptionRow(
        tenant_id=tenant_id,
        thread_id=thread_id,
        topic=topic,
        agent_id=agent_id,
        inbox_thread_id=new_id(ids.THREAD),
        terms=SubscriptionTerms(),
        caller=Caller(tenant_id=tenant_id, principal="ann", roles=("editor",)),
        created_at=START,
    )


def inbox_of(row: SubscriptionRow) -> ThreadRow:
    """Return the thread that is to be a subscription's inbox."""
    return replace(new_thread(), thread_id=row.inbox_thread_id, tenant_id=row.tenant_id)


async def put(store: Store, row: SubscriptionRow) -> SubscriptionRow:
    return await store.put_subscription(row, inbox_of(row))


class SubscriptionContract(Contract):
    """Subscriptions."""

    async def test_a_subscription_and_its_inbox_are_made_together(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        wanted = subscription(thread.thread_id)
        assert await put(store, wanted) == wanted
        assert await reader.list_subscriptions(TENANT_DEFAULT, thread.thread_id) == [wanted]
        inbox = await reader.find_thread(TENANT_DEFAULT, wanted.inbox_thread_id)
        assert inbox is not None
        assert inbox.active_run_id is None

    async def test_the_same_again_gets_new_terms_and_keeps_its_inbox(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        first = await put(store, subscription(thread.thread_id))
        terms = SubscriptionTerms(agent_version="2", budget=Budget(tool_calls=3))
        second = replace(subscription(thread.thread_id), terms=terms)
        assert await put(store, second) == replace(first, terms=terms)
        assert await reader.find_thread(TENANT_DEFAULT, second.inbox_thread_id) is None
        assert len(await reader.list_subscriptions(TENANT_DEFAULT, thread.thread_id)) == 1

    async def test_one_asked_for_many_times_at_once_is_one(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        made: set[str] = set()

        async def ask() -> None:
            made.add((await put(store, subscription(thread.thread_id))).inbox_thread_id)

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(ask)
        [one] = await reader.list_subscriptions(TENANT_DEFAULT, thread.thread_id)
        assert made == {one.inbox_thread_id}

    async def test_they_are_listed_by_topic_and_agent_and_end(
        self, store: Store, reader: Reader
    ) -> None:
        thread, other = new_thread(), new_thread()
        await store.create_thread(thread)
        await store.create_thread(other)
        for topic, agent_id in (("b", "x"), ("a", "z"), ("a", "Y")):
            await put(store, subscription(thread.thread_id, topic=topic, agent_id=agent_id))
        await put(store, subscription(other.thread_id))
        found = await reader.list_subscriptions(TENANT_DEFAULT, thread.thread_id)
        assert [(one.topic, one.agent_id) for one in found] == [("a", "Y"), ("a", "z"), ("b", "x")]
        found = await reader.list_subscriptions(TENANT_DEFAULT, thread.thread_id, "b")
        assert [one.agent_id for one in found] == ["x"]
        assert await reader.list_subscriptions("other", thread.thread_id) == []
        assert not await store.delete_subscription("other", thread.thread_id, "b", "x")
        assert await store.delete_subscription(TENANT_DEFAULT, thread.thread_id, "b", "x")
        assert not await store.delete_subscription(TENANT_DEFAULT, thread.thread_id, "b", "x")
        assert await reader.list_subscriptions(TENANT_DEFAULT, thread.thread_id, "b") == []

    async def test_refused_without_a_thread_and_above_the_limit(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        with pytest.raises(NotFound):
            await put(store, subscription(new_id(ids.THREAD)))
        strange = subscription(thread.thread_id, tenant_id="other")
        with pytest.raises(NotFound):
            await put(store, strange)
        assert await reader.find_thread("other", strange.inbox_thread_id) is None
        for number in range(SUBSCRIPTIONS_MAX):
            await put(store, subscription(thread.thread_id, agent_id=f"a{number}"))
        with pytest.raises(Conflict):
            await put(store, subscription(thread.thread_id, agent_id="one more"))
        await put(store, subscription(thread.thread_id, agent_id="a7"))
