"""One damaged row stops nobody but its own run (F21, R-7.7)."""

from dataclasses import replace
from datetime import timedelta

import anyio
import pytest

from perdure.engine.aside import put_aside
from perdure.engine.context import PlannerContext
from perdure.engine.maintenance import UNMOVED, Maintenance
from perdure.ops.verify import Finding, verify
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.decisions import Ask, Decision, Finish, Sleep
from perdure.protocol.errors import Conflict, Unreadable
from perdure.protocol.events import RepairEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import waiting_on
from perdure.protocol.states import Answer, ParkedOn, RunState, WaitingOn
from perdure.store.commits import Committed, Refused
from perdure.store.reader import RunFilter
from perdure.store.requests import RetentionRule
from perdure.testing import builders as make
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, embedded, scripted
from tests.flow.rows import Rows
from tests.flow.world import data_of, database_at, flow, swept_until

ROWS = {
    "no JSON": "UPDATE runs SET options = ! WHERE run_id = ?",
    "no text": "UPDATE runs SET trace_id = CAST(! AS TEXT) WHERE run_id = ?",
    "no time": "UPDATE runs SET created_at = TIME WHERE run_id = ?",
    "no time in the hot row": "UPDATE run_state SET updated_at = TIME WHERE run_id = ?",
}
"""Damage of a run's row. PostgreSQL keeps no text that is not UTF-8."""


def _damage(url: str, statement: str, run_id: str) -> None:
    """Damage a row; TIME is one that the database has and Python has not."""
    time = "'20000-01-01'" if url.startswith("postgresql") else str(9 * 10**18)
    value = b"\xff" if "!" in statement else None
    Rows(url).damage(statement.replace("TIME", time), run_id, value)


@pytest.mark.parametrize("kind", list(ROWS))
async def test_a_row_that_cannot_be_read_fails_no_list_no_claim_and_no_verification(
    url: str, kind: str
) -> None:
    """F21: the others are listed, claimed and verified; this one is told and put aside."""
    if kind == "no text" and url.startswith("postgresql"):
        kind = "no JSON"
    async with (
        database_at(url) as database,
        embedded(database, [scripted("any", lambda _: Finish(answer="done"))]) as engine,
    ):
        await engine.drain()
        runs = [await engine.submit("any") for _ in range(5)]
        broken, sound = runs[2], [*runs[:2], *runs[3:]]
        _damage(url, ROWS[kind], broken)
        reader = database.reader
        for tenant in (None, TENANT_DEFAULT):
            seen: list[str] = []
            after: str | None = None
            while page := await reader.list_runs(tenant, RunFilter(), after=after, limit=3):
                seen += [row.facts.run_id for row in page]
                after = seen[-1]
            assert seen == sound[::-1]
        with pytest.raises(Unreadable):
            await reader.find_run(None, broken)
        await engine.start_worker()
        for run_id in sound:
            assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert not await reader.is_ready(broken)
        last = (await reader.events_after(broken, 0, limit=10))[-1].type
        assert last == ("state" if "hot" in kind else "repair")  # without a seq nothing is written
        found: list[Finding] = []
        report = await verify(reader, on_finding=found.append)
        assert (report.runs, report.unreadable) == (4, 1)
        assert [(finding.check, finding.run_id) for finding in found] == [("C6", broken)]


async def test_a_timer_whose_time_is_damaged_keeps_no_other_from_being_acted_upon(url: str) -> None:
    """F21: one before all times had failed the sweeps of all runs; it is due, and its run looked at."""
    before_all = "'4000-01-01 BC'" if url.startswith("postgresql") else str(-9 * 10**18)
    async with database_at(url) as database:
        runs = [make.new_run(run_s=0.000001) for _ in range(3)]
        for new in runs:
            await database.store.insert_run(new)
        broken = runs[1].run_id
        Rows(url).damage(f"UPDATE timers SET due_at = {before_all} WHERE run_id = ?", broken)  # noqa: S608  # a time
        due = await database.reader.due_timers(2)
        due += await database.reader.due_timers(2, due[-1])
        assert due[0].run_id == broken
        assert sorted(timer.run_id for timer in due) == sorted(new.run_id for new in runs)
        assert [timer.run_id for timer in await database.reader.timers_of(broken)] == [broken]


NEWER = "UPDATE run_state SET waiting_kind = 'of_a_newer_release' WHERE run_id = ?"


