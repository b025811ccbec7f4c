"""Who stands on an effect: through a retry, a fork of a parent, a damaged or a busy relative."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Finish, GiveUp, Spawn
from perdure.protocol.errors import Unavailable
from perdure.protocol.events import CompensationEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import Answer, RunState
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, RetryRequest, fork, retry
from perdure.service.principal import LOCAL
from perdure.store.commits import Commit
from perdure.store.reader import RunFilter
from perdure.testing.embedded import (
    SETTINGS,
    Embedded,
    call,
    embedded,
    new_worker,
    scripted,
    unasked,
)
from perdure.testing.tools import ToolZoo
from tests.flow.meanwhile import Meanwhile
from tests.flow.rows import Rows
from tests.flow.till import (
    COMPENSATE,
    Till,
    cut_off,
    effects_of,
    follows,
    forked,
    key_of,
    retried,
    two_on_one_key,
)
from tests.flow.world import data_of, database_at, flow

ASKS = Ask(title="?")
FAILS = GiveUp(reason="no")


def boss() -> HostedAgent:
    """An agent that has a child buy, asks, and ends."""
    script = (Spawn(children=(ChildRequest(agent_id="buyer", key="k"),)), ASKS)

    def decide(context: PlannerContext) -> Decision:
        done = len(context.turns)
        return script[done] if done < len(script) else Finish(answer="done")

    return scripted("boss", decide)


def buyer_that(end: Decision) -> HostedAgent:
    """A buyer that ends so after it has charged when it is a child, and asks when it is not."""

    def decide(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("charge")
        return end if context.facts.parent_run_id else ASKS

    return scripted("buyer", decide, tools=unasked("charge"))


async def child_of(engine: Embedded, run_id: str) -> str:
    """Return the one child of a run."""
    where = RunFilter(parent_run_id=run_id)
    (child,) = await engine.core.reader.list_runs(None, where, after=None, limit=9)
    return child.facts.run_id


async def succeed(engine: Embedded, run_id: str) -> None:
    """Answer what a run asks, and wait until it has succeeded."""
    (asked,) = await engine.wait_waiting(run_id)
    await engine.answer(asked.interrupt_id, Answer.RESPOND, value=1)
    assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_retry_stands_on_what_the_failed_fork_before_it_had(url: str, zoo: ToolZoo) -> None:
    """R-9.4: the run that was forked had the payment refunded that the fork's retry counted on."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), ASKS)], zoo) as engine:
        first, beside = await two_on_one_key(engine, zoo)
        till.hangs = False
        for run_id in (first, beside):
            await engine.wait_waiting(run_id)
        await engine.cancel(beside)
        await engine.wait_terminal(beside)
        await succeed(engine, await retried(engine, beside))
        await engine.cancel(first, options=COMPENSATE)
        assert await effects_of(engine, first) == {"charge": ("succeeded", "none")}
        assert (len(till.charges), till.refunds) == (1, [])


