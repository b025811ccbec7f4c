"""What `request_cancel` and `record_late` promise."""

from dataclasses import replace

import pytest

from perdure.protocol import ids
from perdure.protocol.errors import NotFound
from perdure.protocol.events import CancelEvent, LateEvent
from perdure.protocol.states import CancelAction, CancelOption, ParkedOn, RunState, ToolCallStatus
from perdure.protocol.values import BlobRef
from perdure.store.commits import Behind, CancelRequested
from perdure.store.keeping import LATE_PER_EXECUTION_MAX
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import CancelWish, DueTimer, LateKept, NewBlob, TimerKind
from perdure.testing.builders import (
    FAILED,
    PLANNING,
    WAITING,
    advanced,
    asking,
    cancel_wish,
    claimed,
    commit_of,
    finish,
    late_result,
    look,
    new_id,
    new_run,
    note,
    parked,
    want,
    with_call,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history, types_of

ROLLBACK = CancelAction.ROLLBACK


class CancelContract(Contract):
    """Accepting cancels."""

    async def test_a_cancel_of_a_run_in_the_queue_leaves_it_to_its_closing(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        clock.advance(1)
        hot = await store.request_cancel(new.run_id, cancel_wish())
        assert hot is not None
        assert (hot.state, hot.cancel_epoch, hot.last_seq) == (RunState.PENDING, 1, 2)
        assert (hot.cancel_action, hot.parked_on) == (CancelAction.INTERRUPT, ParkedOn.CLOSING)
        assert hot.updated_at == clock()
        assert (await look(reader, new.run_id)).hot == hot
        assert not await reader.is_ready(new.run_id)
        assert await store.claim_runs(want()) == []
        due = await reader.due_timers(10)
        assert due == [DueTimer(run_id=new.run_id, kind=TimerKind.CLOSE, ref=None)]

    async def test_a_cancel_stands_in_the_log(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        wish = CancelWish(action=ROLLBACK, by="ana", source="console", reason="wrong file")
        await store.request_cancel(new.run_id, wish)
        last = (await history(reader, new.run_id))[-1]
        assert last.data == CancelEvent(
            action=ROLLBACK, epoch=1, by="ana", source="console", reason="wrong file"
        )
        assert (last.epoch, last.attempt, last.at) == (1, 0, clock())

    async def test_the_holder_of_a_cancelled_run_keeps_it(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        hot = await store.request_cancel(run_id, cancel_wish())
        assert hot is not None
        assert (hot.lease_owner, hot.lease_token) == (held.row.hot.lease_owner, held.token)
        assert (hot.lease_expires_at, hot.parked_on) == (held.row.hot.lease_expires_at, None)
        assert await reader.timers_of(run_id) == []
        [result] = await store.commit([commit_of(held.row, note())])
        assert result == CancelRequested(epoch=1)

    async def test_a_waiting_run_keeps_its_state_until_it_is_closed(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row = await advanced(store, reader, asking(held.row))
        hot = await store.request_cancel(row.facts.run_id, cancel_wish())
        assert hot is not None
        assert (hot.state, hot.parked_on) == (WAITING, ParkedOn.CLOSING)
        assert (hot.open_interrupts, hot.waiting_since) == (1, row.hot.waiting_since)
        assert [timer.kind for timer in await reader.due_timers(10)] == [TimerKind.CLOSE]
        closing = commit_of(replace(row, hot=hot), path=(FAILED,))
        assert (await advanced(store, reader, closing)).hot.state is FAILED
        assert await reader.timers_of(row.facts.run_id) == []

    async def test_a_sleeping_run_is_woken_to_be_closed(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        row = await advanced(
            store, reader, parked(commit_of(held.row, path=(PLANNING,)), ready_in_s=3600)
        )
        assert row.hot.wake_at is not None
        hot = await store.request_cancel(row.facts.run_id, cancel_wish())
        assert hot is not None
        assert (hot.wake_at, hot.parked_on) == (None, ParkedOn.CLOSING)
        assert not await reader.is_ready(row.facts.run_id)
        assert [timer.kind for timer in await reader.due_timers(10)] == [TimerKind.CLOSE]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (CancelAction.INTERRUPT, CancelAction.INTERRUPT),
            (ROLLBACK, CancelAction.INTERRUPT),
            (ROLLBACK, ROLLBACK),
        ],
    )
    async def test_a_cancel_no_stronger_than_the_accepted_one_changes_nothing(
        self, store: Store, reader: Reader, first: CancelAction, second: CancelAction
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        accepted = await store.request_cancel(new.run_id, cancel_wish(first))
        again = await store.request_cancel(new.run_id, cancel_wish(second))
        assert again == accepted
        assert await types_of(reader, new.run_id) == ["state", "cancel"]

    async def test_an_interrupt_can_be_raised_to_a_rollback(
        self, store: Store, reader: Reader
    ) -> None:
        """R-9.1, decision 35."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish())
        hot = await store.request_cancel(run_id, cancel_wish(ROLLBACK))
        assert hot is not None
        assert (hot.cancel_epoch, hot.cancel_action) == (2, ROLLBACK)
        assert await types_of(reader, run_id) == ["state", "attempt", "cancel", "cancel"]

    async def test_a_later_cancel_may_ask_for_more_and_takes_nothing_back(
        self, store: Store, reader: Reader
    ) -> None:
        """R-9.1, R-9.4: the stronger action stays, the options add up, children get them too."""
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await store.request_cancel(run_id, cancel_wish(ROLLBACK))
        compensate = replace(cancel_wish(), options=CancelOption.COMPENSATE)
        asked = await store.request_cancel(run_id, compensate)
        assert asked is not None
        assert (asked.cancel_epoch, asked.cancel_action) == (2, ROLLBACK)
        assert asked.cancel_options is CancelOption.COMPENSATE
        assert (await look(reader, run_id)).hot.cancel_options is CancelOption.COMPENSATE
        again = await store.request_cancel(run_id, compensate)
        assert again == asked
        discard = replace(cancel_wish(), options=CancelOption.DISCARD_ARTIFACTS)
        both = await store.request_cancel(run_id, discard)
        assert both is not None
        assert both.cancel_options == CancelOption.COMPENSATE | CancelOption.DISCARD_ARTIFACTS
        told = [event.data for event in await history(reader, run_id)]
        assert [
            (data.action, data.compensate, data.discard_artifacts)
            for data in told
            if isinstance(data, CancelEvent)
        ] == [(ROLLBACK, False, False), (ROLLBACK, True, False), (ROLLBACK, True, True)]

    async def test_an_ended_run_is_not_cancelled(self, store: Store, reader: Reader) -> None:
        new = new_run()
        await store.insert_run(new)
        row = await finish(store, reader, new.run_id)
        assert await store.request_cancel(new.run_id, cancel_wish(ROLLBACK)) == row.hot
        assert await look(reader, new.run_id) == row
        assert await reader.timers_of(new.run_id) == []

    async def test_a_run_that_does_not_exist_is_not_cancelled(self, store: Store) -> None:
        assert await store.request_cancel(new_id(ids.RUN), cancel_wish()) is None

    async def test_a_queued_run_of_a_thread_is_cancelled_like_any_other(
        self, store: Store, reader: Reader
    ) -> None:
        first = new_run()
        await store.insert_run(first)
        second, third = (new_run(thread_id=first.thread_id) for _ in range(2))
        await store.insert_run(second)
        await store.insert_run(third)
        hot = await store.request_cancel(second.run_id, cancel_wish())
        assert hot is not None
        assert hot.parked_on is ParkedOn.CLOSING
        row = await look(reader, second.run_id)
        await advanced(store, reader, commit_of(row, path=(FAILED,)))
        thread = await reader.find_thread(first.tenant_id, first.thread_id)
        assert thread is not None
        assert thread.active_run_id == first.run_id
        assert not await reader.is_ready(third.run_id)
        await finish(store, reader, first.run_id)
        assert await reader.is_ready(third.run_id)

    async def test_a_cancelled_run_whose_turn_comes_is_not_made_claimable(
        self, store: Store, reader: Reader
    ) -> None:
        first = new_run()
        await store.insert_run(first)
        second, third = (new_run(thread_id=first.thread_id) for _ in range(2))
        await store.insert_run(second)
        await store.insert_run(third)
        await store.request_cancel(second.run_id, cancel_wish())
        await finish(store, reader, first.run_id)
        assert not await reader.is_ready(second.run_id)
        assert not await reader.is_ready(third.run_id)
        row = await look(reader, second.run_id)
        assert row.hot.parked_on is ParkedOn.CLOSING
        await advanced(store, reader, commit_of(row, path=(FAILED,)))
        assert await reader.is_ready(third.run_id)


class LateContract(Contract):
    """Results that come after their worker lost the run."""

    async def test_a_late_result_is_recorded_once(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        """R-9.3."""
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        clock.advance(3)
        late = replace(late_result(call, output={"n": 1}), step_index=4)
        assert await store.record_late(late) is LateKept.RECORDED
        assert await store.record_late(replace(late, attempt=2, epoch=1)) is LateKept.KNOWN
        last = (await history(reader, call.run_id))[-1]
        assert last.data == LateEvent(
            tool_call_id=call.tool_call_id,
            execution=1,
            attempt=1,
            epoch=0,
            status=ToolCallStatus.SUCCEEDED,
            output={"n": 1},
            external_ref="ref-9",
        )
        assert (last.seq, last.at, last.step_index) == (row.hot.last_seq + 1, clock(), 4)
        [found] = await reader.list_late(call.run_id)
        assert (found.tool_call_id, found.execution, found.run_id) == (
            call.tool_call_id,
            1,
            call.run_id,
        )
        assert (found.attempt, found.epoch, found.seq) == (1, 0, last.seq)
        assert (found.status, found.external_ref) == (ToolCallStatus.SUCCEEDED, "ref-9")
        assert found.recorded_at == clock()

    async def test_each_execution_may_be_late(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        _, call = await with_call(store, reader, held.row)
        for number in (2, 1, 3):
            late = late_result(call, execution=number)
            assert await store.record_late(late) is LateKept.RECORDED
        found = await reader.list_late(call.run_id)
        assert [row.execution for row in found] == [2, 1, 3]
        assert [row.seq for row in found] == sorted(row.seq for row in found)

    async def test_results_of_an_execution_that_differ_are_all_kept_up_to_a_bound(
        self, store: Store, reader: Reader
    ) -> None:
        """R-5.10, R-9.3: output, status and the id outside make another; a few of them are enough."""
        held = await claimed(store)
        _, call = await with_call(store, reader, held.row)
        ref = BlobRef(digest="a" * 64, size=9)
        first = late_result(call)
        others = [
            replace(first, output="another"),
            replace(first, output=None, output_ref=ref),
            replace(first, status=ToolCallStatus.FAILED),
            replace(first, external_ref=None),
            *(replace(first, output=n) for n in range(LATE_PER_EXECUTION_MAX - 5)),
        ]
        for late in (first, *others):
            assert await store.record_late(late) is LateKept.RECORDED
            assert await store.record_late(late) is LateKept.KNOWN
        before = (await look(reader, call.run_id)).hot
        assert await store.record_late(replace(first, output="much")) is LateKept.LEFT_OUT
        assert await store.record_late(first) is LateKept.KNOWN
        assert (await look(reader, call.run_id)).hot == before
        found = await reader.list_late(call.run_id)
        assert len(found) == LATE_PER_EXECUTION_MAX
        assert [row.seq for row in found] == sorted({row.seq for row in found})
        assert await store.record_late(replace(first, execution=2)) is LateKept.RECORDED

    async def test_a_late_result_moves_nothing_but_the_seq(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        await store.record_late(late_result(call))
        after = await look(reader, call.run_id)
        assert after.hot == replace(row.hot, last_seq=row.hot.last_seq + 1)
        found = await reader.find_tool_call(row.facts.tenant_id, call.tool_call_id)
        assert found == call
        [result] = await store.commit([commit_of(row, note())])
        assert result == Behind(seq=after.hot.last_seq)

    async def test_a_late_result_is_recorded_after_the_end_too(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        ended = await advanced(store, reader, commit_of(row, path=(FAILED,)))
        assert await store.record_late(late_result(call)) is LateKept.RECORDED
        after = await look(reader, call.run_id)
        assert after.hot.last_seq == ended.hot.last_seq + 1
        assert after.hot.terminal_seq == ended.hot.terminal_seq
        assert after.hot.state is FAILED
        assert len(await history(reader, call.run_id)) == after.hot.last_seq

    async def test_the_blobs_of_a_late_result_are_kept(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        row, call = await with_call(store, reader, held.row)
        blob = NewBlob(digest="e" * 64, media_type="text/plain", data=b"late")
        await store.record_late(replace(late_result(call), blobs=(blob,)))
        assert await reader.read_blob(row.facts.tenant_id, blob.digest) == b"late"

    async def test_a_late_result_of_an_unknown_run_is_not_found(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        _, call = await with_call(store, reader, held.row)
        with pytest.raises(NotFound):
            await store.record_late(replace(late_result(call), run_id=new_id(ids.RUN)))
        assert await reader.list_late(call.run_id) == []
