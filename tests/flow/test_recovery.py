"""After a crash: the planner sees what it saw, and a damaged run is put aside (R-7)."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass

import anyio
import pytest
from pydantic_core import to_json

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import Ask, CallTools, Decision, Finish, ModelUse, ToolRequest
from perdure.protocol.events import (
    AttemptEvent,
    InterruptEvent,
    PlanItem,
    RepairEvent,
    ResultEvent,
    StateEvent,
    Usage,
)
from perdure.protocol.runs import waiting_on
from perdure.protocol.states import (
    Answer,
    InterruptKind,
    ParkedOn,
    RunState,
    ToolCallStatus,
    WaitingOn,
)
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.runs import list_runs
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, calls, embedded, scripted, unasked
from perdure.testing.tools import WRITE, AnyTool, ToolZoo, append_line
from perdure.tools import ToolContext, tool
from tests.flow.rows import Rows
from tests.flow.world import data_of, database_at, flow, types


@dataclass(slots=True)
class Amnesia:
    """A planner whose worker dies at the first asking of every step, and that notes what it saw."""

    decide: Callable[[PlannerContext], Decision]
    seen: list[tuple[int, bytes]]
    asked: anyio.Event

    async def next_step(self, context: PlannerContext) -> Decision:
        """Decide at the second asking."""
        first = all(step != context.step_index for step, _ in self.seen)
        self.seen.append((context.step_index, to_json(asdict(context), by_alias=False)))
        if first:
            self.asked.set()
            await anyio.sleep_forever()
        return self.decide(context)


def eventful(context: PlannerContext) -> Decision:
    """A little of everything: use, plan, state, large and failed results, a question."""
    use = ModelUse(model="m", text="thinking", usage=Usage(input_tokens=3, cost=0.1))
    match context.step_index:
        case 0:
            return CallTools(
                calls=(
                    ToolRequest(tool="echo", args={"value": {"é": [1.5, None, "\u2028"]}}),
                    ToolRequest(tool="big", args={"size": 9000}, call_id="c2"),
                    ToolRequest(tool="raises", args={"what": "ToolError", "text": "no"}),
                ),
                model_uses=(use,),
                plan=(PlanItem(text="look", status="done"), PlanItem(text="ask")),
            )
        case 1:
            return Ask(title="go on?", key="q", payload={"n": 1}, state={"asked": [1, 2]})
        case 2:
            return call("half_done")
        case 3:
            return call("fly")
        case _:
            return Finish(answer="done", model_uses=(use,))


@pytest.mark.slow
async def test_a_recovered_planner_sees_byte_for_byte_what_it_saw(url: str, zoo: ToolZoo) -> None:
    """R-7.3, R-7.2, RES-04: at every step a worker dies; the next one rebuilds the same context."""
    planner = Amnesia(eventful, [], anyio.Event())
    tools = unasked("echo", "big", "raises", "half_done")
    agent = HostedAgent(
        card=AgentCard(agent_id="eventful", version="1"), planner=planner, grants=tools
    )
    clock = ShiftingClock()
    async with flow(url, [agent], zoo, clock=clock) as engine:
        run_id = await engine.submit("eventful", {"task": "é"})
        for step in range(5):
            await planner.asked.wait()
            planner.asked = anyio.Event()
            await engine.kill_worker()
            clock.advance(60)  # its leases run out
            await engine.start_worker()
            if step == 1:
                (question,) = await engine.wait_waiting(run_id)
                await engine.answer(question.interrupt_id, Answer.RESPOND, value={"ok": True})
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert [step for step, _ in planner.seen] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        for first, again in zip(planner.seen[::2], planner.seen[1::2], strict=True):
            assert first == again
        assert b"thinking" in planner.seen[-1][1]
        log = await engine.events(run_id)
        assert len(data_of(log, ResultEvent)) == 5
        assert [item.phase for item in data_of(log, AttemptEvent)].count("recovered") == 5
        assert zoo.executions == {"echo": 1}, "a committed result is never run again"


async def test_each_commit_leaves_a_checkpoint_that_says_where_the_run_stood(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.1, R-7.2: one at the end of every commit that moved the run or recorded a result."""
    planner = scripted("eventful", eventful, tools=unasked("echo", "big", "raises", "half_done"))
    async with flow(url, [planner], zoo) as engine:
        run_id = await engine.submit("eventful")
        (question,) = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        found = await engine.core.reader.list_checkpoints(run_id, before=None, limit=100)
        chain = list(reversed(found))
        assert [item.parent_seq for item in chain] == [None, *[item.seq for item in chain[:-1]]]
        assert {item.schema_version for item in chain} == {1}
        places = {item.seq for item in chain}
        written_at = {event.at for event in log if event.seq in places}
        covered = [event for event in log[2:] if event.type in {"state", "result", "resume"}]
        assert covered
        assert all(event.at in written_at for event in covered)
        assert chain[-1].seq == log[-1].seq
        assert chain[-1].agent_state == {"asked": [1, 2]}


