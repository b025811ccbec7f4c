"""What branches of threads promise: bases by reference, adoption, deletion, search by metadata."""

import contextlib
from dataclasses import replace

import anyio
import pytest
from pydantic import JsonValue

from perdure.protocol import ids
from perdure.protocol.errors import Conflict, Gone, Invalid, NotFound, ThreadBusy
from perdure.protocol.events import StateEvent
from perdure.protocol.messages import Role
from perdure.protocol.records import BaseKind, ThreadBase, ThreadRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState
from perdure.store.commits import Behind, Commit, CommitResult, Committed, NewMessage
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import NewRun
from perdure.testing.builders import (
    TO_SUCCEEDED,
    claim_one,
    commit_of,
    finish,
    look,
    new_id,
    new_run,
    new_thread,
    want,
)
from perdure.testing.conformance.base import Contract, settled_answer
from perdure.testing.conformance.topics import put, subscription

TENANT = new_thread().tenant_id


async def say(store: Store, thread_id: str, text: str) -> None:
    """Append a message of a caller."""
    await store.append_message(
        tenant_id=TENANT,
        thread_id=thread_id,
        message_id=new_id(ids.MESSAGE),
        role=Role.USER,
        author="local",
        body=[{"type": "text", "text": text}],
    )


def base_of(thread: ThreadRow, source: str, position: int) -> ThreadBase:
    """Return the base of a fork."""
    return ThreadBase(
        thread_id=thread.thread_id,
        from_position=position,
        base_thread_id=source,
        base_position=position,
        kind=BaseKind.FORK,
        author="local",
        created_at=thread.created_at,
    )


async def fork(store: Store, source: str, position: int) -> ThreadRow:
    """Create a fork of a thread."""
    thread = replace(new_thread(), last_position=position)
    assert await store.create_thread(thread, None, base_of(thread, source, position)) is None
    return thread


async def positions(reader: Reader, thread_id: str) -> list[int]:
    """Return the places of a thread's own messages."""
    return [row.position for row in await reader.list_messages(thread_id, after=0, limit=50)]


def forking(thread_id: str) -> NewRun:
    """Return a run that makes a branch of a busy thread."""
    new = new_run(thread_id=thread_id, strategy="fork")
    return replace(new, branch_thread_id=new_id(ids.THREAD))


