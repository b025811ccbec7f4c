"""Fields of scope thread and agent: what runs leave to later ones, by rule and once (R-1.5)."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, cast

import anyio
import pytest
from pydantic import JsonValue

from perdure.agents.catalog import loop_agent
from perdure.agents.code import AgentFailed, Context, Reducer, StateField, agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.fields_kept import READ_ANEW
from perdure.engine.fields_written import WRITE_ONCE
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    Decision,
    Finish,
    GiveUp,
    Handoff,
    ToolRequest,
    WriteField,
)
from perdure.protocol.events import CustomEvent, ResultEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.fields import KEPT_EVENT_NAME, READ_EVENT_NAME
from perdure.protocol.records import StateValueRow
from perdure.protocol.states import Answer, CancelAction, RunState, ToolCallStatus
from perdure.store.commits import Commit
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, new_worker
from perdure.testing.faults import BusyStore
from perdure.testing.tools import ToolZoo
from perdure.tools import ToolContext, tool
from tests.flow.test_code_agents import answer_of, failure_of
from tests.flow.test_fork import forked
from tests.flow.test_retry import again
from tests.flow.world import data_of, flow


def _longer(old: Any, value: Any) -> Any:
    """Keep the longer text, the first in the alphabet of two as long."""
    if not isinstance(value, str):
        raise ValueError("the longest of something else than texts")
    return value if old is None else min(old, value, key=lambda text: (-len(text), text))


LONGEST = Reducer(name="longest", version="1", function=_longer)
SHARED = [
    StateField(name="total", scope="agent", rule="add", json_schema={"type": "integer"}),
    StateField(name="log", scope="agent", rule="append"),
    StateField(name="tags", scope="agent", rule="union"),
    StateField(name="by_key", scope="agent", rule="merge"),
    StateField(name="low", scope="agent", rule="min"),
    StateField(name="high", scope="agent", rule="max"),
    StateField(name="longest", scope="agent", rule="reducer", reducer=LONGEST),
    StateField(name="turns", scope="thread", rule="add"),
    StateField(name="title", scope="thread"),
    StateField(name="mine", rule="append"),
]


def of(name: str) -> dict[str, JsonValue]:
    """Return what a run of that name writes."""
    size = len(name)
    return {
        "total": size,
        "log": name,
        "tags": "seen",
        "by_key": {name: size},
        "low": size,
        "high": size,
        "longest": name,
        "turns": 1,
        "mine": name,
    }


ALL = {
    "by_key": {"a": 1, "bb": 2, "ccc": 3},
    "high": 3,
    "longest": "ccc",
    "low": 1,
    "tags": ["seen"],
    "total": 6,
}
"""What the fields of an agent hold after its runs "a", "bb" and "ccc", but for the log's order."""


def writes(values: Mapping[str, JsonValue]) -> tuple[WriteField, ...]:
    """Return the records of writes."""
    return tuple(WriteField(field=name, value=value) for name, value in values.items())


def _clerk(context: PlannerContext) -> Decision:
    """Write one half with the first decision, wait in a tool, write the other with the answer."""
    name = str(context.input)
    mine = of(name)
    last = {one: mine.pop(one) for one in ("total", "longest")}
    if context.step_index == 0:
        wish = call("hang" if name != "free" else "echo")
        return wish.model_copy(update={"records": writes(mine)})
    return Finish(answer=dict(context.fields), records=writes(last))


def clerk(fields: Sequence[StateField] = SHARED) -> HostedAgent:
    """A loop agent whose decisions write."""
    return loop_agent(
        "clerk", "1", ScriptedPlanner(_clerk), tools=["hang", "echo"], state=list(fields)
    )


@agent("coder", "1", tools=["hang", "echo"], state=SHARED)
async def coder(ctx: Context, input: object) -> object:
    """The same as code."""
    mine = of(str(input))
    last = {one: mine.pop(one) for one in ("total", "longest")}
    for name, value in mine.items():
        ctx.write(name, value)
    await ctx.tool("hang" if input != "free" else "echo")
    seen = {one.name: ctx.read(one.name) for one in SHARED}
    for name, value in last.items():
        ctx.write(name, value)
    return seen


async def rows_of(
    engine: Embedded, scope: Literal["thread", "agent"], scope_id: str
) -> dict[str, StateValueRow]:
    """Return the rows of the fields of an agent or a thread."""
    rows = await engine.core.reader.list_state_values(
        engine.tenant_id, scope, scope_id, after=None, limit=99
    )
    return {row.name: row for row in rows}