@pytest.mark.parametrize(
    ("name", "ends_as", "by", "executions", "payments"),
    [
        ("pay_and_wait", ToolCallStatus.SUCCEEDED, "tool", 2, 1),
        ("pay_then_hang", ToolCallStatus.SUCCEEDED, "lookup", 1, 1),
        ("pay_late", ToolCallStatus.SUCCEEDED, "person", 1, None),
    ],
)
async def test_an_open_call_is_cleared_up_by_what_its_tool_declares(
    url: str,
    zoo: ToolZoo,
    *,
    name: str,
    ends_as: ToolCallStatus,
    by: str,
    executions: int,
    payments: int | None,
) -> None:
    """R-7.6, R-5.7, R-5.6, F02, REC-03: the same key again, a lookup, or a person; nothing twice."""
    zoo.registry.add(_pay_and_wait(zoo))
    agent = scripted(
        "payer",
        lambda context: Finish(answer="paid") if context.turns else call(name, amount=5),
        tools=unasked(name),
    )
    clock = ShiftingClock()
    async with flow(url, [agent], zoo, clock=clock) as engine:
        run_id = await engine.submit("payer")
        await zoo.wait_started(name)
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.start_worker()
        if by == "person":
            event = await engine.wait_event(run_id, "interrupt")
            assert isinstance(event.data, InterruptEvent)
            await engine.wait_waiting(run_id)
            service = Service(core=engine.core)
            state = RunState.WAITING_HUMAN
            (stuck,) = (await list_runs(service, LOCAL, state=state, limit=10)).items
            assert (stuck.run_id, stuck.waiting_on) == (run_id, WaitingOn.PERSON)
            assert stuck.open_interrupts == [event.data.interrupt_id]
            assert event.data.kind is InterruptKind.OUTCOME
            await engine.answer(event.data.interrupt_id, Answer.HAPPENED, external_ref="order-1")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        assert (result.status, result.by) == (ends_as, by)
        assert result.executions == executions
        if payments is not None:
            assert len(zoo.payments()) == payments


def _pay_and_wait(zoo: ToolZoo) -> AnyTool:
    @tool(idempotent=True, **WRITE)
    async def pay_and_wait(amount: int, context: ToolContext) -> str:
        """Pay once per key; the first answer never comes."""
        if not zoo.payments():
            append_line(zoo.journal, context.effect_key, amount)
        if zoo.begin("pay_and_wait") == 1:
            await asyncio.Event().wait()
        return "paid"

    return pay_and_wait


async def test_a_restart_touches_neither_ended_nor_waiting_runs(url: str, zoo: ToolZoo) -> None:
    """R-7.6: terminal stays terminal, waiting waits; not one event is added."""

    def decide(context: PlannerContext) -> Decision:
        if context.input == "ask" and not context.turns:
            return Ask(title="?")
        return Finish(answer="done")

    async with flow(url, [scripted("either", decide)], zoo) as engine:
        done, waits = await engine.submit("either"), await engine.submit("either", "ask")
        await engine.wait_terminal(done)
        (question,) = await engine.wait_waiting(waits)
        before = [await engine.events(done), await engine.events(waits)]
        await engine.kill_worker()
        await engine.start_worker()
        other = await engine.submit("either")
        await engine.wait_terminal(other)
        assert [await engine.events(done), await engine.events(waits)] == before
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        assert (await engine.wait_terminal(waits)).hot.state is RunState.SUCCEEDED


