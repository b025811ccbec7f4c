"""Runs that end on the same field of an agent: each is drafted once, whoever is first (R-1.5)."""

import anyio
import anyio.lowlevel
import pytest

from perdure.agents.catalog import loop_agent
from perdure.agents.code import StateField
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.engine.context import PlannerContext
from perdure.engine.fields_kept import READ_ANEW
from perdure.engine.turns import Turns
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.failures import FailureCode
from perdure.testing.embedded import Embedded, call
from perdure.testing.tools import ToolZoo
from tests.flow.test_code_agents import failure_of
from tests.flow.test_fork import forked
from tests.flow.test_lasting_fields import held, writes
from tests.flow.world import flow

RUNS = 24


async def test_many_ends_on_one_field_are_each_drafted_once(url: str, zoo: ToolZoo) -> None:
    """R-1.5: runs of one worker that end together take turns; none is thrown away for another."""

    def counts(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("hang")
        return Finish(answer=None, records=writes({"total": 1, "seen": 1}))

    fields = [StateField(name=name, scope="agent", rule="add") for name in ("total", "seen")]
    counter = loop_agent("counter", "1", ScriptedPlanner(counts), tools=["hang"], state=fields)
    async with flow(url, [counter], zoo) as engine:
        runs = [await engine.submit("counter") for _ in range(RUNS)]
        await zoo.wait_started("hang", RUNS)
        before = thrown_away(engine)
        zoo.open_gate()
        for run_id in runs:
            await engine.wait_terminal(run_id)
        assert await held(engine, "agent", "counter") == {"total": RUNS, "seen": RUNS}
        assert thrown_away(engine) - before < RUNS / 4


def thrown_away(engine: Embedded) -> float:
    """Return how many commits were drafted in vain."""
    registry = engine.core.metrics.registry
    return registry.get_sample_value("perdure_commits_total", {"result": "Behind"}) or 0


async def test_a_fork_of_a_run_that_replaced_a_field_of_its_agent_says_what_to_do(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.5, R-7.4: the origin itself has moved the row since the place that both read it at."""

    def names(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("echo")
        return Finish(answer=None, records=writes({"name": context.input}))

    field = StateField(name="name", scope="agent")
    namer = loop_agent("namer", "1", ScriptedPlanner(names), tools=["echo"], state=[field])
    async with flow(url, [namer], zoo) as engine:
        first = await engine.submit("namer", "x")
        await engine.wait_terminal(first)
        made = await forked(engine, first, input="y")
        failure = await failure_of(engine, made.run_id)
        assert (failure.code, failure.details["advice"]) == (FailureCode.CONFLICT, READ_ANEW)
        assert await held(engine, "agent", "namer") == {"name": "x"}
        await engine.wait_terminal(await engine.submit("namer", "y"))
        assert await held(engine, "agent", "namer") == {"name": "y"}


async def test_turns_are_taken_in_one_order_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R-1.5: two that need the same fields never wait for each other; one that is cancelled while
    it waits keeps nobody back."""
    monkeypatch.setattr("perdure.engine.turns.HOLD_MAX_S", 60)
    turns, first, second = Turns(), ("t", "agent", "a", "x"), ("t", "agent", "a", "y")
    inside: list[str] = []
    done: list[str] = []

    async def end(name: str, *fields: tuple[str, str, str, str]) -> None:
        async with turns.take(fields):
            assert not inside
            inside.append(name)
            await anyio.lowlevel.checkpoint()
            inside.remove(name)
            done.append(name)

    async def wait_and_give_up() -> None:
        with anyio.CancelScope() as scope:
            waiting.append(scope)
            await end("cancelled", second, first)

    waiting: list[anyio.CancelScope] = []
    with anyio.fail_after(20):
        async with anyio.create_task_group() as group, turns.take([first]):
            group.start_soon(wait_and_give_up)
            await anyio.wait_all_tasks_blocked()
            waiting[0].cancel()
            group.start_soon(end, "one", second, first)
            group.start_soon(end, "other", first, second)
            await anyio.wait_all_tasks_blocked()
            assert turns.fields == {first}
        assert done == ["one", "other"]
    assert turns.fields == set()
