"""Declared state of code agents: parallel branches merge by rule, in one order (R-1.5)."""

from typing import cast

from pydantic import JsonValue

from perdure.agents.code import AgentFailed, Context, StateConflict, StateField, agent
from perdure.engine.states import state_at
from perdure.protocol.events import CustomEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.fields import FIELD_EVENT_NAME
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded
from perdure.testing.tools import ToolZoo
from tests.flow.test_code_agents import answer_of, failure_of
from tests.flow.test_retry import again
from tests.flow.world import data_of, flow

FIELDS = [
    StateField(name="log", rule="append"),
    StateField(name="total", rule="add", json_schema={"type": "integer", "maximum": 100}),
    StateField(name="last"),
]


async def fields_of(engine: Embedded, run_id: str) -> JsonValue:
    """Return the fields as a checkpoint at the end shows them."""
    row = await engine.run(run_id)
    return (await state_at(engine.core, row, row.hot.last_seq))["fields"]


@agent("branching", "1", tools=["echo", "hang"], state=FIELDS)
async def branching(ctx: Context, input: object) -> object:
    """The first branch is the slowest; each sees its own writes only, until they have joined."""
    ctx.write("log", "begun")
    seen: dict[str, JsonValue] = {}

    async def branch(name: str, tool: str) -> None:
        ctx.write("log", f"{name} 1")
        await ctx.tool(tool, **({"value": 1} if tool == "echo" else {}))
        ctx.write("log", f"{name} 2")
        ctx.write("total", 3)
        seen[name] = ctx.read("log")

    await ctx.gather(branch("a", "hang"), branch("b", "echo"))
    ctx.write("last", ctx.read("total"))
    if isinstance(input, dict):
        raise AgentFailed("as asked")
    return [seen["a"], seen["b"], ctx.read("log"), ctx.read("total"), ctx.read("last")]


async def test_branches_merge_in_their_order_also_after_a_crash(url: str, zoo: ToolZoo) -> None:
    """R-1.5, R-4.6: the second branch writes first; the worker dies in between; what the fields
    hold is the order of the branches, in the function and at a checkpoint; nothing is written
    twice."""
    clock = ShiftingClock()
    async with flow(url, [branching], zoo, clock=clock) as engine:
        run_id = await engine.submit("branching")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        log = ["begun", "a 1", "a 2", "b 1", "b 2"]
        assert await answer_of(engine, run_id) == [
            ["begun", "a 1", "a 2"],
            ["begun", "b 1", "b 2"],
            log,
            6,
            6,
        ]
        assert await fields_of(engine, run_id) == {"log": log, "total": 6, "last": 6}
        events = data_of(await engine.events(run_id), CustomEvent)
        assert sum(event.name == FIELD_EVENT_NAME for event in events) == 8


async def test_a_run_that_goes_on_from_another_keeps_its_fields(url: str, zoo: ToolZoo) -> None:
    """R-1.5, R-10.3: a retry shares the writes of its origin."""
    zoo.open_gate()
    async with flow(url, [branching], zoo) as engine:
        run_id = await engine.submit("branching", {"fail": True})
        await failure_of(engine, run_id)
        made = await again(engine, run_id)
        await failure_of(engine, made.run_id)
        assert await fields_of(engine, made.run_id) == await fields_of(engine, run_id)
        fields = cast("dict[str, JsonValue]", await fields_of(engine, made.run_id))
        assert fields["total"] == 6


async def test_two_branches_that_replace_one_field_are_a_conflict(url: str, zoo: ToolZoo) -> None:
    """R-1.5: it ends the run with CONFLICT unless the code does something about it; what does not
    fit or is not declared is an error of the code."""

    async def both(ctx: Context) -> None:
        async def put(value: int) -> None:
            ctx.write("last", value)
            await ctx.tool("echo", value=value)

        await ctx.gather(put(1), put(2))

    @agent("clashing", "1", tools=["echo"], state=FIELDS)
    async def clashing(ctx: Context, input: object) -> object:
        await both(ctx)
        return None

    @agent("minding", "1", tools=["echo"], state=FIELDS)
    async def minding(ctx: Context, input: object) -> object:
        told: list[str] = []
        for name, value in (("total", 101), ("total", "x"), ("nothing", 1)):
            try:
                ctx.write(name, value)
            except ValueError as error:
                told.append(str(error).split()[0])
        try:
            await both(ctx)
        except StateConflict as error:
            ctx.write("last", sum(len(str(item)) for item in error.details))
        await ctx.gather(ctx.tool("echo", value=5))
        return [*told, ctx.read("last")]

    async with flow(url, [clashing, minding], zoo) as engine:
        failure = await failure_of(engine, await engine.submit("clashing"))
        assert failure.code is FailureCode.CONFLICT
        assert failure.details["field"] == "last"
        run_id = await engine.submit("minding")
        assert await answer_of(engine, run_id) == ["the", "a", "the", 14]
        assert await fields_of(engine, run_id) == {"last": 14}
