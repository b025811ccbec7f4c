"""Child runs: spawned with their parent's decision, told once, and waited for by nobody (R-13.1)."""

from dataclasses import replace
from datetime import timedelta
from typing import cast

from pydantic import JsonValue

from perdure.agents.catalog import AgentRegistry, Catalog
from perdure.engine.context import ChildRecord, PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import (
    Ask,
    ChildRequest,
    Decision,
    Finish,
    GiveUp,
    Handoff,
    ModelUse,
    Sleep,
    Spawn,
)
from perdure.protocol.events import ChildEvent, ErrorEvent, ResultEvent, StateEvent, Usage
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunRow, status_of, waiting_on, waits_for_person
from perdure.protocol.states import (
    Answer,
    ParkedOn,
    RunState,
    RunStatus,
    SideEffect,
    WaitingOn,
)
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.runs import get_run
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, Embedded, call, calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import agent_as_tool
from tests.flow.world import data_of, flow, types


def children(context: PlannerContext) -> list[ChildRecord]:
    """Return what a planner sees of its children."""
    return [child for turn in context.turns for child in turn.children]


def told(context: PlannerContext) -> Finish:
    """Finish with what the children came to."""
    return Finish(
        answer=[
            [child.key, child.state, child.answer, child.error.code if child.error else None]
            for child in children(context)
        ]
    )


