"""Campaigns of chaos with real processes, in small; `make chaos` runs them for as long as wanted.

Whatever is disturbed: no acknowledged run is lost, none ends twice, new runs end after each fault,
what clients saw is the log, payments are made once, `verify` is empty, and all processes end in
order (line P3 of issue 4).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from perdure.testing.chaos import Plan, Record, run_campaign
from perdure.testing.chaos.faults import FAULTS
from perdure.testing.chaos.grounds import StoreName

SHORT = Plan(store="sqlite", seconds=30.0, seed=7, workers=3, clients=8)
SMALL = Plan(store="sqlite", rounds=2, seed=5, workers=1, servers=1, clients=2, lease_s=1.0)


def in_order(record: Record) -> Record:
    """Fail unless the campaign found nothing and had something to find."""
    assert not record.findings, record.as_text()
    assert record.counts["runs ended"]["succeeded"] > 0
    assert record.counts["streams"]["events compared"] > 0
    assert record.counts["processes"]["ended in order"] > 0
    return record


async def played(plan: Plan, folder: Path, faults: Sequence[str]) -> Record:
    """Run a campaign of these faults, each at least once."""
    plan = replace(plan, faults=tuple(faults), rounds=plan.rounds or len(faults))
    record = in_order(await run_campaign(plan, folder))
    met = set(record.counts["faults"]) | set(record.left_out)
    assert met >= set(faults), record.as_text()
    return record


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_worker_and_a_server_that_are_killed_leave_everything_in_order(
    tmp_path: Path,
) -> None:
    """F01, F07, R-1.6: the smallest campaign."""
    await played(SMALL, tmp_path, ("kill worker", "kill server"))


@pytest.mark.crash_full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_processes_that_are_killed_stopped_and_replaced(
    store: StoreName, tmp_path: Path
) -> None:
    """F01, F03, F04, F05, F06, F07, F08, F09, F29, F30, F32, F48."""
    faults = [f.name for f in FAULTS if f.touches == "processes" and store in f.stores]
    await played(replace(SHORT, store=store, seconds=300.0), tmp_path, faults)


@pytest.mark.crash_full
@pytest.mark.timeout(900)
async def test_a_postgres_that_is_restarted_slow_and_cut_off(tmp_path: Path) -> None:
    """F12, F13, F14, F15, F22, F28."""
    faults = [f.name for f in FAULTS if f.touches == "database" and "postgres" in f.stores]
    record = await played(replace(SHORT, store="postgres", seconds=300.0), tmp_path, faults)
    assert record.counts["wire"]["answers of transactions lost"] > 0


@pytest.mark.crash_full
@pytest.mark.timeout(900)
async def test_a_sqlite_file_that_is_full_locked_and_read_for_long(tmp_path: Path) -> None:
    """F19, F20."""
    faults = [f.name for f in FAULTS if f.touches == "database" and "sqlite" in f.stores]
    await played(replace(SHORT, seconds=300.0), tmp_path, faults)


@pytest.mark.crash_full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_a_short_campaign_of_all_faults(store: StoreName, tmp_path: Path) -> None:
    """P3 of issue 4, for half a minute."""
    in_order(await run_campaign(replace(SHORT, store=store), tmp_path))