class BranchContract(Contract):
    """Forks of threads, runs on branches, adoption and deletion."""

    async def test_a_fork_goes_on_from_its_place_and_copies_nothing(
        self, store: Store, reader: Reader
    ) -> None:
        """R-7.5, R-11.3: what is said on one is not said on the other."""
        source = new_thread()
        await store.create_thread(source)
        for text in "abc":
            await say(store, source.thread_id, text)
        thread = await fork(store, source.thread_id, 2)
        await say(store, thread.thread_id, "d")
        await say(store, source.thread_id, "e")
        assert await positions(reader, source.thread_id) == [1, 2, 3, 4]
        assert await positions(reader, thread.thread_id) == [3]
        (base,) = await reader.thread_bases(thread.thread_id)
        assert base == base_of(thread, source.thread_id, 2)
        assert await reader.thread_bases(source.thread_id) == []
        assert await reader.list_branches(source.thread_id, after=None, limit=5) == [base]
        assert await reader.list_branches(source.thread_id, after=base.thread_id, limit=5) == []
        for place, error, at in (("thr_" + "0" * 32, NotFound, 0), (source.thread_id, Invalid, 9)):
            with pytest.raises(error):
                await fork(store, place, at)
        # sent again
        assert await store.create_thread(thread, None, base) is None
        assert len(await reader.thread_bases(thread.thread_id)) == 1

    async def test_a_run_that_finds_its_thread_busy_begins_a_branch(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1: claimable at once, on a thread that says what was said before the active run."""
        first = new_run()
        await store.insert_run(first)
        await say(store, first.thread_id, "between")
        held = await claim_one(store)
        await finish(store, reader, held.row.facts.run_id)
        active, free = forking(first.thread_id), new_run()
        row = (await store.insert_run(active)).row
        assert row.facts.thread_id == first.thread_id
        beside = forking(first.thread_id)
        row = (await store.insert_run(beside)).row
        assert row.facts.thread_id == beside.branch_thread_id
        assert (row.hot.parked_on, await reader.is_ready(beside.run_id)) == (None, True)
        assert await look(reader, beside.run_id) == row
        (base,) = await reader.thread_bases(row.facts.thread_id)
        before = await positions(reader, first.thread_id)
        assert (base.base_thread_id, base.run_id) == (first.thread_id, active.run_id)
        assert base.base_position == before[-1] - 1
        assert await positions(reader, row.facts.thread_id) == [base.base_position + 1]
        (event,) = await reader.events_after(beside.run_id, 0, limit=1)
        assert isinstance(event.data, StateEvent)
        assert event.data.branch is not None
        assert event.data.branch.run_id == active.run_id
        again = await store.insert_run(beside)
        assert (again.created, again.row) == (False, row)
        # a run that names another's place, as a fork of that run does
        named = replace(free, branches_from=active.run_id)
        await store.insert_run(named)
        (base,) = await reader.thread_bases(free.thread_id)
        assert (base.base_position, base.run_id) == (before[-1] - 1, active.run_id)

    async def test_a_branch_is_adopted_once_and_not_while_anybody_works(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1: the thread then says what the branch says, from a position of its own on."""
        first = new_run()
        await store.insert_run(first)
        beside = forking(first.thread_id)
        branch = (await store.insert_run(beside)).row.facts.thread_id
        stranger = new_run()
        await store.insert_run(stranger)
        adopt = store.adopt_branch
        with pytest.raises(ThreadBusy):
            await adopt(TENANT, first.thread_id, branch, "ada")
        for held in await store.claim_runs(want(limit=3)):
            await finish(store, reader, held.row.facts.run_id)
        for wrong in (stranger.thread_id, first.thread_id):
            with pytest.raises(Conflict):
                await adopt(TENANT, first.thread_id, wrong, "ada")
        with pytest.raises(NotFound):
            await adopt("acme", first.thread_id, branch, "ada")
        await say(store, branch, "more")
        last = (await positions(reader, branch))[-1]
        base = await adopt(TENANT, first.thread_id, branch, "ada")
        assert (base.kind, base.author, base.base_position) == (BaseKind.ADOPT, "ada", last)
        assert await reader.thread_bases(first.thread_id) == [base]
        assert await adopt(TENANT, first.thread_id, branch, "bob") == base
        thread = await reader.find_thread(TENANT, first.thread_id)
        assert thread is not None
        assert thread.last_position == base.from_position > last
        await say(store, first.thread_id, "on")
        assert (await positions(reader, first.thread_id))[-1] == base.from_position + 1

    async def test_a_deleted_thread_leaves_a_tombstone_and_what_its_branches_say(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.3: nothing new comes to it; messages go with the last branch that says them."""
        first = new_run()
        await store.insert_run(first)
        for text in "abc":
            await say(store, first.thread_id, text)
        with pytest.raises(ThreadBusy):
            await store.delete_thread(TENANT, first.thread_id)
        held = await claim_one(store)
        ended = await finish(store, reader, held.row.facts.run_id)
        thread = await fork(store, first.thread_id, 3)
        below = await fork(store, thread.thread_id, 2)
        with pytest.raises(NotFound):
            await store.delete_thread("acme", first.thread_id)
        assert await store.delete_thread(TENANT, first.thread_id)
        assert not await store.delete_thread(TENANT, first.thread_id)
        assert await positions(reader, first.thread_id) == [1, 2, 3]
        for refused in (
            store.insert_run(new_run(thread_id=first.thread_id)),
            store.insert_run(replace(new_run(), branches_from=first.run_id)),
            say(store, first.thread_id, "late"),
            fork(store, first.thread_id, 1),
            store.adopt_branch(TENANT, first.thread_id, thread.thread_id, "ada"),
        ):
            with pytest.raises(Gone):
                await refused
        assert await store.delete_thread(TENANT, thread.thread_id)
        assert await positions(reader, first.thread_id) == [1, 2]
        assert await store.delete_thread(TENANT, below.thread_id)
        assert await positions(reader, first.thread_id) == []
        gone = await reader.find_thread(TENANT, first.thread_id)
        assert gone is not None
        assert (gone.title, gone.metadata, gone.deleted_at is None) == ("", {}, False)
        assert await reader.list_threads(TENANT, after=None, limit=5) == []
        # the history of its runs goes, the run itself and its end stay
        assert ended.hot.terminal_seq is not None
        for dropped in (1, 0):
            swept = await store.expire_deleted(first.thread_id, after=None, limit=10)
            assert (swept.runs, swept.after) == (dropped, None)
        assert (await store.expire_deleted(None, after=None, limit=10)).runs == 0
        kept = await look(reader, first.run_id)
        assert kept.hot.state is RunState.SUCCEEDED
        assert kept.hot.retained_from_seq == ended.hot.terminal_seq
        seqs = [event.seq for event in await reader.events_after(first.run_id, 0, limit=99)]
        assert seqs[0] == ended.hot.terminal_seq

    async def test_deleted_threads_are_swept_a_page_at_a_time(
        self, store: Store, reader: Reader
    ) -> None:
        """R-6.8: no more threads are looked at, and no more runs dropped, than the page says."""
        runs = list[str]()
        for count in (3, 0, 1, 1):
            thread = new_thread()
            await store.create_thread(thread)
            for _ in range(count):
                new = new_run(thread_id=thread.thread_id)
                await store.insert_run(new)
                await finish(store, reader, new.run_id)
                runs.append(new.run_id)
            await store.delete_thread(TENANT, thread.thread_id)
        swept, calls, dropped = await store.expire_deleted(None, after=None, limit=2), 1, 0
        dropped += swept.runs
        while swept.after is not None:
            swept = await store.expire_deleted(None, after=swept.after, limit=2)
            calls, dropped = calls + 1, dropped + swept.runs
            assert swept.runs <= 2
            assert calls < 9
        assert dropped == len(runs)
        for run_id in runs:
            assert (await look(reader, run_id)).hot.retained_from_seq > 1

    async def test_threads_are_found_by_pairs_of_their_metadata(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.3: all pairs, the same type of value, newest first, in pages."""
        pairs: list[dict[str, JsonValue]] = [
            {"team": "sales", "tier": 1},
            {"team": "sales", "tier": "1"},
            {"team": "sales", "tier": 1, "more": {"a": [1]}},
            {"team": "support"},
        ]
        made = [replace(new_thread(), metadata=metadata) for metadata in pairs]
        for thread in made:
            await store.create_thread(thread)

        async def found(after: str | None = None, limit: int = 9, **wanted: JsonValue) -> list[int]:
            rows = await reader.list_threads(TENANT, after=after, limit=limit, metadata=wanted)
            return [made.index(row) for row in rows]

        assert await found(team="sales") == [2, 1, 0]
        assert await found(team="sales", limit=2) == [2, 1]
        assert await found(team="sales", after=made[1].thread_id) == [0]
        assert await found(team="sales", tier=1) == [2, 0]
        assert await found(more={"a": [1]}) == [2]
        assert await found(tier=1.5) == []
        assert await found() == [3, 2, 1, 0]
        assert await reader.list_threads("acme", after=None, limit=9, metadata=pairs[0]) == []
        await store.delete_thread(TENANT, made[2].thread_id)
        assert await found(team="sales", tier=1) == [0]

    async def test_a_run_beside_the_active_one_ends_only_while_nobody_says_more(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1: it takes no turn; inputs of others do not count, what others say does."""
        first = new_run()
        await store.insert_run(first)
        beside = [new_run(thread_id=first.thread_id, strategy="optimistic") for _ in range(2)]
        for new in beside:
            inserted = (await store.insert_run(new)).row
            assert (inserted.hot.parked_on, inserted.facts.thread_id) == (None, first.thread_id)
        queued = new_run(thread_id=first.thread_id)
        await store.insert_run(queued)
        claims: dict[str, RunRow] = {}
        for _ in range(3):
            for held in await store.claim_runs(want(limit=9)):
                claims[held.row.facts.run_id] = held.row
        assert claims.keys() == {first.run_id, *(new.run_id for new in beside)}
        since = 4
        ends = {
            run_id: replace(commit_of(row, path=TO_SUCCEEDED), unmoved_since=since)
            for run_id, row in claims.items()
        }
        one, other = (new.run_id for new in beside)
        assert await reader.moved_at(first.thread_id, since, one) is None
        assert await reader.moved_at(first.thread_id, 0, one) is None
        (ended,) = await store.commit([ends[one]])
        assert isinstance(ended, Committed)
        thread = await reader.find_thread(TENANT, first.thread_id)
        assert thread is not None
        assert thread.active_run_id == first.run_id
        await say(store, first.thread_id, "aside")
        assert await reader.moved_at(first.thread_id, since, other) == 5
        assert await store.commit([ends[other]]) == [Behind(seq=claims[other].hot.last_seq)]
        (again,) = await store.commit([ends[one]])  # sent again: written is written
        assert isinstance(again, Committed)
        assert (await look(reader, other)).hot == claims[other].hot
        await finish(store, reader, first.run_id)
        assert await reader.is_ready(queued.run_id)
        thread = await reader.find_thread(TENANT, first.thread_id)
        assert thread is not None
        assert thread.active_run_id == queued.run_id

    async def test_a_run_beside_the_active_one_that_is_put_aside_is_not_the_next(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1, R-7.7: the queue goes on behind it, and the thread is free without one."""
        first = new_run()
        await store.insert_run(first)
        (held,) = await store.claim_runs(want())
        beside = new_run(thread_id=first.thread_id, strategy="optimistic")
        await store.insert_run(beside)
        assert await store.quarantine(beside.run_id, None, "damaged", None)
        queued = new_run(thread_id=first.thread_id)
        await store.insert_run(queued)
        assert held.row.facts.run_id == first.run_id
        await finish(store, reader, first.run_id)
        thread = await reader.find_thread(TENANT, first.thread_id)
        assert thread is not None
        assert thread.active_run_id == queued.run_id
        assert await reader.is_ready(queued.run_id)
        await claim_one(store)
        await finish(store, reader, queued.run_id)
        thread = await reader.find_thread(TENANT, first.thread_id)
        assert thread is not None
        assert thread.active_run_id is None

    async def test_two_runs_that_end_beside_the_active_one_at_once_do_not_both_stand(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.1: whichever is written second finds what the first has said."""
        for _ in range(4):
            first = new_run()
            await store.insert_run(first)
            beside = [new_run(thread_id=first.thread_id, strategy="optimistic") for _ in range(2)]
            for new in beside:
                await store.insert_run(new)
            held = dict[str, RunRow]()
            while not held.keys() >= {new.run_id for new in beside}:
                held |= {one.row.facts.run_id: one.row for one in await store.claim_runs(want())}
            ends = [speaking(held[new.run_id], since=3) for new in beside]
            results = list[CommitResult]()

            async def end(commit: Commit, results: list[CommitResult] = results) -> None:
                results.append(await settled_answer(store, commit))

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    for commit in ends:
                        group.start_soon(end, commit)
            assert {type(result) for result in results} == {Committed, Behind}
            assert await positions(reader, first.thread_id) == [1, 2, 3, 4]

    async def test_adoptions_at_once_are_one(self, store: Store, reader: Reader) -> None:
        """R-11.1: all callers are told of the one that was made."""
        for _ in range(3):
            thread = new_thread()
            await store.create_thread(thread)
            await say(store, thread.thread_id, "a")
            branch = await fork(store, thread.thread_id, 1)
            made = list[ThreadBase]()

            async def adopt(
                by: str,
                thread_id: str = thread.thread_id,
                branch_id: str = branch.thread_id,
                made: list[ThreadBase] = made,
            ) -> None:
                made.append(await store.adopt_branch(TENANT, thread_id, branch_id, by))

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    for by in ("ada", "bob", "eve"):
                        group.start_soon(adopt, by)
            bases = await reader.thread_bases(thread.thread_id)
            assert len(bases) == 1
            assert made == bases * 3

    async def test_a_thread_that_is_deleted_at_once_with_new_runs_has_none_or_stays(
        self, store: Store, reader: Reader
    ) -> None:
        """R-11.3: never a run on a deleted thread."""
        for turn in range(4):
            thread = new_thread()
            await store.create_thread(thread)
            made, gone = list[str](), list[str]()

            async def insert(new: NewRun, made: list[str] = made, gone: list[str] = gone) -> None:
                try:
                    made.append((await store.insert_run(new)).row.facts.run_id)
                except Gone:
                    gone.append(new.run_id)

            async def delete(thread_id: str = thread.thread_id) -> None:
                with contextlib.suppress(ThreadBusy):
                    await store.delete_thread(TENANT, thread_id)

            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    for place in range(3):
                        if place == turn % 3:
                            group.start_soon(delete)
                        group.start_soon(insert, new_run(thread_id=thread.thread_id))
            row = await reader.find_thread(TENANT, thread.thread_id)
            assert row is not None
            is_deleted = row.deleted_at is not None
            assert (len(made), len(gone)) == ((0, 3) if is_deleted else (3, 0))
            assert (row.active_run_id is None) == is_deleted

    async def test_deleting_a_thread_ends_its_subscriptions_and_those_into_it(
        self, store: Store, reader: Reader
    ) -> None:
        """R-4.8, R-11.3: of the thread that is published to, and of one that is an inbox."""
        for deletes_inbox in (False, True):
            thread, other = new_thread(), new_thread()
            for one in (thread, other):
                await store.create_thread(one)
            kept = await put(store, subscription(other.thread_id))
            ended = await put(store, subscription(thread.thread_id))
            target = ended.inbox_thread_id if deletes_inbox else thread.thread_id
            assert await store.delete_thread(TENANT, target)
            assert await reader.list_subscriptions(TENANT, thread.thread_id) == []
            assert await reader.list_subscriptions(TENANT, other.thread_id) == [kept]


def speaking(row: RunRow, *, since: int) -> Commit:
    """Return the end of a run that says something, if nobody has said more since a position."""
    commit = commit_of(row, path=TO_SUCCEEDED)
    seq = row.hot.last_seq + len(commit.events)
    message = NewMessage(
        message_id=new_id(ids.MESSAGE), seq=seq, role=Role.ASSISTANT, author="agent"
    )
    return replace(commit, messages=(message,), unmoved_since=since)
