"""What is not known of the effects of a relative whose row cannot be read (R-7.7, R-9.4)."""

from typing import Any

import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import Ask, ChildRequest, Decision, GiveUp, Spawn
from perdure.protocol.errors import Conflict
from perdure.protocol.events import StateEvent
from perdure.protocol.states import TERMINAL, InterruptKind, RunState
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, embedded, scripted
from perdure.testing.tools import ToolZoo
from perdure.tools import agent_as_tool
from tests.flow.rows import Rows
from tests.flow.test_compensation import QUICK, Shop, buyer, cancelled, undone
from tests.flow.till import (
    COMPENSATE,
    Till,
    follows,
    forked,
    key_of,
    one_of_two_undone,
    retried,
)
from tests.flow.world import data_of, database_at, flow

_CHILD = Spawn(children=(ChildRequest(agent_id="buyer", key="a"),))
STOPPED = {RunState.SUCCEEDED, RunState.WAITING_HUMAN}
LOST = "UPDATE runs SET options = ! WHERE run_id = ?"


async def test_an_unreadable_relative_of_one_child_holds_nothing_of_another(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: no payment was refunded of the children that were read after the one it is of."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    both = tuple(ChildRequest(agent_id="buyer", key=key) for key in "ab")
    script = (Spawn(children=both), Ask(title="?"))

    def decide(context: PlannerContext) -> Decision:
        return script[min(len(context.turns), 1)]

    agents = [follows(call("charge")), scripted("boss", decide)]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        parent = await engine.submit("boss")
        await engine.wait_waiting(parent)
        where = RunFilter(parent_run_id=parent)
        first, second = await engine.core.reader.list_runs(None, where, after=None, limit=9)
        beside = await forked(engine, first.facts.run_id)
        await engine.wait_terminal(beside)
        Rows(url).damage(LOST, beside, b"{")
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_terminal(parent)
        assert till.refunds == [await key_of(engine, second.facts.run_id)]


async def test_nothing_goes_on_from_what_a_run_may_have_undone_that_cannot_be_read(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-10.3: a retry counted on a payment that a fork, unreadable since, had refunded."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    agents = [follows(call("charge"), Ask(title="?"))]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        first, beside = await one_of_two_undone(engine, zoo, till)
        *_, at, _ = await engine.core.reader.list_checkpoints(first, before=None, limit=9)
        Rows(url).damage(LOST, beside, b"{")
        with pytest.raises(Conflict, match="cannot be read"):
            await retried(engine, first)
        made = await retried(engine, first, checkpoint_id=at.checkpoint_id)
        (asked,) = await engine.wait_waiting(made)
        assert asked.kind is InterruptKind.OUTCOME


async def test_nothing_goes_on_from_the_undone_work_of_a_child_that_cannot_be_read(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-10.3: a retry counted on a child's payment that the cancel of its parent had refunded."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    agents = [follows(call("charge")), _boss(_CHILD, Ask(title="?"))]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        parent = await engine.submit("boss")
        await engine.wait_waiting(parent)
        child = await _child_of(engine, parent)
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_terminal(parent)
        assert till.refunds == [await key_of(engine, child)]
        Rows(url).damage(LOST, child, b"{")
        with pytest.raises(Conflict, match="cannot be read"):
            await retried(engine, parent)


@pytest.mark.parametrize("is_repaired", [True, False])
async def test_what_a_child_did_that_cannot_be_read_is_undone_once_it_is_repaired(
    url: str, zoo: ToolZoo, *, is_repaired: bool
) -> None:
    """R-9.4, R-7.7: the cancel ended at once and told nothing of it. What the other children did is
    undone meanwhile; when the time for undoing is over, it is told that this is not known: once.
    """
    till, clock = Till(), ShiftingClock()
    zoo.registry.add(*till.tools(zoo))
    both = Spawn(children=tuple(ChildRequest(agent_id="buyer", key=key) for key in "ab"))
    agents = [follows(call("charge")), _boss(both, Ask(title="?"))]
    async with flow(url, agents, zoo, clock=clock) as engine:
        parent = await engine.submit("boss")
        await engine.wait_waiting(parent)
        where = RunFilter(parent_run_id=parent)
        other, lost = await engine.core.reader.list_runs(None, where, after=None, limit=9)
        keys = [await key_of(engine, row.facts.run_id) for row in (lost, other)]
        kept = lost.facts.options.model_dump_json().encode()
        Rows(url).damage(LOST, lost.facts.run_id, b"{")
        await engine.cancel(parent, options=COMPENSATE)
        begun = await engine.wait_event(parent, "compensation")
        await engine.wait_event(parent, "compensation", after=begun.seq)
        await engine.sweep()
        assert (await engine.run(parent)).hot.state not in TERMINAL
        assert till.refunds == keys[1:]
        if is_repaired:
            Rows(url).damage(LOST, lost.facts.run_id, kept)
        else:
            clock.advance(engine.core.settings.compensation_deadline_s)
        await engine.wait_terminal(parent)
        assert till.refunds == keys[::-1][: 2 if is_repaired else 1]
        Rows(url).damage(LOST, lost.facts.run_id, kept)
        end = data_of(await engine.events(parent), StateEvent)[-1]
        told = {(str(one["external_ref"]), one["compensation"]) for one in end.effects or []}
        assert told == {
            (keys[0], "succeeded" if is_repaired else "unknown"),
            (keys[1], "succeeded"),
        }
        assert len(end.effects or []) == len(told)


async def test_a_try_that_was_cut_off_keeps_nothing_else_while_its_run_cannot_be_read(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-5.7: what the others did was not undone until the time for it was over."""
    shop = Shop()
    zoo.registry.add(*shop.tools(), agent_as_tool("child", name="ask_child"))
    script = [call("order", item="a"), call("ask_child", task="go"), call("pay", amount=1)]
    agents = [
        buyer(script, more=("ask_child",)),
        buyer([call("order_twice", item="b")], agent_id="child"),
    ]
    async with flow(url, agents, zoo, settings=QUICK) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        where = RunFilter(parent_run_id=run_id)
        (child,) = await engine.core.reader.list_runs(None, where, after=None, limit=9)
        await engine.cancel(run_id, options=COMPENSATE)
        await shop.undoing.wait()
        await engine.kill_worker()
        Rows(url).damage(LOST, child.facts.run_id, b"{")
        await engine.start_worker()
        while "undo o-a" not in str(shop.log):
            at = (await engine.run(run_id)).hot.last_seq
            await engine.wait_event(run_id, "compensation", after=at)
        assert shop.log.count("undo o-b") == 1
        Rows(url).damage(LOST, child.facts.run_id, child.facts.options.model_dump_json().encode())
        report = await cancelled(engine, run_id)
        assert undone(report) == {"order": "succeeded", "order_twice": "succeeded"}
        assert len(set(shop.keys)) == 2  # one of each call


@pytest.mark.parametrize("is_behind", [True, False])
async def test_a_redrive_takes_a_child_that_cannot_be_read_for_one_that_began_behind_its_place(
    url: str, zoo: ToolZoo, *, is_behind: bool
) -> None:
    """R-10.3: it had a child charge a second time. What one before did may have been undone."""
    till = Till(is_working=False)
    zoo.registry.add(*till.tools(zoo))
    fails = call("look")
    script = (fails, _CHILD) if is_behind else (_CHILD, fails)
    agents = [follows(call("charge")), _boss(*script, GiveUp(reason="no idea"))]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        parent = await engine.submit("boss")
        await engine.wait_terminal(parent)
        child = await _child_of(engine, parent)
        Rows(url).damage(LOST, child, b"{")
        with pytest.raises(Conflict, match=None if is_behind else "cannot be read") as refused:
            await retried(engine, parent, redrive=True)
        assert refused.value.details.get("behind") == ([child] if is_behind else None)


def _boss(*script: Decision) -> HostedAgent:
    def decide(context: PlannerContext) -> Decision:
        return script[context.step_index]

    return scripted("boss", decide, tools=["look"])


async def _child_of(engine: Embedded, run_id: str) -> str:
    where = RunFilter(parent_run_id=run_id)
    (child,) = await engine.core.reader.list_runs(None, where, after=None, limit=9)
    return child.facts.run_id


async def test_nobody_is_asked_about_a_call_without_a_side_effect(url: str, zoo: ToolZoo) -> None:
    """R-5.7: a fork that could not be read made a person say whether a look had happened."""
    zoo.registry.add(*Till().tools(zoo))
    agents = [follows(call("look"))]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        first = await engine.submit("buyer", breakpoints=[{"at": "before_tool"}])
        await engine.wait_waiting(first)
        (at, *_) = await engine.core.reader.list_checkpoints(first, before=None, limit=9)
        await engine.cancel(first)
        await engine.wait_terminal(first)
        goes_on: dict[str, Any] = {
            "checkpoint_id": at.checkpoint_id,
            "options": {"breakpoints": []},
        }
        beside = await forked(engine, first, **goes_on)
        await engine.wait_terminal(beside)
        Rows(url).damage(LOST, beside, b"{")
        row = await engine.wait_until(
            await retried(engine, first, **goes_on), lambda row: row.hot.state in STOPPED
        )
        assert row.hot.state is RunState.SUCCEEDED
