"""What the fence of a commit promises: a writer that is behind writes nothing at all."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from perdure.protocol import ids
from perdure.protocol.events import StateEvent
from perdure.protocol.states import AttemptEnd, RunState
from perdure.store.commits import (
    Behind,
    CancelRequested,
    Commit,
    Committed,
    HotUpdate,
    LeaseLost,
    Refused,
)
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import LeaseKey
from perdure.testing.builders import (
    BACKOFF_S,
    EXECUTING,
    FAILED,
    PLANNING,
    SUCCEEDED,
    TO_EXECUTING,
    TO_SUCCEEDED,
    TTL_S,
    WAITING,
    advanced,
    cancel_wish,
    claim_one,
    claimed,
    commit_of,
    event,
    finish,
    hot_of,
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


def guarded(commit: Commit, **changes: object) -> Commit:
    """Return the commit with another guard."""
    return replace(commit, guard=replace(commit.guard, **changes))


class FenceContract(Contract):
    """Guards, in every variant."""

    async def test_a_stale_token_writes_nothing(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-9.3, CON-02."""
        old = await claimed(store)
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        between = await look(reader, old.row.facts.run_id)
        [result] = await store.commit([commit_of(old.row, note())])
        assert result == LeaseLost()
        assert await look(reader, old.row.facts.run_id) == between

    async def test_a_late_worker_cannot_write_beside_the_new_holder(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """CON-02: not even under the same name; the token is another."""
        old = await claimed(store)
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        clock.advance(BACKOFF_S)
        new = await claim_one(store, worker_id="worker-b")
        stale = commit_of(new.row, path=TO_SUCCEEDED)
        [result] = await store.commit([guarded(stale, token=old.token)])
        assert result == LeaseLost()
        assert await look(reader, old.row.facts.run_id) == new.row
        await write(store, commit_of(new.row, note()))

    async def test_a_token_of_the_future_writes_nothing(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        commit = guarded(commit_of(held.row, note()), token=held.token + 1)
        assert await store.commit([commit]) == [LeaseLost()]
        assert await look(reader, commit.run_id) == held.row

    async def test_a_writer_without_token_cannot_write_to_a_held_run(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        commit = guarded(commit_of(held.row, note()), token=None)
        assert await store.commit([commit]) == [LeaseLost()]
        assert await look(reader, commit.run_id) == held.row

    async def test_a_writer_beside_the_holder_is_let_in_when_it_says_so(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, commit_of(held.row, note(), any_holder=True))
        assert row.hot.last_seq == held.row.hot.last_seq + 1
        assert row.hot.lease_token == held.token
        assert (row.hot.lease_owner, row.hot.lease_expires_at) == (
            held.row.hot.lease_owner,
            held.row.hot.lease_expires_at,
        )
        [result] = await store.commit([commit_of(held.row, note())])
        assert result == Behind(seq=row.hot.last_seq)

    async def test_a_writer_without_token_writes_to_a_run_that_nobody_holds(
        self, store: Store, reader: Reader
    ) -> None:
        new = new_run()
        row = (await store.insert_run(new)).row
        after = await advanced(store, reader, commit_of(row, note()))
        assert (after.hot.last_seq, after.hot.last_commit_id) == (2, None)

    async def test_a_token_without_a_lease_writes_nothing(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, parked(commit_of(held.row, note())))
        commit = guarded(commit_of(row, note()), token=held.token)
        assert await store.commit([commit]) == [LeaseLost()]
        assert await look(reader, commit.run_id) == row

    async def test_a_stale_epoch_writes_nothing(self, store: Store, reader: Reader) -> None:
        """R-9.3."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish())
        row = await look(reader, run_id)
        stale = guarded(commit_of(row, note()), epoch=0)
        assert await store.commit([stale]) == [CancelRequested(epoch=1)]
        assert await look(reader, run_id) == row
        closing = commit_of(row, path=(FAILED,))
        assert (await advanced(store, reader, closing)).hot.state is FAILED

    async def test_a_stale_epoch_without_a_token_writes_nothing(
        self, store: Store, reader: Reader
    ) -> None:
        row = (await store.insert_run(new_run())).row
        await store.request_cancel(row.facts.run_id, cancel_wish())
        between = await look(reader, row.facts.run_id)
        assert await store.commit([commit_of(row, note())]) == [CancelRequested(epoch=1)]
        assert await look(reader, row.facts.run_id) == between

    @pytest.mark.parametrize("offset", [-1, 1])
    async def test_a_wrong_seq_writes_nothing(
        self, store: Store, reader: Reader, offset: int
    ) -> None:
        held = await claimed(store)
        seq = held.row.hot.last_seq
        commit = guarded(commit_of(held.row, note()), expected_seq=seq + offset)
        assert await store.commit([commit]) == [Behind(seq=seq)]
        assert await look(reader, commit.run_id) == held.row

    async def test_a_wrong_state_writes_nothing(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, commit_of(held.row, path=TO_EXECUTING))
        stale = replace(row, hot=replace(row.hot, state=PLANNING))
        commit = commit_of(stale, path=(EXECUTING,))
        assert await store.commit([commit]) == [Behind(seq=row.hot.last_seq)]
        assert await look(reader, commit.run_id) == row

    async def test_the_lease_is_checked_before_the_epoch_and_that_before_the_rest(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish())
        illegal = commit_of(held.row, note(), path=(SUCCEEDED,))
        wrong = guarded(illegal, token=held.token + 1, expected_seq=9)
        assert await store.commit([wrong]) == [LeaseLost()]
        wrong = guarded(illegal, expected_seq=9, from_state=WAITING)
        assert await store.commit([wrong]) == [CancelRequested(epoch=1)]
        wrong = guarded(illegal, expected_seq=9, epoch=1)
        assert await store.commit([wrong]) == [Behind(seq=3)]
        [result] = await store.commit([guarded(illegal, expected_seq=3, epoch=1)])
        assert isinstance(result, Refused)

    async def test_an_ended_run_takes_no_commit(self, store: Store, reader: Reader) -> None:
        """R-2.2."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        row = await finish(store, reader, run_id)
        assert await store.commit([commit_of(held.row, note())]) == [LeaseLost()]
        unheld = guarded(commit_of(held.row, note()), token=None)
        assert await store.commit([unheld]) == [Behind(seq=row.hot.last_seq)]
        [result] = await store.commit([commit_of(row, note())])
        assert isinstance(result, Refused)
        assert await look(reader, run_id) == row

    async def test_what_was_written_beside_a_holder_does_not_stand_once_it_is_handed_back(
        self, store: Store, reader: Reader
    ) -> None:
        """It says nothing of whether the run may be claimed, which nobody would then do."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        beside = commit_of(held.row, note(), any_holder=True)
        lease = LeaseKey(run_id=run_id, token=held.token)
        assert await store.release_runs(held.row.hot.lease_owner or "", [lease]) == 1
        assert await store.commit([beside]) == [Behind(seq=held.row.hot.last_seq)]
        assert await reader.is_ready(run_id)
        row = await look(reader, run_id)
        moved = await advanced(store, reader, replace(commit_of(row, note()), ready_in_s=0.0))
        assert moved.hot.last_seq == row.hot.last_seq + 1
        assert await reader.is_ready(run_id)

    async def test_a_run_that_does_not_exist_is_held_by_nobody(self, store: Store) -> None:
        held = await claimed(store)
        commit = replace(commit_of(held.row, note()), run_id=new_id(ids.RUN))
        assert await store.commit([commit]) == [LeaseLost()]


ILLEGAL: dict[str, Callable[[Commit], Commit]] = {
    "a pair that no transition joins": lambda commit: replace(
        commit, events=(event(StateEvent(state=EXECUTING)),), hot=hot_in(EXECUTING)
    ),
    "an end without its event": lambda commit: replace(commit, hot=hot_in(PLANNING)),
    "an event without the row": lambda commit: replace(
        commit, events=(event(StateEvent(state=PLANNING)),)
    ),
    "an event from elsewhere": lambda commit: replace(
        commit,
        events=(event(StateEvent(state=PLANNING, from_state=EXECUTING)),),
        hot=hot_in(PLANNING),
    ),
    "a state after the end": lambda commit: replace(
        commit,
        events=(event(StateEvent(state=FAILED)), event(StateEvent(state=PLANNING))),
        hot=hot_in(PLANNING),
    ),
    "an end of the run without the end of the attempt": lambda commit: replace(
        commit, events=(event(StateEvent(state=FAILED)),), hot=hot_in(FAILED)
    ),
    "an end of the attempt by another": lambda commit: replace(
        commit,
        guard=replace(commit.guard, token=None, any_holder=True),
        attempt_end=AttemptEnd.PARKED,
    ),
    "an end of the run beside its holder": lambda commit: replace(
        commit,
        guard=replace(commit.guard, token=None, any_holder=True),
        events=(event(StateEvent(state=FAILED)),),
        hot=hot_in(FAILED),
    ),
}


def hot_in(state: RunState) -> HotUpdate:
    """Return the update that moves a fresh run to a state."""
    return HotUpdate(state=state, step_index=0, faults=0)


class BatchContract(Contract):
    """Batches, repeated sends, and legality."""

    @pytest.mark.parametrize("name", list(ILLEGAL))
    async def test_an_illegal_commit_is_refused_and_writes_nothing(
        self, store: Store, reader: Reader, name: str
    ) -> None:
        held = await claimed(store)
        commit = ILLEGAL[name](commit_of(held.row))
        [result] = await store.commit([commit])
        assert isinstance(result, Refused)
        assert result.reason
        assert await look(reader, commit.run_id) == held.row
        assert len(await history(reader, commit.run_id)) == held.row.hot.last_seq

    async def test_several_transitions_in_one_commit_are_normal(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        path = (PLANNING, EXECUTING, PLANNING, EXECUTING, WAITING)
        row = await advanced(store, reader, parked(commit_of(held.row, note(), path=path)))
        assert row.hot.state is WAITING
        found = [event.data for event in await history(reader, row.facts.run_id)]
        states = [data.state for data in found if isinstance(data, StateEvent)]
        assert states == [RunState.PENDING, *path]

    async def test_a_batch_writes_several_runs_and_answers_in_order(
        self, store: Store, reader: Reader
    ) -> None:
        for _ in range(20):
            await store.insert_run(new_run())
        held = await store.claim_runs(want(limit=20))
        commits = [
            commit_of(one.row, *(note(f"n{place}") for place in range(number % 4)))
            for number, one in enumerate(reversed(held))
        ]
        results = await store.commit(commits)
        for number, (commit, result) in enumerate(zip(commits, results, strict=True)):
            assert isinstance(result, Committed)
            assert result.seq == 2 + number % 4
            assert len(await history(reader, commit.run_id)) == result.seq

    async def test_an_empty_batch_has_no_answers(self, store: Store) -> None:
        assert await store.commit([]) == []

    async def test_a_stale_commit_keeps_no_other_of_its_batch_from_being_written(
        self, store: Store, reader: Reader
    ) -> None:
        for _ in range(6):
            await store.insert_run(new_run())
        held = await store.claim_runs(want())
        await store.request_cancel(held[2].row.facts.run_id, cancel_wish())
        commits = [commit_of(one.row, note()) for one in held]
        commits[1] = guarded(commits[1], token=held[1].token + 1)
        commits[3] = guarded(commits[3], expected_seq=1)
        commits[4] = commit_of(held[4].row, path=(SUCCEEDED,))
        results = await store.commit(commits)
        kinds = [Committed, LeaseLost, CancelRequested, Behind, Refused, Committed]
        assert [type(result) for result in results] == kinds
        lengths = [len(await history(reader, one.row.facts.run_id)) for one in held]
        assert lengths == [3, 2, 3, 2, 2, 3]

    async def test_a_run_stands_at_most_once_in_a_batch(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        with pytest.raises(ValueError, match="one commit a run"):
            await store.commit([commit_of(held.row, note()), commit_of(held.row, note())])
        assert await look(reader, held.row.facts.run_id) == held.row

    async def test_a_commit_that_is_sent_again_is_written_once(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        commit = commit_of(held.row, note(), path=TO_EXECUTING)
        first = await write(store, commit)
        row = await look(reader, commit.run_id)
        assert row.hot.last_commit_id == commit.commit_id
        assert await write(store, commit) == first
        assert await look(reader, commit.run_id) == row
        assert len(await history(reader, commit.run_id)) == first.seq

    async def test_a_commit_without_events_that_is_sent_again_is_written_once(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        bare = commit_of(held.row)
        commit = replace(bare, hot=replace(bare.hot, faults=1))
        first = await write(store, commit)
        row = await look(reader, commit.run_id)
        assert (first.seq, row.hot.faults) == (held.row.hot.last_seq, 1)
        assert await write(store, commit) == first
        assert await look(reader, commit.run_id) == row

    async def test_a_commit_that_is_sent_again_after_its_own_end_is_committed(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        commit = parked(commit_of(held.row, note()), ready_in_s=0)
        first = await write(store, commit)
        assert await write(store, commit) == first
        await claim_one(store, worker_id="worker-b")
        assert (await write(store, commit)).seq == first.seq
        ending = commit_of(await look(reader, commit.run_id), path=TO_SUCCEEDED)
        last = await write(store, ending)
        assert await write(store, ending) == last

    async def test_a_commit_sent_again_after_others_wrote_tells_its_own_seq(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        commit = commit_of(held.row, note())
        first = await write(store, commit)
        await store.request_cancel(commit.run_id, cancel_wish())
        row = await look(reader, commit.run_id)
        again = await write(store, commit)
        assert again.seq == first.seq
        assert await look(reader, commit.run_id) == row

    async def test_a_commit_sent_again_after_the_holders_next_is_behind(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        commit = commit_of(held.row, note())
        row = await advanced(store, reader, commit)
        row = await advanced(store, reader, commit_of(row, note()))
        assert await store.commit([commit]) == [Behind(seq=row.hot.last_seq)]
        assert await look(reader, commit.run_id) == row

    async def test_only_holders_leave_their_commit_id(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        commit = commit_of(held.row, note())
        row = await advanced(store, reader, commit)
        beside = commit_of(row, note(), any_holder=True)
        row = await advanced(store, reader, beside)
        assert row.hot.last_commit_id == commit.commit_id
        assert await store.commit([beside]) == [Behind(seq=row.hot.last_seq)]

    async def test_an_answer_for_an_update_that_changes_nothing_is_committed(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        commit = replace(commit_of(held.row), hot=hot_of(held.row.hot, held.row.hot.state))
        result = await write(store, commit)
        assert result.seq == held.row.hot.last_seq
        assert len(await history(reader, commit.run_id)) == result.seq
