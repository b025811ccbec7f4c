"""Reported cases that no other test of a flow shows: duplicates, answers, recovery, time limits."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import asyncpg
import pytest
from pydantic import JsonValue

from perdure.agents.code import Context, agent
from perdure.engine.context import PlannerContext
from perdure.engine.feed import follow
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.codec import digest
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Finish, Spawn
from perdure.protocol.errors import Unavailable
from perdure.protocol.events import (
    ApprovalRequestEvent,
    AttemptEvent,
    ChildEvent,
    CustomEvent,
    ResultEvent,
    RetryEvent,
    StateEvent,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import COMMIT
from perdure.protocol.log import NewEvent
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.runs import status_of
from perdure.protocol.states import (
    Answer,
    InterruptStatus,
    ParkedOn,
    RunState,
    RunStatus,
    ToolCallStatus,
)
from perdure.store.commits import Commit, Committed, Guard, HotUpdate
from perdure.store.ports import Database
from perdure.store.postgres import lanes
from perdure.store.reader import InterruptFilter, RunFilter
from perdure.store.requests import LeaseKey
from perdure.store.sqlite import SqliteDatabase
from perdure.testing import process_tools
from perdure.testing.builders import claimed, commit_of, look, note, write
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import (
    SETTINGS,
    Embedded,
    call,
    calls,
    embedded,
    new_worker,
    scripted,
)
from perdure.testing.tools import ToolZoo
from perdure.tools import ToolUnavailable, tool
from tests.flow.world import assert_sound, data_of, database_at, flow, states, swept_until
from tests.waiting import eventually

# ---------------------------------------------------------------- duplicates


@pytest.mark.slow
async def test_a_call_of_five_leases_on_a_healthy_worker_is_one_attempt(
    url: str, zoo: ToolZoo
) -> None:
    """DUP-05, TIM-09, CON-08: it blocks its loop for ten heartbeats and more; the lease is kept."""
    settings = replace(SETTINGS, lease_ttl_s=0.8, heartbeat_s=0.05, lease_margin_s=0.1)
    agent = scripted(
        "busy", lambda it: Finish(answer="done") if it.turns else call("block"), tools=["block"]
    )
    async with flow(url, [agent], zoo, settings=settings) as engine:
        run_id = await engine.submit("busy")
        await zoo.wait_started("block")
        before = (await engine.run(run_id)).hot.lease_token
        await anyio.sleep(5 * settings.lease_ttl_s)  # the fault itself: longer than five leases
        zoo.open_gate()
        row = await engine.wait_terminal(run_id)
        assert (row.hot.state, row.hot.attempt) == (RunState.SUCCEEDED, 1)
        assert row.hot.lease_token == before
        assert zoo.executions == {"block": 1}
        assert len(await engine.core.reader.list_attempts(run_id)) == 1


async def test_what_a_timed_out_execution_returns_is_late_and_moves_nothing(
    url: str, zoo: ToolZoo
) -> None:
    """DUP-06: the newest execution's result counts, and the next step starts once."""

    @tool(idempotent=True, timeout_s=1.0, retry=RetryPolicy(attempts_max=2, backoff_s=0.01))
    async def stubborn() -> int:
        """Ignore, at the first time, that it is over."""
        execution = zoo.begin("stubborn")
        while execution == 1 and not zoo.gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.005)
        return execution

    def decide(context: PlannerContext) -> Decision:
        match context.step_index:
            case 0:
                return call("stubborn")
            case 1:
                return call("hang")
            case _:
                return Finish(answer=context.turns[0].calls[0].output)

    zoo.registry.add(stubborn)
    agent = scripted("retries", decide, tools=["stubborn", "hang"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("retries")
        await zoo.wait_started("hang")
        assert await engine.core.reader.list_late(run_id) == []
        zoo.open_gate()
        row = await engine.wait_terminal(run_id)
        with anyio.fail_after(30):
            while not await engine.core.reader.list_late(run_id):  # noqa: ASYNC110  # after the end no follower hears of it
                await anyio.sleep(0.01)
        events = await engine.events(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert data_of(events, StateEvent)[-1].answer == 2
        first, second = data_of(events, ResultEvent)
        assert (first.status, first.executions, first.output) == ("succeeded", 2, 2)
        assert (second.status, second.executions) == ("succeeded", 1)
        assert zoo.executions == {"stubborn": 2, "hang": 1}
        (row_late,) = await engine.core.reader.list_late(run_id)
        assert (row_late.execution, row_late.status) == (1, ToolCallStatus.SUCCEEDED)


# ---------------------------------------------------------------- people's answers


def asks_first(context: PlannerContext) -> Decision:
    """Ask; finish with the answer."""
    return Finish(answer=context.turns[0].asks[0].value) if context.turns else Ask(title="?")


async def test_a_run_behind_a_waiting_one_leaves_its_question_open(url: str) -> None:
    """HITL-02: queued, however long nobody answers; it starts when the first one has ended."""
    async with flow(url, [scripted("asks", asks_first)]) as engine:
        first = await engine.submit("asks")
        (question,) = await engine.wait_waiting(first)
        thread = (await engine.run(first)).facts.thread_id
        second = await engine.submit("asks", thread_id=thread)
        await engine.sweep()
        behind = await engine.run(second)
        assert (behind.hot.state, behind.hot.parked_on) == (RunState.PENDING, ParkedOn.THREAD)
        assert await engine.pending(first) == [question]
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="one")
        assert (await engine.wait_terminal(first)).hot.state is RunState.SUCCEEDED
        (next_question,) = await engine.wait_waiting(second)
        await engine.answer(next_question.interrupt_id, Answer.RESPOND, value="two")
        await engine.wait_terminal(second)
        assert data_of(await engine.events(first), StateEvent)[-1].answer == "one"
        assert data_of(await engine.events(second), StateEvent)[-1].answer == "two"


async def test_an_answer_moves_the_run_that_asked_and_no_older_one(url: str) -> None:
    """HITL-08: an abandoned run of the same agent and caller waits on, and so does its thread."""
    async with flow(url, [scripted("asks", asks_first)]) as engine:
        abandoned = await engine.submit("asks")
        await engine.wait_waiting(abandoned)
        thread = (await engine.run(abandoned)).facts.thread_id
        behind = await engine.submit("asks", thread_id=thread)
        later = await engine.submit("asks")
        (question,) = await engine.wait_waiting(later)
        before = await engine.run(abandoned)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="for the later one")
        assert (await engine.wait_terminal(later)).hot.state is RunState.SUCCEEDED
        assert await engine.run(abandoned) == before
        assert (await engine.run(behind)).hot.parked_on is ParkedOn.THREAD


OLD_QUESTIONS = 200
EVENTS = 50_000


@pytest.mark.slow
async def test_one_open_question_of_a_long_history_is_found_at_once(
    url: str,
) -> None:
    """HITL-07: recovery finds it beside 200 answered ones and 50 000 events, and writes nothing."""

    @agent("survey", "1")
    async def survey(ctx: Context, input: object) -> object:
        del input
        keys = [f"q{number}" for number in range(OLD_QUESTIONS)]
        answers: list[object] = []
        for place in range(0, OLD_QUESTIONS, 50):
            asked = [ctx.interrupt(key, key=key) for key in keys[place : place + 50]]
            answers += await ctx.gather(*asked)
        return [len(answers), await ctx.interrupt("last", key="last")]

    async with flow(url, [survey]) as engine:
        run_id = await engine.submit("survey")
        for _ in range(OLD_QUESTIONS // 50):
            for question in await engine.wait_waiting(run_id):
                await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
            await engine.wait_until(run_id, lambda row: row.hot.open_interrupts in {1, 50})
        await engine.wait_waiting(run_id)
        await engine.kill_worker()
        await add_events(engine, run_id, EVENTS)
        before = await engine.run(run_id)
        await engine.start_worker()
        await engine.sweep()
        passed_s: list[float] = []
        for _ in range(5):
            started = time.monotonic()
            questions = await engine.pending(run_id)
            passed_s.append(time.monotonic() - started)
            assert [question.key for question in questions] == ["last"]
        assert min(passed_s) < 0.05
        assert await engine.run(run_id) == before, "nothing was written for what is answered"
        assert await answered(engine, run_id) == OLD_QUESTIONS


async def answered(engine: Embedded, run_id: str) -> int:
    """Return how many questions of a run were answered."""
    where = InterruptFilter(status=InterruptStatus.ANSWERED, run_id=run_id)
    rows = await engine.core.reader.list_interrupts(TENANT_DEFAULT, where, after=None, limit=500)
    return len(rows)


async def add_events(engine: Embedded, run_id: str, count: int) -> None:
    """Make the log of a run that nobody holds longer."""
    for _ in range(count // 5_000):
        hot = (await engine.run(run_id)).hot
        commit = Commit(
            run_id=run_id,
            commit_id=engine.core.ids.new(COMMIT),
            guard=Guard(
                token=None,
                epoch=hot.cancel_epoch,
                from_state=hot.state,
                expected_seq=hot.last_seq,
            ),
            hot=HotUpdate(
                state=hot.state,
                step_index=hot.step_index,
                faults=hot.faults,
                parked_on=hot.parked_on,
                waiting_kind=hot.waiting_kind,
                open_calls=hot.open_calls,
                open_interrupts=hot.open_interrupts,
                counters=hot.counters,
                checkpoint_seq=hot.checkpoint_seq,
            ),
            events=(NewEvent(data=CustomEvent(name="n", value=1), step_index=hot.step_index),)
            * 5_000,
        )
        (result,) = await engine.core.store.commit([commit])
        assert isinstance(result, Committed), result


async def test_an_answered_question_stays_answered_after_a_crash(url: str) -> None:
    """HITL-09: a worker dies between two questions; only the second one is open then."""
    asked = anyio.Event()
    crashes = True

    class Asker:
        async def next_step(self, context: PlannerContext) -> Decision:
            if context.step_index == 1 and crashes:
                asked.set()
                await anyio.sleep_forever()
            if context.step_index < 2:
                return Ask(title=f"question {context.step_index}", key=f"q{context.step_index}")
            return Finish(answer=[turn.asks[0].value for turn in context.turns])

    agent = HostedAgent(card=AgentCard(agent_id="twice", version="1"), planner=Asker())
    clock = ShiftingClock()
    async with flow(url, [agent], clock=clock) as engine:
        run_id = await engine.submit("twice")
        (first,) = await engine.wait_waiting(run_id)
        await engine.answer(first.interrupt_id, Answer.RESPOND, value="one")
        await asked.wait()
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        crashes = False
        await engine.start_worker()
        (second,) = await engine.wait_waiting(run_id)
        assert second.key == "q1"
        where = InterruptFilter(run_id=run_id)
        rows = await engine.core.reader.list_interrupts(TENANT_DEFAULT, where, after=None, limit=9)
        assert [row.status for row in rows] == [InterruptStatus.ANSWERED, InterruptStatus.PENDING]
        await engine.answer(second.interrupt_id, Answer.RESPOND, value="two")
        await engine.wait_terminal(run_id)
        assert data_of(await engine.events(run_id), StateEvent)[-1].answer == ["one", "two"]


async def test_tools_of_every_kind_ask_before_they_write(url: str, zoo: ToolZoo) -> None:
    """HITL-13: in a thread, on a loop, in a process, called by a model's step or by code."""
    zoo.registry.add(process_tools.process_pay)
    writers: dict[str, dict[str, JsonValue]] = {
        "pay": {"amount": 1},
        "pay_late": {"amount": 1},
        "pay_with_lookup": {"amount": 1},
        "process_pay": {"journal": str(zoo.journal), "amount": 1, "then": "return"},
    }

    @agent("code", "1", tools=[*writers])
    async def code(ctx: Context, input: object) -> object:
        del input
        await ctx.gather(*(ctx.tool(name, **args) for name, args in writers.items()))

    loop = scripted("loop", [calls(*writers.items())], tools=[*writers])
    async with flow(url, [code, loop], zoo) as engine:
        for agent_id in ("code", "loop"):
            run_id = await engine.submit(agent_id)
            questions = await engine.wait_waiting(run_id)
            events = await engine.events(run_id)
            assert len(data_of(events, ApprovalRequestEvent)) == len(writers) == len(questions)
            await engine.cancel(run_id)
            await engine.wait_terminal(run_id)
        assert zoo.executions == {}
        assert zoo.payments() == []


# ---------------------------------------------------------------- recovery


async def test_a_worker_of_the_same_name_does_not_keep_what_the_dead_one_held(
    url: str, zoo: ToolZoo
) -> None:
    """REC-01: ownership is lease and token; a name can be used again, and has no row to prune."""
    agent = scripted(
        "reads", lambda it: Finish(answer="done") if it.turns else call("hang"), tools=["hang"]
    )
    clock = ShiftingClock()
    async with flow(url, [agent], zoo, clock=clock) as engine:
        run_id = await engine.submit("reads")
        await zoo.wait_started("hang")
        name, held = engine.worker.worker_id, await engine.run(run_id)
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        again = new_worker(engine.core, engine.catalog, engine.tools, engine.policy)
        again.worker_id = name
        await engine.run_worker(again)
        await zoo.wait_started("hang", 2)
        row = await engine.run(run_id)
        assert (row.hot.lease_owner, row.hot.attempt) == (name, 2)
        assert row.hot.lease_token != held.hot.lease_token
        key = LeaseKey(run_id=run_id, token=held.hot.lease_token)
        assert await engine.core.store.release_runs(name, [key]) == 0
        zoo.open_gate()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        phases = [event.phase for event in data_of(await engine.events(run_id), AttemptEvent)]
        assert phases == ["claimed", "lost", "recovered"]


@asynccontextmanager
async def refused(  # what is refused, and where
    url: str,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    *,
    table: str,
    when: str,
    times: int,
) -> AsyncGenerator[None]:
    """Let the database give up, so many times, every transaction that leaves a row like this."""
    if isinstance(database, SqliteDatabase):
        left = times

        def refuse(connection: sqlite3.Connection) -> None:
            nonlocal left
            query = f"SELECT count(*) FROM {table} WHERE {when}"  # noqa: S608  # of a test
            if left and connection.execute(query).fetchone()[0]:
                left -= 1
                raise sqlite3.OperationalError("database is locked")

        database.writer.before_commit = refuse
        yield
        database.writer.before_commit = None
        assert left < times
        return
    monkeypatch.setattr(lanes, "AGAIN_MAX", 1)
    connection = await asyncpg.connect(url)
    await connection.execute(
        "CREATE SEQUENCE refusals; CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN IF nextval('refusals') <= {times} THEN"
        " RAISE EXCEPTION 'statement timeout' USING ERRCODE = '57014'; END IF; RETURN NULL; END $$;"
        f"CREATE TRIGGER refuse AFTER INSERT OR UPDATE ON {table} FOR EACH ROW"
        f" WHEN (NEW.{when}) EXECUTE FUNCTION refuse()"
    )
    yield
    assert await connection.fetchval("SELECT is_called FROM refusals")
    await connection.execute(
        f"DROP TRIGGER refuse ON {table}; DROP FUNCTION refuse; DROP SEQUENCE refusals"
    )
    await connection.close()


def ends_refused(
    url: str, database: Database, monkeypatch: pytest.MonkeyPatch
) -> AbstractAsyncContextManager[None]:
    """Let no run end."""
    when = "finished_at IS NOT NULL"
    return refused(url, database, monkeypatch, table="run_state", when=when, times=1_000_000)


async def test_an_end_that_the_database_gave_up_is_written_whole_or_not_at_all(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REC-04: the wish to cancel stands, nothing else; the next cancel ends the run whole."""
    async with (
        database_at(url) as database,
        embedded(database, [scripted("asks", asks_first)]) as engine,
    ):
        run_id = await engine.submit("asks")
        (question,) = await engine.wait_waiting(run_id)
        await engine.kill_worker()
        before = len(await engine.events(run_id))
        async with ends_refused(url, database, monkeypatch):
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await engine.cancel(run_id)
            row = await engine.run(run_id)
            assert status_of(row.hot) is RunStatus.CANCEL_REQUESTED
            assert (row.hot.state, row.hot.finished_at) == (RunState.WAITING_HUMAN, None)
            assert await engine.pending(run_id) == [question]
            kinds = [event.type for event in (await engine.events(run_id))[before:]]
            assert kinds == ["cancel"]
        await engine.cancel(run_id)
        row = await engine.run(run_id)
        assert (row.hot.state, row.hot.code) == (RunState.FAILED, FailureCode.RUN_CANCELLED)
        assert row.hot.finished_at is not None
        assert await engine.pending(run_id) == []
        assert states(await engine.events(run_id)).count(RunState.FAILED) == 1
        await assert_sound(database)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_run_whose_work_is_all_done_is_ended_after_a_crash(
    url: str, zoo: ToolZoo, *, is_cancelled: bool
) -> None:
    """REC-05: from its rows: its planner ends it, or the sweep alone does when it was cancelled."""
    asked = anyio.Event()
    crashes = True

    class Finisher:
        async def next_step(self, context: PlannerContext) -> Decision:
            if not context.turns:
                return calls(("echo", {"value": 1}), ("echo", {"value": 2}))
            if crashes:
                asked.set()
                await anyio.sleep_forever()
            return Finish(answer=[record.output for record in context.turns[0].calls])

    agent = HostedAgent(
        card=AgentCard(agent_id="ends", version="1"),
        planner=Finisher(),
        grants=(ToolGrant(name="echo"),),
    )
    clock = ShiftingClock()
    async with flow(url, [agent], zoo, clock=clock) as engine:
        run_id = await engine.submit("ends")
        await asked.wait()
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        crashes = False
        if is_cancelled:
            await engine.cancel(run_id)
            row = await swept_until(engine, run_id, lambda row: row.hot.finished_at is not None)
            assert row.hot.code is FailureCode.RUN_CANCELLED
        else:
            await engine.start_worker()
            assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
            assert data_of(await engine.events(run_id), StateEvent)[-1].answer == [1, 2]
        assert zoo.executions == {"echo": 2}


@pytest.mark.parametrize("times", [1, 4])
async def test_an_approved_payment_whose_result_is_not_written_at_once_is_made_once(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """CKP-01: its result is committed once, before its planner is asked again."""
    seen: list[list[ToolCallStatus]] = []

    def decide(context: PlannerContext) -> Decision:
        seen.append([record.status for turn in context.turns for record in turn.calls])
        return Finish(answer="paid") if context.turns else call("pay", amount=5)

    async with (
        database_at(url) as database,
        embedded(database, [scripted("pays", decide, tools=["pay"])], tools=zoo.registry) as engine,
    ):
        run_id = await engine.submit("pays")
        (question,) = await engine.wait_waiting(run_id)
        seen.clear()
        fault = refused(
            url,
            database,
            monkeypatch,
            table="tool_executions",
            when="ended_at IS NOT NULL",
            times=times,
        )
        async with fault:
            await engine.answer(question.interrupt_id, Answer.APPROVE)
            row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert (len(zoo.payments()), zoo.executions) == (1, {"pay": 1})
        assert len(data_of(await engine.events(run_id), ResultEvent)) == 1
        assert seen == [[ToolCallStatus.SUCCEEDED]]
        await assert_sound(database)


async def test_a_child_whose_insert_failed_once_is_there_or_named_nowhere(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKP-08: it is inserted with the decision that spawns it; no event has an id without a row."""
    child = scripted("child", [Finish(answer=1)])
    parent = scripted(
        "parent",
        lambda it: Finish() if it.turns else Spawn(children=(ChildRequest(agent_id="child"),)),
    )
    async with (
        database_at(url) as database,
        embedded(database, [parent, child]) as engine,
    ):
        fault = refused(
            url, database, monkeypatch, table="runs", when="parent_run_id IS NOT NULL", times=1
        )
        async with fault:
            run_id = await engine.submit("parent")
            row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        named = {event.child_run_id for event in data_of(await engine.events(run_id), ChildEvent)}
        where = RunFilter(parent_run_id=run_id)
        rows = await database.reader.list_runs(None, where, after=None, limit=9)
        assert named == {row.facts.run_id for row in rows}
        assert len(rows) == 1
        await assert_sound(database)


@pytest.mark.parametrize("fault", ["fails", "hangs"])
async def test_a_heartbeat_without_an_answer_stops_the_work_before_the_lease_is_over(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """F28, CON-02: whoever cannot prove that it holds a run lets go of it in time."""
    settings = replace(SETTINGS, lease_ttl_s=3.0, heartbeat_s=0.1, lease_margin_s=2.0)
    agent = scripted("rests", [call("slow", seconds=60)], tools=["slow"])

    async def no_answer(*_: object) -> list[object]:
        if fault == "hangs":
            await anyio.sleep_forever()
        raise Unavailable("no heartbeat")

    async with flow(url, [agent], zoo, settings=settings) as engine:
        run_id = await engine.submit("rests")
        await zoo.wait_started("slow")
        with monkeypatch.context() as patch, anyio.fail_after(30):
            patch.setattr(type(engine.core.store), "renew_leases", no_answer)
            await eventually(lambda: run_id not in engine.worker.held_runs)
            hot = (await engine.run(run_id)).hot
            assert hot.lease_owner == engine.worker.worker_id
            assert hot.lease_expires_at is not None
            assert hot.lease_expires_at > engine.core.clock.now()
            await engine.kill_worker()
        await engine.cancel(run_id)


async def test_what_a_tool_does_to_its_arguments_changes_no_record(url: str, zoo: ToolZoo) -> None:
    """RES-11: after a crash the planner sees the committed result and the arguments as decided."""
    asked = anyio.Event()
    seen: list[object] = []

    class Looking:
        async def next_step(self, context: PlannerContext) -> Decision:
            if not context.turns:
                return call("changes_its_arguments", items=[1, 2, 3])
            seen.append((context.turns[0].calls[0].args, context.turns[0].calls[0].output))
            if len(seen) == 1:
                asked.set()
                await anyio.sleep_forever()
            return Finish()

    agent = HostedAgent(
        card=AgentCard(agent_id="looks", version="1"),
        planner=Looking(),
        grants=(ToolGrant(name="changes_its_arguments"),),
    )
    clock = ShiftingClock()
    async with flow(url, [agent], zoo, clock=clock) as engine:
        run_id = await engine.submit("looks")
        await asked.wait()
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.start_worker()
        await engine.wait_terminal(run_id)
        assert seen == [({"items": [1, 2, 3]}, 0)] * 2
        (row,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=9)
        assert row.args_digest == row.effective_digest == digest({"items": [1, 2, 3]})


# ---------------------------------------------------------------- cancels


@pytest.mark.parametrize("waits", [False, True])
async def test_a_cancelled_run_is_not_tried_again(url: str, zoo: ToolZoo, *, waits: bool) -> None:
    """CAN-07, CAN-09: neither the error that comes after the cancel, nor the back-off before it."""

    @tool(idempotent=True, retry=RetryPolicy(attempts_max=5, backoff_s=60 if waits else 0.01))
    async def unlucky() -> None:
        """Be unavailable, at once or when it is cancelled."""
        zoo.begin("unlucky")
        if not waits:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise ToolUnavailable("down")

    zoo.registry.add(unlucky)

    def decide(context: PlannerContext) -> Decision:
        return call("unlucky") if context.input == "first" else Finish(answer="next")

    clock = ShiftingClock()
    agents = [scripted("tries", decide, tools=["unlucky"])]
    async with flow(url, agents, zoo, clock=clock) as engine:
        run_id = await engine.submit("tries", "first")
        thread = (await engine.run(run_id)).facts.thread_id
        behind = await engine.submit("tries", "second", thread_id=thread)
        await zoo.wait_started("unlucky")
        if waits:
            await engine.wait_event(run_id, "retry")
        await engine.cancel(run_id)
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.RUN_CANCELLED
        tried = zoo.executions["unlucky"]
        assert (await engine.wait_terminal(behind)).hot.state is RunState.SUCCEEDED
        clock.advance(120)  # longer than the back-off
        await engine.sweep()
        await engine.wait_terminal(await engine.submit("tries", "third"))
        assert zoo.executions["unlucky"] == tried
        assert len(await engine.core.reader.list_attempts(run_id)) == 1
        if not waits:
            assert data_of(await engine.events(run_id), RetryEvent) == []


# ---------------------------------------------------------------- time limits


@pytest.mark.slow
async def test_twenty_runs_whose_tools_never_return_end_and_are_told_apart(
    url: str, zoo: ToolZoo
) -> None:
    """TIM-06: every run ends at its call's limit; the lost slots ask for a new process."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return call("hang" if context.input == "hang" else "echo")
        return Finish(answer=context.turns[0].calls[0].status)

    agent = scripted("hangs", decide, tools=["hang", "echo"])
    async with flow(url, [agent], zoo) as engine:
        good = await engine.submit("hangs", "well")
        runs = [await engine.submit("hangs", "hang", timeouts={"tool_s": 0.3}) for _ in range(20)]
        await engine.wait_terminal(good)
        for run_id in runs:
            assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
            (result,) = data_of(await engine.events(run_id), ResultEvent)
            assert result.error is not None
            assert result.error.code in {FailureCode.TOOL_TIMEOUT, FailureCode.TOOL_UNAVAILABLE}
        assert engine.tools.lost_slots == zoo.executions["hang"] >= 16
        assert engine.tools.wants_recycle
        zoo.open_gate()


async def test_waiting_for_an_event_can_be_given_up_and_gone_on_with(
    url: str, zoo: ToolZoo
) -> None:
    """TIM-07: a limit of the reader's own ends the wait and leaves the cursor where it was."""
    agent = scripted(
        "waits", lambda it: Finish(answer="done") if it.turns else call("hang"), tools=["hang"]
    )
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("waits")
        await zoo.wait_started("hang")
        seen: list[int] = []
        async with follow(engine.core, run_id, 0) as cursor:
            seen += [event.seq for event in await cursor.read(wait_s=120)]
            for _ in range(2):
                with anyio.move_on_after(0.1) as limit:
                    while True:
                        seen += [event.seq for event in await cursor.read(wait_s=120)]
                assert limit.cancelled_caught
            zoo.open_gate()
            with anyio.fail_after(30):
                while not cursor.ended:
                    seen += [event.seq for event in await cursor.read(wait_s=120)]
        assert seen == [event.seq for event in await engine.events(run_id)]


@pytest.mark.slow
async def test_appends_to_a_long_history_wait_for_no_reader(url: str) -> None:
    """CON-12: beside ten readers 99 of 100 appends to 50 000 events take less than 50 ms, or on a
    busy machine no more than those to a new run."""
    async with database_at(url) as database:
        long, short = [(await claimed(database.store)).row.facts.run_id for _ in range(2)]
        for _ in range(EVENTS // 5_000):
            row = await look(database.reader, long)
            await write(database.store, commit_of(row, *[note("old", 1)] * 5_000))

        async def read() -> None:
            seq = 0
            while page := await database.reader.events_after(long, seq, limit=100):
                seq = page[-1].seq
                await anyio.sleep(0.01)

        passed_s: dict[str, list[float]] = {long: [], short: []}
        async with anyio.create_task_group() as group:
            for _ in range(10):
                group.start_soon(read)
            for _ in range(100):
                for run_id, times in passed_s.items():
                    commit = commit_of(await look(database.reader, run_id), note("new", 1))
                    started = time.monotonic()
                    await write(database.store, commit)
                    times.append(time.monotonic() - started)
            group.cancel_scope.cancel()
        slowest = {run_id: sorted(times)[98] for run_id, times in passed_s.items()}
        assert slowest[long] < max(0.05, 3 * slowest[short])
        assert (await look(database.reader, long)).hot.last_seq >= EVENTS + 100


# ---------------------------------------------------------------- deploys


@pytest.mark.slow
async def test_columns_added_under_busy_workers_cost_no_attempt(postgres_own_dsn: str) -> None:
    """SCH-02: PostgreSQL alone has plans that go stale; no worker ends, no attempt is lost."""

    def decide(context: PlannerContext) -> Decision:
        return call("echo", value=context.step_index) if context.step_index < 20 else Finish()

    with ToolZoo(Path("unused")) as zoo:
        async with flow(postgres_own_dsn, [scripted("walks", decide, tools=["echo"])], zoo) as it:
            worker = it.worker
            runs = [await it.submit("walks") for _ in range(8)]
            await zoo.wait_started("echo", 8)
            connection = await asyncpg.connect(postgres_own_dsn)
            for table in ("runs", "run_state", "events", "tool_calls", "steps", "checkpoints"):
                await connection.execute(f"ALTER TABLE {table} ADD COLUMN extra text")
            await connection.close()
            assert {(await it.run(run_id)).hot.state for run_id in runs} - {RunState.SUCCEEDED}
            for run_id in runs:
                row = await it.wait_terminal(run_id)
                assert (row.hot.state, row.hot.attempt) == (RunState.SUCCEEDED, 1)
            assert it.worker is worker
