"""Verification beside the work of a process: a page at a time, told once, damage put aside (R-7.7)."""

import logging
from pathlib import Path

import pytest

from perdure.agents.catalog import Catalog
from perdure.ops.settings import DatabaseSettings, Settings, VerifySettings
from perdure.ops.verify.sweep import RULES, Sweep, SweepTerms
from perdure.ops.verify.table import RUN_RULES
from perdure.protocol.decisions import Ask, Finish
from perdure.protocol.events import RepairEvent
from perdure.protocol.states import ParkedOn, RunState
from perdure.runtime import open_runtime
from perdure.store.sqlite import SqliteDatabase
from perdure.testing import builders as make
from perdure.testing.embedded import embedded, scripted
from tests.flow.rows import Rows
from tests.flow.world import data_of, database_at
from tests.waiting import eventually

AGENTS = [scripted("asks", [Ask(title="?"), Finish()]), scripted("ends", [Finish(answer="done")])]
CHECKPOINT = "UPDATE checkpoints SET digest = ! WHERE run_id = ?"
ANSWERED = "UPDATE interrupts SET answered_by = 'mallory' WHERE run_id = ?"
NO_JSON = "UPDATE events SET data = ! WHERE run_id = ? AND seq = 2"


def _findings(text: bytes) -> dict[str, float]:
    lines = text.decode().splitlines()
    told = [line for line in lines if line.startswith("perdure_verify_findings_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in told}


async def test_a_sweep_tells_each_finding_once_and_puts_aside_what_does_not_fold(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R-7.7, F21: a log that disagrees, and an event that cannot be read; another fault is told."""
    async with database_at(url) as database, embedded(database, AGENTS) as engine:
        waiting = [await engine.submit("asks") for _ in range(4)]
        ended = await engine.submit("ends")
        for run_id in waiting:
            await engine.wait_waiting(run_id)
        await engine.wait_terminal(ended)
        sweep = Sweep(core=engine.core)
        assert await sweep.run_once() == []
        changed, broken, odd, sound = waiting
        Rows(url).damage(CHECKPOINT, changed, bytes(32))
        Rows(url).damage(NO_JSON, broken, b"{")
        Rows(url).damage(ANSWERED, odd)
        Rows(url).damage(CHECKPOINT, ended, bytes(32))
        with caplog.at_level(logging.ERROR, logger="perdure.ops.verify.sweep"):
            found = await sweep.run_once()
            assert {one.run_id for one in found} == {changed, broken, odd, ended}
            assert {one.check for one in found if one.run_id == odd} == {"I33"}
            assert {one.check for one in found if one.run_id in {changed, ended}} == {"C1"}
            told = len(caplog.records)
            assert await sweep.run_once() != []
        assert len(caplog.records) == told, "what was told is not told again"
        assert _findings(engine.core.metrics.text())["C1"] >= 3
        for run_id in (changed, broken):
            assert (await engine.run(run_id)).hot.parked_on is ParkedOn.REPAIR
        for run_id in (odd, sound):
            assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN
            assert (await engine.run(run_id)).hot.parked_on is not ParkedOn.REPAIR
        (repair,) = data_of((await engine.events(changed))[2:], RepairEvent)
        assert "does not fold" in repair.reason


async def test_a_sweep_goes_through_all_runs_page_by_page_and_leaves_held_and_long_ones(
    url: str,
) -> None:
    """The page is the bound of what one look costs; the next one goes on behind it."""
    async with database_at(url) as database, embedded(database, AGENTS) as engine:
        runs = [await engine.submit("ends") for _ in range(5)]
        for run_id in runs:
            await engine.wait_terminal(run_id)
        await engine.drain()
        long = await engine.run(runs[0])
        held = (await make.claimed(database.store)).row.facts.run_id
        for run_id in (*runs, held):
            Rows(url).damage("UPDATE run_state SET open_calls = 1 WHERE run_id = ?", run_id)
        sweep = Sweep(core=engine.core, terms=SweepTerms(runs_max=2, events_max=1000))
        seen = [{one.run_id for one in await sweep.run_once()} for _ in range(4)]
        assert set().union(*seen) == {*runs}
        assert max(map(len, seen)) == 2
        assert seen[3] == set(), "behind the last page there is none, then all begins anew"
        assert {one.run_id for one in await sweep.run_once()} == seen[0]
        short = Sweep(core=engine.core, terms=SweepTerms(events_max=long.hot.last_seq - 1))
        assert await short.run_once() == []


async def test_a_worker_sweeps_beside_its_work_unless_it_is_turned_off(tmp_path: Path) -> None:
    """R-7.7: as the settings say."""
    path = tmp_path / "perdure.db"
    new = make.new_run()
    async with SqliteDatabase(path) as database:
        await database.store.insert_run(new)
    Rows(str(path)).damage("UPDATE run_state SET attempt = 1 WHERE run_id = ?", new.run_id)
    db = DatabaseSettings(url=f"sqlite:///{path}")
    catalog = Catalog([])
    settings = Settings(db=db, verify=VerifySettings(interval_s=0.01))
    async with open_runtime(settings, catalog) as runtime:
        metrics = runtime.service.core.metrics
        await eventually(lambda: "C1" in _findings(metrics.text()))
        row = await runtime.service.reader.find_run(None, new.run_id)
        assert row is not None
        assert row.hot.parked_on is ParkedOn.REPAIR
    off = Settings(db=db, verify=VerifySettings(interval_s=0))
    async with open_runtime(off, catalog) as runtime:
        assert runtime.worker.beside == ()


def test_a_sweep_leaves_out_only_what_needs_content() -> None:
    """All other checks of a run are made in production too."""
    assert {rule.check.id for rule in RUN_RULES} - {rule.check.id for rule in RULES} == {
        "I42",
        "H7",
    }
