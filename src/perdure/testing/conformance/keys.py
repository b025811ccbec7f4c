"""Idempotency keys of threads and messages: one object for one key (R-3.2)."""

from dataclasses import replace

import anyio
import pytest
from pydantic import JsonValue

from perdure.protocol import ids
from perdure.protocol.errors import Conflict, NotFound
from perdure.protocol.messages import Role
from perdure.protocol.records import MessageRow
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import Replayed, RequestKey
from perdure.testing.builders import append, new_id, new_thread
from perdure.testing.conformance.base import Contract

THREADS = "threads"
AT_ONCE = 20


def key_of(text: str = "k-1", *, scope: str = THREADS, fingerprint: str = "a" * 64) -> RequestKey:
    """Return a key."""
    return RequestKey(scope=scope, key=text, fingerprint=fingerprint)


async def send(
    store: Store,
    thread_id: str,
    key: RequestKey,
    *,
    message_id: str | None = None,
    body: JsonValue = "hello",
) -> MessageRow | Replayed:
    """Append a message under a key."""
    return await store.append_message(
        tenant_id="default",
        thread_id=thread_id,
        message_id=message_id or new_id(ids.MESSAGE),
        role=Role.USER,
        author="local",
        body=body,
        key=key,
    )


class RequestKeyContract(Contract):
    """Threads and messages under the keys of their requests."""

    async def test_a_key_makes_one_thread_and_keeps_the_first_fingerprint(
        self, store: Store, reader: Reader
    ) -> None:
        first, second = new_thread(), new_thread()
        assert await store.create_thread(first, key_of()) is None
        found = await store.create_thread(second, key_of(fingerprint="another"))
        assert found == Replayed(object_id=first.thread_id, fingerprint="a" * 64)
        assert await reader.find_thread("default", second.thread_id) is None

    async def test_threads_asked_for_at_once_under_one_key_are_one(
        self, store: Store, reader: Reader
    ) -> None:
        found: list[str] = []

        async def create() -> None:
            thread = new_thread()
            known = await store.create_thread(thread, key_of())
            found.append(thread.thread_id if known is None else known.object_id)

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for _ in range(AT_ONCE):
                    group.start_soon(create)
        assert len(found) == AT_ONCE
        threads = await reader.list_threads("default", after=None, limit=AT_ONCE)
        assert {thread.thread_id for thread in threads} == set(found)
        assert len(threads) == 1

    async def test_keys_of_other_tenants_scopes_and_cases_are_others(self, store: Store) -> None:
        keys = [key_of(text) for text in ("k", "K", " k", "k ", "\u1e31", "k\u0301", "a'%\\")]
        keys.append(key_of("k", scope="more"))
        for key in keys:
            assert await store.create_thread(new_thread(), key) is None
            assert await store.create_thread(new_thread(tenant_id="another"), key) is None
            assert await store.create_thread(new_thread(), key) is not None

    async def test_a_key_appends_one_message(self, store: Store, reader: Reader) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        key = key_of(scope=thread.thread_id)
        first = await send(store, thread.thread_id, key)
        assert isinstance(first, MessageRow)
        await append(store, thread.thread_id, "between")
        found = await send(store, thread.thread_id, key_of(scope=key.scope, fingerprint="b"))
        assert found == Replayed(object_id=first.message_id, fingerprint="a" * 64)
        messages = await reader.list_messages(thread.thread_id, after=0, limit=10)
        assert [message.position for message in messages] == [1, 2]
        assert messages[0] == first

    async def test_messages_sent_at_once_under_one_key_are_one(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        made: list[bool] = []

        async def post() -> None:
            key = key_of(scope=thread.thread_id)
            made.append(isinstance(await send(store, thread.thread_id, key), MessageRow))

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for _ in range(AT_ONCE):
                    group.start_soon(post)
        assert sorted(made) == [False] * (AT_ONCE - 1) + [True]
        (message,) = await reader.list_messages(thread.thread_id, after=0, limit=10)
        assert message.position == 1

    async def test_a_refused_request_leaves_its_key_free(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        key = key_of(scope=thread.thread_id)
        with pytest.raises(NotFound):
            await send(store, thread.thread_id, key)
        await store.create_thread(thread)
        message = await send(store, thread.thread_id, key)
        assert isinstance(message, MessageRow)
        taken = replace(thread, title="another")
        with pytest.raises(Conflict):
            await store.create_thread(taken, key_of("free"))
        assert await store.create_thread(new_thread(), key_of("free")) is None
        assert await reader.find_thread("default", thread.thread_id) is not None

    async def test_a_call_that_is_sent_again_is_one_call(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        for key in (None, key_of(), key_of()):
            assert await store.create_thread(thread, key) is None
        message_id = new_id(ids.MESSAGE)
        first = await append(store, thread.thread_id, message_id=message_id)
        assert await append(store, thread.thread_id, message_id=message_id) == first
        for _ in range(2):
            key = key_of(scope=thread.thread_id)
            assert await send(store, thread.thread_id, key, message_id=message_id) == first
        assert await store.create_thread(thread) is None
        assert await reader.list_messages(thread.thread_id, after=0, limit=10) == [first]

    async def test_a_message_id_is_taken_once(self, store: Store, reader: Reader) -> None:
        thread, other = new_thread(), new_thread()
        for one in (thread, other):
            await store.create_thread(one)
        first = await append(store, thread.thread_id)
        for thread_id, body in ((thread.thread_id, "another"), (other.thread_id, "hello")):
            with pytest.raises(Conflict):
                await append(store, thread_id, body, message_id=first.message_id)
        assert await reader.list_messages(thread.thread_id, after=0, limit=10) == [first]
        assert await reader.list_messages(other.thread_id, after=0, limit=10) == []

    async def test_a_message_is_found_by_its_id_in_its_tenant(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        message = await append(store, thread.thread_id, [{"type": "text", "text": "a\0b"}])
        assert await reader.find_message("default", message.message_id) == message
        assert await reader.find_message("another", message.message_id) is None
        assert await reader.find_message("default", new_id(ids.MESSAGE)) is None
