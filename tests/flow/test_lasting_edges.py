"""Fields of scope thread and agent where runs go on from others, and where a write does not fit."""

from collections.abc import Callable
from typing import Any, Literal, cast

import anyio
import pytest
from pydantic import JsonValue

from perdure.agents.catalog import loop_agent
from perdure.agents.code import Context, Reducer, StateField, agent
from perdure.agents.loop.isolated import IsolatedPlanner
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.feed import follow
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    GiveUp,
    Handoff,
    Product,
    Spawn,
    ToolRequest,
)
from perdure.protocol.events import ErrorEvent, ResultEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunOptions
from perdure.protocol.states import Answer, CancelAction
from perdure.service.base import Service
from perdure.service.checkpoints import list_checkpoints
from perdure.service.principal import LOCAL
from perdure.testing.embedded import call
from perdure.testing.tools import ToolZoo
from perdure.tools import ToolContext, tool
from tests.flow.test_code_agents import answer_of, failure_of
from tests.flow.test_fork import forked
from tests.flow.test_lasting_fields import held, rows_of, writes
from tests.flow.test_retry import again
from tests.flow.world import data_of, flow

TOTAL = StateField(name="total", scope="agent", rule="add")
LOG = StateField(name="log", scope="agent", rule="append")
PAIR: dict[str, JsonValue] = {"type": "array", "maxItems": 2}


def planned(
    agent_id: str,
    decide: Callable[[PlannerContext], Decision],
    *fields: StateField,
    version: str = "1",
    tools: tuple[str, ...] = (),
) -> HostedAgent:
    """Return a loop agent with fields, of a function."""
    return loop_agent(agent_id, version, ScriptedPlanner(decide), tools=tools, state=fields)


