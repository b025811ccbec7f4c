"""What keeps a lease and what takes it away: renewal, expiry, hand-back, quarantine."""

from datetime import timedelta

import pytest

from perdure.protocol import ids
from perdure.protocol.events import AttemptEvent, RepairEvent
from perdure.protocol.states import AttemptEnd, ParkedOn, RunState
from perdure.store.commits import LeaseLost
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import DueTimer, LeaseKey, Renewal, Requeued, TimerKind
from perdure.testing.builders import (
    BACKOFF_S,
    TO_EXECUTING,
    TTL_S,
    WORKER,
    advanced,
    cancel_wish,
    claim_one,
    claimed,
    commit_of,
    finish,
    lease_of,
    look,
    new_id,
    new_run,
    note,
    parked,
    want,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history


class LeaseContract(Contract):
    """Renewal, expiry and hand-back."""

    async def test_a_renewal_prolongs_the_lease_and_writes_no_event(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        clock.advance(20)
        answer = await store.renew_leases(WORKER, [lease_of(held)], 45.0)
        assert answer == [Renewal(run_id=run_id, held=True, cancel_epoch=0)]
        hot = (await look(reader, run_id)).hot
        assert hot.lease_expires_at is not None
        assert (hot.lease_expires_at - clock()).total_seconds() == 45.0
        assert hot.last_seq == held.row.hot.last_seq
        clock.advance(44)
        assert await store.requeue_expired(10) == []

    async def test_every_lease_gets_its_answer_in_order(self, store: Store, reader: Reader) -> None:
        for _ in range(3):
            await store.insert_run(new_run())
        one, two, three = await store.claim_runs(want())
        await store.request_cancel(three.row.facts.run_id, cancel_wish())
        await store.release_runs(WORKER, [lease_of(two)])
        unknown = LeaseKey(run_id=new_id(ids.RUN), token=1)
        leases = [lease_of(three), unknown, lease_of(two), lease_of(one)]
        answers = await store.renew_leases(WORKER, leases, TTL_S)
        assert [answer.run_id for answer in answers] == [lease.run_id for lease in leases]
        assert [answer.held for answer in answers] == [True, False, False, True]
        assert [answer.cancel_epoch for answer in answers] == [1, 0, 0, 0]

    async def test_no_lease_is_no_answer(self, store: Store) -> None:
        assert await store.renew_leases(WORKER, [], TTL_S) == []
        assert await store.release_runs(WORKER, []) == 0

    async def test_a_lease_of_another_worker_or_token_is_not_renewed(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        stale = LeaseKey(run_id=held.row.facts.run_id, token=held.token + 1)
        [other] = await store.renew_leases("worker-b", [lease_of(held)], 500.0)
        [wrong] = await store.renew_leases(WORKER, [stale], 500.0)
        assert (other.held, wrong.held) == (False, False)
        assert await look(reader, held.row.facts.run_id) == held.row

    async def test_a_lost_lease_is_not_renewed(self, store: Store, clock: FakeClock) -> None:
        held = await claimed(store)
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        [answer] = await store.renew_leases(WORKER, [lease_of(held)], TTL_S)
        assert not answer.held
        clock.advance(BACKOFF_S)
        await claim_one(store)
        [answer] = await store.renew_leases(WORKER, [lease_of(held)], TTL_S)
        assert not answer.held

    async def test_an_expired_lease_that_nobody_took_away_still_holds(
        self, store: Store, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        clock.advance(TTL_S + 1)
        [answer] = await store.renew_leases(WORKER, [lease_of(held)], TTL_S)
        assert answer.held
        assert await store.requeue_expired(10) == []
        clock.advance(TTL_S + 1)
        await write(store, commit_of(held.row, note()))

    async def test_a_commit_does_not_prolong_the_lease(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        clock.advance(10)
        row = await advanced(store, reader, commit_of(held.row, note()))
        assert row.hot.lease_expires_at == held.row.hot.lease_expires_at

    async def test_a_lease_is_not_taken_away_before_its_time(
        self, store: Store, clock: FakeClock
    ) -> None:
        await claimed(store)
        clock.advance(TTL_S - 0.001)
        assert await store.requeue_expired(10) == []

    async def test_an_expired_run_is_taken_away_and_claimable_at_once(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-12.1."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        row = await advanced(store, reader, commit_of(held.row, note(), path=TO_EXECUTING))
        clock.advance(TTL_S)
        [requeued] = await store.requeue_expired(10)
        assert requeued == Requeued(run_id=run_id, exhausted=False, cancel_requested=False)
        hot = (await look(reader, run_id)).hot
        assert hot.wake_at is not None
        assert timedelta() < hot.wake_at - clock() <= timedelta(seconds=BACKOFF_S)
        assert await store.claim_runs(want()) == []
        assert (hot.lease_owner, hot.lease_expires_at) == (None, None)
        assert (hot.lease_token, hot.faults, hot.attempt) == (held.token + 1, 1, 1)
        assert (hot.state, hot.parked_on) == (RunState.EXECUTING, None)
        assert hot.last_seq == row.hot.last_seq + 1
        assert await reader.is_ready(run_id)
        assert await store.requeue_expired(10) == []

    async def test_a_lost_lease_is_told_in_the_log_and_ends_the_attempt(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        commit = commit_of(held.row, note())
        await write(store, commit)
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        last = (await history(reader, run_id))[-1]
        assert last.data == AttemptEvent(
            phase="lost", attempt=1, worker=WORKER, reason="lease_expired"
        )
        assert (last.attempt, last.at) == (1, clock())
        [attempt] = await reader.list_attempts(run_id)
        assert (attempt.end_reason, attempt.ended_at) == (AttemptEnd.LEASE_LOST, clock())
        assert attempt.last_commit_id == commit.commit_id

    async def test_a_run_whose_faults_reach_the_bound_is_left_to_its_closing(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-10.2."""
        held = await claimed(store, new_run(max_attempts=2))
        run_id = held.row.facts.run_id
        clock.advance(TTL_S)
        assert [one.exhausted for one in await store.requeue_expired(10)] == [False]
        clock.advance(BACKOFF_S)
        await claim_one(store)
        clock.advance(TTL_S)
        [requeued] = await store.requeue_expired(10)
        assert requeued == Requeued(run_id=run_id, exhausted=True, cancel_requested=False)
        hot = (await look(reader, run_id)).hot
        assert (hot.parked_on, hot.faults, hot.lease_owner) == (ParkedOn.CLOSING, 2, None)
        assert not await reader.is_ready(run_id)
        due = await reader.due_timers(10)
        assert due == [DueTimer(run_id=run_id, kind=TimerKind.CLOSE, ref=None)]

    async def test_a_cancelled_run_whose_lease_expires_is_left_to_its_closing(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish())
        clock.advance(TTL_S)
        [requeued] = await store.requeue_expired(10)
        assert requeued == Requeued(run_id=run_id, exhausted=False, cancel_requested=True)
        assert (await look(reader, run_id)).hot.parked_on is ParkedOn.CLOSING
        assert not await reader.is_ready(run_id)
        assert [timer.kind for timer in await reader.due_timers(10)] == [TimerKind.CLOSE]

    async def test_the_longest_expired_are_taken_first_up_to_the_limit(
        self, store: Store, clock: FakeClock
    ) -> None:
        held = [await claimed(store) for _ in range(3)]
        for place, ttl_s in ((0, 20.0), (1, 30.0), (2, 10.0)):
            await store.renew_leases(WORKER, [lease_of(held[place])], ttl_s)
        clock.advance(TTL_S)
        first = await store.requeue_expired(2)
        assert [one.run_id for one in first] == [held[2].row.facts.run_id, held[0].row.facts.run_id]
        assert [one.run_id for one in await store.requeue_expired(2)] == [held[1].row.facts.run_id]

    async def test_a_run_that_is_handed_back_is_claimable_at_once(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        commit = commit_of(held.row, note(), path=TO_EXECUTING)
        row = await advanced(store, reader, commit)
        clock.advance(1)
        assert await store.release_runs(WORKER, [lease_of(held)]) == 1
        hot = (await look(reader, run_id)).hot
        assert (hot.lease_owner, hot.lease_expires_at, hot.parked_on) == (None, None, None)
        assert (hot.faults, hot.last_seq) == (0, row.hot.last_seq)
        assert await reader.is_ready(run_id)
        [attempt] = await reader.list_attempts(run_id)
        assert (attempt.end_reason, attempt.ended_at) == (AttemptEnd.DRAINED, clock())
        assert attempt.last_commit_id == commit.commit_id
        [result] = await store.commit([commit_of(row, note())])
        assert result == LeaseLost()

    async def test_only_what_is_held_is_handed_back(self, store: Store, reader: Reader) -> None:
        for _ in range(3):
            await store.insert_run(new_run())
        one, two, three = await store.claim_runs(want())
        stale = LeaseKey(run_id=two.row.facts.run_id, token=two.token - 1)
        unknown = LeaseKey(run_id=new_id(ids.RUN), token=1)
        assert await store.release_runs("worker-b", [lease_of(one)]) == 0
        assert await store.release_runs(WORKER, [lease_of(three), stale, unknown]) == 1
        assert await store.release_runs(WORKER, [lease_of(three)]) == 0
        assert await look(reader, one.row.facts.run_id) == one.row
        assert await look(reader, two.row.facts.run_id) == two.row

    async def test_a_cancelled_run_that_is_handed_back_is_left_to_its_closing(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish())
        assert await store.release_runs(WORKER, [lease_of(held)]) == 1
        assert (await look(reader, run_id)).hot.parked_on is ParkedOn.CLOSING
        assert not await reader.is_ready(run_id)
        assert [timer.kind for timer in await reader.due_timers(10)] == [TimerKind.CLOSE]


class QuarantineContract(Contract):
    """Putting a run aside."""

    async def test_a_quarantined_run_is_parked_for_repair(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-7.7."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        clock.advance(1)
        assert await store.quarantine(run_id, held.token, "seq 3 is missing", 4)
        hot = (await look(reader, run_id)).hot
        assert (hot.lease_owner, hot.lease_expires_at) == (None, None)
        assert (hot.parked_on, hot.state) == (ParkedOn.REPAIR, RunState.PENDING)
        assert (hot.last_seq, hot.faults) == (held.row.hot.last_seq + 1, 0)
        assert not await reader.is_ready(run_id)
        assert await store.claim_runs(want()) == []
        last = (await history(reader, run_id))[-1]
        assert last.data == RepairEvent(
            action="quarantine", by="runtime", reason="seq 3 is missing"
        )
        assert (last.step_index, last.attempt, last.at) == (4, 1, clock())
        [attempt] = await reader.list_attempts(run_id)
        assert (attempt.end_reason, attempt.ended_at) == (AttemptEnd.ERROR, clock())

    async def test_the_holder_of_a_quarantined_run_has_lost_it(self, store: Store) -> None:
        held = await claimed(store)
        await store.quarantine(held.row.facts.run_id, held.token, "damaged", 0)
        [result] = await store.commit([commit_of(held.row, note())])
        assert result == LeaseLost()

    @pytest.mark.parametrize("offset", [-1, 1])
    async def test_a_run_is_not_put_aside_with_another_token(
        self, store: Store, reader: Reader, offset: int
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        assert not await store.quarantine(run_id, held.token + offset, "damaged", 0)
        assert await look(reader, run_id) == held.row

    async def test_a_token_puts_no_run_aside_that_nobody_holds(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        row = await advanced(store, reader, parked(commit_of(held.row, note())))
        assert not await store.quarantine(run_id, held.token, "damaged", 0)
        assert not await store.quarantine(new_id(ids.RUN), 1, "damaged", 0)
        assert await look(reader, run_id) == row

    async def test_a_quarantined_run_can_be_cancelled(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.quarantine(run_id, held.token, "damaged", 0)
        await store.request_cancel(run_id, cancel_wish())
        assert (await look(reader, run_id)).hot.parked_on is ParkedOn.CLOSING
        assert [timer.kind for timer in await reader.due_timers(10)] == [TimerKind.CLOSE]

    async def test_a_run_that_nobody_holds_is_put_aside_without_a_token(
        self, store: Store, reader: Reader
    ) -> None:
        """R-7.7, F21: it leaves `ready` and its closing timer; a held or ended one stays."""
        waiting, held, ended = [await claimed(store) for _ in range(3)]
        await store.release_runs(WORKER, [lease_of(waiting)])
        await finish(store, reader, ended.row.facts.run_id)
        run_id = waiting.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish())
        before = await look(reader, run_id)
        seen = before.hot.last_seq
        assert not await store.quarantine(run_id, None, "as it was", None, seq=seen - 1)
        assert await look(reader, run_id) == before
        assert await store.quarantine(run_id, None, "damaged", None, seq=seen)
        hot = (await look(reader, run_id)).hot
        assert (hot.parked_on, hot.last_seq) == (ParkedOn.REPAIR, before.hot.last_seq + 1)
        assert (await history(reader, run_id))[-1].step_index == hot.step_index
        assert not await reader.is_ready(run_id)
        assert await reader.timers_of(run_id) == []
        assert not await store.quarantine(run_id, None, "damaged", None)
        for other in (held, ended):
            assert not await store.quarantine(other.row.facts.run_id, None, "damaged", None)