async def held(
    engine: Embedded, scope: Literal["thread", "agent"], scope_id: str
) -> dict[str, JsonValue]:
    """Return what these fields hold."""
    rows = await rows_of(engine, scope, scope_id)
    return {name: row.value for name, row in rows.items() if not row.empty}


async def told(engine: Embedded, run_id: str, name: str) -> dict[str, dict[str, JsonValue]]:
    """Return what the events of one name say, by field."""
    events = data_of(await engine.events(run_id), CustomEvent)
    said = [cast("dict[str, JsonValue]", one.value) for one in events if one.name == name]
    found = {str(one["field"]): one for one in said}
    assert len(found) == len(said), "a field is told of twice"
    return found


@pytest.mark.parametrize("kind", ["clerk", "coder"])
async def test_runs_at_once_on_several_threads_lose_no_write_to_their_agent(
    url: str, zoo: ToolZoo, kind: str
) -> None:
    """R-1.5: each rule and a reducer; none sees another's writes while it goes on, a later run sees
    all of them; a thread's field is the thread's."""
    async with flow(url, [clerk(), coder], zoo) as engine:
        run_ids = [await engine.submit(kind, name) for name in ("a", "bb", "ccc")]
        await zoo.wait_started("hang", 3)
        assert await held(engine, "agent", kind) == {}
        zoo.open_gate()
        for name, run_id in zip(("a", "bb", "ccc"), run_ids, strict=True):
            seen = await answer_of(engine, run_id)
            assert (seen["log"], seen["mine"], seen["turns"]) == ([name], [name], 1)
            assert seen.get("longest") is None, "it is written with the answer"
            row = await engine.run(run_id)
            assert await held(engine, "thread", row.facts.thread_id) == {"turns": 1}
        everything = await held(engine, "agent", kind)
        log = cast("list[str]", everything.pop("log"))
        assert everything == ALL
        assert sorted(log) == ["a", "bb", "ccc"]
        rows = await rows_of(engine, "agent", kind)
        assert {row.version for row in rows.values()} == {3}
        assert "mine" not in rows
        kept = [await told(engine, run_id, KEPT_EVENT_NAME) for run_id in run_ids]
        assert sorted(cast("int", one["total"]["version"]) for one in kept) == [1, 2, 3]
        later = await engine.submit(
            kind, "free", thread_id=(await engine.run(run_ids[0])).facts.thread_id
        )
        seen = await answer_of(engine, later)
        assert (seen["log"], seen["turns"]) == ([*log, "free"], 2)
        assert (seen["longest"], seen["total"], seen["mine"]) == ("ccc", 6, ["free"])
        assert (await held(engine, "agent", kind))["longest"] == "free"


