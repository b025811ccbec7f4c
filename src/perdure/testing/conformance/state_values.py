"""What fields that outlive their runs promise: versions, all or nothing, forks and adoptions."""

from dataclasses import replace

from pydantic import JsonValue

from perdure.protocol import ids
from perdure.protocol.messages import Role
from perdure.protocol.runs import RunRow
from perdure.protocol.states import InterruptStatus
from perdure.store.commits import (
    Behind,
    Commit,
    Committed,
    InterruptClose,
    NewMessage,
    NewStateValue,
    Refused,
)
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.testing.builders import (
    TO_SUCCEEDED,
    claim_one,
    commit_of,
    finish,
    look,
    new_id,
    new_run,
    want,
    write,
)
from perdure.testing.conformance.base import Contract
from perdure.testing.conformance.threads import TENANT, fork, say


def value_of(
    row: RunRow, value: JsonValue, *, expected: int = 0, name: str = "total", agent: str = ""
) -> NewStateValue:
    """Return a new value of a field of the run's thread, or of an agent."""
    return NewStateValue(
        scope="agent" if agent else "thread",
        scope_id=agent or row.facts.thread_id,
        name=name,
        rule="add",
        expected=expected,
        version=expected + 1,
        value=value,
        seq=row.hot.last_seq + 1,
    )


def ending(row: RunRow, *values: NewStateValue) -> Commit:
    """Return the commit that ends a run and leaves values, behind its answer."""
    commit = commit_of(row, path=TO_SUCCEEDED)
    seq = commit.guard.expected_seq + len(commit.events)
    answer = NewMessage(
        message_id=new_id(ids.MESSAGE), seq=seq, role=Role.ASSISTANT, author="writer"
    )
    return replace(commit, messages=(answer,), state_values=values)


async def held(reader: Reader, thread_id: str) -> dict[str, tuple[JsonValue, int]]:
    """Return value and version of each field of a thread."""
    rows = await reader.list_state_values(TENANT, "thread", thread_id, after=None, limit=99)
    return {row.name: (None if row.empty else row.value, row.version) for row in rows}


