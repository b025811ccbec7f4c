"""What is not known of the effects of a relative whose row cannot be read (R-7.7, R-9.4)."""

import asyncio
from typing import Any

import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import Ask, ChildRequest, Decision, GiveUp, Spawn
from perdure.protocol.errors import Conflict
from perdure.protocol.events import CompensationEvent, StateEvent
from perdure.protocol.states import TERMINAL, InterruptKind, ParkedOn, RunState
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, embedded, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import Performed, Returned, ToolContext, succeeded, tool
from tests.flow.rows import Rows
from tests.flow.till import (
    COMPENSATE,
    Till,
    follows,
    forked,
    key_of,
    one_of_two_undone,
    retried,
)
from tests.flow.world import data_of, database_at, flow, swept_until

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
        told = [(one["external_ref"], one["compensation"]) for one in end.effects or []]
        became = "succeeded" if is_repaired else "unknown"
        assert sorted(told) == sorted([(keys[0], became), (keys[1], "succeeded")])


async def test_a_try_that_was_cut_off_of_a_run_that_cannot_be_read_keeps_no_other(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-5.7: the other child's payment was not refunded until the time for undoing was over,
    and then no more. The one of the lost child was told twice.
    """
    clock, refunds, tries = ShiftingClock(), list[str](), list[str]()

    async def refund(performed: Performed) -> None:
        tries.append(performed.effect_key)
        zoo.begin("refund")
        while len(tries) == 1:  # noqa: ASYNC110 (set from another loop)
            await asyncio.sleep(0.002)
        refunds.append(performed.effect_key)

    more: dict[str, Any] = {"side_effect": "external", "idempotent": True, "timeout_s": 1}

    @tool(compensate=refund, compensate_idempotent=True, **more)
    async def charge(context: ToolContext) -> Returned:
        """Charge."""
        return succeeded("charged", external_ref=context.effect_key)

    zoo.registry.add(charge, *Till().tools(zoo)[1:])
    both = Spawn(children=tuple(ChildRequest(agent_id="buyer", key=key) for key in "ab"))
    agents = [follows(call("charge")), _boss(both, Ask(title="?"))]
    async with flow(url, agents, zoo, clock=clock) as engine:
        parent = await engine.submit("boss")
        await engine.wait_waiting(parent)
        where = RunFilter(parent_run_id=parent)
        rows = await engine.core.reader.list_runs(None, where, after=None, limit=9)
        await engine.cancel(parent, options=COMPENSATE)
        begun = await engine.wait_event(parent, "compensation")
        await zoo.wait_started("refund")
        await engine.kill_worker()
        assert isinstance(begun.data, CompensationEvent)
        [lost] = [row for row in rows if row.facts.run_id == begun.data.run_id]
        [other] = [row for row in rows if row.facts.run_id != begun.data.run_id]
        tries.append("freed")
        kept = lost.facts.options.model_dump_json().encode()
        Rows(url).damage(LOST, lost.facts.run_id, b"{")
        clock.advance(60)
        await engine.start_worker()
        key = await key_of(engine, other.facts.run_id)
        await swept_until(engine, parent, lambda _: key in refunds)
        clock.advance(engine.core.settings.compensation_deadline_s)
        await engine.wait_terminal(parent)
        Rows(url).damage(LOST, lost.facts.run_id, kept)
        end = data_of(await engine.events(parent), StateEvent)[-1]
        told = {one["external_ref"]: one["compensation"] for one in end.effects or []}
        assert told == {tries[0]: "unknown", key: "succeeded"}
        assert len(end.effects or []) == 2


async def test_what_a_run_below_waits_for_takes_no_time_for_undoing_from_the_run_above(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: the run between waited for its child to be repaired until the time was over: what the
    root did was not undone any more.
    """
    till, clock = Till(), ShiftingClock()
    zoo.registry.add(*till.tools(zoo))
    between = Spawn(children=(ChildRequest(agent_id="between"),))
    agents = [
        follows(call("charge")),
        scripted("between", [_CHILD, Ask(title="?")]),
        scripted("root", [call("charge"), between, Ask(title="?")], tools=unasked("charge")),
    ]
    async with flow(url, agents, zoo, clock=clock) as engine:
        root = await engine.submit("root")
        await engine.wait_until(root, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        middle = await _child_of(engine, root)
        await engine.wait_waiting(middle)
        lost = await engine.run(await _child_of(engine, middle))
        kept = lost.facts.options.model_dump_json().encode()
        Rows(url).damage(LOST, lost.facts.run_id, b"{")
        await engine.cancel(root, options=COMPENSATE)
        clock.advance(engine.core.settings.compensation_deadline_s)
        await engine.wait_terminal(root)
        assert till.refunds == [await key_of(engine, root)]
        Rows(url).damage(LOST, lost.facts.run_id, kept)


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