async def test_a_value_that_moved_in_the_moment_of_the_end_is_merged_anew(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, decision 1: another run ends between draft and commit; the store refuses what was
    drafted upon the older version, and the end is drafted upon the newer one."""
    zoo.open_gate()
    async with flow(url, [clerk()], zoo, start=False) as engine:
        drafted, is_free, first = anyio.Event(), False, ""

        def is_held(commit: Commit) -> bool:
            if is_free or commit.run_id != first or not commit.state_values:
                return False
            drafted.set()
            return True

        core = replace(engine.core, store=BusyStore(engine.core.store, 1_000_000, is_held))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        first = await engine.submit("clerk", "a")
        with anyio.fail_after(30):
            await drafted.wait()
        second = await engine.submit("clerk", "bb")
        await answer_of(engine, second)
        is_free = True
        await answer_of(engine, first)
        assert (await held(engine, "agent", "clerk"))["log"] == ["bb", "a"]
        kept = await told(engine, first, KEPT_EVENT_NAME)
        assert kept["log"]["over"] == {"version": 1, "value": ["bb"]}
        assert (kept["total"]["version"], kept["total"]["value"]) == (2, 3)
        assert (kept["longest"]["value"], "over" in kept["turns"]) == ("bb", False)


async def test_two_runs_of_one_thread_at_once(url: str, zoo: ToolZoo) -> None:
    """R-1.5, R-11.1: the one that ends later is merged over the other's; replacing what another run
    has replaced since is a CONFLICT, and the field is left as it was."""

    def naming(context: PlannerContext) -> Decision:
        if context.step_index == 0 and context.input != "quick":
            return call("hang")
        named = (
            {"title": context.input, "turns": 1} if context.input != "counting" else {"turns": 1}
        )
        return Finish(answer=dict(context.fields), records=writes(named))

    names = loop_agent("names", "1", ScriptedPlanner(naming), tools=["hang"], state=SHARED)
    async with flow(url, [names], zoo) as engine:
        for number, wish in enumerate(("counting", "slow"), start=1):
            slow = await engine.submit("names", wish)
            await zoo.wait_started("hang", number)
            thread_id = (await engine.run(slow)).facts.thread_id
            quick = await engine.submit(
                "names", "quick", thread_id=thread_id, multitask_strategy="optimistic"
            )
            assert await answer_of(engine, quick) == {}
            zoo.open_gate()
            if wish == "counting":
                assert await answer_of(engine, slow) == {}
                assert await held(engine, "thread", thread_id) == {"title": "quick", "turns": 2}
            else:
                failure = await failure_of(engine, slow)
                assert failure.code is FailureCode.CONFLICT
                said = {"field": "title", "scope": "thread", "read": 0, "version": 1}
                said["advice"] = READ_ANEW
                assert failure.details == said
                assert await held(engine, "thread", thread_id) == {"title": "quick", "turns": 1}
            zoo.gate.clear()


@pytest.mark.parametrize("kind", ["clerk", "coder"])
async def test_a_worker_that_is_lost_and_a_cancel_leave_nothing_twice_and_nothing(
    url: str, zoo: ToolZoo, kind: str
) -> None:
    """R-1.5, R-9.2: a run taken over reads nothing anew and leaves its writes once; one that ends
    cancelled leaves none, also what it had written before."""
    clock = ShiftingClock()
    async with flow(url, [clerk(), coder], zoo, clock=clock) as engine:
        lost, cancelled = await engine.submit(kind, "a"), await engine.submit(kind, "bb")
        await zoo.wait_started("hang", 2)
        await engine.cancel(cancelled, CancelAction.INTERRUPT)
        assert (await failure_of(engine, cancelled)).code is FailureCode.RUN_CANCELLED
        assert await told(engine, cancelled, KEPT_EVENT_NAME) == {}
        await engine.kill_worker()
        clock.advance(60)
        zoo.open_gate()
        await engine.start_worker()
        between = await engine.submit(kind, "free")
        await answer_of(engine, between)
        seen = await answer_of(engine, lost)
        assert seen["log"] == ["a"], "it sees what it saw before"
        assert len(await told(engine, lost, READ_EVENT_NAME)) == 9
        everything = await held(engine, "agent", kind)
        assert sorted(cast("list[str]", everything["log"])) == ["a", "free"]
        assert (everything["total"], everything["by_key"]) == (5, {"a": 1, "free": 4})
        cut = (await engine.run(cancelled)).facts.thread_id
        assert await rows_of(engine, "thread", cut) == {}


@pytest.mark.parametrize("kind", ["clumsy", "clumsy.code"])
async def test_what_goes_on_from_a_run_keeps_what_that_one_did_not(
    url: str, zoo: ToolZoo, kind: str
) -> None:
    """R-1.5, R-10.3, R-11.3: a retry of a run that failed leaves the shared writes, once; a fork of
    one that succeeded leaves only its own, and has its own thread's fields."""
    well = False

    def clumsy(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("echo").model_copy(update={"records": writes({"log": "one", "turns": 1})})
        if not well:
            return GiveUp(code=FailureCode.MODEL_ERROR, reason="no idea")
        return Finish(answer=context.fields["log"], records=writes({"log": "two"}))

    @agent("clumsy.code", "1", tools=["echo"], state=SHARED)
    async def as_code(ctx: Context, input: object) -> object:
        ctx.write("log", "one")
        ctx.write("turns", 1)
        await ctx.tool("echo")
        if not well:
            raise AgentFailed("no idea")
        seen = ctx.read("log")
        ctx.write("log", "two")
        return seen

    loop = loop_agent("clumsy", "1", ScriptedPlanner(clumsy), tools=["echo"], state=SHARED)
    async with flow(url, [loop, as_code], zoo) as engine:
        run_id = await engine.submit(kind)
        await failure_of(engine, run_id)
        assert await held(engine, "agent", kind) == {}
        well = True
        retried = await again(engine, run_id)
        assert await answer_of(engine, retried.run_id) == ["one"]
        assert await held(engine, "agent", kind) == {"log": ["one", "two"]}
        assert await held(engine, "thread", retried.thread_id) == {"turns": 1}
        fork = await forked(engine, retried.run_id)
        assert await answer_of(engine, fork.run_id) == ["one"]
        assert await held(engine, "agent", kind) == {"log": ["one", "two", "two"]}
        assert await held(engine, "thread", fork.thread_id) == {"turns": 1}
        assert (await rows_of(engine, "agent", kind))["log"].version == 2


async def test_tools_write_with_their_results(url: str, zoo: ToolZoo) -> None:
    """R-1.5: calls of one step merge in the order of the wishes, whichever ends first; what a
    call writes that fails is not written, what does not fit makes its result invalid; two calls that
    replace one field are a CONFLICT, in code an error where its branches join."""

    @tool
    async def note(name: str, value: JsonValue, context: ToolContext, then: str = "") -> str:
        """Write to a field; the first of two waits for the second."""
        context.write(name, value)
        if then == "wait":
            await zoo.wait_started("note")
        zoo.begin("note")
        if then == "fail":
            raise RuntimeError("after all")
        return "noted"

    zoo.registry.add(note)

    def wish(name: str, value: JsonValue, then: str = "") -> ToolRequest:
        return ToolRequest(tool="note", args={"name": name, "value": value, "then": then})

    def steps(context: PlannerContext) -> Decision:
        if context.input == "clash":
            both = (wish("title", 1), wish("title", 2))
            return CallTools(calls=both) if context.step_index == 0 else Finish(answer=None)
        match context.step_index:
            case 0:
                return CallTools(calls=(wish("log", 1, "wait"), wish("log", 2)))
            case 1:
                more = wish("log", 3, "fail"), wish("total", "x"), wish("other", 1)
                return CallTools(calls=(*more, wish("longest", "abc")))
            case _:
                return Finish(answer=dict(context.fields))

    @agent("scribe.code", "1", tools=["note"], state=SHARED)
    async def as_code(ctx: Context, input: object) -> object:
        first = ctx.tool("note", name="log", value=1, then="wait")
        await ctx.gather(first, ctx.tool("note", name="log", value=2))
        seen = ctx.read("log")
        ctx.write("log", 3)
        return [seen, ctx.read("log")]

    loop = loop_agent("scribe", "1", ScriptedPlanner(steps), tools=["note"], state=SHARED)
    async with flow(url, [loop, as_code], zoo) as engine:
        run_id = await engine.submit("scribe")
        assert await answer_of(engine, run_id) == {"log": [1, 2], "longest": "abc"}
        results = [one.status for one in data_of(await engine.events(run_id), ResultEvent)]
        assert results.count(ToolCallStatus.SUCCEEDED) == 3
        assert results.count(ToolCallStatus.FAILED) == 3
        assert await held(engine, "agent", "scribe") == {"log": [1, 2], "longest": "abc"}
        failure = await failure_of(engine, await engine.submit("scribe", "clash"))
        assert (failure.code, failure.details["field"]) == (FailureCode.CONFLICT, "title")
        assert failure.details["advice"] == WRITE_ONCE
        in_code = await engine.submit("scribe.code")
        assert await answer_of(engine, in_code) == [[1, 2], [1, 2, 3]]
        assert await held(engine, "agent", "scribe.code") == {"log": [1, 2, 3]}


async def test_a_call_that_works_though_its_run_is_cancelled_has_written(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-10.3: its result is shared by a fork, which does not call again; so is its write."""

    @tool
    async def stubborn(context: ToolContext) -> str:
        """Write, and end well when it is asked to end."""
        context.write("log", "done")
        zoo.begin("stubborn")
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        return "done"

    zoo.registry.add(stubborn)

    def steps(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return CallTools(calls=(ToolRequest(tool="stubborn", args={}),))
        return Finish(answer=dict(context.fields))

    loop = loop_agent("mule", "1", ScriptedPlanner(steps), tools=["stubborn"], state=SHARED)
    async with flow(url, [loop], zoo) as engine:
        run_id = await engine.submit("mule")
        await zoo.wait_started("stubborn")
        await engine.cancel(run_id, CancelAction.INTERRUPT)
        assert (await failure_of(engine, run_id)).code is FailureCode.RUN_CANCELLED
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        assert result.status is ToolCallStatus.SUCCEEDED
        assert await held(engine, "agent", "mule") == {}
        fork = await forked(engine, run_id)
        assert await answer_of(engine, fork.run_id) == {"log": ["done"]}
        assert await held(engine, "agent", "mule") == {"log": ["done"]}


async def test_what_cannot_be_merged_ends_the_run_and_changes_nothing(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5: a write that its rule, its schema or its reducer does not take, a field by another
    rule than it was written by, and a value that grew too large; waiting runs hold nothing."""

    def wrong(context: PlannerContext) -> Decision:
        kinds: dict[str, dict[str, JsonValue]] = {
            "good": {"total": 1, "log": "x" * 5000},
            "schema": {"total": 0.5},
            "rule": {"total": "x"},
            "undeclared": {"nothing": 1},
            "reducer": {"longest": 7},
            "large": {"log": "y" * 5000},
        }
        if context.input == "asking" and context.step_index == 0:
            return Ask(title="On?", key="on", records=writes({"total": 1}))
        return Finish(answer="ok", records=writes(kinds.get(str(context.input), {})))

    old = loop_agent("wrong", "1", ScriptedPlanner(wrong), state=SHARED)
    other = [StateField(name="total", scope="agent", rule="max")]
    new = loop_agent("wrong", "2", ScriptedPlanner(wrong), state=other)
    async with flow(url, [old, new], zoo) as engine:
        await answer_of(engine, await engine.submit("wrong", "good", agent_version="1"))
        before = await held(engine, "agent", "wrong")
        ends = {
            "schema": "the field total does not fit",
            "rule": "the field total does not take it: a field with the rule add takes numbers",
            "undeclared": "the state has no field 'nothing'",
            "reducer": "the agent's field longest cannot be merged: the longest of something else",
            "large": "the field log holds at most",
        }
        for wish, reason in ends.items():
            run_id = await engine.submit("wrong", wish, agent_version="1", recovery_mode="fail")
            failure = await failure_of(engine, run_id)
            assert failure.code is FailureCode.INTERNAL, wish
            assert failure.reason.startswith(reason), wish
            assert await held(engine, "agent", "wrong") == before, wish
        failure = await failure_of(engine, await engine.submit("wrong", agent_version="2"))
        assert (failure.code, failure.details["field"]) == (FailureCode.INTERNAL, "total")
        asking = await engine.submit("wrong", "asking", agent_version="1")
        (question,) = await engine.wait_waiting(asking)
        assert await held(engine, "agent", "wrong") == before
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        row = await engine.wait_terminal(asking)
        assert row.hot.state is RunState.SUCCEEDED
        assert (await held(engine, "agent", "wrong"))["total"] == 2


async def test_a_run_that_is_handed_over_leaves_what_both_agents_wrote(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-4.8: the second agent shares the thread's fields; declared by another rule, or with
    a reducer that it does not have, they end the run and stay as they were."""

    def first(context: PlannerContext) -> Decision:
        wish = {"turns": 1, "log": "first"} if context.input != "reduced" else {"longest": "x"}
        return Handoff(agent_id=f"to.{context.input}", records=writes(wish))

    last = ScriptedPlanner([Finish()] * 9)
    adds = ScriptedPlanner(lambda _: Finish(answer="ok", records=writes({"turns": 1})))
    agents = [
        loop_agent("from", "1", ScriptedPlanner(first), state=SHARED),
        loop_agent(
            "to.same", "1", adds, state=[StateField(name="turns", scope="thread", rule="add")]
        ),
        loop_agent("to.other", "1", last, state=[StateField(name="turns", scope="thread")]),
        loop_agent("to.reduced", "1", last),
    ]
    async with flow(url, agents, zoo) as engine:
        for wish in ("other", "reduced"):
            run_id = await engine.submit("from", wish)
            assert (await failure_of(engine, run_id)).code is FailureCode.INTERNAL
            assert await held(engine, "agent", "from") == {}
        run_id = await engine.submit("from", "same")
        assert await answer_of(engine, run_id) == "ok"
        assert await held(engine, "agent", "from") == {"log": ["first"]}
        thread_id = (await engine.run(run_id)).facts.thread_id
        assert await held(engine, "thread", thread_id) == {"turns": 2}