def manager(*requests: ChildRequest, wait: bool = True, name: str = "manager") -> HostedAgent:
    """An agent that spawns once and finishes with what it was told."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return Spawn(children=requests, wait=wait)
        return told(context)

    return scripted(name, decide)


def echoing(context: PlannerContext) -> Decision:
    """Finish with the input."""
    return Finish(answer=context.input)


ECHO = scripted("echoer", echoing)


async def rows_below(engine: Embedded, run_id: str) -> list[RunRow]:
    """Return all runs below a root, oldest first."""
    where = RunFilter(root_run_id=run_id)
    return (await engine.core.reader.list_runs(None, where, after=None, limit=500))[::-1]


def phases(events: list[ChildEvent]) -> list[str]:
    return [event.phase for event in events]


async def test_fan_out_and_fan_in(url: str) -> None:
    """R-4.8, R-13.1: three children, own threads, results by key; large answers by reference."""
    big = "x" * 20_000
    requests = [ChildRequest(agent_id="echoer", input=value, key=f"k{value}") for value in (1, 2)]
    requests.append(ChildRequest(agent_id="echoer", input=big, key="big"))
    async with flow(url, [manager(*requests), ECHO]) as engine:
        run_id = await engine.submit("manager")
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        events = data_of(await engine.events(run_id), ChildEvent)
        assert phases(events) == ["spawned"] * 3 + ["result"] * 3
        below = await rows_below(engine, run_id)
        assert len(below) == 3
        for child in below:
            facts = child.facts
            assert (facts.parent_run_id, facts.root_run_id, facts.depth) == (run_id, run_id, 1)
            assert facts.thread_id != row.facts.thread_id
            assert facts.caller == row.facts.caller
            assert facts.trace_id == row.facts.trace_id
        answer = await answer_of(engine, run_id)
        assert answer[0] == ["k1", "succeeded", 1, None]
        assert answer[1] == ["k2", "succeeded", 2, None]
        assert cast("dict[str, int]", answer[2][2])["size"] > len(big)


async def answer_of(engine: Embedded, run_id: str) -> list[list[JsonValue]]:
    """Return the answer of a run that tells what its children came to."""
    answer = data_of(await engine.events(run_id), StateEvent)[-1].answer
    return cast("list[list[JsonValue]]", answer)


async def test_a_failed_child_is_data_for_its_parent(url: str) -> None:
    """R-13.1: one child fails, one is refused, one succeeds; the parent goes on with all three."""
    failing = scripted("failing", [GiveUp(code=FailureCode.MODEL_ERROR, reason="no idea")])
    requests = [
        ChildRequest(agent_id="failing", key="a"),
        ChildRequest(agent_id="nobody", key="b"),
        ChildRequest(agent_id="echoer", key="c", input=3),
    ]
    async with flow(url, [manager(*requests), ECHO, failing]) as engine:
        run_id = await engine.submit("manager")
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert await answer_of(engine, run_id) == [
            ["a", "failed", None, "MODEL_ERROR"],
            ["b", None, None, "AGENT_NOT_FOUND"],
            ["c", "succeeded", 3, None],
        ]


async def test_a_parent_waits_without_a_worker_while_its_child_asks_a_person(
    url: str, zoo: ToolZoo
) -> None:
    """R-13.1, R-13.5, HITL-09, RES-07: the wait outlives the worker; only what is open is asked,
    and what the child did before is not done again."""
    script = [
        call("echo", value=0),
        call("echo", value=1),
        Ask(title="one"),
        Ask(title="two"),
        Finish(answer="told"),
    ]
    asking = scripted("asking", script, tools=["echo"])
    async with flow(url, [manager(ChildRequest(agent_id="asking")), asking], zoo) as engine:
        run_id = await engine.submit("manager")
        row = await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        assert (row.hot.lease_owner, row.hot.open_children) == (None, 1)
        assert waiting_on(row.hot) is WaitingOn.CHILD
        assert status_of(row.hot) is RunStatus.RUNNING
        assert not await engine.core.reader.is_ready(run_id)
        [child] = await rows_below(engine, run_id)
        child_id = child.facts.run_id
        [first] = await engine.wait_waiting(child_id)
        await engine.kill_worker()
        await engine.start_worker()
        await engine.answer(first.interrupt_id, Answer.RESPOND, value=1)
        second = first
        while second.interrupt_id == first.interrupt_id:
            [second] = await engine.wait_waiting(child_id)
        await engine.answer(second.interrupt_id, Answer.RESPOND, value=2)
        await engine.wait_terminal(run_id)
        assert await answer_of(engine, run_id) == [["0", "succeeded", "told", None]]
        assert zoo.executions == {"echo": 2}


async def test_children_beside_their_parents_work(url: str, zoo: ToolZoo) -> None:
    """R-13.1: a parent that does not wait goes on at once, and joins later; a sleep stays a sleep."""

    def decide(context: PlannerContext) -> Decision:
        script: list[Decision] = [
            Spawn(children=(ChildRequest(agent_id="held", key="h"),), wait=False),
            call("echo", value=1),
            Sleep(duration=timedelta(seconds=0.3)),
            Spawn(),
        ]
        return script[context.step_index] if context.step_index < 3 else _join(context, script)

    def _join(context: PlannerContext, script: list[Decision]) -> Decision:
        return (
            script[3] if any(child.state is None for child in children(context)) else told(context)
        )

    held = scripted("held", [call("hang"), Finish(answer="free")], tools=["hang"])
    parent = scripted("parent", decide, tools=["echo"])
    async with flow(url, [parent, held], zoo) as engine:
        run_id = await engine.submit("parent")
        await zoo.wait_started("hang")
        await engine.wait_event(run_id, "result")
        zoo.open_gate()
        await engine.wait_terminal(run_id)
        assert await answer_of(engine, run_id) == [["h", "succeeded", "free", None]]


async def test_an_end_waits_for_the_children(url: str, zoo: ToolZoo) -> None:
    """R-2.2: a planner that says it is done is asked again once its children have ended."""
    asked: list[int] = []

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return Spawn(children=(ChildRequest(agent_id="held"),), wait=False)
        asked.append(len(context.turns))
        return told(context)

    held = scripted("held", [call("hang"), Finish(answer="free")], tools=["hang"])
    async with flow(url, [scripted("parent", decide), held], zoo) as engine:
        run_id = await engine.submit("parent")
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        zoo.open_gate()
        await engine.wait_terminal(run_id)
        assert len(asked) == 2
        assert await answer_of(engine, run_id) == [["0", "succeeded", "free", None]]


async def test_a_detached_child_goes_its_own_way(url: str) -> None:
    """R-3.4: the parent ends before it, and a cancel does not reach it."""
    asking = scripted("asking", [Ask(title="still?"), Finish(answer="alone")])
    requests = [ChildRequest(agent_id="asking", detach=True), ChildRequest(agent_id="asking")]

    def decide(context: PlannerContext) -> Decision:
        return Finish() if context.turns else Spawn(children=tuple(requests))

    async with flow(url, [scripted("manager", decide), asking]) as engine:
        run_id = await engine.submit("manager")
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        detached, attached = await rows_below(engine, run_id)
        assert (detached.facts.detached, attached.facts.detached) == (True, False)
        for child in (detached, attached):
            await engine.wait_waiting(child.facts.run_id)
        await engine.cancel(run_id)
        assert (await engine.wait_terminal(run_id)).hot.code is FailureCode.RUN_CANCELLED
        assert (await engine.run(attached.facts.run_id)).hot.code is FailureCode.RUN_CANCELLED
        [question] = await engine.wait_waiting(detached.facts.run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND)
        ended = await engine.wait_terminal(detached.facts.run_id)
        assert ended.hot.state is RunState.SUCCEEDED
        events = data_of(await engine.events(run_id), ChildEvent)
        assert phases(events) == ["spawned", "spawned", "result"]


async def test_what_a_detached_child_asks_keeps_its_parent_from_nothing(
    url: str, zoo: ToolZoo
) -> None:
    """R-2.7, R-3.4: the parent waits for the other child, and shows only what that one asks."""
    asking = scripted("asking", [Ask(title="still?"), Finish(answer="alone")])
    busy = scripted("busy", [call("hang"), Ask(title="now?"), Finish()], tools=["hang"])
    requests = [ChildRequest(agent_id="asking", detach=True), ChildRequest(agent_id="busy")]
    async with flow(url, [manager(*requests), asking, busy], zoo) as engine:
        service = Service(core=engine.core)
        run_id = await engine.submit("manager")
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        detached, attached = await rows_below(engine, run_id)
        await engine.wait_waiting(detached.facts.run_id)
        shown = await get_run(service, LOCAL, run_id)
        assert (shown.open_interrupts, waits_for_person(shown)) == ([], False)
        zoo.open_gate()
        [question] = await engine.wait_waiting(attached.facts.run_id)
        shown = await get_run(service, LOCAL, run_id)
        assert (shown.open_interrupts, waits_for_person(shown)) == ([question.interrupt_id], True)
        await engine.answer(question.interrupt_id, Answer.RESPOND)
        await engine.wait_terminal(run_id)
        await engine.cancel(detached.facts.run_id)


async def test_limits_of_depth_and_width(url: str) -> None:
    """ASI08, F44: a child too deep or too many is refused, and the planner told."""

    def decide(context: PlannerContext) -> Decision:
        if context.turns:
            return told(context)
        wish = ChildRequest(agent_id="nest")
        return Spawn(children=(wish, wish, wish) if context.facts.depth == 0 else (wish,))

    settings = replace(SETTINGS, depth_max=2, children_max=2)
    async with flow(url, [scripted("nest", decide)], settings=settings) as engine:
        run_id = await engine.submit("nest")
        await engine.wait_terminal(run_id)
        depths = [row.facts.depth for row in await rows_below(engine, run_id)]
        assert sorted(depths) == [1, 1, 2, 2]
        answer = await answer_of(engine, run_id)
        assert [item[3] for item in answer] == [None, None, "BUDGET_EXCEEDED"]
        assert answer[0][2] == [["0", "succeeded", [["0", None, None, "BUDGET_EXCEEDED"]], None]]


async def test_a_budget_is_shared_by_a_tree(url: str, zoo: ToolZoo) -> None:
    """BUD-02, F49, R-14.3: a limit of 5 calls over four children that each want two."""

    def work(context: PlannerContext) -> Decision:
        done = len(context.turns)
        return call("echo", value=done) if done < 2 else Finish(answer=done)

    requests = [ChildRequest(agent_id="worker", key=str(number)) for number in range(4)]
    worker = scripted("worker", work, tools=["echo"])
    async with flow(url, [manager(*requests), worker], zoo) as engine:
        run_id = await engine.submit("manager", budget={"tool_calls": 5})
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert zoo.executions["echo"] == 5
        codes = [item[3] for item in await answer_of(engine, run_id)]
        assert codes == [None] + ["BUDGET_EXCEEDED"] * 3
        kept = [event.use for event in data_of(await engine.events(run_id), ChildEvent)]
        shares = [use.tool_calls or 0 for use in kept if use is not None]
        assert (shares[:4], sorted(shares[4:])) == ([2, 1, 1, 1], [1, 1, 1, 2])


async def test_what_children_used_counts_for_their_parent(url: str) -> None:
    """R-14.3: model calls of children are added when they end; then nothing is left."""

    def decide(context: PlannerContext) -> Decision:
        if len(context.turns) == 2:
            return told(context)
        return Spawn(children=(ChildRequest(agent_id="thinker", key=f"c{len(context.turns)}"),))

    use = ModelUse(model="m", usage=Usage(input_tokens=10, output_tokens=5))
    thinker = scripted("thinker", [Finish(answer="thought", model_uses=(use,))])
    async with flow(url, [scripted("manager", decide), thinker]) as engine:
        run_id = await engine.submit("manager", budget={"model_calls": 1})
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.BUDGET_EXCEEDED
        [child] = await rows_below(engine, run_id)
        assert child.facts.options.budget.model_calls == 1


async def test_an_agent_as_a_tool(url: str, zoo: ToolZoo) -> None:
    """R-13.4, SUB-03, HITL-13: one call, one result; the call is judged like any other; a child
    that waits for a person does not run the other calls of the turn again."""
    zoo.registry.add(
        agent_as_tool("expert", name="ask_expert"),
        agent_as_tool("expert", name="order_expert", side_effect=SideEffect.WRITE),
    )
    expert = scripted("expert", [Ask(title="sure?"), Finish(answer={"advice": "sell"})])
    wishes = calls(
        ("ask_expert", {"task": "which way?"}),
        ("order_expert", {"task": "do it"}),
        ("ask_expert", {"work": "does not fit"}),
        ("pay", {"amount": 1}),
    )
    boss = scripted(
        "boss",
        [wishes, Finish(answer="done")],
        tools=["ask_expert", "order_expert", *unasked("pay")],
    )
    async with flow(url, [boss, expert], zoo) as engine:
        run_id = await engine.submit("boss")
        [approval] = await engine.wait_waiting(run_id)
        assert len(await rows_below(engine, run_id)) == 1
        await engine.answer(approval.interrupt_id, Answer.APPROVE)
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        below = await rows_below(engine, run_id)
        assert [row.facts.agent_id for row in below] == ["expert", "expert"]
        rows = await engine.core.reader.list_tool_calls(run_id, after=None, limit=10)
        assert [row.status for row in rows] == ["pending", "pending", "failed", "succeeded"]
        for child in below:
            [question] = await engine.wait_waiting(child.facts.run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        results = data_of(await engine.events(run_id), ResultEvent)
        answers = [result.output for result in results if result.by == "child"]
        assert answers == [{"advice": "sell"}] * 2
        assert zoo.executions["pay"] == 1


async def test_a_child_of_a_call_that_fails_or_is_unknown(url: str, zoo: ToolZoo) -> None:
    """R-13.4: the failure of the child is the error of the call, which the planner goes on with."""
    zoo.registry.add(agent_as_tool("failing"), agent_as_tool("nobody"))
    failing = scripted("failing", [GiveUp(code=FailureCode.MODEL_ERROR, reason="no idea")])
    wishes = calls(("failing", {"task": "x"}), ("nobody", {"task": "x"}))
    boss = scripted("boss", [wishes, Finish(answer="done")], tools=["failing", "nobody"])
    async with flow(url, [boss, failing], zoo) as engine:
        run_id = await engine.submit("boss")
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        errors = [result.error for result in data_of(await engine.events(run_id), ResultEvent)]
        assert {error.code for error in errors if error} == {"MODEL_ERROR", "AGENT_NOT_FOUND"}


async def test_a_parent_dies_while_its_child_runs(url: str, zoo: ToolZoo) -> None:
    """F48: the child's end is reported once, whoever is there; here a sweep delivers it."""
    held = scripted("held", [call("hang"), Finish(answer="free")], tools=["hang"])
    clock = ShiftingClock()
    parent = scripted(
        "parent",
        lambda context: (
            Spawn(children=(ChildRequest(agent_id="held"),), wait=False)
            if not context.turns
            else (call("hang") if len(context.turns) == 1 else told(context))
        ),
        tools=["hang"],
    )
    async with flow(url, [parent, held], zoo, clock=clock) as engine:
        run_id = await engine.submit("parent")
        await zoo.wait_started("hang", 2)
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        await engine.wait_terminal(run_id)
        events = data_of(await engine.events(run_id), ChildEvent)
        assert phases(events).count("result") == 1


