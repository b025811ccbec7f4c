"""What `insert_run` promises: a run with all that belongs to it, and one run for one key."""

from dataclasses import replace
from datetime import timedelta

import anyio
import pytest

from perdure.protocol import ids
from perdure.protocol.errors import Conflict, NotFound
from perdure.protocol.events import Origin, StateEvent
from perdure.protocol.log import NewEvent
from perdure.protocol.messages import Role
from perdure.protocol.states import ParkedOn, RunState
from perdure.store.ports import Store
from perdure.store.reader import Reader, RunFilter
from perdure.store.requests import DueTimer, Inserted, NewBlob, NewRun, TimerKind
from perdure.testing.builders import (
    finish,
    look,
    new_id,
    new_run,
    new_thread,
    want,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history


class InsertContract(Contract):
    """Creating runs."""

    async def test_a_new_run_is_pending_and_claimable(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run()
        inserted = await store.insert_run(new)
        hot = inserted.row.hot
        assert inserted.created
        assert inserted.fingerprint == new.fingerprint
        assert (hot.state, hot.last_seq, hot.attempt, hot.faults) == (RunState.PENDING, 1, 0, 0)
        assert (hot.lease_owner, hot.lease_token, hot.lease_expires_at) == (None, 0, None)
        assert (hot.parked_on, hot.wake_at, hot.cancel_epoch) == (None, None, 0)
        assert (hot.started_at, hot.finished_at, hot.updated_at) == (None, None, clock())
        assert await reader.is_ready(new.run_id)
        assert await look(reader, new.run_id) == inserted.row

    async def test_a_delayed_run_is_claimable_from_its_time_on(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-3.4, R-12.7: parked on a timer with an entry in `ready`; claimed once."""
        at = clock() + timedelta(seconds=60)
        new, past = new_run(start_at=at), new_run(start_at=clock() - timedelta(seconds=1))
        hot = (await store.insert_run(new)).row.hot
        assert (hot.state, hot.parked_on, hot.wake_at) == (RunState.PENDING, ParkedOn.TIMER, at)
        assert await reader.is_ready(new.run_id)
        assert (await look(reader, new.run_id)).hot == hot
        hot = (await store.insert_run(past)).row.hot
        assert (hot.parked_on, hot.wake_at) == (None, None)
        assert [one.row.facts.run_id for one in await store.claim_runs(want())] == [past.run_id]
        clock.advance(59.9)
        assert await store.claim_runs(want()) == []
        clock.advance(0.1)
        (held,) = await store.claim_runs(want())
        assert held.row.facts.run_id == new.run_id
        assert (held.row.hot.parked_on, held.row.hot.wake_at) == (None, None)
        assert await store.claim_runs(want()) == []

    async def test_delayed_runs_that_are_inserted_at_once_keep_their_times(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """Runs that travel to the database together are each what they are alone."""
        delays = (0, 60, 0, 120)
        runs = [new_run(start_at=clock() + timedelta(seconds=s) if s else None) for s in delays]
        async with anyio.create_task_group() as group:
            for new in runs:
                group.start_soon(store.insert_run, new)
        for new in runs:
            hot = (await look(reader, new.run_id)).hot
            waits = None if new.start_at is None else ParkedOn.TIMER
            assert (hot.parked_on, hot.wake_at) == (waits, new.start_at)
            assert await reader.is_ready(new.run_id)
        assert len(await store.claim_runs(want())) == 2

    async def test_the_facts_of_a_run_are_kept_as_they_were_given(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run(input={"task": ["a", 1, None]}, key="k-1", max_attempts=7, run_s=60.0)
        facts = (await store.insert_run(new)).row.facts
        assert (facts.run_id, facts.tenant_id) == (new.run_id, new.tenant_id)
        assert (facts.agent_id, facts.agent_version) == (new.agent_id, new.agent_version)
        assert (facts.thread_id, facts.root_run_id) == (new.thread_id, new.run_id)
        assert (facts.parent_run_id, facts.retry_of) == (None, None)
        assert (facts.input, facts.context, facts.options) == (new.input, new.context, new.options)
        assert (facts.caller, facts.trace_id) == (new.caller, new.trace_id)
        assert (facts.created_at, facts.required_runtime) == (clock(), new.required_runtime)
        assert (await look(reader, new.run_id)).facts == facts

    async def test_a_run_keeps_whose_history_it_shares(self, store: Store, reader: Reader) -> None:
        failed = new_run()
        await store.insert_run(failed)
        event = NewEvent(
            data=StateEvent(
                state=RunState.PENDING,
                origin=Origin(run_id=failed.run_id, seq=1, mode="retry", by="local"),
            ),
            step_index=4,
        )
        new = replace(
            new_run(thread_id=failed.thread_id),
            event=event,
            retry_of=failed.run_id,
            forked_from=failed.run_id,
            origin_run_id=failed.run_id,
            origin_seq=1,
        )
        row = (await store.insert_run(new)).row
        assert row == await look(reader, new.run_id)
        assert (row.facts.retry_of, row.facts.forked_from) == (failed.run_id, failed.run_id)
        assert (row.facts.origin_run_id, row.facts.origin_seq) == (failed.run_id, 1)
        assert row.hot.step_index == 4
        [first] = await history(reader, new.run_id)
        assert first.data == event.data

    async def test_the_first_event_is_the_given_one(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        [first] = await history(reader, new.run_id)
        assert (first.seq, first.at, first.attempt, first.epoch) == (1, clock(), 0, 0)
        assert (first.type, first.step_index, first.run_id) == ("state", 0, new.run_id)
        assert first.data == StateEvent(state=RunState.PENDING)
        assert first.raw == new.event.encoded()

    async def test_the_input_is_the_first_message_of_a_thread_of_its_own(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        [message] = await reader.list_messages(new.thread_id, after=0, limit=10)
        assert (message.message_id, message.position) == (new.message_id, 1)
        assert (message.run_id, message.seq, message.body) == (new.run_id, None, None)
        assert (message.role, message.author) == (Role.USER, new.caller.principal)
        assert (message.tenant_id, message.created_at) == (new.tenant_id, clock())
        thread = await reader.find_thread(new.tenant_id, new.thread_id)
        assert thread is not None
        assert (thread.active_run_id, thread.last_position) == (new.run_id, 1)
        assert (thread.title, thread.metadata, thread.created_at) == ("", {}, clock())

    async def test_its_blobs_are_kept_under_the_tenant(self, store: Store, reader: Reader) -> None:
        blob = NewBlob(digest="d" * 64, media_type="text/plain", data=b"\x00bytes\xff")
        new = new_run(blobs=(blob,))
        await store.insert_run(new)
        assert await reader.read_blob(new.tenant_id, blob.digest) == blob.data
        assert await reader.read_blob("another", blob.digest) is None

    async def test_a_total_time_sets_the_deadline_and_its_timer(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run(run_s=60.0)
        row = (await store.insert_run(new)).row
        assert row.hot.deadline_at is not None
        assert (row.hot.deadline_at - clock()).total_seconds() == 60.0
        expected = DueTimer(run_id=new.run_id, kind=TimerKind.DEADLINE, ref=None)
        assert await reader.timers_of(new.run_id) == [expected]

    async def test_a_run_without_a_total_time_has_no_timer(
        self, store: Store, reader: Reader
    ) -> None:
        new = new_run()
        row = (await store.insert_run(new)).row
        assert row.hot.deadline_at is None
        assert await reader.timers_of(new.run_id) == []

    async def test_an_unknown_thread_is_not_found(self, store: Store, reader: Reader) -> None:
        new = new_run(thread_id=new_id(ids.THREAD))
        with pytest.raises(NotFound):
            await store.insert_run(new)
        assert await reader.find_run(None, new.run_id) is None

    async def test_a_thread_of_another_tenant_is_not_found(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread(tenant_id="another")
        await store.create_thread(thread)
        new = new_run(thread_id=thread.thread_id)
        with pytest.raises(NotFound):
            await store.insert_run(new)
        assert await reader.find_run(None, new.run_id) is None
        assert await reader.list_messages(thread.thread_id, after=0, limit=10) == []

    async def test_a_thread_cannot_be_made_twice(self, store: Store, reader: Reader) -> None:
        first = new_run()
        await store.insert_run(first)
        second = replace(new_run(), thread_id=first.thread_id)
        with pytest.raises(Conflict):
            await store.insert_run(second)
        assert await reader.find_run(None, second.run_id) is None


class IdempotencyContract(Contract):
    """One key, one run."""

    async def test_the_same_key_returns_the_first_run_and_writes_nothing(
        self, store: Store, reader: Reader
    ) -> None:
        first, second = new_run(key="k"), new_run(key="k", fingerprint="print-b")
        one, two = await store.insert_run(first), await store.insert_run(second)
        assert (two.created, two.fingerprint) == (False, "print-a")
        assert two.row == one.row
        assert await reader.find_run(None, second.run_id) is None
        assert await reader.find_thread(second.tenant_id, second.thread_id) is None
        assert await reader.list_messages(second.thread_id, after=0, limit=10) == []

    async def test_the_run_is_returned_as_it_stands_now(self, store: Store, reader: Reader) -> None:
        """R-3.2, decision 34."""
        first = new_run(key="k")
        await store.insert_run(first)
        row = await finish(store, reader, first.run_id)
        again = await store.insert_run(new_run(key="k"))
        assert again.row == row
        assert not again.created

    async def test_the_key_wins_over_a_busy_or_unknown_thread(self, store: Store) -> None:
        first = new_run(key="k")
        await store.insert_run(first)
        busy = new_run(key="k", thread_id=first.thread_id, strategy="reject")
        unknown = new_run(key="k", thread_id=new_id(ids.THREAD))
        assert (await store.insert_run(busy)).row.facts.run_id == first.run_id
        assert (await store.insert_run(unknown)).row.facts.run_id == first.run_id

    @pytest.mark.parametrize(
        "other",
        [
            new_run(key="k", tenant_id="another"),
            new_run(key="k", agent_id="other-agent"),
            new_run(key="K"),
            new_run(),
        ],
        ids=["tenant", "agent", "key", "none"],
    )
    async def test_a_key_is_of_one_tenant_and_agent(self, store: Store, other: NewRun) -> None:
        await store.insert_run(new_run(key="k"))
        found = await store.insert_run(other)
        assert found.created
        assert found.row.facts.run_id == other.run_id

    async def test_runs_without_a_key_are_never_the_same(self, store: Store) -> None:
        found = [await store.insert_run(new_run()) for _ in range(3)]
        assert len({inserted.row.facts.run_id for inserted in found}) == 3

    async def test_a_call_sent_again_finds_its_own_run(self, store: Store, reader: Reader) -> None:
        new = new_run()
        first, again = await store.insert_run(new), await store.insert_run(new)
        assert not again.created
        assert again.row == first.row
        assert len(await history(reader, new.run_id)) == 1

    async def test_fifty_calls_at_once_with_one_key_make_one_run(
        self, store: Store, reader: Reader
    ) -> None:
        """R-3.2."""
        found: list[Inserted] = []

        async def ask() -> None:
            found.append(await store.insert_run(new_run(key="k")))

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for _ in range(50):
                    group.start_soon(ask)
        assert len({inserted.row.facts.run_id for inserted in found}) == 1
        assert sum(inserted.created for inserted in found) == 1
        assert len(await reader.list_runs(None, RunFilter(), after=None, limit=100)) == 1
        assert len(await reader.list_threads("default", after=None, limit=100)) == 1