async def test_a_retry_of_a_retry_stands_on_what_that_had_taken_over(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: the cancel of a fork that had taken over the same call had the payment refunded."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), ASKS)], zoo) as engine:
        first, at = await cut_off(engine, zoo)
        till.hangs = False
        second = await retried(engine, first, checkpoint_id=at)
        third = await forked(engine, first, checkpoint_id=at)
        for run_id in (second, third):
            await engine.wait_waiting(run_id)
        await engine.cancel(second)
        await engine.wait_terminal(second)
        await succeed(engine, await retried(engine, second))
        await engine.cancel(third, options=COMPENSATE)
        assert await effects_of(engine, third) == {"charge": ("succeeded", "none")}
        assert till.refunds == []


@pytest.mark.parametrize("ends", [True, False], ids=["succeeded", "failed"])
async def test_a_fork_of_a_parent_stands_on_what_its_children_did(
    url: str, zoo: ToolZoo, ends: bool
) -> None:
    """R-9.4: the cancel of the parent had refunded the child's payment, on which the fork stood."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge")), boss()], zoo) as engine:
        parent = await engine.submit("boss")
        await engine.wait_waiting(parent)
        beside = await forked(engine, parent)
        if ends:
            await succeed(engine, beside)
        else:
            await engine.cancel(beside)
            await engine.wait_terminal(beside)
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_terminal(parent)
        assert (len(till.charges), till.refunds) == (1, [] if ends else till.charges)


async def test_a_fork_from_before_a_child_had_ended_does_not_stand_on_it(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: it has a child of its own, so the first one's payment is undone."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge")), boss()], zoo) as engine:
        parent = await engine.submit("boss")
        await zoo.wait_started("charge")
        beside = await forked(engine, parent)
        await zoo.wait_started("charge", 2)
        till.hangs = False
        for run_id in (parent, beside):
            await engine.wait_waiting(run_id)
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_terminal(parent)
        assert till.refunds == [await key_of(engine, await child_of(engine, parent))]
        await succeed(engine, beside)
        assert len(till.charges) == 2


@pytest.mark.parametrize("fails", [False, True], ids=["goes-on", "undone"])
async def test_a_fork_of_a_child_knows_what_its_parent_has_undone(
    url: str, zoo: ToolZoo, fails: bool
) -> None:
    """R-5.6, R-9.4: it had acted under the refunded key, and refunded it a second time."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    buyer = buyer_that(FAILS) if fails else follows(call("charge"))
    async with flow(url, [buyer, boss()], zoo) as engine:
        parent = await engine.submit("boss")
        await zoo.wait_started("charge")
        child = await child_of(engine, parent)
        (at, *_) = await engine.core.reader.list_checkpoints(child, before=None, limit=9)
        till.hangs = False
        await engine.wait_waiting(parent)
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_terminal(parent)
        assert till.refunds == till.charges
        made = await forked(engine, child, checkpoint_id=at.checkpoint_id)
        if fails:
            await engine.wait_waiting(made)
            await engine.cancel(made, options=COMPENSATE)
            assert await effects_of(engine, made) == {"charge": ("succeeded", "succeeded")}
        else:
            assert (await engine.wait_terminal(made)).hot.state is RunState.SUCCEEDED
        assert len(set(till.charges)) == 2
        assert len(set(till.refunds)) == len(till.refunds) == 1 + fails


async def test_of_a_parent_and_the_fork_of_its_child_one_undoes(url: str, zoo: ToolZoo) -> None:
    """R-9.4: both are to undo one payment, which one has by its child and one by its own call."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [buyer_that(FAILS), boss()], zoo) as engine:
        parent = await engine.submit("boss")
        await zoo.wait_started("charge")
        beside = await forked(engine, await child_of(engine, parent))
        await zoo.wait_started("charge", 2)
        till.hangs = False
        for run_id in (parent, beside):
            await engine.wait_waiting(run_id)
        await engine.kill_worker()
        for run_id in (beside, parent):
            await engine.cancel(run_id, options=COMPENSATE)
        await engine.start_worker()
        for run_id in (parent, beside):
            await engine.wait_terminal(run_id)
        assert till.refunds == till.charges


async def test_who_can_undo_does_not_wait_for_one_that_does_not_know_what_it_did(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: the one that had its answer left it to the other, whose call ended as unknown: the
    payment stayed, and both told `none`."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    settings = replace(SETTINGS, lease_ttl_s=6.0)
    buyer = follows(call("charge"), ASKS)
    async with flow(url, [buyer], zoo, settings=settings) as engine:
        first, beside = await two_on_one_key(engine, zoo)
        till.freed.add(beside)
        await engine.wait_waiting(beside)
        await engine.kill_worker()
        for run_id in (first, beside):
            await engine.cancel(run_id, options=COMPENSATE)
        till.hangs = False
        await engine.start_worker()
        assert await effects_of(engine, beside) == {"charge": ("succeeded", "succeeded")}
        await engine.wait_terminal(first)
        assert till.refunds == till.charges


async def test_a_damaged_relative_stops_nobody(url: str, zoo: ToolZoo) -> None:
    """R-7.7, R-9.4: a retry beside it failed, a cancel never ended. Whether it had undone an effect
    that others have under the same key is not known: a person is asked, and nobody undoes it."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    lose = (
        "UPDATE events SET data = ! WHERE run_id = ? AND seq > (SELECT last_seq - 4 FROM run_state"
        " WHERE run_id = events.run_id)"
    )
    agents = [follows(call("charge"), ASKS)]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        first, at = await cut_off(engine, zoo)
        till.hangs = False
        damaged = await forked(engine, first, checkpoint_id=at)
        await engine.wait_waiting(damaged)
        await engine.cancel(damaged, options=COMPENSATE)
        assert await effects_of(engine, damaged) == {"charge": ("succeeded", "succeeded")}
        Rows(url).damage(lose, damaged, b"\xff")
        made = await retried(engine, first, checkpoint_id=at)
        (asked,) = await engine.wait_waiting(made)
        await engine.answer(asked.interrupt_id, Answer.HAPPENED)
        await engine.wait_until(made, lambda row: row.hot.step_index == 1)
        await engine.wait_waiting(made)
        await engine.cancel(made, options=COMPENSATE)
        assert await effects_of(engine, made) == {"charge": ("succeeded", "none")}
        assert till.refunds == till.charges