DAMAGE: dict[str, tuple[str, bytes | None]] = {
    "checkpoint digest": ("UPDATE checkpoints SET digest = ! WHERE run_id = ?", b"\x00" * 32),
    "missing event": ("DELETE FROM events WHERE run_id = ? AND seq = 5", None),
    "missing last event": ("DELETE FROM events WHERE run_id = ? AND seq > 8", None),
    "garbled event": ("UPDATE events SET data = ! WHERE run_id = ? AND seq = 3", b"{"),
    "changed result": (
        "UPDATE events SET data = ! WHERE run_id = ? AND type = 3",
        b'{"tool_call_id":"%s","status":"succeeded","output":2,"executions":1}',
    ),
    "unknown type": ("UPDATE events SET type = 99 WHERE run_id = ? AND seq = 3", None),
}


@pytest.mark.parametrize("kind", list(DAMAGE))
async def test_a_damaged_run_is_put_aside_and_its_planner_is_not_asked(
    url: str, zoo: ToolZoo, kind: str
) -> None:
    """R-7.7, CKP-06, F21: quarantined, waiting on repair, told in the log; others go on."""
    asked: list[str] = []

    def decide(context: PlannerContext) -> Decision:
        asked.append(context.facts.run_id)
        if context.input == "ask" and not context.turns:
            return calls(("echo", {"value": 1}))
        if context.input == "ask" and len(context.turns) == 1:
            return Ask(title="?")
        return Finish(answer="done")

    agent = scripted("asker", decide, tools=["echo"])
    async with (
        database_at(url) as database,
        embedded(database, [agent], tools=zoo.registry) as engine,
    ):
        run_id = await engine.submit("asker", "ask")
        (question,) = await engine.wait_waiting(run_id)
        await engine.kill_worker()
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        statement, value = DAMAGE[kind]
        if value is not None:
            value = value.replace(b"%s", result.tool_call_id.encode())
        Rows(url).damage(statement, run_id, value)
        asked.clear()
        await engine.start_worker()
        await _put_aside(engine, run_id)
        assert asked == []
        other = await engine.submit("asker", "go")
        assert (await engine.wait_terminal(other)).hot.state is RunState.SUCCEEDED
        assert asked == [other]


async def _put_aside(engine: Embedded, run_id: str) -> None:
    with anyio.fail_after(30):
        while (row := await engine.run(run_id)).hot.parked_on is not ParkedOn.REPAIR:  # noqa: ASYNC110  # its log cannot be followed
            await anyio.sleep(0.01)
    assert waiting_on(row.hot) is WaitingOn.REPAIR
    assert row.hot.lease_owner is None
    assert not await engine.core.reader.is_ready(run_id)
    (last,) = await engine.core.reader.events_after(run_id, row.hot.last_seq - 1, limit=1)
    assert isinstance(last.data, RepairEvent)
    assert last.data.by
    assert last.data.reason


async def test_the_log_of_a_whole_run_is_in_the_order_of_its_states(url: str, zoo: ToolZoo) -> None:
    """R-6.1, R-6.2, R-2.6: one run id and one gapless log through waiting, crash and recovery."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return Ask(title="?")
        return call("hang") if len(context.turns) == 1 else Finish(answer="done")

    clock = ShiftingClock()

    async with flow(url, [scripted("long", decide, tools=["hang"])], zoo, clock=clock) as engine:
        run_id = await engine.submit("long")
        (question,) = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.start_worker()
        await zoo.wait_started("hang", 2)
        zoo.open_gate()
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert [event.seq for event in log] == list(range(1, row.hot.last_seq + 1))
        assert {event.run_id for event in log} == {run_id}
        assert {event.event_id for event in log} == {
            f"evt_{run_id[4:]}_{seq}" for seq in range(1, len(log) + 1)
        }
        moves = data_of(log, StateEvent)
        assert [move.from_state for move in moves[1:]] == [move.state for move in moves[:-1]]
        assert types(log)[0] == "state"
        assert moves[0].state is RunState.PENDING
