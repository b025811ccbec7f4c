"""What `claim_runs` promises: who gets which run, and what a claim writes."""

from dataclasses import replace

import anyio
import anyio.lowlevel
import pytest

from perdure.protocol.events import AttemptEvent
from perdure.protocol.states import AttemptEnd, RunState
from perdure.store.commits import Commit
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import ClaimWant
from perdure.testing.builders import (
    BACKOFF_S,
    TO_EXECUTING,
    TTL_S,
    WORKER,
    claim_one,
    claimed,
    commit_of,
    finish,
    lease_of,
    look,
    new_run,
    note,
    parked,
    want,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history, types_of


async def last_attempt_event(reader: Reader, run_id: str) -> AttemptEvent:
    """Return the last event of a run, which must be of an attempt."""
    data = (await history(reader, run_id))[-1].data
    assert isinstance(data, AttemptEvent)
    return data


class ClaimContract(Contract):
    """Taking runs."""

    async def test_a_claim_makes_the_worker_the_holder(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-12.1."""
        new = new_run()
        await store.insert_run(new)
        clock.advance(1)
        held = await claim_one(store)
        hot = held.row.hot
        assert (held.token, held.input_position, held.deadline_in_s) == (1, 1, None)
        assert (hot.lease_owner, hot.lease_token, hot.attempt) == (WORKER, 1, 1)
        assert hot.lease_expires_at is not None
        assert (hot.lease_expires_at - clock()).total_seconds() == TTL_S
        assert (hot.state, hot.last_seq, hot.started_at) == (RunState.PENDING, 2, None)
        assert hot.updated_at == clock()
        assert await look(reader, new.run_id) == held.row
        assert not await reader.is_ready(new.run_id)

    async def test_a_claim_writes_its_event_and_its_attempt(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        last = (await history(reader, run_id))[-1]
        assert (last.seq, last.attempt, last.epoch, last.at) == (2, 1, 0, clock())
        assert last.data == AttemptEvent(phase="claimed", attempt=1, worker=WORKER)
        [attempt] = await reader.list_attempts(run_id)
        assert (attempt.attempt, attempt.token, attempt.worker_id) == (1, 1, WORKER)
        assert (attempt.started_at, attempt.ended_at, attempt.end_reason) == (clock(), None, None)

    async def test_a_held_run_cannot_be_claimed(self, store: Store) -> None:
        await claimed(store)
        assert await store.claim_runs(want(worker_id="worker-b")) == []

    async def test_an_ended_run_cannot_be_claimed(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        await finish(store, reader, held.row.facts.run_id)
        assert await store.claim_runs(want()) == []

    async def test_a_claim_takes_no_more_than_its_limit(self, store: Store) -> None:
        for _ in range(3):
            await store.insert_run(new_run())
        assert len(await store.claim_runs(want(limit=2))) == 2
        assert len(await store.claim_runs(want(limit=2))) == 1
        assert await store.claim_runs(want(limit=2)) == []

    async def test_a_larger_priority_comes_first_then_who_came_first(
        self, store: Store, clock: FakeClock
    ) -> None:
        low, late, early, high = (new_run(priority=number) for number in (-1, 0, 0, 5))
        for new in (low, early, late, high):
            await store.insert_run(new)
            clock.advance(1)
        order: list[str] = []
        for _ in range(4):
            order += [held.row.facts.run_id for held in await store.claim_runs(want(limit=1))]
        assert order == [high.run_id, early.run_id, late.run_id, low.run_id]

    async def test_who_became_claimable_at_one_time_comes_in_order_of_id(
        self, store: Store
    ) -> None:
        new = [new_run() for _ in range(5)]
        for one in reversed(new):
            await store.insert_run(one)
        found = [held.row.facts.run_id for held in await store.claim_runs(want())]
        assert found == [one.run_id for one in new]

    @pytest.mark.parametrize(
        "wanted",
        [
            want(serves=()),
            want(serves=(("helper", "2"), ("another", "1"))),
            want(queues=("slow",)),
            want(queues=()),
            want(runtime_version=0),
            want(limit=0),
        ],
        ids=["nothing", "version", "queue", "no queue", "runtime", "limit"],
    )
    async def test_a_run_that_does_not_fit_is_left(
        self, store: Store, reader: Reader, wanted: ClaimWant
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        assert await store.claim_runs(wanted) == []
        assert await reader.is_ready(new.run_id)

    async def test_a_worker_takes_every_version_it_serves_from_all_its_queues(
        self, store: Store
    ) -> None:
        await store.insert_run(new_run(agent_version="1"))
        await store.insert_run(new_run(agent_version="2", queue="slow"))
        await store.insert_run(new_run(agent_version="3"))
        await store.insert_run(new_run(agent_id="other", required_runtime=2))
        wanted = want(
            serves=(("helper", "1"), ("helper", "2"), ("other", "1")),
            queues=("default", "slow"),
            runtime_version=2,
        )
        found = [held.row.facts for held in await store.claim_runs(wanted)]
        expected = [("helper", "1"), ("helper", "2"), ("other", "1")]
        assert [(facts.agent_id, facts.agent_version) for facts in found] == expected

    async def test_a_pair_is_served_as_a_pair(self, store: Store) -> None:
        await store.insert_run(new_run(agent_id="one", agent_version="2"))
        await store.insert_run(new_run(agent_id="two", agent_version="1"))
        assert await store.claim_runs(want(serves=(("one", "1"), ("two", "2")))) == []

    async def test_a_run_that_sleeps_is_claimable_when_its_time_has_come(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await write(store, parked(commit_of(held.row), ready_in_s=10.0))
        clock.advance(9.999)
        assert await store.claim_runs(want()) == []
        assert await reader.is_ready(run_id)
        clock.advance(0.001)
        again = await claim_one(store)
        assert (again.row.facts.run_id, again.row.hot.wake_at) == (run_id, None)

    async def test_each_claim_takes_the_next_attempt_and_a_new_token(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        await write(store, parked(commit_of(held.row), ready_in_s=0))
        again = await claim_one(store, worker_id="worker-b")
        assert (again.token, again.row.hot.attempt) == (held.token + 1, 2)
        attempts = await reader.list_attempts(held.row.facts.run_id)
        assert [(row.attempt, row.worker_id) for row in attempts] == [
            (1, WORKER),
            (2, "worker-b"),
        ]

    @pytest.mark.parametrize(
        ("end", "phase"),
        [(AttemptEnd.PARKED, "claimed"), (AttemptEnd.ERROR, "recovered")],
    )
    async def test_the_event_tells_how_the_attempt_before_ended(
        self, store: Store, reader: Reader, end: AttemptEnd, phase: str
    ) -> None:
        held = await claimed(store)
        commit = parked(commit_of(held.row, path=TO_EXECUTING), ready_in_s=0)
        await write(store, _ended(commit, end))
        await claim_one(store)
        found = await last_attempt_event(reader, held.row.facts.run_id)
        assert (found.phase, found.attempt) == (phase, 2)

    async def test_a_run_that_was_handed_back_is_claimed(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        await store.release_runs(WORKER, [lease_of(held)])
        await claim_one(store)
        found = await last_attempt_event(reader, held.row.facts.run_id)
        assert (found.phase, found.attempt) == ("claimed", 2)

    async def test_a_run_that_was_lost_is_recovered(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        clock.advance(BACKOFF_S)
        again = await claim_one(store, worker_id="worker-b")
        assert again.token > held.token + 1
        found = await last_attempt_event(reader, held.row.facts.run_id)
        assert (found.phase, found.attempt, found.worker) == ("recovered", 2, "worker-b")
        assert await types_of(reader, held.row.facts.run_id) == ["state"] + ["attempt"] * 3

    async def test_of_suspected_runs_no_more_are_taken_than_wanted(
        self, store: Store, clock: FakeClock
    ) -> None:
        """F45: those that may have killed their worker go one at a time, others as they come."""
        lost = [(await claimed(store)).row.facts.run_id for _ in range(3)]
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        clock.advance(BACKOFF_S)
        fresh = new_run()
        await store.insert_run(fresh)
        first = [held.row.facts.run_id for held in await store.claim_runs(want())]
        assert len(first) == 2
        assert fresh.run_id in first
        assert len(set(first) & set(lost)) == 1
        assert await store.claim_runs(want(suspects_max=0)) == []
        [drained] = await store.claim_runs(want(worker_id="worker-b"))
        assert await store.release_runs("worker-b", [lease_of(drained)]) == 1
        assert await store.claim_runs(want(suspects_max=0)) == []
        again = [held.row.facts.run_id for held in await store.claim_runs(want(suspects_max=2))]
        assert sorted([*again, *(set(first) & set(lost))]) == sorted(lost)

    async def test_a_run_that_waits_after_a_fault_is_suspected(
        self, store: Store, clock: FakeClock
    ) -> None:
        """F45: a fault that its holder wrote counts like a lost lease; a step clears the run."""
        both = [await claimed(store) for _ in range(2)]
        for faults, held in enumerate(both):
            commit = parked(commit_of(held.row, note()), ready_in_s=0.0)
            await write(store, replace(commit, hot=replace(commit.hot, faults=faults)))
        [cleared] = await store.claim_runs(want(suspects_max=0))
        assert cleared.row.facts.run_id == both[0].row.facts.run_id
        [suspected] = await store.claim_runs(want(suspects_max=1))
        assert suspected.row.hot.faults == 1

    async def test_a_claim_tells_what_is_left_of_the_total_time(
        self, store: Store, clock: FakeClock
    ) -> None:
        await store.insert_run(new_run(run_s=60.0))
        clock.advance(45.5)
        assert (await claim_one(store)).deadline_in_s == pytest.approx(14.5)

    async def test_what_is_left_is_never_below_nothing(
        self, store: Store, clock: FakeClock
    ) -> None:
        await store.insert_run(new_run(run_s=60.0))
        clock.advance(600)
        assert (await claim_one(store)).deadline_in_s == 0

    async def test_a_claim_tells_the_place_of_the_input_in_its_thread(
        self, store: Store, reader: Reader
    ) -> None:
        first = new_run()
        await store.insert_run(first)
        await finish(store, reader, first.run_id)
        held = await claimed(store, new_run(thread_id=first.thread_id))
        assert held.input_position == 2

    async def test_eight_claimers_at_once_take_a_hundred_runs_once_each(
        self, store: Store, reader: Reader
    ) -> None:
        """R-12.1."""
        new = [new_run() for _ in range(100)]
        for one in new:
            await store.insert_run(one)
        taken: list[str] = []

        async def take(worker_id: str) -> None:
            while len(taken) < len(new):
                found = await store.claim_runs(want(worker_id=worker_id, limit=7))
                taken.extend(held.row.facts.run_id for held in found)
                await anyio.lowlevel.checkpoint()

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(take, f"worker-{number}")
        assert sorted(taken) == [one.run_id for one in new]
        for one in new:
            assert await types_of(reader, one.run_id) == ["state", "attempt"]


def _ended(commit: Commit, end: AttemptEnd) -> Commit:
    return replace(commit, attempt_end=end)
