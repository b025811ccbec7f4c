"""Ends of trees in which a run waits for its children: within their time, and whatever became of
the runs between (R-9.5, R-20.1, F47)."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from perdure.engine.load import load_view
from perdure.engine.tree import close_unheld
from perdure.engine.unheld import unheld_draft
from perdure.protocol.codec import digest
from perdure.protocol.decisions import Ask
from perdure.protocol.events import CompensationEvent, ErrorEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, CancelAction, ParkedOn
from perdure.store.postgres.wire import data_out
from perdure.store.reader import RunFilter
from perdure.store.requests import CancelWish, ClaimWant, TimerKind
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call
from perdure.testing.tools import ToolZoo
from tests.flow.rows import Rows
from tests.flow.test_trees import (
    ASKING,
    SHORT,
    assert_ended,
    registrations,
    spawning,
    wait_tree,
)
from tests.flow.till import COMPENSATE, Till, effects_of, follows
from tests.flow.world import data_of, flow, swept_until, types

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


async def test_a_cancel_that_comes_beside_a_sweep_leaves_the_children_their_time(url: str) -> None:
    """R-9.5: a sweep that looked at the run before saw the timer of the stronger cancel: the child
    was ORPHANED, and its lease taken away."""
    async with flow(url, [spawning("root", "asking")]) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root")
        child = (await held_by_ghost(engine, run_id, "asking")).facts.run_id
        await engine.cancel(run_id)
        await engine.kill_worker()
        reader: Any = _Strengthening(engine, run_id)
        core = replace(engine.core, reader=reader)
        assert not await close_unheld(core, run_id, TimerKind.CLOSE, engine.tools)
        assert (await engine.run(run_id)).hot.cancel_action is CancelAction.ROLLBACK
        assert (await engine.run(child)).hot.lease_owner == "wrk_ghost"
        await engine.core.store.take_away(child, "expired")
        await swept_until(engine, run_id, lambda row: row.hot.state in TERMINAL)
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)


class _Strengthening:
    """A reader before whose look at the timers of a run a stronger cancel of it is accepted."""

    def __init__(self, engine: Embedded, run_id: str) -> None:
        self._engine = engine
        self._run_id = run_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.core.reader, name)

    async def timers_of(self, run_id: str) -> Any:
        wish = CancelWish(action=CancelAction.ROLLBACK, by="ada", source="test")
        await self._engine.core.store.request_cancel(self._run_id, wish)
        return await self._engine.core.reader.timers_of(run_id)


async def test_a_run_of_a_later_release_begins_to_end_once(url: str) -> None:
    """R-9.5, R-20.1, R-10.4: it did so again with every sweep, which gave its child its time anew:
    neither ended, and the log grew."""
    async with flow(url, [spawning("root", "asking", "asking")], settings=SHORT) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root")
        rows = await wait_tree(engine, run_id, 3)
        held = (await held_by_ghost(engine, run_id, "asking")).facts.run_id
        [other] = [row.facts.run_id for row in rows[1:] if row.facts.run_id != held]
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        Rows(url).set_version(run_id, LATER)
        await engine.cancel(other)
        await assert_ended(engine, run_id, FailureCode.CHECKPOINT_INCOMPATIBLE)
        assert (await engine.run(held)).hot.code is FailureCode.ORPHANED
        assert len(data_of(await engine.events(run_id), ErrorEvent)) == 1


async def test_a_run_of_a_later_release_is_orphaned_soundly(url: str) -> None:
    """R-9.5, R-20.1: I52 took it that an older release had carried it on."""
    async with flow(url, [spawning("root", "asking")], settings=SHORT) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root")
        child = (await held_by_ghost(engine, run_id, "asking")).facts.run_id
        Rows(url).set_version(child, LATER)
        await engine.cancel(run_id)
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        assert (await engine.run(child)).hot.code is FailureCode.ORPHANED


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


async def test_a_run_that_is_put_aside_and_sound_does_not_keep_the_tree(url: str) -> None:
    """R-9.5, R-7.7: it takes no report while it is aside, and was not ended for want of it."""
    agents = [spawning("root", "middle"), spawning("middle", "asking")]
    async with flow(url, agents, settings=SHORT) as engine:
        await engine.core.store.register(registrations(ASKING), [])
        run_id = await engine.submit("root")
        rows = await wait_tree(engine, run_id, 3)
        await held_by_ghost(engine, run_id, "asking")
        await engine.cancel(run_id)
        assert await engine.core.store.quarantine(rows[1].facts.run_id, None, "look", None)
        await assert_ended(engine, run_id, FailureCode.RUN_CANCELLED)
        assert (await engine.run(rows[1].facts.run_id)).hot.code is FailureCode.ORPHANED


@pytest.mark.parametrize("what", ["its row cannot be written", "its end cannot be read"])
async def test_a_run_below_that_cannot_be_read_puts_nothing_above_it_aside(
    url: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """R-9.1, R-9.5, R-7.7: the cancel of the root raised, or all above were put aside for repair, and
    ended no more once the run was repaired."""
    agents = [spawning("root", "middle"), spawning("middle", "asking"), ASKING]
    async with flow(url, agents, settings=SHORT) as engine:
        run_id = await engine.submit("root")
        rows = await wait_tree(engine, run_id, 3)
        root, middle, child = (row.facts.run_id for row in rows)
        await engine.wait_waiting(child)
        for above in (root, middle):
            await engine.wait_until(above, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        await engine.kill_worker()
        if what == "its end cannot be read":
            with monkeypatch.context() as patched:
                patched.setattr("perdure.engine.tree.tell_parent", _tells_nobody)
                await engine.cancel(child)
            change, broken = "UPDATE runs SET options = ! WHERE run_id = ?", b"{"
            sound = rows[2].facts.options.model_dump_json().encode()
        else:
            change = "UPDATE run_state SET waiting_kind = ! WHERE run_id = ?"
            broken, sound = b"of_a_newer_release", b"input"
            in_postgres = url.startswith("postgresql://")
            text = "convert_from(!, 'UTF8')" if in_postgres else "CAST(! AS TEXT)"
            change = change.replace("!", text)
        Rows(url).damage(change, child, broken)
        await engine.cancel(root)
        for _ in range(10):
            await engine.sweep()
            await anyio.sleep(SHORT.cancel_deadline_s / 5)
        for above in (root, middle):
            assert (await engine.run(above)).hot.parked_on is ParkedOn.CHILD
        Rows(url).damage(change, child, sound)
        await swept_until(engine, root, lambda row: row.hot.state in TERMINAL)
        await assert_ended(engine, root, FailureCode.RUN_CANCELLED)


async def _tells_nobody(*_: object) -> None:
    """Stand for a process that ends before it tells of an end: a sweep does."""


async def test_a_run_of_a_later_release_waits_for_a_child_that_cannot_be_read(url: str) -> None:
    """R-9.5, R-20.1: it ended before its child."""
    async with flow(url, [spawning("root", "asking"), ASKING], settings=SHORT) as engine:
        root = await engine.submit("root")
        child = (await wait_tree(engine, root, 2))[1]
        await engine.wait_waiting(child.facts.run_id)
        await engine.wait_until(root, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        sound, change = (
            child.facts.options.model_dump_json().encode(),
            "UPDATE runs SET options = !",
        )
        change += " WHERE run_id = ?"
        Rows(url).damage(change, child.facts.run_id, b"{")
        Rows(url).set_version(root, LATER)
        await engine.cancel(root)
        await anyio.sleep(2 * SHORT.cancel_deadline_s)
        assert (await engine.run(root)).hot.state not in TERMINAL
        Rows(url).damage(change, child.facts.run_id, sound)
        await assert_ended(engine, root, FailureCode.RUN_CANCELLED)


async def test_a_run_of_a_later_release_waits_also_when_another_child_ends_meanwhile(
    url: str,
) -> None:
    """R-9.5, R-20.1: who ended it counted a child twice that ended then, once in the place of the one
    that cannot be read: it ended before that.
    """
    async with flow(url, [spawning("root", "asking", "asking"), ASKING], settings=SHORT) as engine:
        root = await engine.submit("root")
        _, lost, other = await wait_tree(engine, root, 3)
        for child in (lost, other):
            await engine.wait_waiting(child.facts.run_id)
        await engine.wait_until(root, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        await engine.kill_worker()
        change = "UPDATE runs SET options = ! WHERE run_id = ?"
        Rows(url).damage(change, lost.facts.run_id, b"{")
        Rows(url).set_version(root, LATER)
        wish = CancelWish(action=CancelAction.INTERRUPT, by="ada", source="test")
        await engine.core.store.request_cancel(root, wish)
        reader: Any = _Ending(engine, root, other.facts.run_id)
        assert await close_unheld(
            replace(engine.core, reader=reader), root, TimerKind.CLOSE, engine.tools
        )
        assert (await engine.run(other.facts.run_id)).hot.state in TERMINAL
        assert (await engine.run(root)).hot.state not in TERMINAL
        sound = lost.facts.options.model_dump_json().encode()
        Rows(url).damage(change, lost.facts.run_id, sound)
        await swept_until(engine, root, lambda row: row.hot.state in TERMINAL)
        await assert_ended(engine, root, FailureCode.RUN_CANCELLED)


class _Ending:
    """A reader behind whose look at the unfinished children of a run one of them ends."""

    def __init__(self, engine: Embedded, parent: str, child: str) -> None:
        self._engine = engine
        self._parent = parent
        self._child = child

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.core.reader, name)

    async def list_runs(self, tenant_id: str | None, where: RunFilter, **more: Any) -> Any:
        found = await self._engine.core.reader.list_runs(tenant_id, where, **more)
        if where.parent_run_id == self._parent and where.unfinished:
            await close_unheld(self._engine.core, self._child, TimerKind.CLOSE, self._engine.tools)
        return found


async def test_an_end_that_waits_looks_once_at_what_is_below_each_run(url: str) -> None:
    """R-9.5: each level of a tree whose time was over did so twice, and so did those below it each
    time: every sweep that waited for one run read the others two, four, eight times over."""
    names = ["one", "two", "three", "four", "asking"]
    agents = [ASKING, *(spawning(*pair) for pair in pairwise(names))]
    async with flow(url, agents, settings=SHORT) as engine:
        root = await engine.submit("one")
        *above, lost = await wait_tree(engine, root, len(names))
        await engine.wait_waiting(lost.facts.run_id)
        for row in above:
            await engine.wait_until(
                row.facts.run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD
            )
        await engine.kill_worker()
        change = "UPDATE runs SET options = ! WHERE run_id = ?"
        Rows(url).damage(change, lost.facts.run_id, b"{")
        await engine.cancel(root)
        await anyio.sleep(2 * SHORT.cancel_deadline_s)
        reader: Any = _Counting(engine)
        core = replace(engine.core, reader=reader)
        assert not await close_unheld(core, root, TimerKind.CLOSE, engine.tools)
        looked = [reader.looks[row.facts.run_id] for row in above]
        assert looked == [2, 2, 2, 1]  # a page, and what is behind it
        sound = lost.facts.options.model_dump_json().encode()
        Rows(url).damage(change, lost.facts.run_id, sound)
        await swept_until(engine, root, lambda row: row.hot.state in TERMINAL)


class _Counting:
    """A reader that counts the looks at the unfinished children of each run."""

    def __init__(self, engine: Embedded) -> None:
        self._engine = engine
        self.looks = Counter[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.core.reader, name)

    async def list_runs(self, tenant_id: str | None, where: RunFilter, **more: Any) -> Any:
        if where.unfinished:
            self.looks[where.parent_run_id or ""] += 1
        return await self._engine.core.reader.list_runs(tenant_id, where, **more)


async def test_a_try_that_a_later_release_began_has_an_end(url: str, zoo: ToolZoo) -> None:
    """R-9.4, R-20.1, I75: an older release ended the run while a worker undid what it had done."""
    till = Till()
    zoo.registry.add(*till.tools(zoo))
    async with flow(url, [follows(call("charge"), Ask(title="?"))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.kill_worker()
        await engine.cancel(run_id, options=COMPENSATE)
        [made] = await engine.core.reader.list_tool_calls(run_id, after=None, limit=9)
        row = await engine.run(run_id)
        draft = unheld_draft(engine.core, await load_view(engine.core, row), row)
        draft.add(
            CompensationEvent(
                tool_call_id=made.tool_call_id,
                status="started",
                key=digest(["compensate", made.effect_key]),
                number=1,
            )
        )
        draft.parked_on, draft.close_in_s, draft.with_checkpoint = ParkedOn.CLOSING, 0, False
        await engine.core.store.commit([draft.build()])
        Rows(url).set_version(run_id, LATER)
        await swept_until(engine, run_id, lambda row: row.hot.state in TERMINAL)
        assert await effects_of(engine, run_id) == {"charge": ("succeeded", "unknown")}
