"""What timers promise: what is due, for runs that nobody holds."""

from dataclasses import replace

from perdure.protocol.ids import TOOL_CALL
from perdure.protocol.states import AttemptEnd, ParkedOn, RunState
from perdure.store.commits import NewCallback, NoticeDue
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import DueTimer, TimerKind
from perdure.testing.builders import (
    BACKOFF_S,
    FAILED,
    TO_EXECUTING,
    TTL_S,
    WORKER,
    advanced,
    answering,
    asking,
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
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract


def timer(run_id: str, kind: TimerKind, ref: str | None = None) -> DueTimer:
    """Return a timer of a run."""
    return DueTimer(run_id=run_id, kind=kind, ref=ref)


class TimerContract(Contract):
    """Deadlines, expiries and closings."""

    async def test_a_deadline_is_due_when_its_time_has_come(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run(run_s=60.0)
        await store.insert_run(new)
        clock.advance(59.999)
        assert await reader.due_timers(10) == []
        clock.advance(0.001)
        expected = [timer(new.run_id, TimerKind.DEADLINE)]
        assert await reader.due_timers(10) == expected
        assert await reader.due_timers(10) == expected

    async def test_a_run_that_something_moves_is_not_found_to_be_unmoved(
        self, store: Store, reader: Reader
    ) -> None:
        """RES-08: a holder, `ready`, a question, a timer, the run before it, repair, the end; and
        pages go through all that is unfinished."""
        first = await claimed(store)
        behind = new_run(thread_id=first.row.facts.thread_id)
        await store.insert_run(behind)
        asked = await claimed(store)
        await write(store, asking(asked.row))
        aside = await claimed(store)
        await store.quarantine(aside.row.facts.run_id, aside.row.hot.lease_token, "x", None)
        cancelled = await claimed(store)
        await write(store, parked(commit_of(cancelled.row, note())))
        await store.request_cancel(cancelled.row.facts.run_id, cancel_wish())
        ended = await claimed(store)
        await finish(store, reader, ended.row.facts.run_id)
        lost = await claimed(store, new_run(run_s=60.0))
        left = parked(commit_of(lost.row, note()))
        await write(store, replace(left, hot=replace(left.hot, parked_on=ParkedOn.TIMER)))
        await store.insert_run(new_run())
        found, after, pages = list[str](), None, 0
        while pages == 0 or after is not None:
            page = await reader.unmoved_runs(after=after, limit=3)
            found += page.seqs
            assert list(page.seqs.values()) == [
                (await look(reader, run_id)).hot.last_seq for run_id in page.seqs
            ]
            after, pages = page.after, pages + 1
        assert found == [lost.row.facts.run_id]
        assert pages == 3

    async def test_the_timers_of_a_held_run_are_left_to_its_holder(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store, new_run(run_s=60.0))
        run_id = held.row.facts.run_id
        clock.advance(61)
        assert await reader.due_timers(10) == []
        assert await reader.timers_of(run_id) == [timer(run_id, TimerKind.DEADLINE)]
        await store.release_runs(WORKER, [lease_of(held)])
        assert await reader.due_timers(10) == [timer(run_id, TimerKind.DEADLINE)]

    async def test_the_deadline_of_a_run_that_sleeps_goes_on(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store, new_run(run_s=60.0))
        await write(store, parked(commit_of(held.row), ready_in_s=3600))
        clock.advance(60)
        due = await reader.due_timers(10)
        assert due == [timer(held.row.facts.run_id, TimerKind.DEADLINE)]

    async def test_the_deadline_of_a_lost_run_stays(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store, new_run(run_s=60.0))
        clock.advance(TTL_S)
        await store.requeue_expired(10)
        clock.advance(BACKOFF_S)
        again = await claim_one(store)
        assert again.deadline_in_s == 60.0 - TTL_S - BACKOFF_S
        assert again.row.hot.deadline_at == held.row.hot.deadline_at

    async def test_an_expiry_is_due_with_its_interrupt(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        asked = asking(held.row, expires_in_s=30.0)
        await write(store, asked)
        expected = timer(asked.run_id, TimerKind.EXPIRY, asked.new_interrupts[0].interrupt_id)
        assert await reader.timers_of(asked.run_id) == [expected]
        clock.advance(29)
        assert await reader.due_timers(10) == []
        clock.advance(1)
        assert await reader.due_timers(10) == [expected]

    async def test_an_answer_removes_the_expiry(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        asked = asking(held.row, expires_in_s=30.0)
        row = await advanced(store, reader, asked)
        await write(store, answering(row, asked.new_interrupts[0].interrupt_id))
        assert await reader.timers_of(asked.run_id) == []
        clock.advance(31)
        assert await reader.due_timers(10) == []

    async def test_each_callback_has_its_own_timer(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-5.10: set, moved and removed by the commits of a call's run; due beside no holder."""
        held = await claimed(store)
        first, second = new_id(TOOL_CALL), new_id(TOOL_CALL)
        waits = (
            NewCallback(tool_call_id=first, expires_in_s=20.0),
            NewCallback(tool_call_id=second, expires_in_s=10.0),
        )
        commit = commit_of(held.row, note(), path=TO_EXECUTING)
        row = await advanced(store, reader, replace(commit, new_callbacks=waits))
        run_id = commit.run_id
        both = [timer(run_id, TimerKind.CALLBACK, call) for call in (second, first)]
        assert await reader.timers_of(run_id) == both
        moved = (NewCallback(tool_call_id=second, expires_in_s=30.0),)
        row = await advanced(store, reader, replace(commit_of(row, note()), new_callbacks=moved))
        clock.advance(25)
        assert await reader.due_timers(10) == []
        waiting = commit_of(row, note())
        waiting = replace(waiting, attempt_end=AttemptEnd.PARKED)
        waiting = replace(waiting, hot=replace(waiting.hot, parked_on=ParkedOn.CALLBACK))
        row = await advanced(store, reader, waiting)
        assert await reader.due_timers(10) == [both[1]]
        over = replace(commit_of(row, note()), callbacks_over=(first,))
        over = replace(over, hot=replace(over.hot, parked_on=ParkedOn.CALLBACK))
        row = await advanced(store, reader, over)
        assert await reader.timers_of(run_id) == [both[0]]
        await write(store, commit_of(row, path=(FAILED,)))
        assert await reader.timers_of(run_id) == []

    async def test_a_notice_is_due_beside_a_holder_and_goes_with_its_interrupt(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-8.3: set, moved and taken away by commits of the run."""
        held = await claimed(store)
        asked = asking(held.row)
        approval = asked.new_interrupts[0].interrupt_id

        def due_in(seconds: float | None) -> tuple[NoticeDue, ...]:
            return (NoticeDue(interrupt_id=approval, due_in_s=seconds),)

        first = commit_of(held.row, note(), path=TO_EXECUTING)
        row = await advanced(store, reader, replace(first, notices=due_in(10.0)))
        expected = timer(asked.run_id, TimerKind.NOTICE, approval)
        clock.advance(10)
        assert await reader.due_timers(10) == [expected]
        row = await advanced(store, reader, replace(commit_of(row, note()), notices=due_in(5.0)))
        assert await reader.due_timers(10) == []
        row = await advanced(store, reader, replace(commit_of(row, note()), notices=due_in(None)))
        assert await reader.timers_of(asked.run_id) == []
        again = asking(row, path=(RunState.WAITING_HUMAN,))
        key = again.new_interrupts[0].interrupt_id
        notice = NoticeDue(interrupt_id=key, due_in_s=0.0)
        row = await advanced(store, reader, replace(again, notices=(notice,)))
        assert await reader.due_timers(10) == [timer(asked.run_id, TimerKind.NOTICE, key)]
        await write(store, answering(row, key))
        assert await reader.timers_of(asked.run_id) == []

    async def test_each_interrupt_has_its_own_expiry(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        first, second = asking(held.row, expires_in_s=20.0), asking(held.row, expires_in_s=10.0)
        both = (*first.new_interrupts, *second.new_interrupts)
        row = await advanced(store, reader, replace(first, new_interrupts=both))
        refs = [one.ref for one in await reader.timers_of(first.run_id)]
        one, two = (new.interrupt_id for new in both)
        assert refs == [two, one]
        await write(store, replace(answering(row, two), ready_in_s=None))
        assert [one.ref for one in await reader.timers_of(first.run_id)] == [one]
        clock.advance(20)
        assert [one.ref for one in await reader.due_timers(10)] == [one]

    async def test_a_closing_is_due_after_the_given_time(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        row = await advanced(store, reader, replace(parked(commit_of(held.row)), close_in_s=15.0))
        clock.advance(14)
        assert await reader.due_timers(10) == []
        row = await advanced(store, reader, replace(commit_of(row, note()), close_in_s=15.0))
        clock.advance(14)
        assert await reader.due_timers(10) == []
        clock.advance(1)
        assert await reader.due_timers(10) == [timer(run_id, TimerKind.CLOSE)]
        await write(store, commit_of(row, path=(FAILED,)))
        assert await reader.timers_of(run_id) == []

    async def test_a_closing_stays_until_the_end(self, store: Store, reader: Reader) -> None:
        new = new_run()
        row = (await store.insert_run(new)).row
        hot = await store.request_cancel(new.run_id, cancel_wish())
        assert hot is not None
        await write(store, commit_of(replace(row, hot=hot), note()))
        assert await reader.due_timers(10) == [timer(new.run_id, TimerKind.CLOSE)]

    async def test_the_longest_due_come_first_up_to_the_limit(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = [new_run(run_s=run_s) for run_s in (30.0, 10.0, 20.0, 500.0)]
        for one in new:
            await store.insert_run(one)
        clock.advance(100)
        found = [one.run_id for one in await reader.due_timers(10)]
        assert found == [new[1].run_id, new[2].run_id, new[0].run_id]
        assert [one.run_id for one in await reader.due_timers(2)] == found[:2]

    async def test_a_page_goes_on_behind_the_last_timer_of_the_one_before(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        for _ in range(2):  # due at one time, each with two timers
            new = new_run(run_s=10.0)
            await store.insert_run(new)
            await store.request_cancel(new.run_id, cancel_wish())
        asked = asking((await claimed(store)).row, expires_in_s=20.0)
        await write(store, asked)
        clock.advance(100)
        whole = await reader.due_timers(10)
        assert len(whole) == 5
        assert whole[-1] == timer(asked.run_id, TimerKind.EXPIRY, whole[-1].ref)
        paged: list[DueTimer] = []
        last: DueTimer | None = None
        while page := await reader.due_timers(2, last):
            paged += page
            last = page[-1]
        assert paged == whole

    async def test_the_timers_of_a_run_are_its_own_the_first_due_first(
        self, store: Store, reader: Reader
    ) -> None:
        await store.insert_run(new_run(run_s=60.0))
        new = new_run(run_s=60.0)
        await store.insert_run(new)
        await store.request_cancel(new.run_id, cancel_wish())
        found = await reader.timers_of(new.run_id)
        assert found == [
            timer(new.run_id, TimerKind.CLOSE),
            timer(new.run_id, TimerKind.DEADLINE),
        ]

    async def test_held_runs_do_not_use_up_the_limit(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        for _ in range(3):
            await claimed(store, new_run(run_s=10.0))
        new = new_run(run_s=20.0)
        await store.insert_run(new)
        clock.advance(25)
        assert await reader.due_timers(1) == [timer(new.run_id, TimerKind.DEADLINE)]
