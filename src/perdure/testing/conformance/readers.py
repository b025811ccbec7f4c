"""What the reader promises: pages in order, cursors, filters, tenants, counts."""

from dataclasses import replace
from datetime import timedelta

import pytest

from perdure.protocol import ids
from perdure.protocol.runs import RunRow
from perdure.protocol.states import (
    ArtifactStatus,
    InterruptStatus,
    RunState,
    StepStatus,
    ToolCallStatus,
)
from perdure.store.commits import CallUpdate, NewArtifact, NewCheckpoint, NewExecution, StepChange
from perdure.store.ports import Store
from perdure.store.reader import Backlog, InterruptFilter, QueueBacklog, Reader, RunFilter
from perdure.store.requests import AgentRegistration, ToolRegistration
from perdure.testing.builders import (
    AGENT,
    PLANNING,
    WORKER,
    advanced,
    answering,
    append,
    asking,
    cancel_wish,
    claimed,
    commit_of,
    finish,
    lease_of,
    new_call,
    new_id,
    new_run,
    new_thread,
    note,
    parked,
    result_of,
    write,
)
from perdure.testing.clock import FakeClock
from perdure.testing.conformance.base import Contract


class ReaderContract(Contract):
    """Runs, threads and what stands beside a run."""

    async def test_what_does_not_exist_is_not_found(self, reader: Reader) -> None:
        run_id = new_id(ids.RUN)
        assert await reader.find_run(None, run_id) is None
        assert await reader.find_tool_call("default", new_id(ids.TOOL_CALL)) is None
        assert await reader.find_checkpoint("default", new_id(ids.RUN), 1) is None
        assert await reader.find_interrupt(None, new_id(ids.INTERRUPT)) is None
        assert await reader.find_artifact("default", new_id(ids.ARTIFACT)) is None
        assert await reader.find_thread("default", new_id(ids.THREAD)) is None
        assert await reader.read_blob("default", "0" * 64) is None
        assert await reader.events_after(run_id, 0, limit=10) == []
        assert await reader.list_attempts(run_id) == []
        assert await reader.list_executions(run_id) == []
        assert await reader.timers_of(run_id) == []
        assert not await reader.is_ready(run_id)

    async def test_a_run_is_found_under_its_key_as_an_insert_would_find_it(
        self, store: Store, reader: Reader
    ) -> None:
        new = new_run(key="k")
        await store.insert_run(new)
        assert await reader.find_run_by_key("default", AGENT, "k") == await store.insert_run(new)
        for place in (("other", AGENT), ("default", "other")):
            assert await reader.find_run_by_key(*place, "k") is None
        assert await reader.find_run_by_key("default", AGENT, "l") is None

    async def test_the_leases_of_a_worker_are_told_until_they_are_given_up(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        held = sorted([lease_of(await claimed(store)) for _ in range(3)], key=lambda k: k.run_id)
        clock.advance(1000)
        assert await reader.leases_of(WORKER, 10) == held
        assert await reader.leases_of(WORKER, 2) == held[:2]
        assert await reader.leases_of("another", 10) == []
        await store.release_runs(WORKER, held[1:])
        assert await reader.leases_of(WORKER, 10) == held[:1]
        assert await reader.now() == clock()

    async def test_runs_come_newest_first_in_pages(self, store: Store, reader: Reader) -> None:
        new = [new_run() for _ in range(5)]
        for one in new:
            await store.insert_run(one)
        found: list[str] = []
        after: str | None = None
        while page := await reader.list_runs("default", RunFilter(), after=after, limit=2):
            assert len(page) <= 2
            found += [row.facts.run_id for row in page]
            after = found[-1]
        assert found == [one.run_id for one in reversed(new)]

    async def test_runs_of_another_tenant_are_not_shown(self, store: Store, reader: Reader) -> None:
        mine, other = new_run(), new_run(tenant_id="another")
        await store.insert_run(mine)
        await store.insert_run(other)
        assert await reader.find_run("default", other.run_id) is None
        assert await reader.find_run("another", other.run_id) is not None
        assert await reader.find_run(None, other.run_id) is not None
        found = await reader.list_runs("default", RunFilter(), after=None, limit=10)
        assert [row.facts.run_id for row in found] == [mine.run_id]
        assert len(await reader.list_runs(None, RunFilter(), after=None, limit=10)) == 2

    @pytest.mark.parametrize("name", ["state", "agent", "thread", "unfinished", "parent", "both"])
    async def test_runs_are_filtered(self, store: Store, reader: Reader, name: str) -> None:
        ended, other, third = new_run(), new_run(agent_id="other"), new_run()
        for one in (ended, other, third):
            await store.insert_run(one)
        await finish(store, reader, ended.run_id)
        where, expected = {
            "state": (RunFilter(state=RunState.SUCCEEDED), [ended]),
            "agent": (RunFilter(agent_id="other"), [other]),
            "thread": (RunFilter(thread_id=third.thread_id), [third]),
            "unfinished": (RunFilter(unfinished=True), [third, other]),
            "parent": (RunFilter(parent_run_id=ended.run_id), []),
            "both": (RunFilter(agent_id="helper", unfinished=True), [third]),
        }[name]
        found = await reader.list_runs("default", where, after=None, limit=10)
        assert [row.facts.run_id for row in found] == [one.run_id for one in expected]

    async def test_runs_are_found_by_the_run_they_go_on_from(
        self, store: Store, reader: Reader
    ) -> None:
        first = new_run()
        await store.insert_run(first)
        await finish(store, reader, first.run_id)
        again = replace(new_run(), origin_run_id=first.run_id, origin_seq=1)
        for one in (again, new_run()):
            await store.insert_run(one)
        where = RunFilter(origin_run_id=first.run_id)
        found = await reader.list_runs("default", where, after=None, limit=10)
        assert [row.facts.run_id for row in found] == [again.run_id]
        assert await reader.list_runs("another", where, after=None, limit=10) == []
        assert await reader.list_runs(None, where, after=again.run_id, limit=10) == []

    async def test_events_come_in_order_after_a_seq(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        run_id = held.row.facts.run_id
        await write(store, commit_of(held.row, *(note(f"n{place}") for place in range(5))))
        assert [event.seq for event in await reader.events_after(run_id, 3, limit=2)] == [4, 5]
        assert [event.seq for event in await reader.events_after(run_id, 5, limit=9)] == [6, 7]
        assert await reader.events_after(run_id, 7, limit=9) == []
        assert await reader.events_after(run_id, 99, limit=9) == []

    async def test_steps_come_in_order_after_an_index(self, store: Store, reader: Reader) -> None:
        held = await claimed(store)
        steps = tuple(
            StepChange(index=index, status=StepStatus.RUNNING, first_seq=3)
            for index in (2, 0, 1, 3)
        )
        await write(store, replace(commit_of(held.row, note()), steps=steps))
        run_id = held.row.facts.run_id
        found = await reader.list_steps(run_id, after=-1, limit=3)
        assert [step.index for step in found] == [0, 1, 2]
        assert [step.index for step in await reader.list_steps(run_id, after=2, limit=9)] == [3]

    async def test_calls_come_in_order_of_step_and_ordinal(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        places = [(1, 0), (0, 1), (0, 0), (1, 1), (0, 10)]
        calls = tuple(
            new_call(held.row, action_seq=3, step_index=step, ordinal=ordinal)
            for step, ordinal in places
        )
        await write(store, replace(commit_of(held.row, note()), new_calls=calls))
        run_id, order = held.row.facts.run_id, sorted(places)
        found = await reader.list_tool_calls(run_id, after=None, limit=3)
        assert [(call.step_index, call.ordinal) for call in found] == order[:3]
        found = await reader.list_tool_calls(run_id, after=(0, 1), limit=9)
        assert [(call.step_index, call.ordinal) for call in found] == order[2:]
        assert await reader.find_tool_call("default", calls[0].tool_call_id) == calls[0]
        assert await reader.find_tool_call("another", calls[0].tool_call_id) is None

    async def test_open_executions_are_those_of_calls_without_a_result(
        self, store: Store, reader: Reader
    ) -> None:
        held = await claimed(store)
        one, two = (new_call(held.row, action_seq=3, ordinal=ordinal) for ordinal in (0, 1))
        begins = tuple(
            NewExecution(tool_call_id=call.tool_call_id, number=number, args_digest="a" * 64)
            for call, number in ((one, 2), (one, 1), (two, 1))
        )
        commit = replace(commit_of(held.row, note()), new_calls=(one, two), new_executions=begins)
        row = await advanced(store, reader, commit)
        found = await reader.open_executions(commit.run_id)
        assert [execution.number for execution in found] == [1, 1, 2]
        assert await reader.list_executions(commit.run_id) == found
        done = CallUpdate(
            tool_call_id=one.tool_call_id, status=ToolCallStatus.SUCCEEDED, result_seq=4
        )
        await write(store, replace(commit_of(row, result_of(one)), call_updates=(done,)))
        found = await reader.open_executions(commit.run_id)
        assert [execution.tool_call_id for execution in found] == [two.tool_call_id]
        assert len(await reader.list_executions(commit.run_id)) == 3

    async def test_checkpoints_come_newest_first_before_a_seq(
        self, store: Store, reader: Reader
    ) -> None:
        row = (await claimed(store)).row
        made: list[int] = []
        for _ in range(3):
            new = _checkpoint(row.hot.last_seq + 1)
            made.append(new.seq)
            row = await advanced(store, reader, replace(commit_of(row, note()), checkpoint=new))
        run_id = row.facts.run_id
        found = await reader.list_checkpoints(run_id, before=None, limit=2)
        assert [one.seq for one in found] == [made[2], made[1]]
        found = await reader.list_checkpoints(run_id, before=found[-1].seq, limit=2)
        assert [one.seq for one in found] == [made[0]]
        assert await reader.find_checkpoint("another", run_id, made[0]) is None

    async def test_interrupts_come_oldest_first_by_status_and_run(
        self, store: Store, reader: Reader
    ) -> None:
        rows: list[RunRow] = []
        opened: list[str] = []
        for _ in range(3):
            asked = asking((await claimed(store)).row)
            opened.append(asked.new_interrupts[0].interrupt_id)
            rows.append(await advanced(store, reader, asked))
        await write(store, answering(rows[1], opened[1]))

        async def found(where: InterruptFilter, after: str | None = None) -> list[str]:
            page = await reader.list_interrupts("default", where, after=after, limit=2)
            return [row.interrupt_id for row in page]

        assert await found(InterruptFilter()) == opened[:2]
        assert await found(InterruptFilter(), opened[1]) == opened[2:]
        pending = InterruptFilter(status=InterruptStatus.PENDING)
        assert await found(pending) == [opened[0], opened[2]]
        assert await found(InterruptFilter(run_id=rows[1].facts.run_id)) == [opened[1]]
        where = InterruptFilter()
        assert await reader.list_interrupts("another", where, after=None, limit=9) == []
        assert await reader.find_interrupt("another", opened[0]) is None
        assert await reader.find_interrupt(None, opened[0]) is not None

    async def test_artifacts_come_oldest_first_by_run_and_thread(
        self, store: Store, reader: Reader
    ) -> None:
        made: list[str] = []
        rows: list[RunRow] = []
        for _ in range(2):
            row = (await claimed(store)).row
            new = tuple(_artifact(row.hot.last_seq + 1, version) for version in (1, 2))
            made += [one.artifact_id for one in new]
            rows.append(
                await advanced(store, reader, replace(commit_of(row, note()), artifacts=new))
            )

        async def found(
            run_id: str | None = None, thread_id: str | None = None, after: str | None = None
        ) -> list[str]:
            page = await reader.list_artifacts(
                "default", run_id=run_id, thread_id=thread_id, after=after, limit=3
            )
            return [row.artifact_id for row in page]

        assert await found() == made[:3]
        assert await found(after=made[2]) == made[3:]
        assert await found(run_id=rows[1].facts.run_id) == made[2:]
        assert await found(thread_id=rows[0].facts.thread_id) == made[:2]
        assert await found(rows[0].facts.run_id, rows[1].facts.thread_id) == []
        assert await reader.find_artifact("another", made[0]) is None

    async def test_threads_come_newest_first_in_pages(self, store: Store, reader: Reader) -> None:
        threads = [new_thread() for _ in range(3)]
        for thread in (*threads, new_thread(tenant_id="another")):
            await store.create_thread(thread)
        page = await reader.list_threads("default", after=None, limit=2)
        assert page == [threads[2], threads[1]]
        page = await reader.list_threads("default", after=page[-1].thread_id, limit=2)
        assert page == [threads[0]]

    async def test_messages_come_in_order_between_two_places(
        self, store: Store, reader: Reader
    ) -> None:
        thread = new_thread()
        await store.create_thread(thread)
        for place in range(1, 6):
            await append(store, thread.thread_id, place)

        async def bodies(after: int, limit: int, until: int | None = None) -> list[object]:
            page = await reader.list_messages(
                thread.thread_id, after=after, limit=limit, until=until
            )
            return [message.body for message in page]

        assert await bodies(0, 9) == [1, 2, 3, 4, 5]
        assert await bodies(1, 2) == [2, 3]
        assert await bodies(1, 9, 4) == [2, 3, 4]
        assert await bodies(4, 9, 4) == []

    async def test_a_thread_s_runs_come_in_order_of_their_inputs(
        self, store: Store, reader: Reader
    ) -> None:
        first = (await store.insert_run(new_run())).row
        thread_id = first.facts.thread_id
        await store.insert_run(new_run())
        await append(store, thread_id, 1)
        later = [(await store.insert_run(new_run(thread_id=thread_id))).row for _ in range(2)]

        async def places(after: int, limit: int = 9) -> list[tuple[int, RunRow]]:
            found = await reader.thread_runs(thread_id, after=after, limit=limit)
            return [(placed.position, placed.row) for placed in found]

        assert await places(0) == [(1, first), (3, later[0]), (4, later[1])]
        assert await places(1, 1) == [(3, later[0])]
        assert await places(4) == []

    async def test_an_open_database_answers(self, reader: Reader) -> None:
        await reader.ping()


class BacklogContract(Contract):
    """How much waits."""

    async def test_an_empty_store_has_no_backlog(self, reader: Reader) -> None:
        found = await reader.backlog()
        assert found == Backlog(
            queues={}, open_interrupts=0, oldest_interrupt_s=0.0, runs_by_state={}
        )
        assert (found.ready, found.oldest_ready_s) == (0, 0.0)

    async def test_the_backlog_counts_what_waits_and_for_how_long(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        sleeping = await claimed(store)
        await write(store, parked(commit_of(sleeping.row, path=(PLANNING,)), ready_in_s=3600))
        asked = asking((await claimed(store)).row)
        waiting = await advanced(store, reader, asked)
        ended = await claimed(store)
        await finish(store, reader, ended.row.facts.run_id)
        clock.advance(5)
        await store.insert_run(new_run())
        await store.insert_run(new_run(start_at=clock() + timedelta(seconds=60)))
        clock.advance(10)
        await store.insert_run(new_run())
        await store.insert_run(new_run(queue="slow"))
        clock.advance(1.5)
        assert await reader.backlog() == Backlog(
            queues={
                "default": QueueBacklog(ready=2, oldest_ready_s=11.5),
                "slow": QueueBacklog(ready=1, oldest_ready_s=1.5),
            },
            open_interrupts=1,
            oldest_interrupt_s=16.5,
            runs_by_state={"planning": 1, "waiting_human": 1, "pending": 4},
        )
        interrupt_id = asked.new_interrupts[0].interrupt_id
        await write(store, answering(waiting, interrupt_id))
        found = await reader.backlog()
        assert (found.ready, found.open_interrupts, found.oldest_interrupt_s) == (4, 0, 0.0)

    async def test_a_cancelled_run_is_not_counted_as_claimable(
        self, store: Store, reader: Reader
    ) -> None:
        new = new_run()
        await store.insert_run(new)
        await store.request_cancel(new.run_id, cancel_wish())
        found = await reader.backlog()
        assert (found.ready, found.runs_by_state) == (0, {"pending": 1})


class RegistryContract(Contract):
    """What workers say they serve."""

    async def test_versions_come_by_agent_then_by_registration(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        first = clock()
        await store.register([_agent("b", "9"), _agent("a", "2")], [_tool("t", "9")])
        clock.advance(1)
        await store.register([_agent("b", "10")], [_tool("t", "1"), _tool("s", "1")])
        agents = await reader.list_agents()
        assert [(row.agent_id, row.version) for row in agents] == [
            ("a", "2"),
            ("b", "9"),
            ("b", "10"),
        ]
        assert [row.registered_at for row in agents] == [first, first, clock()]
        assert agents[0].card == {"name": "a", "edition": 1}
        tools = await reader.list_tools()
        assert [(row.name, row.version) for row in tools] == [("s", "1"), ("t", "9"), ("t", "1")]
        assert tools[0].spec == {"name": "s", "edition": 1}

    async def test_a_known_version_is_replaced_and_keeps_its_place(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        first = clock()
        await store.register([_agent("a", "1")], [_tool("t", "1")])
        clock.advance(1)
        await store.register([_agent("a", "2")], [_tool("t", "2")])
        clock.advance(1)
        await store.register([_agent("a", "1", edition=2)], [_tool("t", "1", edition=2)])
        agents, tools = await reader.list_agents(), await reader.list_tools()
        assert [row.version for row in agents] == ["1", "2"]
        assert (agents[0].card, agents[0].registered_at) == ({"name": "a", "edition": 2}, first)
        assert [row.version for row in tools] == ["1", "2"]
        assert (tools[0].spec, tools[0].registered_at) == ({"name": "t", "edition": 2}, first)

    async def test_registering_again_changes_nothing(
        self, store: Store, reader: Reader, clock: FakeClock
    ) -> None:
        await store.register([_agent("a", "1")], [_tool("t", "1")])
        before = (await reader.list_agents(), await reader.list_tools())
        clock.advance(1)
        await store.register([_agent("a", "1")], [_tool("t", "1")])
        await store.register([], [])
        assert (await reader.list_agents(), await reader.list_tools()) == before


def _agent(agent_id: str, version: str, edition: int = 1) -> AgentRegistration:
    return AgentRegistration(
        agent_id=agent_id,
        version=version,
        card={"name": agent_id, "edition": edition},
        digest=f"{agent_id}-{version}-{edition}",
    )


def _tool(name: str, version: str, edition: int = 1) -> ToolRegistration:
    return ToolRegistration(
        name=name,
        version=version,
        spec={"name": name, "edition": edition},
        digest=f"{name}-{version}-{edition}",
    )


def _checkpoint(seq: int) -> NewCheckpoint:
    return NewCheckpoint(
        seq=seq,
        parent_seq=seq - 1,
        step_index=0,
        agent_state=None,
        digest="a" * 64,
    )


def _artifact(seq: int, version: int) -> NewArtifact:
    return NewArtifact(
        artifact_id=new_id(ids.ARTIFACT),
        name="report",
        version=version,
        media_type="text/plain",
        digest="b" * 64,
        size=1,
        status=ArtifactStatus.DRAFT,
        step_index=0,
        tool_call_id=None,
        seq=seq,
    )
