"""Code agents: an async function whose operations are recorded and never done twice (R-4.5, R-4.6)."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from perdure.agents.code import (
    AgentFailed,
    ChildFailed,
    Context,
    InterruptExpired,
    StepFailed,
    ToolFailed,
    agent,
)
from perdure.agents.models.port import ModelReply
from perdure.agents.models.scripted import ScriptedModel
from perdure.protocol.decisions import ToolRequest
from perdure.protocol.events import (
    ActionEvent,
    ArtifactEvent,
    ChildEvent,
    CustomEvent,
    ModelEvent,
    StateEvent,
)
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import Answer, InterruptKind, ParkedOn, RunState
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, unasked
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow
from tests.waiting import eventually


async def answer_of(engine: Embedded, run_id: str) -> Any:
    """Return the answer of a run once it has succeeded."""
    row = await engine.wait_terminal(run_id)
    last = data_of(await engine.events(run_id), StateEvent)[-1]
    assert row.hot.state is RunState.SUCCEEDED, last.failure
    return last.answer


async def failure_of(engine: Embedded, run_id: str) -> Failure:
    """Return the failure of a run once it has failed."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.state is RunState.FAILED
    failure = data_of(await engine.events(run_id), StateEvent)[-1].failure
    assert failure is not None
    return failure


async def test_a_loop_that_asks_three_times_does_nothing_twice(url: str, zoo: ToolZoo) -> None:
    """RES-01, R-4.6, R-8.1: work before a question happens once a round, not once an answer."""
    logged: list[int] = []

    @agent("gate", "1")
    async def gate(ctx: Context, input: object) -> object:
        rounds = 0
        while True:
            rounds += 1
            await ctx.step(logged.append, rounds)
            if await ctx.interrupt({"round": rounds}, title="Good enough?"):
                return rounds

    async with flow(url, [gate], zoo) as engine:
        run_id = await engine.submit("gate")
        for answer in (False, False, True):
            (question,) = await engine.wait_waiting(run_id)
            assert (await engine.run(run_id)).hot.lease_owner is None
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=answer)
            await engine.wait_until(run_id, lambda row: row.hot.state is not RunState.WAITING_HUMAN)
        assert await answer_of(engine, run_id) == 3
        assert logged == [1, 2, 3]


async def test_every_operation_survives_restarts(url: str, zoo: ToolZoo) -> None:
    """R-4.5, R-4.6, R-7.3: what was said once is the same after each question's rebuild."""
    seen: list[list[object]] = []

    @agent("all", "1", tools=[*unasked("pay_idempotent"), "echo"])
    async def everything(ctx: Context, input: dict[str, Any]) -> object:
        told: list[object] = [ctx.now().isoformat(), ctx.random(), str(ctx.uuid())]
        ctx.emit("progress", {"at": 1})
        ctx.artifact("note.txt", "hello", "text/plain")
        input["changed"] = True  # a copy of its own

        async def branch(number: int) -> object:
            paid = await ctx.tool("pay_idempotent", amount=number)
            paid["changed"] = True
            return [paid, await ctx.step(lambda: number * 2, name="double")]

        told += await ctx.gather(branch(1), branch(2))
        with pytest.raises(ToolFailed):
            await ctx.tool("echo", nothing="fits")
        await ctx.sleep(0.05)
        large = await ctx.step(str.upper, "x" * 20_000, name="large")
        told.append([len(large), await ctx.interrupt("go on?"), await ctx.interrupt("and now?")])
        seen.append(told)
        return told

    async with flow(url, [everything], zoo) as engine:
        run_id = await engine.submit("all", {"a": 1})
        for word in ("yes", "surely"):
            (question,) = await engine.wait_waiting(run_id)
            await engine.kill_worker()
            await engine.start_worker()
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=word)
            await engine.wait_until(run_id, lambda row: row.hot.state is not RunState.WAITING_HUMAN)
        told = await answer_of(engine, run_id)
        assert told[3:] == [
            [{"paid": 1, "changed": True}, 2],
            [{"paid": 2, "changed": True}, 4],
            [20_000, "yes", "surely"],
        ]
        assert seen == [told]
        assert sorted(line["amount"] for line in zoo.payments()) == [1, 2]
        events = await engine.events(run_id)
        names = [event.name for event in data_of(events, CustomEvent)]
        assert names == ["perdure.code", "perdure.now", "progress", "perdure.sleep"]
        assert len(data_of(events, ArtifactEvent)) == 1
        positions = [event.position for event in data_of(events, ActionEvent)]
        assert positions == ["5.0.0", "5.1.0", "5.0.1", "5.1.1", "6", "8"]


