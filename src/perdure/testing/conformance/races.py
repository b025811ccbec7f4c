"""What concurrent writers promise: whatever order they come in, nothing is lost or half written."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from perdure.protocol.states import AttemptEnd, ParkedOn
from perdure.store.commits import (
    Behind,
    CancelRequested,
    Commit,
    CommitResult,
    Committed,
    LeaseLost,
)
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.testing.builders import (
    TO_EXECUTING,
    TO_SUCCEEDED,
    TTL_S,
    advanced,
    answering,
    asking,
    cancel_wish,
    claimed,
    commit_of,
    look,
    new_run,
    note,
    parked,
    want,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history, settled_answer, types_of

ROUNDS = 10
WAIT_S_MAX = 15


class RaceContract(Contract):
    """Writers at once."""

    async def test_a_cancel_and_a_commit_leave_one_of_two_orders(
        self, store: Store, reader: Reader
    ) -> None:
        for place in range(ROUNDS):
            held = await claimed(store)
            commit = commit_of(held.row, note(), path=TO_SUCCEEDED)
            results: list[CommitResult] = []

            async def cancel(run_id: str = commit.run_id) -> None:
                await store.request_cancel(run_id, cancel_wish())

            async def write(commit: Commit = commit, into: list[CommitResult] = results) -> None:
                into.append(await settled_answer(store, commit))

            await _at_once(cancel, write) if place % 2 else await _at_once(write, cancel)
            found = await types_of(reader, commit.run_id)
            row = await look(reader, commit.run_id)
            match results:
                case [Committed()]:
                    assert found == ["state", "attempt", "custom", "state", "state", "state"]
                    assert row.hot.cancel_epoch == 0
                case [CancelRequested(epoch=1)]:
                    assert found == ["state", "attempt", "cancel"]
                    assert row.hot.lease_owner is not None
                case _:
                    pytest.fail(f"neither order: {results}")

    async def test_a_cancel_and_a_park_never_leave_a_run_that_nobody_closes(
        self, store: Store, reader: Reader
    ) -> None:
        for place in range(ROUNDS):
            held = await claimed(store)
            run_id = held.row.facts.run_id

            async def cancel(run_id: str = run_id) -> None:
                await store.request_cancel(run_id, cancel_wish())

            async def park(commit: Commit = parked(commit_of(held.row), ready_in_s=0)) -> None:
                await settled_answer(store, commit)

            await _at_once(cancel, park) if place % 2 else await _at_once(park, cancel)
            hot = (await look(reader, run_id)).hot
            if hot.lease_owner is None:
                assert hot.parked_on is ParkedOn.CLOSING
                assert [one.kind for one in await reader.timers_of(run_id)] == ["close"]
            else:
                assert hot.cancel_epoch == 1
            assert not await reader.is_ready(run_id)

    async def test_a_park_and_an_answer_never_lose_the_wake_up(
        self, store: Store, reader: Reader
    ) -> None:
        """The interrupt is open while the holder goes on; it parks while the answer comes."""
        for place in range(ROUNDS):
            held = await claimed(store)
            asked = asking(held.row, path=TO_EXECUTING)
            row = await advanced(store, reader, replace(asked, attempt_end=None))
            interrupt_id = asked.new_interrupts[0].interrupt_id

            async def answer(run_id: str = asked.run_id, opened: str = interrupt_id) -> None:
                while True:
                    seen = await look(reader, run_id)
                    result = await settled_answer(store, answering(seen, opened))
                    if isinstance(result, Committed):
                        return
                    assert isinstance(result, Behind)

            async def park(commit: Commit = parked(commit_of(row))) -> None:
                while True:
                    result = await settled_answer(store, commit)
                    if isinstance(result, Committed):
                        return
                    assert isinstance(result, Behind)
                    seen = await look(reader, commit.run_id)
                    answered = seen.hot.open_interrupts == 0
                    commit = parked(commit_of(seen), ready_in_s=0 if answered else None)

            await _at_once(answer, park) if place % 2 else await _at_once(park, answer)
            found = await look(reader, asked.run_id)
            assert (found.hot.lease_owner, found.hot.open_interrupts) == (None, 0)
            [again] = await store.claim_runs(want())
            assert again.row.facts.run_id == asked.run_id

    async def test_writers_beside_each_other_leave_no_gap(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id

        async def write(name: str) -> None:
            while True:
                seen = await look(reader, run_id)
                commit = commit_of(seen, note(name), note(name), any_holder=True)
                result = await settled_answer(store, commit)
                if isinstance(result, Committed):
                    return
                assert isinstance(result, Behind)

        with anyio.fail_after(WAIT_S_MAX):
            async with anyio.create_task_group() as group:
                for number in range(8):
                    group.start_soon(write, f"writer-{number}")
        assert len(await history(reader, run_id)) == 2 + 16

    async def test_a_requeue_and_a_commit_leave_one_of_two_orders(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        for place in range(ROUNDS):
            held = await claimed(store)
            commit = commit_of(held.row, note(), path=TO_SUCCEEDED)
            clock.advance(TTL_S)
            results: list[CommitResult] = []

            async def requeue() -> None:
                await store.requeue_expired(10)

            async def write(commit: Commit = commit, into: list[CommitResult] = results) -> None:
                into.append(await settled_answer(store, commit))

            await _at_once(requeue, write) if place % 2 else await _at_once(write, requeue)
            [attempt] = await reader.list_attempts(commit.run_id)
            if results == [LeaseLost()]:
                assert attempt.end_reason is AttemptEnd.LEASE_LOST
                assert await reader.is_ready(commit.run_id)
                await store.request_cancel(commit.run_id, cancel_wish())
            else:
                assert [type(result) for result in results] == [Committed]
                assert attempt.end_reason is AttemptEnd.FINISHED
                assert not await reader.is_ready(commit.run_id)
            await history(reader, commit.run_id)

    async def test_one_of_many_reapers_takes_an_expired_run(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        runs = [(await claimed(store)).row.facts.run_id for _ in range(10)]
        clock.advance(TTL_S)
        taken: list[str] = []

        async def reap() -> None:
            taken.extend([one.run_id for one in await store.requeue_expired(10)])

        await _at_once(reap, reap, reap, reap)
        taken.extend([one.run_id for one in await store.requeue_expired(10)])
        assert sorted(taken) == sorted(runs)
        for run_id in runs:
            assert (await look(reader, run_id)).hot.faults == 1

    async def test_a_cancel_and_a_claim_leave_one_of_two_orders(
        self, store: Store, reader: Reader
    ) -> None:
        for place in range(ROUNDS):
            new = new_run()
            await store.insert_run(new)

            async def cancel(run_id: str = new.run_id) -> None:
                await store.request_cancel(run_id, cancel_wish())

            async def claim() -> None:
                await store.claim_runs(want())

            await _at_once(cancel, claim) if place % 2 else await _at_once(claim, cancel)
            hot = (await look(reader, new.run_id)).hot
            assert hot.cancel_epoch == 1
            assert not await reader.is_ready(new.run_id)
            closing = hot.parked_on is ParkedOn.CLOSING
            assert closing is (hot.lease_owner is None)
            assert len(await reader.timers_of(new.run_id)) == (1 if closing else 0)
            await history(reader, new.run_id)

    async def test_batches_that_share_runs_never_block_each_other(
        self, store: Store, reader: Reader
    ) -> None:
        for _ in range(10):
            await store.insert_run(new_run())
        held = await store.claim_runs(want(limit=10))

        async def write(rows: list[int]) -> None:
            for _ in range(5):
                seen = [await look(reader, held[place].row.facts.run_id) for place in rows]
                await store.commit([commit_of(row, note(), any_holder=True) for row in seen])
                await anyio.lowlevel.checkpoint()

        with anyio.fail_after(WAIT_S_MAX):
            async with anyio.create_task_group() as group:
                group.start_soon(write, list(range(10)))
                group.start_soon(write, list(reversed(range(10))))
                group.start_soon(write, [5, 2, 7])
        for one in held:
            await history(reader, one.row.facts.run_id)


async def _at_once(*writers: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run writers beside each other, bounded in time; they start in the given order."""
    with anyio.fail_after(WAIT_S_MAX):
        async with anyio.create_task_group() as group:
            for writer in writers:
                group.start_soon(writer)
