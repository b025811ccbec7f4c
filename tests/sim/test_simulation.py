"""The deterministic simulation: seeds are green, replay exactly, and find planted faults (P2)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from perdure.testing.sim import StoreKind, draw_script, shrink, simulate
from perdure.testing.sim.draw import PROFILES
from perdure.testing.sim.planted import PLANTED, Planted
from perdure.testing.sim.script import Crash, Jump, Profile, Script, Submit
from perdure.testing.sim.stores import STORES

SEEDS = 25
FIVE = [planted for planted in PLANTED if planted.profile != "fields"]
SEEDS_MAX = 40
"""A planted fault is found within so many seeds."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_seeds_are_green_and_exercise_every_kind_of_fault() -> None:
    """Architecture §9.3: verify is empty, all ends, the journal and what was followed are right."""
    coverage: set[str] = set()
    for seed in range(1, SEEDS + 1):
        outcome = simulate(draw_script(seed))
        assert outcome.is_green, (seed, [str(finding) for finding in outcome.findings])
        coverage |= set(outcome.coverage)
    told = " ".join(sorted(coverage))
    for kind in ("refused", "ack_lost", "late", "slow", "crash", "crash_after", "pause"):
        assert f"fault {kind} at" in told
    for what in (
        "signal lost",
        "signal doubled",
        "signal misdirected",
        "clock set",
        "answers opposite",
        "answers doubled",
        "answer outcome retry",
        "cancel accepted interrupt",
        "cancel accepted rollback",
        "event late",
        "event child",
        "event artifact",
        "transition expired",
        "transition rejected",
        "transition exec_error",
    ):
        assert what in told


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("planted", FIVE, ids=lambda planted: planted.name)
def test_a_planted_fault_is_found(planted: Planted, store: StoreKind) -> None:
    """Each of the five faults of issue 4 (P2) breaks a check, and leaves nothing behind."""
    found = next((seed for seed in range(1, SEEDS_MAX + 1) if _fails(seed, planted, store)), None)
    assert found is not None
    assert simulate(draw_script(found, planted.profile), store=store).is_green


def _fails(seed: int, planted: Planted, store: StoreKind = "memory") -> bool:
    return not simulate(draw_script(seed, planted.profile), planted, store=store).is_green


@pytest.mark.parametrize(
    ("seed", "profile"),
    [
        (2114, "crash"),
        (2606, "commits"),
        (4606, "mixed"),
        (15061, "mixed"),
        (17251, "mixed"),
        (17264, "mixed"),
        (2434, "mixed"),
        (3318, "mixed"),
        (9309, "mixed"),
    ],
)
def test_seeds_that_found_faults_are_green(seed: int, profile: Profile) -> None:
    """R-9.4: a parent undid again what an orphaned child had begun to undo. R-7.4: a fork and the
    run it was made beside paid under one key. R-10.4: what came as a run's time was over was late.
    R-9.4: a run undid again what one between it and a run below had undone. R-9.1: a cancelled run
    ended from its rows told of nobody. R-7.7: one whose history went while it was read was damaged.
    R-5.7: a fork made a failed call again under the key of its origin. I19 judged a dropped history.
    R-5.7: a retry paid under the key under which the run that went on by itself had paid."""
    outcome = simulate(draw_script(seed, profile))
    assert outcome.is_green, outcome.findings


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_fields_that_outlive_their_runs_hold_what_the_books_say() -> None:
    """R-1.5: by every rule, in threads and agents, over others and behind origins; on both stores."""
    coverage: set[str] = set()
    plays: list[tuple[int, StoreKind]] = [(seed, "memory") for seed in range(1, 8)]
    plays.append((8, "sqlite"))
    for seed, store in plays:
        outcome = simulate(draw_script(seed, "fields"), store=store)
        assert outcome.is_green, (seed, [str(finding) for finding in outcome.findings])
        coverage |= set(outcome.coverage)
    told = " ".join(sorted(coverage))
    for what in (
        "field left over others add agent",
        "field left append thread",
        "field left reducer agent",
        "field left replace",
        "field left by a run with an origin",
        "field row after an adoption",
        "writes settled",
    ):
        assert what in told


