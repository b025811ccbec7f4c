"""What a commit that is let through makes of the log and of the run's row."""

from dataclasses import replace

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import Counters
from perdure.protocol.states import (
    AttemptEnd,
    InterruptKind,
    ParkedOn,
    RunState,
)
from perdure.store.commits import (
    HotUpdate,
)
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.testing.builders import (
    EXECUTING,
    FAILED,
    PLANNING,
    TO_EXECUTING,
    TO_SUCCEEDED,
    advanced,
    asking,
    cancel_wish,
    claimed,
    commit_of,
    look,
    new_run,
    note,
    parked,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history


class CommitContract(Contract):
    """The log and the hot row."""

    async def test_events_are_numbered_from_the_expected_seq_on(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-6.1."""
        held = await claimed(store)
        clock.advance(2)
        events = (note("a", [1], step_index=3), note("b", step_index=4))
        commit = commit_of(held.row, *events)
        result = await write(store, commit)
        assert (result.seq, result.at) == (4, clock())
        found = (await history(reader, commit.run_id))[2:]
        assert [event.seq for event in found] == [3, 4]
        assert [event.data for event in found] == [event.data for event in events]
        assert [event.raw for event in found] == [event.encoded() for event in events]
        assert [event.step_index for event in found] == [3, 4]
        assert {(event.at, event.attempt, event.epoch) for event in found} == {(clock(), 1, 0)}
        assert {event.schema_version for event in found} == {SCHEMA_VERSION}

    async def test_commits_of_one_moment_are_ordered_by_number(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """CON-03: the clock stands still; only seqs decide what is stale, and none is refused."""
        held = await claimed(store)
        for number in range(50):
            row = await look(reader, held.row.facts.run_id)
            await write(store, commit_of(row, note("n", number)))
        found = (await history(reader, held.row.facts.run_id))[2:]
        assert [event.seq for event in found] == list(range(3, 53))
        assert {event.at for event in found} == {clock()}

    async def test_time_does_not_run_backwards_when_the_clock_does(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """F26, F27: times of a run do not go back, whatever the clock does."""
        held = await claimed(store)
        before = held.row.hot.updated_at
        clock.advance(-3600)
        result = await write(store, commit_of(held.row, note()))
        assert result.at == before
        await store.request_cancel(held.row.facts.run_id, cancel_wish())
        assert {event.at for event in await history(reader, held.row.facts.run_id)} == {before}
        clock.advance(3601)
        row = await look(reader, held.row.facts.run_id)
        assert (await write(store, commit_of(row, note()))).at == clock()

    async def test_the_hot_row_takes_the_given_values(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        counters = Counters(model_calls=2, tool_calls=3, input_tokens=4, cost=0.25, waiting_ms=7)
        hot = HotUpdate(
            state=EXECUTING,
            step_index=3,
            faults=2,
            parked_on=ParkedOn.CALLBACK,
            waiting_kind=InterruptKind.AUTH,
            code=FailureCode.TOOL_ERROR,
            open_calls=4,
            open_interrupts=5,
            open_children=6,
            counters=counters,
            checkpoint_seq=2,
        )
        clock.advance(1)
        commit = replace(commit_of(held.row, path=TO_EXECUTING), hot=hot)
        found = (await advanced(store, reader, commit)).hot
        assert (
            HotUpdate(
                state=found.state,
                step_index=found.step_index,
                faults=found.faults,
                parked_on=found.parked_on,
                waiting_kind=found.waiting_kind,
                code=found.code,
                open_calls=found.open_calls,
                open_interrupts=found.open_interrupts,
                open_children=found.open_children,
                counters=found.counters,
                checkpoint_seq=found.checkpoint_seq,
            )
            == hot
        )
        assert (found.last_commit_id, found.updated_at) == (commit.commit_id, clock())
        assert (found.lease_owner, found.attempt) == (held.row.hot.lease_owner, 1)

    async def test_a_run_starts_when_it_first_leaves_pending(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, commit_of(held.row, note()))
        assert row.hot.started_at is None
        clock.advance(1)
        started = clock()
        row = await advanced(store, reader, commit_of(row, path=(PLANNING,)))
        assert row.hot.started_at == started
        clock.advance(1)
        row = await advanced(store, reader, commit_of(row, path=(EXECUTING, PLANNING)))
        assert row.hot.started_at == started

    async def test_a_run_that_ends_in_the_queue_never_started(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        row = (await store.insert_run(new_run())).row
        after = await advanced(store, reader, commit_of(row, path=(FAILED,)))
        assert (after.hot.started_at, after.hot.finished_at) == (None, clock())

    async def test_waiting_since_is_set_on_entering_and_gone_after_leaving(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        clock.advance(1)
        since = clock()
        row = await advanced(store, reader, asking(held.row))
        assert row.hot.waiting_since == since
        clock.advance(1)
        row = await advanced(store, reader, commit_of(row, note()))
        assert row.hot.waiting_since == since
        row = await advanced(store, reader, commit_of(row, path=(EXECUTING,)))
        assert row.hot.waiting_since is None

    async def test_the_end_of_a_run_clears_what_it_held(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store, new_run(run_s=60.0))
        clock.advance(1)
        commit = commit_of(held.row, note(), path=TO_SUCCEEDED)
        hot = (await advanced(store, reader, commit)).hot
        assert (hot.state, hot.finished_at) == (RunState.SUCCEEDED, clock())
        assert hot.terminal_seq == hot.last_seq == held.row.hot.last_seq + 4
        assert (hot.lease_owner, hot.lease_expires_at, hot.lease_token) == (None, None, held.token)
        assert (hot.parked_on, hot.wake_at) == (None, None)
        assert not await reader.is_ready(commit.run_id)
        assert await reader.timers_of(commit.run_id) == []
        [attempt] = await reader.list_attempts(commit.run_id)
        assert (attempt.end_reason, attempt.ended_at) == (AttemptEnd.FINISHED, clock())
        assert attempt.last_commit_id == commit.commit_id

    async def test_the_terminal_seq_is_that_of_the_terminal_event(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        ending = commit_of(held.row, path=TO_SUCCEEDED)
        hot = (await advanced(store, reader, replace(ending, events=(*ending.events, note())))).hot
        assert hot.terminal_seq is not None
        assert hot.terminal_seq == hot.last_seq - 1
        last = (await history(reader, ending.run_id))[hot.terminal_seq - 1].data
        assert isinstance(last, StateEvent)
        assert last.state is RunState.SUCCEEDED

    async def test_a_run_may_be_ended_without_a_lease_when_nobody_holds_it(
        self, store: Store, reader: Reader
    ) -> None:
        new = new_run(run_s=60.0)
        row = (await store.insert_run(new)).row
        after = await advanced(store, reader, commit_of(row, path=(FAILED,)))
        assert (after.hot.state, after.hot.terminal_seq) == (FAILED, 2)
        assert not await reader.is_ready(new.run_id)
        assert await reader.timers_of(new.run_id) == []

    async def test_a_parked_run_has_no_holder_and_is_not_claimable(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        commit = parked(commit_of(held.row, path=TO_EXECUTING))
        commit = replace(commit, hot=replace(commit.hot, parked_on=ParkedOn.CALLBACK))
        hot = (await advanced(store, reader, commit)).hot
        assert (hot.lease_owner, hot.lease_expires_at, hot.lease_token) == (None, None, held.token)
        assert (hot.parked_on, hot.wake_at) == (ParkedOn.CALLBACK, None)
        assert not await reader.is_ready(commit.run_id)
        [attempt] = await reader.list_attempts(commit.run_id)
        assert (attempt.end_reason, attempt.ended_at) == (AttemptEnd.PARKED, clock())
        assert attempt.last_commit_id == commit.commit_id

    async def test_a_run_parked_for_a_while_tells_when_it_wakes(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, parked(commit_of(held.row), ready_in_s=12.5))
        assert row.hot.wake_at is not None
        assert (row.hot.wake_at - clock()).total_seconds() == 12.5
        assert await reader.is_ready(row.facts.run_id)

    async def test_a_run_made_claimable_at_once_has_no_wake_time(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, parked(commit_of(held.row), ready_in_s=0))
        assert row.hot.wake_at is None
        assert await reader.is_ready(row.facts.run_id)

    async def test_a_held_run_gets_no_entry_in_ready(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        beside = replace(commit_of(held.row, note(), any_holder=True), ready_in_s=0.0)
        row = await advanced(store, reader, beside)
        assert not await reader.is_ready(row.facts.run_id)
        row = await advanced(store, reader, replace(commit_of(row, note()), ready_in_s=5.0))
        assert not await reader.is_ready(row.facts.run_id)
        assert row.hot.wake_at is None

    async def test_a_commit_decides_whether_an_unheld_run_stays_claimable(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        row = (await store.insert_run(new_run())).row
        moved = await advanced(store, reader, replace(commit_of(row, note()), ready_in_s=9.0))
        assert moved.hot.wake_at is not None
        assert (moved.hot.wake_at - clock()).total_seconds() == 9.0
        assert await reader.is_ready(row.facts.run_id)
        gone = await advanced(store, reader, commit_of(moved, note()))
        assert gone.hot.wake_at is None
        assert not await reader.is_ready(row.facts.run_id)

    async def test_what_is_left_of_the_total_time_stands_while_a_person_is_waited_for(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-10.4."""
        held = await claimed(store, new_run(run_s=60.0))
        clock.advance(20)
        row = await advanced(store, reader, asking(held.row))
        assert row.hot.deadline_at is None
        assert await reader.timers_of(row.facts.run_id) == []
        clock.advance(10_000)
        row = await advanced(store, reader, commit_of(row, note()))
        assert await reader.due_timers(10) == []
        row = await advanced(store, reader, commit_of(row, path=(EXECUTING,)))
        assert row.hot.deadline_at is not None
        assert (row.hot.deadline_at - clock()).total_seconds() == 40.0
        assert await reader.due_timers(10) == []
        clock.advance(40)
        assert [timer.kind for timer in await reader.due_timers(10)] == ["deadline"]
