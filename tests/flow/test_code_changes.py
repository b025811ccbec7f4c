"""Code that changed under a run, and functions that do what no function should (R-4.6, R-5.8)."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from perdure.agents.code import AgentFailed, Context, agent
from perdure.engine.context import PlannerContext
from perdure.engine.continuing import carry_on, comes_too_early
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import ChildRequest, Decision, Finish, Spawn
from perdure.protocol.events import ActionEvent, CustomEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.runs import status_of
from perdure.protocol.states import Answer, RunState, RunStatus
from perdure.store.reader import RunFilter
from perdure.store.requests import AgentRegistration
from perdure.testing.embedded import Embedded, call, embedded, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.rows import Rows
from tests.flow.test_code_agents import answer_of, failure_of
from tests.flow.test_retry import again
from tests.flow.world import data_of, database_at, flow, states

Body = Callable[[Context, object], Awaitable[object]]


def versioned(body: Body, *, version: str = "1") -> HostedAgent:
    """Return one code of the agent `changing`."""
    return agent("changing", version, tools=["echo"])(body)


async def first_code(ctx: Context, input: object) -> object:
    """Two calls beside each other, a step, a question, a last step."""
    told = await ctx.gather(ctx.tool("echo", value=1), ctx.tool("echo", value=2))
    told.append(await ctx.step(sum, [1, 2], name="add"))
    told.append(await ctx.interrupt("go on?"))
    return [*told, await ctx.step(str, "end")]


async def other_arguments(ctx: Context, input: object) -> object:
    """A call has other arguments."""
    await ctx.gather(ctx.tool("echo", value=1), ctx.tool("echo", value=3))
    await ctx.step(sum, [1, 2], name="add")
    return await ctx.interrupt("go on?")


async def less(ctx: Context, input: object) -> object:
    """The first call is gone."""
    await ctx.step(sum, [1, 2], name="add")
    return await ctx.interrupt("go on?")


async def more(ctx: Context, input: object) -> object:
    """A branch more, which would run again in the past."""
    await ctx.gather(*[ctx.tool("echo", value=value) for value in (1, 2, 3)])
    await ctx.step(sum, [1, 2], name="add")
    return await ctx.interrupt("go on?")


async def fewer_branches(ctx: Context, input: object) -> object:
    """A branch less."""
    await ctx.gather(ctx.tool("echo", value=1))
    await ctx.step(sum, [1, 2], name="add")
    return await ctx.interrupt("go on?")


async def ends_early(ctx: Context, input: object) -> object:
    """It ends before what it asked for once."""
    return await ctx.gather(ctx.tool("echo", value=1), ctx.tool("echo", value=2))


async def inserted_value(ctx: Context, input: object) -> object:
    """A random number before all else, in a function that swallows every error."""
    try:
        ctx.random()
        return await first_code(ctx, input)
    except Exception:  # noqa: BLE001  # what this function is for
        return "swallowed"


CHANGES = {
    other_arguments: ("0.1.0", "tool echo", "tool echo"),
    less: ("0", "gather", "step add"),
    more: ("0.2.0", "nothing", "tool echo"),
    fewer_branches: ("0.1.0", "tool echo", "gather of 1"),
    ends_early: ("1", "step add", "the end of the branch"),
    inserted_value: ("0", "gather", "random"),
}


@pytest.mark.slow
async def test_changed_code_is_named_and_nothing_lands_elsewhere(url: str, zoo: ToolZoo) -> None:
    """R-4.6, SCH-04: NON_DETERMINISTIC with position, expected, got; nothing is done again."""
    async with flow(url, [versioned(first_code)], zoo) as engine:
        runs = {change: await engine.submit("changing") for change in CHANGES}
        same = await engine.submit("changing")
        for run_id in (*runs.values(), same):
            await engine.wait_waiting(run_id)
    for change, (position, expected, got) in CHANGES.items():
        run_id = runs[change]
        async with flow(url, [versioned(change)], zoo) as engine:
            before = len(data_of(await engine.events(run_id), ActionEvent))
            (question,) = await engine.pending(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
            failure = await failure_of(engine, run_id)
            assert failure.code is FailureCode.NON_DETERMINISTIC
            assert failure.details["position"] == position, failure
            assert str(failure.details["expected"]).startswith(expected), failure
            assert str(failure.details["got"]).startswith(got), failure
            assert failure.details["code_recorded"] != failure.details["code_running"]
            assert len(data_of(await engine.events(run_id), ActionEvent)) == before
    async with flow(url, [versioned(first_code)], zoo) as engine:
        (question,) = await engine.pending(same)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        assert await answer_of(engine, same) == [1, 2, 3, True, "end"]


async def test_a_marker_lets_running_code_be_changed(url: str, zoo: ToolZoo) -> None:
    """R-20.2: runs that were past the place keep the old way, later ones take the new."""

    async def old(ctx: Context, input: object) -> object:
        await ctx.interrupt("first?")
        told = await ctx.tool("echo", value="old")
        return [told, await ctx.interrupt("second?")]

    async def new(ctx: Context, input: object) -> object:
        await ctx.interrupt("first?")
        if ctx.patched("echo-twice"):
            told = [await ctx.tool("echo", value=word) for word in ("new", "twice")]
        else:
            told = await ctx.tool("echo", value="old")
        return [told, await ctx.interrupt("second?")]

    async with flow(url, [versioned(old)], zoo) as engine:
        past, before = [await engine.submit("changing") for _ in range(2)]
        for run_id in (past, before):
            await engine.wait_waiting(run_id)
        (question,) = await engine.pending(past)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        await engine.wait_event(past, "result")
        await engine.wait_waiting(past)
    async with flow(url, [versioned(new)], zoo) as engine:
        (question,) = await engine.pending(before)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        await engine.wait_event(before, "result")
        for run_id in (past, before):
            (question,) = await engine.wait_waiting(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=2)
        assert await answer_of(engine, past) == ["old", 2]
        assert await answer_of(engine, before) == [["new", "twice"], 2]
        names = [event.name for event in data_of(await engine.events(before), CustomEvent)]
        assert names == ["perdure.code", "perdure.patched"]


async def short(ctx: Context, input: object) -> object:
    """A step and a question."""
    return [await ctx.step(str, "first"), await ctx.interrupt("go on?")]


async def short_changed(ctx: Context, input: object) -> object:
    """The step is gone."""
    return [await ctx.interrupt("go on?")]


async def _dies_before_the_end(engine: Embedded, run_id: str) -> str:
    """Make the run that goes on, as a worker does that then dies; return it."""
    row = await engine.run(run_id)
    card = AgentCard(agent_id="changing", version="5")
    registration = AgentRegistration(
        agent_id="changing", version="5", card=card.model_dump(mode="json"), digest="d"
    )
    await engine.core.store.register([registration], [])
    made = await carry_on(engine.core, row, card, "gone")
    assert made is not None
    return made


@pytest.mark.slow
@pytest.mark.timeout(60)
async def test_fifty_waiting_runs_meet_changed_code(url: str, zoo: ToolZoo) -> None:
    """R-20.2, issue 3 B5: kept by a version that is served, changed, not served, or gone."""
    served = [versioned(short, version=version) for version in ("1", "2", "3")]
    async with flow(url, served, zoo) as engine:
        runs = [
            await engine.submit("changing", number, agent_version=str(number % 3 + 1))
            for number in range(12 if url.startswith("postgresql:") else 50)
        ]
        for run_id in runs:
            await engine.wait_waiting(run_id)
    changed, kept, unserved = runs[::3], runs[1::3], runs[2::3]
    now_served = [versioned(short_changed), versioned(short, version="2")]
    async with flow(url, now_served, zoo) as engine:
        for run_id in runs:
            (question,) = await engine.pending(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        for run_id in changed:
            assert (await failure_of(engine, run_id)).code is FailureCode.NON_DETERMINISTIC
        for run_id in kept:
            assert await answer_of(engine, run_id) == ["first", True]
        for run_id in unserved:
            row = await engine.run(run_id)
            assert status_of(row.hot) is RunStatus.QUEUED
    newest = agent("changing", "4", tools=["echo"], replaces=["3"])(short)
    async with flow(url, [newest], zoo) as engine:
        for run_id in unserved:
            failure = await failure_of(engine, run_id)
            assert failure.code is FailureCode.CHECKPOINT_INCOMPATIBLE
            assert "4 replaces it" in failure.reason
        made = await again(engine, unserved[0], options={"agent_version": "4"})
        assert await answer_of(engine, made.run_id) == ["first", True]
        steps = data_of(await engine.events(made.run_id), ActionEvent)
        assert steps == []


async def test_a_run_whose_version_is_replaced_goes_on_as_one_new_run(
    url: str, zoo: ToolZoo
) -> None:
    """R-20.2, issue 3 B5: linked both ways, nothing is done again, and no second one is made though
    a worker dies in between; one whose code does not fit ends; a child is left to its parent."""
    fits, differs = versioned(short), agent("other", "1", tools=["echo"])(short)
    parent = scripted("parent", [Spawn(children=(ChildRequest(agent_id="changing"),)), Finish()])
    async with flow(url, [fits, differs, parent], zoo) as engine:
        runs = [await engine.submit(name) for name in ("changing", "other", "parent")]
        children = RunFilter(parent_run_id=runs[2])
        await engine.wait_until(runs[2], lambda row: row.hot.open_children == 1)
        [child] = await engine.core.reader.list_runs(None, children, after=None, limit=2)
        for run_id in (*runs[:2], child.facts.run_id):
            await engine.wait_waiting(run_id)
    newest = [
        agent("changing", "5", tools=["echo"], replaces=["1"], continues=True)(short),
        agent("other", "5", tools=["echo"], replaces=["1"], continues=True)(short_changed),
        parent,
    ]
    async with flow(url, newest, zoo, start=False) as engine:
        await _dies_before_the_end(engine, runs[0])
        await engine.start_worker()
        for run_id in (*runs[:2], child.facts.run_id):
            (question,) = await engine.pending(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        for run_id in runs[:2]:
            failure = await failure_of(engine, run_id)
            assert failure.code is FailureCode.CHECKPOINT_INCOMPATIBLE
            where = RunFilter(thread_id=(await engine.run(run_id)).facts.thread_id)
            [new, old] = await engine.core.reader.list_runs(None, where, after=None, limit=5)
            new_id = new.facts.run_id
            assert failure.details == {"continued_by": new_id}
            assert (new.facts.retry_of, old.facts.run_id) == (run_id, run_id)
            assert new.facts.agent_version == "5"
            if run_id == runs[1]:
                assert (await failure_of(engine, new_id)).code is FailureCode.NON_DETERMINISTIC
                continue
            (question,) = await engine.wait_waiting(new_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
            assert await answer_of(engine, new_id) == ["first", True]
            assert data_of(await engine.events(new_id), ActionEvent) == []
        failure = await failure_of(engine, child.facts.run_id)
        assert (failure.code, failure.details) == (FailureCode.CHECKPOINT_INCOMPATIBLE, {})
        await engine.wait_terminal(runs[2])


async def test_what_was_to_go_on_does_not_when_its_run_ended_otherwise(
    url: str, zoo: ToolZoo
) -> None:
    """R-20.2, R-9.1: the worker that made it died; the run was cancelled, or its version was served
    again and it succeeded. No step is run twice, and what was cancelled stays so."""
    async with flow(url, [versioned(short)], zoo) as engine:
        cancelled, succeeds = [await engine.submit("changing") for _ in range(2)]
        made: list[str] = []
        for run_id in (cancelled, succeeds):
            (question,) = await engine.wait_waiting(run_id)
            made.append(await _dies_before_the_end(engine, run_id))
        await engine.cancel(cancelled)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        assert await answer_of(engine, succeeds) == ["first", True]
    newest = agent("changing", "5", tools=["echo"], replaces=["1"], continues=True)(short)
    async with flow(url, [newest], zoo) as engine:
        for run_id, old_id in zip(made, (cancelled, succeeds), strict=True):
            failure = await failure_of(engine, run_id)
            assert failure.code is FailureCode.RUN_CANCELLED
            assert failure.details == {
                "by": "runtime",
                "reason": f"{old_id}, from which it was to go on, ended otherwise",
            }
            assert RunState.PLANNING not in states(await engine.events(run_id))


@pytest.mark.parametrize("gone", [False, True], ids=["served", "gone as well"])
async def test_what_goes_on_waits_for_an_origin_that_holds_no_turn(
    url: str, zoo: ToolZoo, gone: bool
) -> None:
    """R-20.2, R-9.1: an optimistic run beside an active one waits when its worker dies that made the
    run that goes on. That one does not begin when the thread is free: first the other has to end,
    also when the version of the one that goes on is gone by now."""

    def works(context: PlannerContext) -> Decision:
        return call("hang") if context.step_index == 0 else Finish()

    newest = agent("changing", "5", tools=["echo"])(short)
    if gone:
        newest = agent("changing", "6", tools=["echo"], replaces=["5"], continues=True)(short)
    active = scripted("active", works, tools=[ToolGrant(name="hang")])
    async with flow(url, [versioned(short), newest, active], zoo) as engine:
        first = await engine.submit("active")
        await zoo.wait_started("hang", 1)
        thread_id = (await engine.run(first)).facts.thread_id
        old = await engine.submit(
            "changing",
            agent_version="1",
            thread_id=thread_id,
            multitask_strategy="optimistic",
        )
        await engine.wait_waiting(old)
        made = await _dies_before_the_end(engine, old)
        zoo.open_gate()
        await engine.wait_terminal(first)
        await engine.wait_until(made, lambda row: row.hot.attempt >= 1)
        row = await engine.wait_until(made, lambda row: row.hot.lease_owner is None)
        assert (row.hot.state, row.hot.faults) == (RunState.PENDING, 0)
        await engine.cancel(old)
        assert (await failure_of(engine, made)).code is FailureCode.RUN_CANCELLED
        assert RunState.PLANNING not in states(await engine.events(made))


@pytest.mark.parametrize("kind", ["damaged", "no longer kept"])
async def test_the_row_tells_how_an_origin_ended_when_its_last_event_is_lost(
    url: str, zoo: ToolZoo, kind: str
) -> None:
    """R-20.2, R-7.7: what was to go on from a cancelled run does not, from a replaced one it does."""
    lose = {
        "damaged": "UPDATE events SET data = ! WHERE run_id = ? AND seq = ",
        "no longer kept": "DELETE FROM events WHERE run_id = ? AND seq = ",
    }[kind]
    value = b"{" if kind == "damaged" else None
    newest = agent("changing", "5", tools=["echo"], replaces=["1"], continues=True)(short)
    async with database_at(url) as database:
        async with embedded(database, [versioned(short)], tools=zoo.registry) as engine:
            cancelled, replaced = [await engine.submit("changing") for _ in range(2)]
            made: list[str] = []
            for run_id in (cancelled, replaced):
                await engine.wait_waiting(run_id)
                made.append(await _dies_before_the_end(engine, run_id))
            before = [await engine.run(run_id) for run_id in made]
            await engine.cancel(cancelled)
            end = await engine.wait_terminal(cancelled)
            Rows(url).damage(f"{lose}{end.hot.terminal_seq}", cancelled, value)
            assert not await comes_too_early(engine.core, before[0])
            assert (await engine.run(made[0])).hot.cancel_epoch == 1
            (question,) = await engine.pending(replaced)
        async with embedded(database, [newest], tools=zoo.registry, start=False) as engine:
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
            await engine.start_worker()
            end = await engine.wait_terminal(replaced)
            Rows(url).damage(f"{lose}{end.hot.terminal_seq}", replaced, value)
            assert not await comes_too_early(engine.core, before[1])
            assert (await engine.run(made[1])).hot.cancel_epoch == 0


async def blocks(ctx: Context, input: object) -> object:
    """It holds the loop."""
    time.sleep(2)  # noqa: ASYNC251  # what this function is for
    return "late"


async def never_waits(ctx: Context, input: object) -> object:
    """It waits for what never comes."""
    await asyncio.Event().wait()
    return None


async def swallows(ctx: Context, input: object) -> object:
    """It does not let itself be cancelled at once."""
    for _ in range(3):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue
    return None


async def returns_garbage(ctx: Context, input: object) -> object:
    """Not JSON."""
    return object()


async def too_deep(ctx: Context, input: object) -> object:
    """It never ends by itself."""
    return await too_deep(ctx, input)


async def exits(ctx: Context, input: object) -> object:
    """It wants to end the process."""
    raise SystemExit(3)


async def two_at_once(ctx: Context, input: object) -> object:
    """It waits for two operations of one branch."""
    return await asyncio.gather(  # noqa: TID251  # what this function is for
        ctx.tool("echo", value=1), ctx.tool("echo", value=2)
    )


async def gives_up_waiting(ctx: Context, input: object) -> object:
    """It puts a time limit of its own around an operation, and swallows what comes of it."""
    try:
        await asyncio.wait_for(ctx.step(asyncio.sleep, 0.2), 0.05)
    except TimeoutError:
        await asyncio.sleep(0.01)
    return "went on"


async def says_why(ctx: Context, input: object) -> object:
    """It fails by a code of the author's."""
    raise AgentFailed("the order is gone", code="CONFLICT", details={"order": 7})