async def test_a_value_of_a_newer_release_concerns_nobody_but_its_own_run(url: str) -> None:
    """R-20.4: commits, releases, sweeps, cancels of the tree and the thread's next run go on."""
    async with database_at(url) as database:
        store, reader = database.store, database.reader
        broken, good = await make.claimed(store), await make.claimed(store)
        ended = await make.claimed(store)
        await make.finish(store, reader, ended.row.facts.run_id)
        run_id = broken.row.facts.run_id
        old = await make.claimed(store)
        await make.finish(store, reader, old.row.facts.run_id)
        child = make.new_run(thread_id=old.row.facts.thread_id)
        child = replace(child, parent_run_id=good.row.facts.run_id)
        child = replace(child, root_run_id=good.row.facts.run_id)
        spawn = replace(make.commit_of(good.row, make.note()), new_children=(child,))
        parent = await make.advanced(store, reader, spawn)
        behind = make.new_run(thread_id=old.row.facts.thread_id)
        await store.insert_run(behind)
        for each in (run_id, ended.row.facts.run_id, child.run_id, behind.run_id):
            Rows(url).damage(NEWER, each)
        stale = make.commit_of(broken.row, make.note())
        stale = replace(stale, guard=replace(stale.guard, expected_seq=99))
        results = await store.commit([stale, make.commit_of(parent, make.note())])
        assert [type(result) for result in results] == [Refused, Committed]
        keep = [RetentionRule(state=RunState.SUCCEEDED, older_than_s=0)]
        assert (await store.expire_history(keep, after=None, limit=50)).runs == 1
        hot = await store.request_cancel(parent.facts.run_id, make.cancel_wish())
        assert hot is not None
        assert hot.cancel_epoch == 1
        leases = [make.lease_of(broken), make.lease_of(good)]
        assert await store.release_runs(make.WORKER, leases) == 1
        Rows(url).damage("UPDATE run_state SET waiting_kind = NULL WHERE run_id = ?", child.run_id)
        await make.finish(store, reader, child.run_id)
        thread = await reader.find_thread(TENANT_DEFAULT, old.row.facts.thread_id)
        assert thread is not None
        assert thread.active_run_id == behind.run_id, "it has its turn, and stands"


async def test_an_attempt_that_ended_in_an_unknown_way_keeps_no_other_run_from_a_claim(
    url: str,
) -> None:
    """R-20.4: its run is put aside."""
    async with database_at(url) as database:
        store, reader = database.store, database.reader
        strange = await make.claimed(store)
        run_id = strange.row.facts.run_id
        await store.release_runs(make.WORKER, [make.lease_of(strange)])
        Rows(url).damage("UPDATE attempts SET end_reason = 'left' WHERE run_id = ?", run_id)
        others = [make.new_run() for _ in range(2)]
        for new in others:
            await store.insert_run(new)
        taken = await store.claim_runs(make.want())
        assert {one.row.facts.run_id for one in taken} == {new.run_id for new in others}
        assert (await make.look(reader, run_id)).hot.parked_on is ParkedOn.REPAIR


async def test_a_worker_outlives_the_sweep_that_meets_a_row_of_a_newer_release(url: str) -> None:
    """R-20.4, R-6.8: the sweep goes on behind it."""
    rule = RetentionRule(state=RunState.SUCCEEDED, older_than_s=0)
    settings = replace(SETTINGS, retention=(rule,), retention_interval_s=0.05)
    async with (
        database_at(url) as database,
        embedded(
            database, [scripted("any", lambda _: Finish(answer="done"))], settings=settings
        ) as engine,
    ):
        await engine.drain()
        strange = await engine.submit("any")
        Rows(url).damage(NEWER, strange)
        await engine.start_worker()
        other = await engine.submit("any")
        await engine.wait_terminal(other)
        with anyio.fail_after(30):
            while (await engine.run(other)).hot.retained_from_seq == 1:  # noqa: ASYNC110
                await anyio.sleep(0.02)  # no signal tells of a sweep


DUE = (
    "INSERT INTO timers (run_id, kind, ref, due_at) SELECT run_id, 'close', run_id, updated_at "
    "FROM run_state WHERE run_id = ?"
)


async def test_the_timer_of_a_row_of_a_newer_release_takes_no_worker_with_it(url: str) -> None:
    """R-20.4: it is left to whoever can read it, and the timers of the others are acted upon."""
    ask = scripted("asker", [Ask(title="?"), Finish(answer="done")])
    async with database_at(url) as database, embedded(database, [ask]) as engine:
        strange, sound = await engine.submit("asker"), await engine.submit("asker")
        for run_id in (strange, sound):
            await engine.wait_waiting(run_id)
        Rows(url).damage(NEWER, strange)
        Rows(url).damage(DUE, strange)
        await engine.core.store.request_cancel(sound, make.cancel_wish())
        await swept_until(engine, sound, lambda row: row.hot.finished_at is not None)
        assert [timer.run_id for timer in await database.reader.due_timers(10)] == [strange]
        other = await engine.submit("asker")
        await engine.wait_waiting(other)