class StateValueContract(Contract):
    """Fields of scope thread and agent."""

    async def test_values_are_written_with_their_commit_or_not_at_all(
        self, store: Store, reader: Reader
    ) -> None:
        """R-1.5: a row at another version leaves the run as it was; sent again is written once."""
        first, other = new_run(), new_run()
        await store.insert_run(first)
        await store.insert_run(other)
        claims = {held.row.facts.run_id: held.row for held in await store.claim_runs(want(limit=2))}
        one, two = claims[first.run_id], claims[other.run_id]
        commit = ending(one, value_of(one, 3), value_of(one, {"a": [1]}, name="seen", agent="w"))
        done = await write(store, commit)
        assert await write(store, commit) == done
        (total,) = await reader.list_state_values(
            TENANT, "thread", first.thread_id, after=None, limit=9
        )
        (seen,) = await reader.list_state_values(TENANT, "agent", "w", after=None, limit=9)
        assert (total.value, total.version, total.rule, total.run_id) == (
            3,
            1,
            "add",
            first.run_id,
        )
        assert (total.position, seen.position, total.empty) == (2, 0, False)
        assert (seen.value, total.updated_at) == ({"a": [1]}, done.at)
        mine = value_of(two, 1)
        for stale in (0, 2):
            moved = value_of(two, 9, name="seen", agent="w", expected=stale)
            assert await store.commit([ending(two, mine, moved)]) == [Behind(seq=two.hot.last_seq)]
        assert await held(reader, other.thread_id) == {}
        assert await look(reader, other.run_id) == two
        await write(store, ending(two, mine, replace(moved, expected=1, version=2)))
        (seen,) = await reader.list_state_values(TENANT, "agent", "w", after=None, limit=9)
        assert (seen.value, seen.version, seen.run_id) == (9, 2, other.run_id)
        assert await reader.list_state_values("acme", "agent", "w", after=None, limit=9) == []
        assert await reader.list_state_values(TENANT, "agent", "w", after="seen", limit=9) == []

    async def test_of_two_that_build_on_one_version_one_is_written(
        self, store: Store, reader: Reader
    ) -> None:
        """R-1.5: also in one batch; the other one draws its value up anew."""
        new = [new_run() for _ in range(2)]
        for one in new:
            await store.insert_run(one)
        rows = [held.row for held in await store.claim_runs(want(limit=2))]
        commits = [ending(row, value_of(row, 1, agent="w")) for row in rows]
        results = list(await store.commit(commits))
        assert sorted(type(result).__name__ for result in results) == ["Behind", "Committed"]
        (place,) = [place for place, one in enumerate(results) if not isinstance(one, Committed)]
        await write(
            store, ending(rows[place], replace(value_of(rows[place], 2, agent="w"), expected=1))
        )

    async def test_whether_a_row_has_moved_is_asked_before_what_would_be_refused(
        self, store: Store, reader: Reader
    ) -> None:
        """R-1.5: what was drafted on what is no more there is drafted anew, whatever else is wrong."""
        await store.insert_run(new_run())
        row = (await claim_one(store)).row
        commit = ending(row, value_of(row, 1, expected=1))
        closed = InterruptClose(
            interrupt_id=new_id(ids.INTERRUPT),
            status=InterruptStatus.CANCELLED,
            closed_seq=commit.messages[0].seq,
        )
        for bad in (
            replace(commit, interrupt_closes=(closed,)),
            replace(commit, unmoved_since=1, interrupt_closes=(closed,)),
        ):
            assert await store.commit([bad]) == [Behind(seq=row.hot.last_seq)]
            fits = replace(bad, state_values=(value_of(row, 1),))
            assert await store.commit([fits]) == [Refused(reason="the interrupt is not pending")]
        assert await look(reader, row.facts.run_id) == row
        assert await held(reader, row.facts.thread_id) == {}

    async def test_a_fork_begins_with_what_was_written_up_to_its_place(
        self, store: Store, reader: Reader
    ) -> None:
        """R-1.5, R-11.1: adopted, its fields become the thread's, and versions go on; deleted, the
        values go."""
        first = new_run()
        await store.insert_run(first)
        thread_id = first.thread_id
        row = (await claim_one(store)).row
        await write(store, ending(row, value_of(row, 1), value_of(row, 1, name="early")))
        await say(store, thread_id, "more")
        second = new_run(thread_id=thread_id)
        await store.insert_run(second)
        row = (await claim_one(store)).row
        await write(
            store, ending(row, value_of(row, 5, expected=1), value_of(row, 7, name="later"))
        )
        branch = (await fork(store, thread_id, 3)).thread_id
        assert await held(reader, branch) == {"early": (1, 1)}
        beside = new_run(thread_id=branch)
        await store.insert_run(beside)
        row = (await claim_one(store)).row
        await write(store, ending(row, value_of(row, 100), value_of(row, 2, name="new")))
        assert await held(reader, thread_id) == {"early": (1, 1), "later": (7, 1), "total": (5, 2)}
        await store.adopt_branch(TENANT, thread_id, branch, "ada")
        adopted = {"early": (1, 2), "later": (None, 2), "new": (2, 2), "total": (100, 3)}
        assert await held(reader, thread_id) == adopted
        await store.adopt_branch(TENANT, thread_id, branch, "ada")
        assert await held(reader, thread_id) == adopted
        assert await store.delete_thread(TENANT, thread_id)
        assert await held(reader, thread_id) == {}
        assert (await held(reader, branch))["total"] == (100, 1)
        await finish(store, reader, (await _one_more(store, branch)))
        assert (await held(reader, branch))["total"] == (100, 1)


async def _one_more(store: Store, thread_id: str) -> str:
    """Order and claim another run, which writes nothing."""
    new = new_run(thread_id=thread_id)
    await store.insert_run(new)
    await claim_one(store)
    return new.run_id