async def keeps_errors(ctx: Context, input: object) -> object:
    """An ordinary error."""
    raise KeyError("missing")


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        (blocks, FailureCode.INTERNAL, "neither ended"),
        (never_waits, FailureCode.INTERNAL, "neither ended"),
        (swallows, FailureCode.INTERNAL, "neither ended"),
        (returns_garbage, FailureCode.INTERNAL, "not JSON"),
        (too_deep, FailureCode.INTERNAL, "RecursionError"),
        (exits, FailureCode.INTERNAL, "SystemExit"),
        (two_at_once, FailureCode.INTERNAL, "ctx.gather"),
        (gives_up_waiting, FailureCode.INTERNAL, "cannot be cancelled"),
        (says_why, FailureCode.CONFLICT, "the order is gone"),
        (keeps_errors, FailureCode.INTERNAL, "KeyError: 'missing'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_what_a_function_does_hurts_its_own_run_only(
    tmp_path: Path, zoo: ToolZoo, body: Body, code: FailureCode, reason: str
) -> None:
    """R-5.8, decision 15: the run fails with its reason, and the worker serves the next."""
    once = RetryPolicy(attempts_max=1)
    timeout_s = 0.3 if reason == "neither ended" else 20.0
    made = agent("bad", "1", tools=["echo"], timeout_s=timeout_s, grace_s=0.1, model_retry=once)
    bad = made(body)
    async with flow(str(tmp_path / "perdure.db"), [bad, versioned(first_code)], zoo) as engine:
        run_id = await engine.submit("bad")
        failure = await failure_of(engine, run_id)
        assert failure.code is code
        assert reason in failure.reason
        good = await engine.submit("changing")
        (question,) = await engine.wait_waiting(good)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=0)
        assert await answer_of(engine, good) == [1, 2, 3, 0, "end"]


@pytest.mark.slow
async def test_a_neighbour_that_blocks_the_loop_is_left_behind(
    tmp_path: Path, zoo: ToolZoo
) -> None:
    """Decision 15: the function begins anew on the next loop, against its journal."""
    entered, free = threading.Event(), threading.Event()

    @agent("blocking", "1", timeout_s=20, grace_s=0.1)
    async def blocking(ctx: Context, input: object) -> object:
        entered.set()
        free.wait(15)  # what this function is for
        return "late"

    @agent("patient", "1", tools=["echo"])
    async def patient(ctx: Context, input: object) -> object:
        told = await ctx.tool("echo", value=1)
        while not entered.is_set():  # noqa: ASYNC110  # the other's code sets no event of a loop
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        return [told, await ctx.tool("echo", value=2)]

    async with flow(str(tmp_path / "perdure.db"), [blocking, patient], zoo) as engine:
        good = await engine.submit("patient")
        await engine.wait_event(good, "step")
        bad = await engine.submit("blocking")
        assert await answer_of(engine, good) == [1, 2]
        assert (await engine.run(bad)).hot.state is RunState.PLANNING
        free.set()
        assert await answer_of(engine, bad) == "late"