async def test_expired_leases_that_cannot_be_read_keep_no_other_from_being_taken_away(
    url: str,
) -> None:
    """F21, R-20.4: however many they are, and however long they stand first."""
    async with database_at(url) as database:
        for _ in range(5):
            await database.store.insert_run(make.new_run())
        first = await database.store.claim_runs(make.want(ttl_s=0.0, limit=4))
        [last] = await database.store.claim_runs(make.want(ttl_s=0.0, limit=4))
        for held in first:
            Rows(url).damage(NEWER, held.row.facts.run_id)
        taken = await database.store.requeue_expired(2)
        assert [one.run_id for one in taken] == [last.row.facts.run_id]


async def test_a_run_that_moved_since_it_was_found_still_is_not_put_aside(url: str) -> None:
    """RES-08: somebody's cancel came in between."""
    nap = scripted("nap", lambda _: Sleep(duration=timedelta(days=1)))
    async with flow(url, [nap]) as engine:
        run_id = await engine.submit("nap")
        row = await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.TIMER)
        await engine.core.store.request_cancel(run_id, make.cancel_wish())
        await put_aside(engine.core, run_id, UNMOVED, seq=row.hot.last_seq)
        row = await swept_until(engine, run_id, lambda row: row.hot.finished_at is not None)
        assert row.hot.code is FailureCode.RUN_CANCELLED


DAMAGE = ("UPDATE events SET data = ! WHERE run_id = ? AND seq = 3", b"{")


@pytest.mark.parametrize("met_by", ["a cancel", "an answer", "its total time", "an expiry"])
async def test_a_damaged_run_that_nobody_holds_is_put_aside_by_whoever_meets_the_damage(
    url: str, met_by: str
) -> None:
    """F21, R-7.7: the caller is told, and no timer tries it again."""

    def decide(context: PlannerContext) -> Decision:
        limit = timedelta(hours=1) if met_by == "an expiry" else None
        return Finish(answer="done") if context.turns else Ask(title="?", expires_in=limit)

    clock = ShiftingClock()
    async with (
        database_at(url, clock) as database,
        embedded(database, [scripted("asker", decide)]) as engine,
    ):
        run_id = await engine.submit("asker")
        (question,) = await engine.wait_waiting(run_id)
        await engine.kill_worker()
        Rows(url).damage(DAMAGE[0], run_id, DAMAGE[1])
        match met_by:
            case "a cancel":
                for _ in range(2):
                    with pytest.raises(Conflict, match="put aside for repair"):
                        await engine.cancel(run_id)
            case "an answer":
                for _ in range(2):
                    with pytest.raises(Conflict, match="put aside for repair"):
                        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
            case "its total time":
                Rows(url).damage(DUE, run_id)
                Rows(url).damage("UPDATE run_state SET cancel_epoch = 1 WHERE run_id = ?", run_id)
                await engine.sweep()
            case _:
                clock.advance(3600)
                await engine.sweep()
        row = await engine.run(run_id)
        assert row.hot.parked_on is ParkedOn.REPAIR
        assert await database.reader.due_timers(10) == []


async def test_a_run_that_nothing_wakes_is_put_aside_and_its_thread_goes_on(url: str) -> None:
    """RES-08: what moves is left alone; a cancel ends the stuck run, and the next one starts."""
    nap = scripted("nap", lambda _: Sleep(duration=timedelta(days=1)))
    ask = scripted("ask", [Ask(title="Go on?"), Finish()])
    quick = scripted("quick", lambda _: Finish(answer="done"))
    async with flow(url, [nap, ask, quick]) as engine:
        stuck = await engine.submit("nap")
        sound = [await engine.submit("nap"), await engine.submit("nap", after=600)]
        asked = await engine.submit("ask")
        for run_id in (stuck, sound[0]):
            await engine.wait_until(run_id, lambda row: row.hot.parked_on is ParkedOn.TIMER)
        await engine.wait_waiting(asked)
        thread = (await engine.run(stuck)).facts.thread_id
        behind = await engine.submit("quick", thread_id=thread)
        maintenance = Maintenance(core=engine.core, tools=None)
        assert await maintenance.put_unmoved_aside() == []
        Rows(url).damage("DELETE FROM ready WHERE run_id = ?", stuck)
        found: list[Finding] = []
        await verify(engine.core.reader, run_id=stuck, on_finding=found.append)
        assert [finding.check for finding in found] == ["L6"]
        assert await maintenance.put_unmoved_aside() == [stuck]
        row = await engine.run(stuck)
        assert waiting_on(row.hot) is WaitingOn.REPAIR
        (repair,) = data_of(await engine.events(stuck), RepairEvent)
        assert (repair.action, "nothing moves it" in repair.reason) == ("quarantine", True)
        assert await maintenance.put_unmoved_aside() == []
        await engine.cancel(stuck)
        assert (await engine.wait_terminal(stuck)).hot.code is FailureCode.RUN_CANCELLED
        assert (await engine.wait_terminal(behind)).hot.state is RunState.SUCCEEDED
        for run_id in (*sound, asked):
            await engine.cancel(run_id)
