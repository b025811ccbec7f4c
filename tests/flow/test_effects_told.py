"""What the end of a run tells of its effects, by whichever door it ends (R-9.4, R-6.8)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import anyio
import pytest
from pydantic import JsonValue

from perdure.engine import closing, effects_told, undone
from perdure.engine.incompatible import end_incompatible
from perdure.engine.lease import Lease
from perdure.engine.undone import undone_by
from perdure.ops.verify import verify
from perdure.ops.verify.checks import Finding
from perdure.protocol.decisions import CallTools
from perdure.protocol.events import ChildEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.schema import Incompatible
from perdure.protocol.states import ParkedOn, RunState
from perdure.service.base import Service
from perdure.service.branches import RetryRequest, retry
from perdure.service.principal import LOCAL
from perdure.service.repairs import RepairRequest, repair
from perdure.store.postgres.wire import data_out
from perdure.store.requests import ClaimWant, RetentionRule
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, Embedded, call, calls
from perdure.testing.tools import ToolZoo
from perdure.tools import agent_as_tool
from tests.flow.rows import Rows
from tests.flow.test_compensation import COMPENSATE, Shop, buyer, cancelled
from tests.flow.world import data_of, flow

LATER = 99
FAIL = RepairRequest(action="fail", reason="a disk was replaced")


def limit(monkeypatch: pytest.MonkeyPatch, effects: int) -> None:
    """Let the end of a run tell of so many effects, and calls be read two at a time."""
    monkeypatch.setattr(closing, "EFFECTS_TOLD_MAX", effects)
    monkeypatch.setattr(effects_told, "EFFECTS_TOLD_MAX", effects)
    monkeypatch.setattr(undone, "PAGE", 2)


def each(tool: str, items: str) -> CallTools:
    """Call a tool once for each letter."""
    wishes: list[tuple[str, dict[str, JsonValue]]] = [(tool, {"item": item}) for item in items]
    return calls(*wishes)


def told(report: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return what became of undoing each call that was made, by what the shop calls it."""
    known = {one["external_ref"]: one["compensation"] for one in report}
    return {ref: word for ref, word in known.items() if ref is not None}


async def ended(engine: Embedded, run_id: str) -> list[dict[str, Any]]:
    """Return what the end of a run tells."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.terminal_seq is not None
    before = row.hot.terminal_seq - 1
    (end,) = await engine.core.reader.events_after(run_id, before, limit=1)
    assert isinstance(end.data, StateEvent)
    return end.data.effects or []


async def drop_history(engine: Embedded) -> None:
    """Drop the history of all runs that have failed, once the store's clock is past their end."""
    rule = RetentionRule(state=RunState.FAILED, older_than_s=0)
    store = engine.core.store
    with anyio.fail_after(30):
        while not (await store.expire_history([rule], after=None, limit=10)).runs:  # noqa: ASYNC110  # a clock
            await anyio.sleep(0.01)