async def test_branches_answered_in_any_order_get_their_own_answers(url: str, zoo: ToolZoo) -> None:
    """R-8.2, HITL-11, SUB-05: two questions at once; nothing goes on before the last answer."""

    @agent("two", "1")
    async def two(ctx: Context, input: object) -> object:
        return await ctx.gather(ctx.interrupt("a", key="a"), ctx.interrupt("b", key="b"))

    async with flow(url, [two], zoo) as engine:
        run_id = await engine.submit("two")
        first, second = sorted(await engine.wait_waiting(run_id), key=lambda row: row.key or "")
        await engine.answer(second.interrupt_id, Answer.RESPOND, value="for b")
        assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN
        await engine.answer(first.interrupt_id, Answer.RESPOND, value="for a")
        assert await answer_of(engine, run_id) == ["for a", "for b"]


async def test_a_question_of_one_branch_holds_no_other_up(url: str, zoo: ToolZoo) -> None:
    """Decision 21: sibling calls run first, one after the other, then the run parks."""

    @agent("busy", "1", tools=["echo"])
    async def busy(ctx: Context, input: object) -> object:
        async def work() -> object:
            return [await ctx.tool("echo", value=number) for number in range(3)]

        return await ctx.gather(ctx.interrupt("ready?"), work())

    async with flow(url, [busy], zoo) as engine:
        run_id = await engine.submit("busy")
        (question,) = await engine.wait_waiting(run_id)
        assert len(data_of(await engine.events(run_id), ActionEvent)) == 3
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        assert await answer_of(engine, run_id) == [True, [0, 1, 2]]


async def test_an_answer_wakes_a_run_whose_sibling_sleeps(url: str, zoo: ToolZoo) -> None:
    """Decision 20: a sleeping branch parks the run on its timer; an answer comes first."""

    @agent("sleeper", "1")
    async def sleeper(ctx: Context, input: object) -> object:
        async def ask() -> object:
            first = await ctx.interrupt("first?")
            return [first, await ctx.step(lambda: "done", name="after")]

        async def slow() -> str:
            await ctx.sleep(3600)
            return "slept"

        return await ctx.gather(ask(), slow())

    clock = ShiftingClock()
    async with flow(url, [sleeper], zoo, clock=clock) as engine:
        run_id = await engine.submit("sleeper")
        row = await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.TIMER)
        assert row.hot.lease_owner is None
        (question,) = await engine.pending(run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        await engine.wait_event(run_id, "result")
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.TIMER)
        clock.advance(3600)
        assert await answer_of(engine, run_id) == [[1, "done"], "slept"]


async def test_models_are_paid_once_and_their_calls_are_the_codes_to_make(
    url: str, zoo: ToolZoo
) -> None:
    """R-4.5: a reply that is recorded is not asked for again; failures fall back and retry."""
    model = ScriptedModel(
        [
            Failure(code=FailureCode.MODEL_ERROR, reason="busy", retryable=True),
            ModelReply(text="", calls=(ToolRequest(tool="echo", args={"value": 7}, call_id="c"),)),
            "seven " * 3000,
        ]
    )

    @agent("thinker", "1", tools=["echo"], models=[model], model_retry=RetryPolicy(backoff_s=0.01))
    async def thinker(ctx: Context, input: str) -> object:
        ctx.emit("asks", input)
        first = await ctx.model(input, system="Be brief.", tools=["echo"])
        ctx.emit("heard", first.finish)
        call: dict[str, Any] = dict(first.calls[0])
        out: object = await ctx.tool(call["tool"], **call["args"])
        second = await ctx.model([{"role": "user", "text": f"{out}"}])
        return [out, len(second.text), await ctx.interrupt("fine?")]

    async with flow(url, [thinker], zoo) as engine:
        run_id = await engine.submit("thinker", "what is 7?", stream=True)
        (question,) = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=True)
        assert await answer_of(engine, run_id) == [7, 18_000, True]
        assert len(model.requests) == 3
        assert [tool.name for tool in model.requests[1].tools] == ["echo"]
        models = data_of(await engine.events(run_id), ModelEvent)
        assert len(models) == 2
        assert models[1].message_id is not None


async def test_steps_fail_retry_and_can_be_caught(url: str, zoo: ToolZoo) -> None:
    """R-4.5, R-10.1: a step's error is an error of the code; a policy tries it again."""
    tries: list[int] = []

    def flaky() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")
        return "well"

    async def broken(word: str) -> None:
        raise ValueError(word)

    @agent("tough", "1")
    async def tough(ctx: Context, input: object) -> object:
        told = await ctx.step(flaky, retry=RetryPolicy(attempts_max=3, backoff_s=0.01))
        try:
            await ctx.step(broken, "no")
        except StepFailed as error:
            return [told, error.code, str(error)]
        raise AssertionError

    async with flow(url, [tough], zoo) as engine:
        run_id = await engine.submit("tough")
        assert await answer_of(engine, run_id) == ["well", "TOOL_ERROR", "broken: ValueError: no"]
        assert len(tries) == 3