@pytest.mark.parametrize(
    ("name", "seed", "store"),
    [
        ("update-lost", 8, "memory"),
        ("update-lost", 10, "sqlite"),
        ("left-twice", 15, "memory"),
        ("left-twice", 1, "sqlite"),
    ],
)
def test_the_books_find_what_is_lost_or_left_twice(name: str, seed: int, store: StoreKind) -> None:
    """R-1.5: beside `verify`, which does not see what a fork should not have left."""
    planted = next(one for one in PLANTED if one.name == name)
    outcome = simulate(draw_script(seed, planted.profile), planted, store=store)
    assert "fields" in {finding.check for finding in outcome.findings}


@pytest.mark.parametrize("store", STORES)
def test_a_seed_replays_exactly(store: StoreKind) -> None:
    """The same script gives the same trace, whatever lies where in memory; another seed another."""
    first = simulate(draw_script(1), store=store)
    ballast = [bytearray(1000 + place) for place in range(500)]
    again = simulate(draw_script(1), store=store)
    assert first.is_green, first.findings
    assert (first.digest, first.trace) == (again.digest, again.trace)
    assert simulate(draw_script(2), store=store).digest != first.digest
    del ballast


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_the_command_tells_the_same_digests_in_every_process() -> None:
    """Whatever the hash seed of the process; a failure is told with its short script, exit 1."""
    told = [_command("--seeds", "3..4", "--json", "--digests", hash_seed=seed) for seed in "15"]
    assert told[0][0] == told[1][0] == 0
    assert told[0][1]["digests"] == told[1][1]["digests"]
    code, failed = _command(
        "--seeds", "1..9", "--json", "--no-shrink", "--planted", PLANTED[2].name
    )
    assert code == 1
    assert failed["failed"][0]["findings"]


def _command(*arguments: str, hash_seed: str = "7") -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "perdure.testing.sim.command", *arguments],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_shrinking_keeps_what_the_failure_needs() -> None:
    """A shorter script fails alike, and leaves out crashes that an answer by order does not need."""
    planted = next(one for one in PLANTED if one.name == "resumed-by-order")
    seed = next(seed for seed in range(1, SEEDS_MAX + 1) if _fails(seed, planted))
    outcome = simulate(draw_script(seed, planted.profile), planted)
    short = shrink(outcome, planted, plays_max=15)
    assert not short.is_green
    assert len(short.script.items) < len(outcome.script.items)
    assert simulate(short.script, planted).digest == short.digest


def test_a_worker_that_is_dead_does_nothing_more() -> None:
    """A crash runs no clean-up: its leases stay until they expire, and others recover its runs."""
    script = draw_script(5, "calm")
    crashes = tuple(Crash(at, worker, 5.0) for worker, at in enumerate((3.0, 9.0, 15.0)))
    items = sorted((*script.items, *crashes), key=lambda item: item.at)
    outcome = simulate(replace(script, items=tuple(items)))
    assert outcome.is_green, outcome.findings
    assert outcome.coverage["worker crashed"] == 3


def test_a_worker_whose_clock_is_behind_tries_a_call_again_in_time() -> None:
    """R-10.1: found by seed 229. The back-off began anew with each claim, as long as it lagged."""
    submit = Submit(
        at=2.0,
        run=0,
        agent="loop",
        steps=(["call", [["flaky", 2]]],),
    )
    outcome = simulate(Script(1, (Jump(1.0, None, 3600.0), submit)))
    assert outcome.is_green, outcome.findings
    assert outcome.coverage["event retry"] == 2
    assert outcome.coverage["event attempt"] < 10


@pytest.mark.crash_full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("profile", PROFILES)
def test_many_seeds_are_green(profile: Profile) -> None:
    """P2: hundreds of seeds of each profile; part of `make crash`."""
    for seed in range(1, 501):
        outcome = simulate(draw_script(seed, profile))
        assert outcome.is_green, (seed, [str(finding) for finding in outcome.findings])