@pytest.mark.parametrize("room", [2, 4])
async def test_what_was_undone_is_told_whatever_else_a_run_did(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """R-9.4, R-6.8: a refund behind the first 1000 calls was not told, and forgotten with the
    history. Where there are more effects than are told, those that nobody undid are left out."""
    limit(monkeypatch, room)
    shop = Shop()
    zoo.registry.add(*shop.tools())
    script = [LOOKS, each("shout", "abc"), each("order", "def"), call("pay", amount=1)]
    async with flow(url, [buyer(script, more=("echo",))], zoo) as engine:
        run_id = await engine.submit("buyer")
        await engine.wait_waiting(run_id)
        await engine.cancel(run_id, options=COMPENSATE)
        undone_ones = dict.fromkeys(("o-d", "o-e", "o-f"), "succeeded")
        others = {} if room == 2 else {"o-a": "none"}
        assert told(await cancelled(engine, run_id)) == others | undone_ones
        before = await undone_by(engine.core, await engine.run(run_id))
        assert len(before) == 3
        await drop_history(engine)
        row = await engine.run(run_id)
        assert row.hot.retained_from_seq > 1
        assert await undone_by(engine.core, row) == before


async def test_an_effect_behind_many_calls_without_one_is_told(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-9.4: calls were counted in the place of effects; those that a retry shares, too."""
    limit(monkeypatch, 2)
    zoo.registry.add(*Shop().tools())
    script = [LOOKS, each("shout", "a"), call("pay", amount=1)]
    async with flow(url, [buyer(script, more=("echo",))], zoo) as engine:
        first = await engine.submit("buyer")
        await engine.wait_waiting(first)
        await engine.cancel(first)
        assert [one["external_ref"] for one in await ended(engine, first)] == ["o-a", None]
        made = await retry(Service(core=engine.core), LOCAL, first, RetryRequest())
        second = made.run.run_id
        await engine.wait_waiting(second)
        await engine.cancel(second)
        shared, _ = await ended(engine, second)
        assert (shared["run_id"], shared["external_ref"]) == (first, "o-a")


async def cut_off(engine: Embedded, shop: Shop) -> str:
    """Start a run, cancel it, and kill its worker when one order is undone and another tried."""
    run_id = await engine.submit("buyer")
    await engine.wait_waiting(run_id)
    await engine.cancel(run_id, options=COMPENSATE)
    await shop.undoing.wait()
    await engine.kill_worker()
    return run_id


LOOKS = calls(*[("echo", dict[str, JsonValue](value=n)) for n in range(5)])
SCRIPT = [each("shout", "a"), each("order_once", "b"), each("order", "c"), call("pay", amount=1)]


@pytest.mark.parametrize("lost", ["nothing", "events", "words"])
async def test_a_run_that_is_ended_by_hand_tells_what_it_had_undone(
    url: str, zoo: ToolZoo, lost: str
) -> None:
    """R-9.4, R-7.7: it told nothing of it, so that all was forgotten with the history. What was
    undone in events that are lost is not known: it may have been any call."""
    shop = Shop()
    zoo.registry.add(*shop.tools())
    async with flow(url, [buyer(SCRIPT)], zoo) as engine:
        run_id = await cut_off(engine, shop)
        tries = [event.seq for event in await engine.events(run_id) if event.type == "compensation"]
        if lost != "nothing":  # both of the order that was undone
            where = f"run_id = ? AND seq IN ({tries[0]}, {tries[1]})"  # numbers
            change = "DELETE FROM events" if lost == "events" else "UPDATE events SET data = !"
            value = None if lost == "events" else b"\x00{}"
            Rows(url).damage(f"{change} WHERE {where}", run_id, value)
        await engine.core.store.quarantine(run_id, None, "a disk", None)
        await repair(Service(core=engine.core), LOCAL, run_id, FAIL)
        other = "none" if lost == "nothing" else "unknown"
        undid = "succeeded" if lost == "nothing" else "unknown"
        words = {"o-a": other, "o-b": "unknown", "o-c": undid}
        assert told(await ended(engine, run_id)) == words
        found: list[Finding] = []
        await verify(engine.core.reader, run_id=run_id, on_finding=found.append)
        assert found == []
        await drop_history(engine)
        became = await undone_by(engine.core, await engine.run(run_id))
        assert sorted(became.values()) == sorted(word for word in words.values() if word != "none")


async def child_of(engine: Embedded, run_id: str) -> str:
    """Wait until a run has begun a child; return its id."""
    await engine.wait_event(run_id, "child")
    (begun,) = data_of(await engine.events(run_id), ChildEvent)
    assert begun.child_run_id is not None
    return begun.child_run_id


async def test_a_child_that_is_damaged_while_it_is_undone_does_not_keep_its_parent(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.5, R-9.4: an event that could not be read kept it from being ended as ORPHANED."""
    shop = Shop()
    zoo.registry.add(*shop.tools(), agent_as_tool("child", name="ask_child"))
    settings, clock = replace(SETTINGS, cancel_deadline_s=30), ShiftingClock()
    agents = [
        buyer([call("ask_child", task="go")], more=("ask_child",)),
        buyer(SCRIPT, agent_id="child"),
    ]
    async with flow(url, agents, zoo, settings=settings, clock=clock) as engine:
        run_id = await engine.submit("buyer")
        child = await child_of(engine, run_id)
        await engine.wait_waiting(child)
        await engine.cancel(run_id, options=COMPENSATE)
        await shop.undoing.wait()
        await engine.kill_worker()
        last = [one for one in await engine.events(child) if one.type == "compensation"][-1]
        change = f"UPDATE events SET data = ! WHERE run_id = ? AND seq = {last.seq}"  # noqa: S608  # a number
        Rows(url).damage(change, child, b"\x00{}")
        clock.advance(60)
        await engine.start_worker()
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.RUN_CANCELLED
        assert (await engine.run(child)).hot.code is FailureCode.ORPHANED
        words = {"o-a": "unknown", "o-b": "unknown", "o-c": "succeeded"}
        assert told(await ended(engine, child)) == words
        in_postgres = url.startswith("postgresql://")
        Rows(url).damage(change, child, data_out(last.raw) if in_postgres else last.raw)


async def test_a_run_of_a_later_release_that_is_cancelled_while_it_is_held_tells_what_it_did(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-20.1: only its open calls were told."""
    zoo.registry.add(*Shop().tools())
    clock = ShiftingClock()
    script = [each("shout", "a"), call("hang")]
    async with flow(url, [buyer(script, more=("hang",))], zoo, clock=clock) as engine:
        run_id = await engine.submit("buyer")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its lease runs out
        await engine.sweep()
        clock.advance(60)  # and the pause before it is tried again
        want = ClaimWant(worker_id="wrk_a", limit=1, lease_ttl_s=600, serves=(("buyer", "1"),))
        [held] = await engine.core.store.claim_runs(want)
        await engine.cancel(run_id)
        lease = Lease(run_id, held.token, valid_until=1e9, epoch=0)
        await end_incompatible(engine.core, lease, Incompatible("of a later release"))
        assert "o-a" in {one["external_ref"] for one in await ended(engine, run_id)}


async def test_a_run_of_a_later_release_that_waited_for_a_child_tells_what_is_not_undone(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.4, R-20.1: its child's report, not taken yet, counted as a child that goes on: nothing
    was told, and I52 did not know the report."""
    zoo.registry.add(*Shop().tools(), agent_as_tool("child", name="ask_child"))
    agents = [
        buyer([each("order", "a"), call("ask_child", task="go")], more=("ask_child",)),
        buyer([call("pay", amount=1)], agent_id="child"),
    ]
    async with flow(url, agents, zoo) as engine:
        run_id = await engine.submit("buyer")
        child = await child_of(engine, run_id)
        await engine.wait_waiting(child)
        await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.CHILD)
        Rows(url).set_version(run_id, LATER)
        await engine.cancel(run_id, options=COMPENSATE)
        assert told(await ended(engine, run_id))["o-a"] == "not_started"
