"""Runs of one thread: their turns, strategies on a busy thread, and messages of no run."""

from dataclasses import replace
from datetime import timedelta

import anyio
import pytest
from pydantic import JsonValue

from perdure.protocol import ids
from perdure.protocol.errors import Conflict, NotFound, ThreadBusy
from perdure.protocol.events import CancelEvent, StateEvent
from perdure.protocol.messages import Role
from perdure.protocol.states import CancelAction, ParkedOn, RunState
from perdure.store.commits import CancelRequested
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import Inserted, NewRun
from perdure.testing.builders import (
    FAILED,
    SUCCEEDED,
    TO_EXECUTING,
    advanced,
    append,
    claimed,
    commit_of,
    finish,
    lease_of,
    look,
    new_id,
    new_run,
    new_thread,
    want,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history


class ThreadContract(Contract):
    """Runs of one thread take turns; threads and their messages."""

    async def test_a_second_run_of_a_thread_waits_for_the_first(
        self, store: Store, reader: Reader
    ) -> None:
        """CON-05: `enqueue`."""
        first = new_run()
        await store.insert_run(first)
        second = new_run(thread_id=first.thread_id)
        row = (await store.insert_run(second)).row
        assert (row.hot.state, row.hot.parked_on) == (RunState.PENDING, ParkedOn.THREAD)
        assert not await reader.is_ready(second.run_id)
        thread = await reader.find_thread(first.tenant_id, first.thread_id)
        assert thread is not None
        assert (thread.active_run_id, thread.last_position) == (first.run_id, 2)

    async def test_the_next_run_becomes_claimable_when_the_first_ends(
        self, store: Store, reader: Reader
    ) -> None:
        first = new_run()
        await store.insert_run(first)
        second, third = (new_run(thread_id=first.thread_id) for _ in range(2))
        await store.insert_run(second)
        await store.insert_run(third)
        await finish(store, reader, first.run_id)
        assert await reader.is_ready(second.run_id)
        assert not await reader.is_ready(third.run_id)
        assert (await look(reader, second.run_id)).hot.parked_on is None
        assert (await look(reader, third.run_id)).hot.parked_on is ParkedOn.THREAD
        thread = await reader.find_thread(first.tenant_id, first.thread_id)
        assert thread is not None
        assert thread.active_run_id == second.run_id

    async def test_a_delayed_run_of_a_thread_waits_for_its_turn_and_for_its_time(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-3.4: its time is kept while it queues, and it leaves the queue only with its turn."""
        first = new_run()
        await store.insert_run(first)
        at = clock() + timedelta(seconds=60)
        late, later = (new_run(thread_id=first.thread_id, start_at=at) for _ in range(2))
        for new in (late, later):
            hot = (await store.insert_run(new)).row.hot
            assert (hot.parked_on, hot.wake_at) == (ParkedOn.THREAD, at)
            assert not await reader.is_ready(new.run_id)
        await finish(store, reader, first.run_id)
        hot = (await look(reader, late.run_id)).hot
        assert (hot.parked_on, hot.wake_at) == (ParkedOn.TIMER, at)
        assert await reader.is_ready(late.run_id)
        assert await store.claim_runs(want()) == []
        clock.advance(61)
        (held,) = await store.claim_runs(want())
        assert held.row.facts.run_id == late.run_id
        await store.release_runs(held.row.hot.lease_owner or "", [lease_of(held)])
        await finish(store, reader, late.run_id)
        hot = (await look(reader, later.run_id)).hot
        assert (hot.parked_on, hot.wake_at) == (None, None)
        assert [one.row.facts.run_id for one in await store.claim_runs(want())] == [later.run_id]

    async def test_a_thread_without_unfinished_runs_is_free(
        self, store: Store, reader: Reader
    ) -> None:
        first = new_run()
        await store.insert_run(first)
        await finish(store, reader, first.run_id)
        thread = await reader.find_thread(first.tenant_id, first.thread_id)
        assert thread is not None
        assert thread.active_run_id is None
        next_run = new_run(thread_id=first.thread_id, strategy="reject")
        assert (await store.insert_run(next_run)).row.hot.parked_on is None
        assert await reader.is_ready(next_run.run_id)

    async def test_reject_raises_thread_busy_and_writes_nothing(
        self, store: Store, reader: Reader
    ) -> None:
        """R-3.4, CON-05: `reject`."""
        first = new_run()
        await store.insert_run(first)
        second = new_run(thread_id=first.thread_id, strategy="reject")
        with pytest.raises(ThreadBusy):
            await store.insert_run(second)
        assert await reader.find_run(None, second.run_id) is None
        messages = await reader.list_messages(first.thread_id, after=0, limit=10)
        assert [message.run_id for message in messages] == [first.run_id]

    @pytest.mark.parametrize("action", list(CancelAction))
    async def test_a_run_that_supersedes_cancels_the_active_run_and_nothing_else(
        self, store: Store, reader: Reader, action: CancelAction
    ) -> None:
        """R-11.1, CON-05: in the same transaction; what waits keeps its place before it."""
        first = new_run()
        await store.insert_run(first)
        waits = new_run(thread_id=first.thread_id)
        await store.insert_run(waits)
        new = new_run(thread_id=first.thread_id, key="k", strategy=action)
        inserted = await store.insert_run(new)
        assert (inserted.superseded, inserted.row.hot.parked_on) == (
            first.run_id,
            ParkedOn.THREAD,
        )
        assert inserted.row == await look(reader, new.run_id)
        hot = (await look(reader, first.run_id)).hot
        assert (hot.cancel_action, hot.cancel_epoch) == (action, 1)
        assert hot.parked_on is ParkedOn.CLOSING
        log = await history(reader, first.run_id)
        assert log[-1].data == CancelEvent(
            action=action,
            epoch=1,
            by="local",
            source="thread",
            reason=f"superseded by {new.run_id}",
        )
        (event,) = await history(reader, new.run_id)
        assert isinstance(event.data, StateEvent)
        assert event.data.supersedes == first.run_id
        again = await store.insert_run(replace(new, run_id=new_id(ids.RUN)))
        assert (again.created, again.superseded) == (False, None)
        assert (await look(reader, first.run_id)).hot == hot
        later = new_run(thread_id=first.thread_id, strategy="interrupt")
        assert (await store.insert_run(later)).superseded is None
        assert (await look(reader, first.run_id)).hot == hot
        row = await look(reader, first.run_id)
        await advanced(store, reader, commit_of(row, path=(FAILED,)))
        for one in (waits, new, later):
            assert (await look(reader, one.run_id)).hot.cancel_epoch == 0
            assert await reader.is_ready(one.run_id)
            await finish(store, reader, one.run_id)

    async def test_a_held_run_is_superseded_with_what_is_below_it(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1, R-9.5: the holder meets the new epoch, and the children have theirs."""
        parent = (await claimed(store)).row
        child = replace(
            new_run(), parent_run_id=parent.facts.run_id, root_run_id=parent.facts.run_id, depth=1
        )
        commit = commit_of(parent, path=TO_EXECUTING)
        hot = replace(commit.hot, open_children=1)
        parent = await advanced(store, reader, replace(commit, new_children=(child,), hot=hot))
        new = new_run(thread_id=parent.facts.thread_id, strategy="rollback")
        assert (await store.insert_run(new)).superseded == parent.facts.run_id
        [refused] = await store.commit([commit_of(parent, path=(SUCCEEDED,))])
        assert refused == CancelRequested(epoch=1)
        below = (await look(reader, child.run_id)).hot
        assert (below.cancel_action, below.parked_on) == (
            CancelAction.ROLLBACK,
            ParkedOn.CLOSING,
        )

    async def test_a_run_supersedes_nothing_on_a_free_or_foreign_thread(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1."""
        alone = new_run(strategy="interrupt")
        assert (await store.insert_run(alone)).superseded is None
        assert await reader.is_ready(alone.run_id)
        theirs = new_run(tenant_id="other", thread_id=alone.thread_id, strategy="interrupt")
        with pytest.raises(NotFound):
            await store.insert_run(theirs)
        assert (await look(reader, alone.run_id)).hot.cancel_epoch == 0
        await finish(store, reader, alone.run_id)
        after = new_run(thread_id=alone.thread_id, strategy="interrupt")
        assert (await store.insert_run(after)).superseded is None
        assert await reader.is_ready(after.run_id)

    async def test_runs_that_supersede_at_once_cancel_each_active_run_at_most_once(
        self, store: Store, reader: Reader
    ) -> None:
        """CON-05: while the runs before them end; nothing is lost and nothing overlaps."""
        first = new_run()
        await store.insert_run(first)
        new = [new_run(thread_id=first.thread_id, strategy="interrupt") for _ in range(6)]
        answers: list[Inserted] = []

        async def insert(one: NewRun) -> None:
            answers.append(await store.insert_run(one))

        async def end() -> None:
            row = await look(reader, first.run_id)
            while row.hot.state is not FAILED:
                await store.commit([commit_of(row, path=(FAILED,))])
                row = await look(reader, first.run_id)

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for place, one in enumerate(new):
                    group.start_soon(insert, one)
                    if place == 2:
                        group.start_soon(end)
        named = [answer.superseded for answer in answers if answer.superseded is not None]
        assert len(named) == len(set(named))
        for run_id in (first.run_id, *(one.run_id for one in new)):
            hot = (await look(reader, run_id)).hot
            assert hot.cancel_epoch == (1 if run_id in named else 0)
        ready = [one.run_id for one in new if await reader.is_ready(one.run_id)]
        assert len(ready) <= 1

    async def test_runs_started_at_once_on_one_thread_never_overlap(
        self, store: Store, reader: Reader
    ) -> None:
        """CON-05: however close they come."""
        thread = new_thread()
        await store.create_thread(thread)
        new = [new_run(thread_id=thread.thread_id) for _ in range(8)]
        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for one in new:
                    group.start_soon(store.insert_run, one)
        done: list[str] = []
        while len(done) < len(new):
            ready = [one.run_id for one in new if await reader.is_ready(one.run_id)]
            assert len(ready) == 1
            done += ready
            await finish(store, reader, ready[0])
        messages = await reader.list_messages(thread.thread_id, after=0, limit=100)
        assert [message.position for message in messages] == list(range(1, 9))
        assert [message.run_id for message in messages] == done

    async def test_a_thread_is_kept_as_it_was_given(self, store: Store, reader: Reader) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        assert await reader.find_thread(thread.tenant_id, thread.thread_id) == thread
        assert await reader.find_thread("another", thread.thread_id) is None

    async def test_a_thread_id_is_taken_once(self, store: Store, reader: Reader) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        with pytest.raises(Conflict):
            await store.create_thread(replace(thread, title="another"))
        assert await reader.find_thread(thread.tenant_id, thread.thread_id) == thread

    async def test_a_message_of_no_run_is_appended_with_its_body(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        clock.advance(5)
        body: JsonValue = [{"type": "text", "text": "hello"}]
        message = await append(store, new.thread_id, body, role=Role.SYSTEM, author="operator")
        assert (message.position, message.run_id, message.seq) == (2, None, None)
        assert (message.role, message.author, message.created_at) == (
            Role.SYSTEM,
            "operator",
            clock(),
        )
        assert message.body == [{"type": "text", "text": "hello"}]
        found = await reader.list_messages(new.thread_id, after=1, limit=10)
        assert found == [message]
        thread = await reader.find_thread(new.tenant_id, new.thread_id)
        assert thread is not None
        assert (thread.last_position, thread.updated_at) == (2, clock())

    async def test_a_message_to_an_unknown_thread_is_not_found(self, store: Store) -> None:
        thread = new_thread(tenant_id="another")
        await store.create_thread(thread)
        for thread_id in (thread.thread_id, new_id(ids.THREAD)):
            with pytest.raises(NotFound):
                await append(store, thread_id)