async def test_a_lost_step_runs_again_and_a_lost_once_is_a_question(url: str, zoo: ToolZoo) -> None:
    """Decision 29, R-5.7: at least once; with `once` a person says what became of it."""
    ran: list[str] = []

    async def hang(name: str) -> str:
        ran.append(name)
        if ran.count(name) == 1:
            await asyncio.sleep(60)
        return f"{name} at last"

    @agent("lost", "1")
    async def lost(ctx: Context, input: object) -> object:
        return await ctx.gather(ctx.step(hang, "again"), ctx.step(hang, "once", once=True))

    clock = ShiftingClock()

    async with flow(url, [lost], zoo, clock=clock) as engine:
        run_id = await engine.submit("lost")
        await eventually(lambda: len(ran) == 2)
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.start_worker()
        (question,) = await engine.wait_waiting(run_id)
        assert question.kind is InterruptKind.OUTCOME
        assert sorted(ran) == ["again", "again", "once"]
        await engine.answer(question.interrupt_id, Answer.RETRY)
        assert await answer_of(engine, run_id) == ["again at last", "once at last"]


async def test_an_expired_question_is_an_error_of_the_code(url: str, zoo: ToolZoo) -> None:
    """R-8.3: `on_expiry="deny"` lets the function decide."""

    @agent("late", "1")
    async def late(ctx: Context, input: object) -> object:
        try:
            return await ctx.interrupt(
                "now?", expires_in=timedelta(milliseconds=50), on_expiry="deny"
            )
        except InterruptExpired:
            return "nobody"

    async with flow(url, [late], zoo) as engine:
        assert await answer_of(engine, await engine.submit("late")) == "nobody"


async def test_a_cancel_stops_code_wherever_it_is(url: str, zoo: ToolZoo) -> None:
    """R-9.2, R-9.4: in a step, at a question, and awaiting what is no operation."""
    stopped: list[str] = []

    async def linger() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append("step")

    @agent("lingers", "1", grace_s=0.2)
    async def lingers(ctx: Context, input: str) -> object:
        if input == "step":
            await ctx.step(linger)
        if input == "question":
            await ctx.interrupt("well?")
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append("raw")

    async with flow(url, [lingers], zoo) as engine:
        runs = {
            where: await engine.submit("lingers", where) for where in ("step", "question", "raw")
        }
        await engine.wait_waiting(runs["question"])
        await engine.wait_event(runs["step"], "action")
        await engine.wait_until(runs["raw"], lambda row: row.hot.state is RunState.PLANNING)
        for run_id in runs.values():
            await engine.cancel(run_id)
        for run_id in runs.values():
            assert (await failure_of(engine, run_id)).code is FailureCode.RUN_CANCELLED
    assert sorted(stopped) == ["raw", "step"]


async def test_children_answer_their_own_branch(url: str, zoo: ToolZoo) -> None:
    """R-4.5, R-13.1, SUB-05: side by side, one asks, one fails, one is refused, one goes its way."""

    @agent("child", "1")
    async def child(ctx: Context, input: Any) -> object:
        if input == "fail":
            raise AgentFailed("no luck", code="CONFLICT")
        if input == "ask":
            return await ctx.interrupt("which?")
        return ["did", input]

    @agent("parent", "1", tools=["echo"])
    async def parent(ctx: Context, input: object) -> object:
        async def one(what: str, agent_id: str = "child") -> object:
            try:
                return await ctx.spawn(agent_id, what)
            except ChildFailed as error:
                return [error.status, error.code]

        told = await ctx.gather(
            one("work"), one("ask"), one("fail"), one("x", "nobody"), ctx.tool("echo", value=1)
        )
        own_way = await ctx.spawn("child", "alone", detach=True)
        return [*told, own_way.startswith("run_"), await ctx.interrupt("and you?")]

    async with flow(url, [child, parent], zoo) as engine:
        run_id = await engine.submit("parent")
        row = await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        assert row.hot.lease_owner is None
        spawned = data_of(await engine.events(run_id), ChildEvent)
        asking = spawned[1].child_run_id
        assert asking is not None
        (question,) = await engine.wait_waiting(asking)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="this")
        (question,) = await engine.wait_waiting(run_id)
        await engine.kill_worker()
        await engine.start_worker()
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="fine")
        assert await answer_of(engine, run_id) == [
            ["did", "work"],
            "this",
            ["failed", "CONFLICT"],
            ["refused", "AGENT_NOT_FOUND"],
            1,
            True,
            "fine",
        ]
        positions = [event.position for event in data_of(await engine.events(run_id), ChildEvent)]
        assert [item for item in positions if item] == ["0.0.0", "0.1.0", "0.2.0", "0.3.0", "1"]
