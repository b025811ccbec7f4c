"""Fork: a run of its own from a checkpoint of another; states at checkpoints and their difference."""

from typing import Any, cast

import jsonpatch
import pytest
from pydantic import JsonValue

from perdure.agents.code import Context, agent
from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.errors import Conflict, Invalid
from perdure.protocol.events import StateEvent
from perdure.protocol.runs import Run
from perdure.protocol.states import Answer, CancelAction, InterruptKind, RunState
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, fork
from perdure.service.checkpoints import diff, get_checkpoint, get_state, list_checkpoints
from perdure.service.principal import LOCAL
from perdure.testing.embedded import Embedded, call, scripted, unasked
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow


async def forked(engine: Embedded, run_id: str, **wish: Any) -> Run:
    """Fork a run as a caller would."""
    made = await fork(Service(core=engine.core), LOCAL, run_id, ForkRequest(**wish))
    return made.run


async def answer_of(engine: Embedded, run_id: str) -> JsonValue:
    """Return the answer of a run that succeeds."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.state is RunState.SUCCEEDED, row.hot.code
    return data_of(await engine.events(run_id), StateEvent)[-1].answer


def tells(context: PlannerContext) -> Decision:
    """Pay, draw twice with a state of its own, and tell what was seen."""
    match context.step_index:
        case 0:
            return call("pay", amount=1)
        case 1 | 2:
            wish = call("draw", text=str(context.step_index))
            return wish.model_copy(update={"state": {"step": context.step_index}})
        case _:
            seen = [item.tool for turn in context.turns for item in turn.calls]
            return Finish(answer=[context.input, context.state, *seen])


async def test_a_fork_goes_on_from_any_checkpoint_with_another_input_and_state(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.4, R-11.3, R-7.5: on a thread of its own; what was done is shared, the run untouched."""
    agent = scripted("teller", tells, tools=[*unasked("pay"), "draw"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("teller", "first")
        whole = ["first", {"step": 2}, "pay", "draw", "draw"]
        assert await answer_of(engine, run_id) == whole
        before = await engine.run(run_id)
        same = await forked(engine, run_id)
        assert await answer_of(engine, same.run_id) == whole
        assert (same.forked_from, same.retry_of) == (run_id, None)
        assert same.thread_id != before.facts.thread_id
        rows = await engine.core.reader.list_checkpoints(run_id, before=None, limit=50)
        at = min((row for row in rows if row.step_index == 2), key=lambda row: row.seq)
        other = await forked(
            engine, run_id, checkpoint_id=at.checkpoint_id, input="second", state={"mine": 1}
        )
        assert await answer_of(engine, other.run_id) == ["second", {"step": 2}, *whole[2:]]
        again = await forked(engine, other.run_id, state={"mine": 2})
        assert await answer_of(engine, again.run_id) == ["second", {"mine": 2}, *whole[2:]]
        end = max(rows, key=lambda row: row.seq)
        more = await forked(engine, other.run_id, checkpoint_id=at.checkpoint_id, input="third")
        assert cast("list[Any]", await answer_of(engine, more.run_id))[0] == "third"
        assert len(zoo.payments()) == 1
        assert await engine.run(run_id) == before
        later = await forked(engine, run_id, checkpoint_id=end.checkpoint_id, input="on")
        assert await answer_of(engine, later.run_id) == ["on", *whole[1:]]


async def test_a_run_that_waits_is_forked_beside_and_its_question_asked_anew(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.4, HITL-02: the open approval stays with its run; the fork has one of its own."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="ok") if context.turns else call("pay", amount=4)

    async with flow(url, [scripted("payer", decide, tools=["pay"])], zoo) as engine:
        run_id = await engine.submit("payer")
        (first,) = await engine.wait_waiting(run_id)
        made = await forked(engine, run_id)
        (second,) = await engine.wait_waiting(made.run_id)
        assert second.kind is InterruptKind.APPROVAL
        await engine.answer(second.interrupt_id, Answer.APPROVE)
        assert await answer_of(engine, made.run_id) == "ok"
        assert [row.interrupt_id for row in await engine.pending(run_id)] == [first.interrupt_id]
        await engine.cancel(run_id, CancelAction.ROLLBACK)
        with pytest.raises(Conflict):
            await forked(engine, run_id)


async def test_states_at_checkpoints_are_read_and_compared_across_runs(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.4, R-11.3: the patch turns one state into the other; the chain leads into the origin."""
    agent = scripted("teller", tells, tools=[*unasked("pay"), "draw"])
    async with flow(url, [agent], zoo) as engine:
        service = Service(core=engine.core)
        run_id = await engine.submit("teller", "first")
        await engine.wait_terminal(run_id)
        page = await list_checkpoints(service, LOCAL, run_id, before=None, limit=50)
        first, last = page.items[-1], page.items[0]
        made = await forked(engine, run_id, checkpoint_id=page.items[2].checkpoint_id)
        await engine.wait_terminal(made.run_id)
        own = (await list_checkpoints(service, LOCAL, made.run_id, before=None, limit=50)).items
        parent = (own[-1].parent_run_id, own[-1].parent_seq)
        assert parent == (run_id, page.items[2].seq)
        assert (await get_checkpoint(service, LOCAL, own[-1].checkpoint_id)) == own[-1]
        for other in (last, own[0]):
            a = await get_state(service, LOCAL, first.checkpoint_id)
            b = await get_state(service, LOCAL, other.checkpoint_id)
            patch = await diff(service, LOCAL, first.checkpoint_id, other.checkpoint_id)
            assert jsonpatch.apply_patch(a.values, patch.patch) == b.values
            assert b.values["state"] == "succeeded"
            assert b.values["agent_state"] == {"step": 2}
        nothing = await diff(service, LOCAL, last.checkpoint_id, last.checkpoint_id)
        assert nothing.patch == []
        with pytest.raises(Invalid):
            await forked(engine, made.run_id, state="x" * 9000)


async def test_what_code_draws_is_the_same_in_a_fork_as_far_as_the_history_is_shared(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.4, R-4.6: found by the simulation (seed 10). Behind it a fork of a fork draws its own."""

    @agent("drawing", "1", tools=["echo"])
    async def drawing(ctx: Context, _: Any) -> object:
        first = [ctx.random(), str(ctx.uuid())]
        ctx.emit("drawn", first)
        await ctx.interrupt(first)
        branches = [ctx.tool("echo", value=ctx.random()) for _ in range(2)]
        second = [*await ctx.gather(*branches), str(ctx.uuid())]
        ctx.emit("drawn", second)
        await ctx.interrupt(second)
        return [first, second, ctx.random()]

    async def answer(engine: Embedded, run_id: str, times: int) -> None:
        for number in range(times):
            (asked,) = await engine.wait_waiting(run_id)
            await engine.answer(asked.interrupt_id, Answer.RESPOND, value=number)

    async with flow(url, [drawing], zoo) as engine:
        run_id = await engine.submit("drawing")
        await answer(engine, run_id, 1)
        await engine.wait_waiting(run_id)
        fork_id = (await forked(engine, run_id)).run_id
        await answer(engine, fork_id, 1)
        told = cast("list[Any]", await answer_of(engine, fork_id))
        again_id = (await forked(engine, fork_id)).run_id
        again = cast("list[Any]", await answer_of(engine, again_id))
        await answer(engine, run_id, 1)
        first = cast("list[Any]", await answer_of(engine, run_id))
        assert told[:2] == again[:2] == first[:2]
        assert len({told[2], again[2], first[2]}) == 3


async def test_a_fork_beside_a_run_that_waits_makes_its_call_under_a_key_of_its_own(
    url: str, zoo: ToolZoo
) -> None:
    """R-5.6, R-7.4: found by the simulation (seed 2606 of `commits`). Both paid under one key."""
    agent = scripted("payer", [call("pay", amount=3), Finish(answer="paid")], tools=["pay"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("payer")
        await engine.wait_waiting(run_id)
        fork_id = (await forked(engine, run_id)).run_id
        for waiting in (fork_id, run_id):
            (asked,) = await engine.wait_waiting(waiting)
            await engine.answer(asked.interrupt_id, Answer.APPROVE)
            await engine.wait_terminal(waiting)
        keys = [
            row.effect_key
            for one in (run_id, fork_id)
            for row in await engine.core.reader.list_tool_calls(one, after=None, limit=9)
        ]
        assert len(set(keys)) == 2