@pytest.mark.parametrize("waits", ["ask", "spawn"])
async def test_a_step_that_a_retry_decides_anew_leaves_its_writes_once(
    url: str, zoo: ToolZoo, waits: Literal["ask", "spawn"]
) -> None:
    """R-1.5, R-10.3: cancelled while it waited for a person or a child, the retry's decision takes
    the place of the one that was cut off, and so do its writes."""

    def asks(context: PlannerContext) -> Decision:
        if context.step_index > 0:
            return Finish(answer=dict(context.fields))
        records = writes({"total": 1})
        if waits == "ask":
            return Ask(title="On?", key="on", records=records)
        return Spawn(children=(ChildRequest(agent_id="child", input=1),), records=records)

    def slow(context: PlannerContext) -> Decision:
        return call("hang") if context.step_index == 0 else Finish(answer=1)

    agents = [planned("asks", asks, TOTAL), planned("child", slow, tools=("hang",))]
    async with flow(url, agents, zoo) as engine:
        run_id = await engine.submit("asks")
        if waits == "ask":
            await engine.wait_waiting(run_id)
        else:
            await zoo.wait_started("hang")
        await engine.cancel(run_id, CancelAction.INTERRUPT)
        await failure_of(engine, run_id)
        zoo.open_gate()
        retried = await again(engine, run_id)
        if waits == "ask":
            (question,) = await engine.wait_waiting(retried.run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        assert await answer_of(engine, retried.run_id) == {"total": 1}
        assert await held(engine, "agent", "asks") == {"total": 1}


async def test_a_fork_that_decides_the_only_write_anew_leaves_its_own(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-7.5: it stands where the write stood that its origin has left, and is another."""

    def asks(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return Ask(title="On?", key="on", records=writes({"total": context.input}))
        return call("echo") if context.step_index == 1 else Finish(answer=dict(context.fields))

    async with flow(url, [planned("asks", asks, TOTAL, tools=("echo",))], zoo) as engine:

        async def answered(run_id: str) -> JsonValue:
            (question,) = await engine.wait_waiting(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
            return await answer_of(engine, run_id)

        run_id = await engine.submit("asks", 1)
        await engine.wait_waiting(run_id)
        service = Service(core=engine.core)
        kept = await list_checkpoints(service, LOCAL, run_id, before=None, limit=50)
        waiting = max(kept.items, key=lambda one: one.seq)
        assert await answered(run_id) == {"total": 1}
        fork = await forked(engine, run_id, checkpoint_id=waiting.checkpoint_id, input=100)
        assert await answered(fork.run_id) == {"total": 100}
        assert await held(engine, "agent", "asks") == {"total": 101}


@pytest.mark.parametrize("rule", ["append", "replace"])
async def test_what_another_version_left_by_another_rule_is_not_written_over(
    url: str, zoo: ToolZoo, rule: Literal["append", "replace"]
) -> None:
    """R-1.5: a run ends with CONFLICT when the field that it read came to another rule since."""

    def slow(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("hang").model_copy(update={"records": writes({"total": 5})})
        return Finish(answer=None)

    def quick(context: PlannerContext) -> Decision:
        return Finish(answer=None, records=writes({"total": "text"}))

    other = StateField(name="total", scope="agent", rule=rule)
    older = planned("one", slow, TOTAL, tools=("hang",))
    async with flow(url, [older, planned("one", quick, other, version="2")], zoo) as engine:
        run_id = await engine.submit("one", agent_version="1")
        await zoo.wait_started("hang")
        await answer_of(engine, await engine.submit("one", agent_version="2"))
        before = await held(engine, "agent", "one")
        zoo.open_gate()
        failure = await failure_of(engine, run_id)
        assert (failure.code, failure.details["field"]) == (FailureCode.CONFLICT, "total")
        assert failure.reason.endswith(f"by another run, by {rule}, not by add")
        assert await held(engine, "agent", "one") == before


async def test_a_call_that_a_retry_makes_anew_writes_behind_the_calls_beside_it(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-10.3: one call of the step had worked when the run was cancelled, another was cut
    off; what both wrote stands."""

    @tool
    async def note(value: int, context: ToolContext) -> str:
        """Write to the log."""
        context.write("log", value)
        context.write("log", value * 10)
        if value == 2:
            zoo.begin("note")
            while not zoo.gate.is_set():  # noqa: ASYNC110 (set from another thread)
                await anyio.sleep(0.002)
        return "noted"

    zoo.registry.add(note)

    def both(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            wishes = [ToolRequest(tool="note", args={"value": value}) for value in (1, 2)]
            return CallTools(calls=tuple(wishes))
        return Finish(answer=dict(context.fields))

    async with flow(url, [planned("both", both, LOG, tools=("note",))], zoo) as engine:
        run_id = await engine.submit("both")
        await zoo.wait_started("note")
        async with follow(engine.core, run_id, 0) as cursor:
            while not data_of(await engine.events(run_id), ResultEvent):
                await cursor.read(wait_s=5)
        await engine.cancel(run_id, CancelAction.INTERRUPT)
        await failure_of(engine, run_id)
        zoo.open_gate()
        retried = await again(engine, run_id)
        assert await answer_of(engine, retried.run_id) == {"log": [1, 10, 2, 20]}
        assert await held(engine, "agent", "both") == {"log": [1, 10, 2, 20]}


async def test_a_fork_of_a_run_that_goes_on_leaves_what_they_share(url: str, zoo: ToolZoo) -> None:
    """R-1.5, R-7.5: its origin may never succeed; the fork's own end leaves the shared writes."""

    def slow(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("echo").model_copy(update={"records": writes({"total": 1})})
        if context.facts.origin_run_id is None:
            return call("hang")
        return Finish(answer=dict(context.fields))

    async with flow(url, [planned("slow", slow, TOTAL, tools=("echo", "hang"))], zoo) as engine:
        run_id = await engine.submit("slow")
        await zoo.wait_started("hang")
        service = Service(core=engine.core)
        kept = await list_checkpoints(service, LOCAL, run_id, before=None, limit=50)
        first = min((one for one in kept.items if one.step_index == 1), key=lambda one: one.seq)
        fork = await forked(engine, run_id, checkpoint_id=first.checkpoint_id)
        assert await answer_of(engine, fork.run_id) == {"total": 1}
        await engine.cancel(run_id, CancelAction.INTERRUPT)
        await failure_of(engine, run_id)
        assert await held(engine, "agent", "slow") == {"total": 1}


async def test_a_planner_may_change_what_it_is_shown_of_fields(url: str, zoo: ToolZoo) -> None:
    """R-1.5, decision 15: what it does with the values stays its own; it is given no writes."""

    def greedy(context: PlannerContext) -> Decision:
        seen = cast("list[JsonValue]", context.fields["log"]) if "log" in context.fields else []
        for one in cast("list[dict[str, JsonValue]]", seen):
            one["by"] = "greedy"
        seen.append("more")
        cast("dict[str, JsonValue]", context.writes).clear()
        cast("dict[str, JsonValue]", context.fields_read).clear()
        if context.step_index == 0:
            return call("echo").model_copy(update={"records": writes({"log": {"n": 1}})})
        return Finish(answer=None)

    own = StateField(name="log", scope="agent", rule="append")
    greedy_one = loop_agent("greedy", "1", IsolatedPlanner(greedy), tools=["echo"], state=[own])
    async with flow(url, [greedy_one], zoo) as engine:
        for count in (1, 2):
            await answer_of(engine, await engine.submit("greedy"))
            assert await held(engine, "agent", "greedy") == {"log": [{"n": 1}] * count}


async def test_a_write_in_order_is_merged_once(url: str, zoo: ToolZoo) -> None:
    """R-1.5, R-7.5: not again in each step and at the end."""
    merges = 0

    def counted(old: Any, value: Any) -> Any:
        nonlocal merges
        merges += 1
        return (old or 0) + value

    def steps(context: PlannerContext) -> Decision:
        if context.step_index == 10:
            return Finish(answer=context.fields["total"])
        wish = call("echo", value=context.step_index)
        return wish.model_copy(update={"records": writes({"total": 1})})

    reducer = Reducer(name="counted", version="1", function=counted)
    total = StateField(name="total", scope="agent", rule="reducer", reducer=reducer)
    async with flow(url, [planned("steps", steps, total, tools=("echo",))], zoo) as engine:
        assert await answer_of(engine, await engine.submit("steps")) == 10
        assert merges <= 20, "a view that is loaded again merges again"


async def test_a_retry_by_another_rule_or_reducer_ends_and_changes_nothing(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-10.3: a newer version that declares a field of the shared history otherwise cannot
    go on with it."""
    well = False

    def clumsy(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("echo").model_copy(update={"records": writes({"total": 5})})
        if not well:
            return GiveUp(code=FailureCode.MODEL_ERROR, reason="no idea")
        return Finish(answer=dict(context.fields), records=writes({"total": 3}))

    def reduced(version: str) -> StateField:
        reducer = Reducer(name="sum", version=version, function=lambda old, new: (old or 0) + new)
        return StateField(name="total", scope="agent", rule="reducer", reducer=reducer)

    largest = StateField(name="total", scope="agent", rule="max")
    pairs = {"rule": (TOTAL, largest), "reducer": (reduced("1"), reduced("2"))}
    agents = [
        planned(name, clumsy, one, version=str(number), tools=("echo",))
        for name, pair in pairs.items()
        for number, one in enumerate(pair, start=1)
    ]
    async with flow(url, agents, zoo) as engine:
        for name, told in {"rule": "add, not by max", "reducer": "sum@1, not by sum@2"}.items():
            well = False
            run_id = await engine.submit(name, agent_version="1")
            await failure_of(engine, run_id)
            well = True
            newer = await again(engine, run_id, options=RunOptions(agent_version="2"))
            failure = await failure_of(engine, newer.run_id)
            assert failure.code is FailureCode.INTERNAL
            assert failure.reason == f"the agent's field total is written by {told}"
            assert await held(engine, "agent", name) == {}
            same = await again(engine, run_id, options=RunOptions(agent_version="1"))
            await answer_of(engine, same.run_id)
            assert await held(engine, "agent", name) == {"total": 8}


async def test_writes_of_one_call_are_judged_with_those_before_them(url: str, zoo: ToolZoo) -> None:
    """R-1.5: what each would leave is looked at, by schema and by size; the result that does not
    fit writes nothing, and a full field can still be read and left alone."""

    @tool
    def fill(name: str, value: JsonValue, context: ToolContext, times: int = 1) -> str:
        """Write a value several times."""
        for _ in range(times):
            context.write(name, value)
        return "filled"

    zoo.registry.add(fill)

    def fills(context: PlannerContext) -> Decision:
        if context.step_index > 0 or context.input is None:
            done = context.turns[-1].calls[-1].status if context.turns else None
            return Finish(
                answer=[
                    done,
                    {name: len(cast("Any", value)) for name, value in context.fields.items()},
                ]
            )
        wish = cast("dict[str, JsonValue]", context.input)
        return CallTools(calls=(ToolRequest(tool="fill", args=wish),))

    pair = StateField(name="pair", rule="append", json_schema=PAIR)

    @agent("fills.code", "1", state=[LOG])
    async def as_code(ctx: Context, input: object) -> object:
        for _ in range(3):
            ctx.write("log", "x" * 3000)
        return None

    fills_one = planned("fills", fills, pair, LOG, tools=("fill",))
    async with flow(url, [fills_one, as_code], zoo) as engine:

        async def told(wish: JsonValue) -> JsonValue:
            return await answer_of(engine, await engine.submit("fills", wish))

        large = "x" * 3000
        assert await told({"name": "pair", "value": 1, "times": 3}) == ["failed", {}]
        assert await told({"name": "pair", "value": 1, "times": 2}) == ["succeeded", {"pair": 2}]
        assert await told({"name": "log", "value": large, "times": 3}) == ["failed", {}]
        assert await told({"name": "log", "value": large, "times": 2}) == ["succeeded", {"log": 2}]
        assert await told({"name": "log", "value": large}) == ["failed", {"log": 2}]
        assert await told(None) == [None, {"log": 2}]
        failure = await failure_of(engine, await engine.submit("fills.code"))
        assert "the field log holds at most" in failure.reason
        assert {
            name: row.version for name, row in (await rows_of(engine, "agent", "fills")).items()
        } == {"log": 1}


async def test_an_answer_that_does_not_stand_is_told_to_the_planner_not_judged_by_its_writes(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-4.9: what ends the run is judged, with the artifacts that it makes itself."""

    def wrong(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return Finish(answer="no", records=writes({"total": "x"}))
        product = Product(position="0", name="report", media_type="text/plain", data=b"all")
        return Finish(answer=1, records=(*writes({"total": 1}), product))

    async with flow(url, [planned("wrong", wrong, TOTAL)], zoo) as engine:
        run_id = await engine.submit(
            "wrong", output_schema={"type": "integer"}, required_artifacts=("report",)
        )
        assert await answer_of(engine, run_id) == 1
        errors = data_of(await engine.events(run_id), ErrorEvent)
        assert [one.failure.code for one in errors] == [FailureCode.OUTPUT_INVALID]
        assert await held(engine, "agent", "wrong") == {"total": 1}


async def test_what_a_run_has_left_is_left_by_no_run_that_shares_it_through_others(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-7.5: a fork of a run that succeeded is cancelled before it began; its retry leaves
    what is its own."""

    def adds(context: PlannerContext) -> Decision:
        records = writes({"total": 1})
        if context.step_index == 0:
            return call("echo").model_copy(update={"records": records})
        return Finish(answer=None, records=records)

    async with flow(url, [planned("adds", adds, TOTAL, tools=("echo",))], zoo) as engine:
        run_id = await engine.submit("adds")
        await answer_of(engine, run_id)
        await engine.kill_worker()
        fork = await forked(engine, run_id)
        await engine.cancel(fork.run_id, CancelAction.INTERRUPT)
        await engine.start_worker()
        await failure_of(engine, fork.run_id)
        retried = await again(engine, fork.run_id)
        await answer_of(engine, retried.run_id)
        assert await held(engine, "agent", "adds") == {"total": 3}


async def test_what_fits_alone_and_not_with_what_others_left_is_a_conflict(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5: the run that ends later is told that others have written; alone it is its own fault.
    So it is when the rule itself does not take both."""

    def pairs(context: PlannerContext) -> Decision:
        if context.step_index == 0 and context.input != "quick":
            return call("hang")
        wish = {"quick": {"total": 2**51}, "sum": {"total": 2**52}}.get(str(context.input), {})
        times = {"3": 3, "sum": 0}.get(str(context.input), 1)
        return Finish(answer=None, records=(*writes({"pair": 1}) * times, *writes(wish)))

    pair = StateField(name="pair", scope="agent", rule="append", json_schema=PAIR)
    both = planned("pairs", pairs, pair, TOTAL, tools=("hang",))
    async with flow(url, [both], zoo) as engine:
        slow, adding = await engine.submit("pairs", "slow"), await engine.submit("pairs", "sum")
        await zoo.wait_started("hang", 2)
        for _ in range(2):
            await answer_of(engine, await engine.submit("pairs", "quick"))
        zoo.open_gate()
        assert (await failure_of(engine, slow)).code is FailureCode.CONFLICT
        failure = await failure_of(engine, adding)
        assert (failure.code, failure.details["field"]) == (FailureCode.CONFLICT, "total")
        alone = await engine.submit("pairs", "3", recovery_mode="fail")
        assert (await failure_of(engine, alone)).code is FailureCode.INTERNAL
        assert await held(engine, "agent", "pairs") == {"pair": [1, 1], "total": 2**52}


async def test_a_fork_merges_over_what_runs_of_its_own_thread_have_left(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5: it read the field of its origin's thread, whose versions say nothing of its own."""

    def counts(context: PlannerContext) -> Decision:
        if context.input == "quick":
            return Finish(answer=0, records=writes({"total": 1}))
        if context.step_index == 0:
            return call("echo", value=1).model_copy(update={"records": writes({"total": 1})})
        if context.step_index == 1 and context.input == "slow":
            return call("hang")
        return Finish(answer=0)

    shared = StateField(name="total", scope="thread", rule="add")
    agents = [planned("counts", counts, shared, tools=("echo", "hang"))]
    async with flow(url, agents, zoo) as engine:
        first = await engine.submit("counts", "quick")
        await answer_of(engine, first)
        thread_id = (await engine.run(first)).facts.thread_id
        origin = await engine.submit("counts", "other", thread_id=thread_id)
        await answer_of(engine, origin)
        fork = await forked(engine, origin, input="slow")
        await zoo.wait_started("hang")
        beside = await engine.submit(
            "counts", "quick", thread_id=fork.thread_id, multitask_strategy="optimistic"
        )
        await answer_of(engine, beside)
        before = (await held(engine, "thread", fork.thread_id))["total"]
        zoo.open_gate()
        await answer_of(engine, fork.run_id)
        after = (await held(engine, "thread", fork.thread_id))["total"]
        assert isinstance(before, int)
        assert after == before + 1


async def test_a_handed_over_run_keeps_a_field_by_the_schema_of_the_agent_that_wrote_it(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5: both agents have a field of this name; each is its own."""
    small: dict[str, JsonValue] = {"maximum": 10}
    agents = [
        planned("a", lambda _: Handoff(agent_id="b", records=writes({"total": 50})), TOTAL),
        planned("b", lambda _: Finish(answer=1), TOTAL.model_copy(update={"json_schema": small})),
    ]
    async with flow(url, agents, zoo) as engine:
        assert await answer_of(engine, await engine.submit("a")) == 1
        assert await held(engine, "agent", "a") == {"total": 50}


async def test_a_decision_makes_a_bounded_number_of_writes(url: str, zoo: ToolZoo) -> None:
    """R-1.5: each write is checked behind the others, so that very many would hold up a worker."""

    def floods(context: PlannerContext) -> Decision:
        wish = call("echo") if context.input == "call" else Finish(answer=None)
        return wish.model_copy(update={"records": writes({"total": 1}) * 51})

    async with flow(url, [planned("floods", floods, TOTAL, tools=("echo",))], zoo) as engine:
        for wish in ("call", "finish"):
            run_id = await engine.submit("floods", wish, recovery_mode="fail")
            assert "at most 50 writes" in (await failure_of(engine, run_id)).reason
