"""Runs that an older or a later release wrote to (R-20.1, R-20.4; SCH-01, faults F51, F53)."""

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest
from pydantic_core import to_json

from perdure.agents.code import Context, agent
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import Ask, Decision, Finish
from perdure.protocol.errors import Conflict
from perdure.protocol.events import ResultEvent, ResumeEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import Answer, ParkedOn, RunState, ToolCallStatus
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from tests.flow.rows import Rows
from tests.flow.world import data_of, flow

LATER = 99


def _decide(context: PlannerContext) -> Decision:
    if not context.turns:
        return calls(("echo", {"value": "a"}))
    if len(context.turns) == 1:
        return calls(("pay", {"amount": 5}))
    first, second = (turn.calls[0] for turn in context.turns)
    return Finish(answer=[first.output, first.args, second.status])


async def test_a_run_that_an_older_release_began_is_carried_on(url: str, zoo: ToolZoo) -> None:
    """R-20.1: its events stay as they were written and are read in the present form."""
    agent = scripted("payer", _decide, tools=["echo", "pay"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("payer")
        (question,) = await engine.wait_waiting(run_id)
        await engine.stop()
        before = [event.raw for event in await engine.events(run_id)]
        Rows(url).rewrite_as_version_0(run_id)
        old = await engine.events(run_id)
        assert {event.schema_version for event in old} == {0}
        assert [event.raw for event in old] != before
        await engine.start_worker()
        await engine.answer(question.interrupt_id, Answer.APPROVE)
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        events = await engine.events(run_id)
        end = data_of(events, StateEvent)[-1]
        assert end.answer == ["a", {"value": "a"}, "succeeded"]
        assert [event.raw for event in events[: len(old)]] == [event.raw for event in old]


class OldPlanner:
    """A planner under the name it had once; its state is what it says, not what it is."""

    async def next_step(self, context: PlannerContext) -> Decision:
        """Ask first, then do as told."""
        if not context.turns:
            return Ask(title="?", state={"seen": [1, 2]})
        return Finish(answer=[context.state, context.turns[0].asks[0].value])


async def test_rows_name_no_code_so_that_code_can_be_renamed(url: str, zoo: ToolZoo) -> None:
    """SCH-01: planner, code agent and their modules have other names when the runs go on."""

    async def old_name(ctx: Context, input: object) -> object:
        del input
        return [await ctx.tool("echo", value=1), await ctx.interrupt("?")]

    def hosted(
        planner: type[OldPlanner], code: Callable[[Context, Any], Awaitable[object]]
    ) -> list[HostedAgent]:
        card = AgentCard(agent_id="loop", version="1")
        return [
            HostedAgent(card=card, planner=planner()),
            agent("code", "1", tools=["echo"])(code),
        ]

    async with flow(url, hosted(OldPlanner, old_name), zoo) as engine:
        runs = [await engine.submit(name) for name in ("loop", "code")]
        for run_id in runs:
            await engine.wait_waiting(run_id)
        modules = [name.encode() for name in sys.modules if name.startswith(("perdure.", "tests."))]
        for run_id in runs:
            checkpoints = await engine.core.reader.list_checkpoints(run_id, before=None, limit=9)
            stored = [to_json(point.agent_state) for point in checkpoints]
            stored += [event.raw for event in await engine.events(run_id)]
            for raw in stored:
                json.loads(raw)
                assert not [name for name in (b"OldPlanner", *modules) if name + b"." in raw]
    new_planner = type("NewPlanner", (OldPlanner,), {"__module__": "moved.elsewhere"})
    new_code = FunctionType(
        old_name.__code__.replace(co_name="new_name", co_qualname="new_name"),
        {**old_name.__globals__, "__name__": "moved.elsewhere"},
        "new_name",
    )
    async with flow(url, hosted(new_planner, new_code), zoo) as engine:
        for run_id in runs:
            (question,) = await engine.pending(run_id)
            await engine.answer(question.interrupt_id, Answer.RESPOND, value="yes")
            await engine.wait_terminal(run_id)
        answers = [data_of(await engine.events(run_id), StateEvent)[-1].answer for run_id in runs]
        assert answers == [[{"seen": [1, 2]}, "yes"], [1, "yes"]]


async def test_a_run_that_a_later_release_wrote_to_ends_with_its_own_code(
    url: str, zoo: ToolZoo
) -> None:
    """F51, R-20.1, F53: never carried on on a guess; every call gets a result, the open one `unknown`."""
    agent = scripted("payer", [calls(("pay_late", {"amount": 5}))], tools=unasked("pay_late"))
    clock = ShiftingClock()
    async with flow(url, [agent], zoo, clock=clock) as engine:
        run_id = await engine.submit("payer")
        await zoo.wait_started("pay_late")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        Rows(url).set_version(run_id, LATER)
        await engine.start_worker()
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.CHECKPOINT_INCOMPATIBLE
        (result,) = data_of(await engine.events(run_id), ResultEvent)
        assert result.status is ToolCallStatus.UNKNOWN


async def test_such_a_run_is_put_aside_when_the_settings_say_so(url: str, zoo: ToolZoo) -> None:
    """R-20.1: `on_incompatible = repair`."""
    settings, clock = replace(SETTINGS, on_incompatible="repair"), ShiftingClock()
    agent = scripted("payer", [calls(("hang", {}))], tools=["hang"])
    async with flow(url, [agent], zoo, settings=settings, clock=clock) as engine:
        run_id = await engine.submit("payer")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        Rows(url).set_version(run_id, LATER)
        await engine.start_worker()
        row = await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.REPAIR)
        assert row.hot.state is RunState.EXECUTING


async def test_a_waiting_run_of_a_later_release_can_be_cancelled_and_not_answered(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.6, R-20.1: what is owed is told by the rows; an answer is refused and changes nothing."""
    agent = scripted("payer", [calls(("pay", {"amount": 5}))], tools=["pay"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("payer")
        (question,) = await engine.wait_waiting(run_id)
        Rows(url).set_version(run_id, LATER)
        with pytest.raises(Conflict, match="cannot carry the run on"):
            await engine.answer(question.interrupt_id, Answer.APPROVE)
        await engine.cancel(run_id)
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.RUN_CANCELLED
        events = await engine.events(run_id)
        assert [data.outcome for data in data_of(events, ResumeEvent)] == ["cancelled"]
        assert [data.status for data in data_of(events, ResultEvent)] == [ToolCallStatus.CANCELLED]
