"""Ends of trees in which a run waits for its children: within their time, and whatever became of
the runs between (R-9.5, R-20.1, F47)."""

import pytest

from perdure.engine.tree import close_unheld
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, CancelAction, ParkedOn
from perdure.store.postgres.wire import data_out
from perdure.store.requests import CancelWish, ClaimWant, TimerKind
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded
from tests.flow.rows import Rows
from tests.flow.test_trees import (
    ASKING,
    SHORT,
    assert_ended,
    registrations,
    spawning,
    wait_tree,
)
from tests.flow.world import flow, types

LATER = 99


async def held_by_ghost(engine: Embedded, root: str, agent: str) -> RunRow:
    """Return the child of a run, held by a worker that stands still."""
    await wait_tree(engine, root, 2)
    want = ClaimWant(worker_id="wrk_ghost", limit=1, lease_ttl_s=600, serves=((agent, "1"),))
    [held] = await engine.core.store.claim_runs(want)
    return held.row


async def test_a_cancel_that_is_sent_again_leaves_the_children_their_time(url: str) -> None:
    """R-9.5: the second one took it that the time to end was over: the child was ORPHANED."""
    async with flow(url, [spawning("root", "asking")]) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root")
        held = await held_by_ghost(engine, run_id, "asking")
        child = held.facts.run_id
        for _ in range(2):
            await engine.cancel(run_id)
        assert (await engine.run(run_id)).hot.parked_on is ParkedOn.CHILD
        assert not await close_unheld(engine.core, run_id, TimerKind.CLOSE, None)
        row = await engine.run(child)
        assert row.hot.state not in TERMINAL
        assert row.hot.lease_token == held.hot.lease_token
        await engine.core.store.take_away(child, "expired")
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        assert (await engine.run(child)).hot.code is FailureCode.RUN_CANCELLED


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_run_of_a_later_release_ends_with_its_children(url: str, *, in_time: bool) -> None:
    """R-9.5, R-20.1: it had begun to end, and could not take the report of the child that it
    waited for: it never ended."""
    async with flow(url, [spawning("root", "asking")], settings=SHORT) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root")
        child = (await held_by_ghost(engine, run_id, "asking")).facts.run_id
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        Rows(url).set_version(run_id, LATER)
        await engine.cancel(run_id)
        if in_time:
            await engine.core.store.take_away(child, "expired")
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_run_of_a_later_release_whose_time_is_over_begins_to_end_once(
    url: str, *, in_time: bool
) -> None:
    """R-9.5, R-20.1, R-10.4: each sweep wrote the time-out anew and gave the children more time: the
    log grew without end, and a child that did not end was never ORPHANED."""
    clock = ShiftingClock()
    async with flow(url, [spawning("root", "asking")], settings=SHORT, clock=clock) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root", timeouts={"run_s": 300})
        child = (await held_by_ghost(engine, run_id, "asking")).facts.run_id
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        Rows(url).set_version(run_id, LATER)
        clock.advance(300)
        await engine.wait_event(run_id, "error")
        await engine.sweep()
        if in_time:
            await engine.core.store.take_away(child, "expired")
        await assert_ended(engine, run_id, FailureCode.RUN_TIMEOUT)
        told = types(await engine.events(run_id))
        assert (told.count("timeout"), told.count("error")) == (1, 1)
        code = FailureCode.RUN_CANCELLED if in_time else FailureCode.ORPHANED
        assert (await engine.run(child)).hot.code is code


@pytest.mark.parametrize("what", ["damaged", "of a later release"])
async def test_a_run_that_takes_no_report_does_not_keep_the_tree(url: str, what: str) -> None:
    """R-9.5, F47: what is below the root could not be ended, as one of it took no report."""
    agents = [spawning("root", "middle", "asking"), spawning("middle", "quick"), ASKING]
    async with flow(url, agents, settings=SHORT) as engine:
        await engine.core.store.register(registrations(spawning("quick")), [])
        run_id = await engine.submit("root")
        rows = await wait_tree(engine, run_id, 4)
        middle = next(row.facts.run_id for row in rows if row.facts.agent_id == "middle")
        quick = next(row.facts.run_id for row in rows if row.facts.agent_id == "quick")
        await engine.wait_until(middle, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        change = "UPDATE events SET data = ! WHERE run_id = ? AND seq = 1"
        first = (await engine.events(middle))[0]
        if what == "damaged":
            Rows(url).damage(change, middle, b"\x00{}")
            await engine.core.store.quarantine(middle, None, "damaged", None)
        else:
            Rows(url).set_version(middle, LATER)
        await engine.core.store.request_cancel(
            quick, CancelWish(action=CancelAction.INTERRUPT, by="ada", source="test")
        )
        await engine.wait_terminal(quick)
        await engine.cancel(run_id)
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        if what == "damaged":
            in_postgres = url.startswith("postgresql://")
            Rows(url).damage(change, middle, data_out(first.raw) if in_postgres else first.raw)