async def test_children_that_write_much_do_not_disturb_their_parent(url: str, zoo: ToolZoo) -> None:
    """SUB-08: separate logs; the parent gets `child` events only."""

    def work(context: PlannerContext) -> Decision:
        done = len(context.turns)
        return call("echo", value=done) if done < 30 else Finish(answer=done)

    worker = scripted("worker", work, tools=["echo"])
    requests = [ChildRequest(agent_id="worker") for _ in range(2)]
    async with flow(url, [manager(*requests), worker], zoo) as engine:
        run_id = await engine.submit("manager")
        await engine.wait_terminal(run_id)
        log = types(await engine.events(run_id))
        assert log.count("child") == 4
        assert len(log) < 20
        below = await rows_below(engine, run_id)
        for row in below:
            assert len(await engine.events(row.facts.run_id)) > 90


async def test_a_handoff_survives_recovery(url: str, zoo: ToolZoo) -> None:
    """R-13.2: the new agent's planner and tools count from then on, on a worker that serves it."""
    first = scripted("first", [Handoff(agent_id="second", reason="your field", view="none")])

    def decide(context: PlannerContext) -> Decision:
        assert context.handoff is not None
        if not context.turns:
            return call("pay_idempotent", amount=1)
        if len(context.turns) == 1:
            return call("hang")
        return Finish(answer=[context.agent_id, context.handoff.source, context.handoff.reason])

    second = scripted("second", decide, tools=unasked("pay_idempotent", "hang"))
    clock = ShiftingClock()
    async with flow(url, [first, second], zoo, clock=clock) as engine:
        run_id = await engine.submit("first")
        await zoo.wait_started("hang")
        row = await engine.run(run_id)
        assert (row.facts.agent_id, row.facts.agent_now) == ("first", ("second", "1"))
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert await answer_of(engine, run_id) == ["second", "first", "your field"]
        assert zoo.executions["pay_idempotent"] == 1
        thread = row.facts.thread_id
        messages = await engine.core.reader.list_messages(thread, after=0, limit=10)
        assert messages[-1].author == "second"


async def test_a_run_that_was_handed_over_waits_for_who_serves_the_new_agent(url: str) -> None:
    """Decision 18: a worker claims only runs whose agent of the moment it serves."""
    first = scripted("first", [Handoff(agent_id="second")])
    second = scripted("second", lambda _: Finish(answer="mine"))
    async with flow(url, [first, second], start=False) as engine:
        registry = AgentRegistry()
        registry.add(first)
        both = engine.catalog
        await engine.start_worker()
        await engine.kill_worker()
        engine.catalog = Catalog([registry])
        await engine.start_worker()
        run_id = await engine.submit("first")
        await engine.wait_event(run_id, "handoff")
        await engine.wait_until(run_id, lambda row: row.hot.lease_owner is None)
        assert await engine.core.reader.is_ready(run_id)
        engine.catalog = both
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_handoff_to_nobody_is_an_error_for_the_planner(url: str) -> None:
    """R-13.2: nothing is handed over, the planner goes on."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="alone") if context.turns else Handoff(agent_id="nobody")

    async with flow(url, [scripted("first", decide)]) as engine:
        run_id = await engine.submit("first")
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        [error] = data_of(await engine.events(run_id), ErrorEvent)
        assert error.failure.code is FailureCode.AGENT_NOT_FOUND
