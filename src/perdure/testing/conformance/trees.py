"""What a store promises of runs that belong to a tree: children, their reports, cancels, agents."""

from dataclasses import replace

import pytest

from perdure.protocol import ids
from perdure.protocol.errors import ThreadBusy
from perdure.protocol.events import AttemptEvent, CancelEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import AttemptEnd, ParkedOn, RunState
from perdure.store.commits import Behind, CancelRequested, Commit, Committed, LeaseLost, Refused
from perdure.store.ports import Store
from perdure.store.reader import Reader, RunFilter
from perdure.store.requests import DueTimer, NewBlob, NewRun, TimerKind
from perdure.testing.builders import (
    EXECUTING,
    FAILED,
    TO_EXECUTING,
    TO_SUCCEEDED,
    VERSION,
    advanced,
    cancel_wish,
    claim_one,
    claimed,
    commit_of,
    look,
    new_id,
    new_run,
    note,
    parked,
    want,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract, history, types_of


def child_of(parent: RunRow, *, detached: bool = False, blobs: tuple[NewBlob, ...] = ()) -> NewRun:
    """Return a child to be created with a commit of its parent."""
    facts = parent.facts
    return replace(
        new_run(blobs=blobs),
        parent_run_id=facts.run_id,
        root_run_id=facts.root_run_id,
        depth=facts.depth + 1,
        detached=detached,
    )


def spawning(parent: RunRow, *children: NewRun) -> Commit:
    """Return a commit of a pending parent's holder that creates children and waits for them."""
    attached = sum(not child.detached for child in children)
    commit = parked(commit_of(parent, note(), path=TO_EXECUTING))
    hot = replace(commit.hot, open_children=attached, parked_on=ParkedOn.CHILD)
    return replace(commit, new_children=children, hot=hot)


async def family(store: Store, reader: Reader, *, detached: bool = False) -> tuple[RunRow, RunRow]:
    """Return a parent that waits, held by nobody, and its child, which is claimable."""
    parent = (await claimed(store)).row
    child = child_of(parent, detached=detached)
    row = await advanced(store, reader, spawning(parent, child))
    return row, await look(reader, child.run_id)


def ending(child: RunRow) -> Commit:
    """Return the commit that ends a pending child, and leaves its report with its parent."""
    commit = commit_of(child, path=TO_SUCCEEDED)
    return replace(commit, reports_to=child.facts.parent_run_id)


class TreeContract(Contract):
    """Children and their parents."""

    async def test_children_are_created_with_their_parents_commit(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        blob = NewBlob(digest="ab" * 32, media_type="application/json", data=b"1")
        first, second = child_of(parent, blobs=(blob,)), child_of(parent, detached=True)
        row = await advanced(store, reader, spawning(parent, first, second))
        assert (row.hot.open_children, row.hot.parked_on) == (1, ParkedOn.CHILD)
        one, two = await look(reader, first.run_id), await look(reader, second.run_id)
        for child in (one, two):
            facts = child.facts
            assert (facts.parent_run_id, facts.depth) == (parent.facts.run_id, 1)
            assert facts.root_run_id == parent.facts.run_id
            assert child.hot.state is RunState.PENDING
            assert await types_of(reader, facts.run_id) == ["state"]
            thread = await reader.find_thread(facts.tenant_id, facts.thread_id)
            assert thread is not None
            assert thread.active_run_id == facts.run_id
        assert (one.facts.detached, two.facts.detached) == (False, True)
        assert await reader.read_blob(parent.facts.tenant_id, blob.digest) == b"1"
        claims = await store.claim_runs(want())
        assert {item.row.facts.run_id for item in claims} == {first.run_id, second.run_id}

    async def test_children_on_a_thread_that_lasts(self, store: Store, reader: Reader) -> None:
        """R-13.4: one makes the thread, others join it, in one commit too; one runs at a time."""
        parent = (await claimed(store)).row
        first = child_of(parent)
        joins = {"thread_id": first.thread_id, "creates_thread": False}
        second, third = (replace(child_of(parent), **joins) for _ in range(2))
        alone = child_of(parent)
        await write(store, spawning(parent, first, second, alone, third))
        claims = await store.claim_runs(want())
        assert {c.row.facts.run_id for c in claims} == {first.run_id, alone.run_id}
        thread = await reader.find_thread(parent.facts.tenant_id, first.thread_id)
        assert thread is not None
        assert (thread.active_run_id, thread.last_position) == (first.run_id, 3)
        assert (await look(reader, second.run_id)).hot.parked_on is ParkedOn.THREAD
        [run] = [claim for claim in claims if claim.row.facts.run_id == first.run_id]
        await write(store, ending(run.row))
        next_one = await claim_one(store)
        assert (next_one.row.facts.run_id, next_one.input_position) == (second.run_id, 2)

    async def test_a_thread_of_a_child_is_not_deleted_while_its_parent_goes_on(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.3, R-13.4: the parent may speak there again; a detached child's goes at once."""
        for detached in (False, True):
            parent, child = await family(store, reader, detached=detached)
            tenant, thread = child.facts.tenant_id, child.facts.thread_id
            await write(store, ending((await claim_one(store)).row))
            if not detached:
                with pytest.raises(ThreadBusy) as busy:
                    await store.delete_thread(tenant, thread)
                assert busy.value.details == {"run_id": parent.facts.run_id}
            else:
                assert await store.delete_thread(tenant, thread)

    async def test_a_child_on_a_thread_that_is_not_there_refuses_the_commit(
        self, store: Store, reader: Reader
    ) -> None:
        """Beside it, and in the same batch, others are written."""
        parent, other = (await claimed(store)).row, (await claimed(store)).row
        lost = replace(child_of(parent), creates_thread=False)
        good = child_of(other)
        refused, written = await store.commit([spawning(parent, lost), spawning(other, good)])
        assert isinstance(refused, Refused)
        assert isinstance(written, Committed)
        assert (await look(reader, parent.facts.run_id)).hot == parent.hot
        assert await reader.find_run(None, lost.run_id) is None
        elsewhere = replace(new_run(tenant_id="other"))
        await store.insert_run(elsewhere)
        strange = replace(lost, thread_id=elsewhere.thread_id)
        [refused] = await store.commit([spawning(parent, strange)])
        assert isinstance(refused, Refused)

    async def test_a_commit_that_is_not_written_creates_no_child(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        child = child_of(parent)
        good = spawning(parent, child)
        stale = replace(good, guard=replace(good.guard, expected_seq=7))
        assert await store.commit([stale]) == [Behind(seq=parent.hot.last_seq)]
        lost = replace(good, guard=replace(good.guard, token=9))
        assert await store.commit([lost]) == [LeaseLost()]
        await store.request_cancel(parent.facts.run_id, cancel_wish())
        assert await store.commit([good]) == [CancelRequested(epoch=1)]
        assert await reader.find_run(None, child.run_id) is None

    async def test_a_child_that_exists_refuses_the_whole_commit(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        child = child_of(parent)
        await store.insert_run(replace(child, parent_run_id=None, root_run_id=None, depth=0))
        [result] = await store.commit([spawning(parent, child)])
        assert isinstance(result, Refused)
        assert (await look(reader, parent.facts.run_id)).hot == parent.hot

    async def test_a_commit_sent_again_creates_no_second_child(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        commit = spawning(parent, child_of(parent))
        first = await write(store, commit)
        [again] = await store.commit([commit])
        assert isinstance(again, Committed)
        assert again.seq == first.seq
        where = RunFilter(parent_run_id=parent.facts.run_id)
        assert len(await reader.list_runs(None, where, after=None, limit=10)) == 1

    async def test_a_run_that_is_cancelled_or_ends_has_no_new_children(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        await store.request_cancel(parent.facts.run_id, cancel_wish())
        parent = await look(reader, parent.facts.run_id)
        [result] = await store.commit([spawning(parent, child_of(parent))])
        assert isinstance(result, Refused)
        other = (await claimed(store)).row
        last = replace(commit_of(other, path=TO_SUCCEEDED), new_children=(child_of(other),))
        [result] = await store.commit([last])
        assert isinstance(result, Refused)

    async def test_a_parent_does_not_end_before_its_children(
        self, store: Store, reader: Reader
    ) -> None:
        """R-2.2."""
        parent, _ = await family(store, reader)
        [result] = await store.commit([commit_of(parent, path=(FAILED,))])
        assert isinstance(result, Refused)
        assert (await look(reader, parent.facts.run_id)).hot == parent.hot

    async def test_the_end_of_a_child_leaves_a_report(self, store: Store, reader: Reader) -> None:
        """Decision 12: in the same transaction, also while the parent is held; taken once."""
        parent, child = await family(store, reader)
        held = await claim_one(store)
        await write(store, ending(held.row))
        report = DueTimer(run_id=parent.facts.run_id, kind=TimerKind.CHILD, ref=child.facts.run_id)
        assert await reader.due_timers(10) == [report]
        told = commit_of(parent, note("told"))
        told = replace(
            told,
            reported=(child.facts.run_id,),
            ready_in_s=0.0,
            hot=replace(told.hot, open_children=0, parked_on=None),
        )
        await write(store, told)
        assert await reader.due_timers(10) == []
        assert await store.commit([told]) == [Behind(seq=parent.hot.last_seq + 1)]
        assert (await claim_one(store)).row.facts.run_id == parent.facts.run_id

    async def test_a_report_is_due_while_the_parent_is_held(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        child = child_of(parent)
        commit = commit_of(parent, note(), path=TO_EXECUTING)
        commit = replace(commit, new_children=(child,), hot=replace(commit.hot, open_children=1))
        parent = await advanced(store, reader, commit)
        await write(store, ending((await claim_one(store)).row))
        [due] = await reader.due_timers(10)
        assert (due.run_id, due.kind, due.ref) == (
            parent.facts.run_id,
            TimerKind.CHILD,
            child.run_id,
        )

    async def test_a_refused_end_leaves_no_report(self, store: Store, reader: Reader) -> None:
        parent, _ = await family(store, reader)
        held = await claim_one(store)
        wrong = ending(held.row)
        wrong = replace(wrong, guard=replace(wrong.guard, token=9))
        assert await store.commit([wrong]) == [LeaseLost()]
        assert await reader.timers_of(parent.facts.run_id) == []

    async def test_a_batch_may_hold_a_parent_and_its_children(
        self, store: Store, reader: Reader
    ) -> None:
        parent = (await claimed(store)).row
        first, second = child_of(parent), child_of(parent)
        parent = await advanced(store, reader, spawning(parent, first, second))
        held = [item.row for item in await store.claim_runs(want())]
        await write(store, ending(held[0]))
        told = commit_of(parent, note("told"))
        told = replace(
            told,
            reported=(held[0].facts.run_id,),
            hot=replace(told.hot, open_children=1),
        )
        results = await store.commit([told, ending(held[1])])
        assert all(isinstance(result, Committed) for result in results)
        [left] = await reader.timers_of(parent.facts.run_id)
        assert left.ref == held[1].facts.run_id

    async def test_all_runs_below_a_root_are_found_by_it(
        self, store: Store, reader: Reader
    ) -> None:
        parent, child = await family(store, reader)
        held = await claim_one(store)
        grandchild = child_of(held.row)
        await write(store, spawning(held.row, grandchild))
        other = new_run()
        await store.insert_run(other)
        where = RunFilter(root_run_id=parent.facts.run_id)
        rows = await reader.list_runs(None, where, after=None, limit=10)
        assert [row.facts.run_id for row in rows] == [grandchild.run_id, child.facts.run_id]
        assert rows[0].facts.depth == 2
        [newest] = await reader.list_runs(None, where, after=None, limit=1)
        [rest] = await reader.list_runs(None, where, after=newest.facts.run_id, limit=5)
        assert rest.facts.run_id == child.facts.run_id
        assert await reader.list_runs("other", where, after=None, limit=10) == []
        where = RunFilter(root_run_id=child.facts.run_id)
        assert await reader.list_runs(None, where, after=None, limit=10) == []


class TreeCancelContract(Contract):
    """Cancels of trees, and taking runs away."""

    async def test_a_cancel_reaches_all_that_is_below_and_not_detached(
        self, store: Store, reader: Reader
    ) -> None:
        """R-9.5: waiting, held and queued runs; not a detached child, nor what has ended."""
        root = (await claimed(store)).row
        alive, gone = child_of(root), child_of(root)
        free = child_of(root, detached=True)
        root = await advanced(store, reader, spawning(root, alive, gone, free))
        held = {item.row.facts.run_id: item.row for item in await store.claim_runs(want())}
        await write(store, ending(held[gone.run_id]))
        below = child_of(held[alive.run_id])
        commit = commit_of(held[alive.run_id], note(), path=TO_EXECUTING)
        commit = replace(commit, new_children=(below,), hot=replace(commit.hot, open_children=1))
        await write(store, commit)
        hot = await store.request_cancel(root.facts.run_id, cancel_wish())
        assert hot is not None
        assert hot.cancel_epoch == 1
        assert (await look(reader, root.facts.run_id)).hot == hot
        epochs = {
            run_id: (await look(reader, run_id)).hot.cancel_epoch
            for run_id in (alive.run_id, below.run_id, gone.run_id, free.run_id)
        }
        assert epochs == {alive.run_id: 1, below.run_id: 1, gone.run_id: 0, free.run_id: 0}
        cancel = (await history(reader, below.run_id))[-1].data
        assert cancel == CancelEvent(
            action=cancel_wish().action, epoch=1, by="local", source="parent", reason="enough"
        )
        queued = (await look(reader, below.run_id)).hot
        assert queued.parked_on is ParkedOn.CLOSING
        assert not await reader.is_ready(below.run_id)
        closing = {due.run_id for due in await reader.due_timers(10) if due.kind == "close"}
        assert closing == {root.facts.run_id, below.run_id}

    async def test_a_child_that_was_cancelled_before_keeps_its_cancel(
        self, store: Store, reader: Reader
    ) -> None:
        root, child = await family(store, reader)
        await store.request_cancel(child.facts.run_id, cancel_wish())
        before = (await look(reader, child.facts.run_id)).hot
        await store.request_cancel(root.facts.run_id, cancel_wish())
        assert (await look(reader, child.facts.run_id)).hot == before
        again = await store.request_cancel(root.facts.run_id, cancel_wish())
        assert again is not None
        assert again.cancel_epoch == 1

    async def test_a_run_is_taken_from_its_holder(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        clock.advance(1)
        assert await store.take_away(run_id, "orphaned")
        hot = (await look(reader, run_id)).hot
        assert (hot.lease_owner, hot.lease_token, hot.faults) == (None, held.token + 1, 1)
        assert hot.parked_on is ParkedOn.CLOSING
        lost = (await history(reader, run_id))[-1].data
        assert isinstance(lost, AttemptEvent)
        assert (lost.phase, lost.reason) == ("lost", "orphaned")
        [attempt] = await reader.list_attempts(run_id)
        assert attempt.end_reason is AttemptEnd.LEASE_LOST
        [due] = await reader.due_timers(10)
        assert due.kind is TimerKind.CLOSE
        assert await store.commit([commit_of(held.row, note())]) == [LeaseLost()]
        assert not await store.take_away(run_id, "orphaned")
        assert not await store.take_away(new_id(ids.RUN), "orphaned")


class HandoffContract(Contract):
    """Runs that another agent carries on."""

    async def test_a_run_is_claimed_by_who_serves_its_agent_of_the_moment(
        self, store: Store, reader: Reader
    ) -> None:
        """R-13.2: the agent it was started with stays known; claims go by the other one."""
        held = (await claimed(store)).row
        commit = parked(commit_of(held, note(), path=TO_EXECUTING), ready_in_s=0.0)
        row = await advanced(store, reader, replace(commit, handed_to=("other", "2")))
        assert (row.facts.agent_id, row.facts.agent_version) == (held.facts.agent_id, VERSION)
        assert row.facts.agent_now == ("other", "2")
        assert await store.claim_runs(want()) == []
        [other] = await store.claim_runs(want(serves=(("other", "2"),)))
        assert other.row.facts.active_agent == ("other", "2")
        assert other.row.hot.state is EXECUTING

    async def test_it_stays_so_when_its_worker_is_lost(
        self, store: Store, clock: FakeClock
    ) -> None:
        held = (await claimed(store)).row
        commit = parked(commit_of(held, note(), path=TO_EXECUTING), ready_in_s=0.0)
        await write(store, replace(commit, handed_to=("other", "2")))
        await store.claim_runs(want(serves=(("other", "2"),)))
        clock.advance(100)
        assert len(await store.requeue_expired(10)) == 1
        clock.advance(100)
        assert await store.claim_runs(want()) == []
        assert len(await store.claim_runs(want(serves=(("other", "2"),)))) == 1