async def test_what_goes_on_from_a_chain_of_retries_is_made_with_few_reads(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3: the reads had grown with the square of the chain's length."""
    async with flow(url, [scripted("loser", lambda _: GiveUp(reason="no"))], zoo) as engine:
        run_id = await engine.submit("loser")
        reads: list[int] = []
        for _ in range(12):
            await engine.wait_terminal(run_id)
            counting = _Counting(engine.core.reader)
            service = Service(core=replace(engine.core, reader=cast("Any", counting)))
            made = await retry(service, LOCAL, run_id, RetryRequest())
            reads.append(counting.reads)
            run_id = made.run.run_id
        await engine.wait_terminal(run_id)
        steps = [after - before for before, after in pairwise(reads[1:])]
        assert max(steps) == min(steps) < 16, reads


class _Counting:
    """A reader that counts what it is asked."""

    def __init__(self, reader: object) -> None:
        self._reader = reader
        self.reads = 0

    def __getattr__(self, name: str) -> object:
        self.reads += 1
        return getattr(self._reader, name)


@pytest.mark.parametrize("go_on", ["retry", "fork"])
async def test_what_was_accepted_while_its_history_was_undone_does_not_begin(
    url: str, zoo: ToolZoo, go_on: str
) -> None:
    """R-9.4, R-10.3: the cancel came between the look at the history and the run's own row."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    script = (call("charge"), call("look"), ASKS)
    async with flow(url, [follows(*script)], zoo) as engine:
        first = await engine.submit("buyer")
        await engine.wait_waiting(first)
        rows = await engine.core.reader.list_checkpoints(first, before=None, limit=50)

        async def undo() -> None:
            await engine.cancel(first, options=COMPENSATE)
            await engine.wait_terminal(first)

        store = cast("Any", Meanwhile(cast("Any", engine.core.store), "insert_run", undo))
        service = Service(core=replace(engine.core, store=store))
        if go_on == "fork":
            made = await fork(
                service, LOCAL, first, ForkRequest(checkpoint_id=rows[0].checkpoint_id)
            )
        else:
            failed = await forked(engine, first)
            await engine.cancel(failed)
            await engine.wait_terminal(failed)
            made = await retry(service, LOCAL, failed, RetryRequest())
        row = await engine.wait_terminal(made.run.run_id)
        assert (row.hot.state, row.hot.code) == (RunState.FAILED, FailureCode.CONFLICT)
        assert till.refunds == till.charges


async def test_an_undoing_that_had_begun_gives_way_to_a_run_that_came_to_stand_on_the_effect(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: the fork was made between the look at who stands on the effect and `started`; it saw
    nothing undone and succeeded, and the payment was refunded."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), ASKS)], zoo, start=False) as engine:
        looked, goes_on = anyio.Event(), anyio.Event()

        class Held:
            """A store that holds the first `started` back."""

            async def commit(self, commits: list[Commit]) -> object:
                begun = [
                    event
                    for one in commits
                    for event in one.events
                    if isinstance(event.data, CompensationEvent)
                ]
                if begun:
                    looked.set()
                    await goes_on.wait()
                return await engine.core.store.commit(commits)

            def __getattr__(self, name: str) -> object:
                return getattr(engine.core.store, name)

        await engine.start_worker()
        first = await engine.submit("buyer")
        await engine.wait_waiting(first)
        await engine.stop()
        core = replace(engine.core, store=cast("Any", Held()))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))

        async def undo() -> None:
            await engine.cancel(first, options=COMPENSATE)
            with anyio.fail_after(30):
                await looked.wait()

        store = cast("Any", Meanwhile(cast("Any", engine.core.store), "insert_run", undo))
        made = await fork(
            Service(core=replace(engine.core, store=store)), LOCAL, first, ForkRequest()
        )
        (asked,) = await engine.wait_waiting(made.run.run_id)
        goes_on.set()
        became = await effects_of(engine, first)
        assert became["charge"][1] in ("not_started", "none")  # it had begun, or was to begin
        await engine.answer(asked.interrupt_id, Answer.RESPOND, value=1)
        assert (await engine.wait_terminal(made.run.run_id)).hot.state is RunState.SUCCEEDED
        assert till.refunds == []


async def test_a_look_that_the_store_does_not_answer_uses_up_no_try(url: str, zoo: ToolZoo) -> None:
    """R-9.4: one outage between `started` and the tool, and the effect was never undone."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), ASKS)], zoo, start=False) as engine:
        await engine.start_worker()
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.stop()
        is_begun = False

        class Store:
            """A store behind which the reader does not answer once, when undoing has begun."""

            async def commit(self, commits: list[Commit]) -> object:
                written = await engine.core.store.commit(commits)
                told = [event.data for one in commits for event in one.events]
                nonlocal is_begun
                is_begun |= any(isinstance(data, CompensationEvent) for data in told)
                return written

            def __getattr__(self, name: str) -> object:
                return getattr(engine.core.store, name)

        class Reader:
            """Does not answer the first look at a family once undoing has begun."""

            is_due = True

            async def list_runs(self, tenant: str | None, where: RunFilter, **page: Any) -> object:
                if is_begun and self.is_due and where.origin_run_id is not None:
                    self.is_due = False
                    raise Unavailable("the store does not answer")
                return await engine.core.reader.list_runs(tenant, where, **page)

            def __getattr__(self, name: str) -> object:
                return getattr(engine.core.reader, name)

        core = replace(engine.core, store=cast("Any", Store()), reader=cast("Any", Reader()))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        await engine.cancel(run_id, options=COMPENSATE)
        assert await effects_of(engine, run_id) == {"charge": ("succeeded", "succeeded")}
        told = data_of(await engine.events(run_id), CompensationEvent)
        assert [(one.status, one.begun) for one in told] == [
            ("started", True),
            ("failed", False),
            ("started", True),
            ("succeeded", True),
        ]


async def test_what_a_run_has_whose_row_cannot_be_read_is_not_undone(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7, R-9.4: a fork was left out of the look, and its payment was refunded."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    agents = [follows(call("charge"), ASKS)]
    async with (
        database_at(url) as database,
        embedded(database, agents, tools=zoo.registry) as engine,
    ):
        first = await engine.submit("buyer")
        await engine.wait_waiting(first)
        beside = await forked(engine, first)
        await engine.wait_waiting(beside)
        Rows(url).damage("UPDATE runs SET options = ! WHERE run_id = ?", beside, b"{")
        await engine.cancel(first, options=COMPENSATE)
        assert await effects_of(engine, first) == {"charge": ("succeeded", "none")}
        assert till.refunds == []


async def test_a_child_whose_parent_has_failed_stands_on_nothing(url: str, zoo: ToolZoo) -> None:
    """R-9.4: the parent left the payment to the fork of its child, and that one to the child."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [buyer_that(Finish(answer="done")), boss()], zoo) as engine:
        parent = await engine.submit("boss")
        await zoo.wait_started("charge")
        beside = await forked(engine, await child_of(engine, parent))
        await zoo.wait_started("charge", 2)
        till.hangs = False
        for run_id in (parent, beside):
            await engine.wait_waiting(run_id)
        for run_id in (parent, beside):
            await engine.cancel(run_id, options=COMPENSATE)
            await engine.wait_terminal(run_id)
        assert till.refunds == till.charges


async def test_nothing_is_left_to_a_run_above_that_does_not_look_so_far_down(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4: a grandparent leaves alone what is below a parent that has undone what it did."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    script = (call("look"), Spawn(children=(ChildRequest(agent_id="boss", key="k"),)), ASKS)

    def decide(context: PlannerContext) -> Decision:
        done = len(context.turns)
        return script[done] if done < len(script) else Finish(answer="done")

    top = scripted("top", decide, tools=["look"])
    async with flow(url, [buyer_that(FAILS), boss(), top], zoo) as engine:
        above = await engine.submit("top")
        await zoo.wait_started("charge")
        parent = await child_of(engine, above)
        beside = await forked(engine, await child_of(engine, parent))
        await zoo.wait_started("charge", 2)
        till.hangs = False
        for run_id in (parent, beside):
            await engine.wait_waiting(run_id)
        await engine.cancel(parent, options=COMPENSATE)
        await engine.wait_waiting(above)
        assert till.refunds == []
        await engine.kill_worker()
        for run_id in (above, beside):
            await engine.cancel(run_id, options=COMPENSATE)
        await engine.start_worker()
        for run_id in (above, beside):
            await engine.wait_terminal(run_id)
        assert till.refunds == till.charges


async def test_a_retry_goes_on_from_a_call_that_was_cut_off_though_another_was_undone(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-10.3: it was refused, though the call had not been done and gets a key of its own."""
    till = Till(hangs=True)
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), ASKS)], zoo) as engine:
        first, _ = await cut_off(engine, zoo)
        till.hangs = False
        second = await retried(engine, first)
        await engine.wait_waiting(second)
        await engine.cancel(second, options=COMPENSATE)
        await engine.wait_terminal(second)
        assert till.refunds == till.charges
        await succeed(engine, await retried(engine, first))
        assert (len(till.charges), till.refunds) == (2, till.charges[:1])
