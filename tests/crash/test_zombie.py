"""Workers that are stopped and come back, workers that all die, and a run that kills its worker.

Real processes and signals on both stores (faults F03, F05, F09, F45; case BUD-08).
"""

import random
import signal
from pathlib import Path

import anyio
import pytest

from perdure.protocol.events import LateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.policies import MAX_ATTEMPTS_DEFAULT
from perdure.protocol.states import AttemptEnd, RunState, ToolCallStatus
from perdure.testing.stopping import stop_between_writes
from tests.crash.stage import Followed, Stage, staged

WORKERS = 3
SEED = 7_203
PATIENT = 50
"""Attempts that a swizzled run may lose in one step: its bound is not what is tested."""


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database that goes with the test."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'scene.db'}"
    return request.getfixturevalue("postgres_own_dsn")


# ---------------------------------------------------------------- one stale writer


async def assert_sound(stage: Stage, followed: Followed, state: RunState) -> list[RecordedEvent]:
    """Fail unless the run ended so and nothing is wrong with any row; return its log."""
    row = await stage.row(followed.run_id)
    assert row.hot.state is state, row.hot
    assert await stage.findings() == []
    keys = [line["key"] for line in stage.outside.payments()]
    assert len(keys) == len(set(keys))
    return await stage.log(followed.run_id)


async def late_of(stage: Stage, run_id: str) -> list[LateEvent]:
    """Return the late results of a run once there is one."""
    with anyio.fail_after(30):
        while not (rows := await stage.core.reader.list_late(run_id)):  # noqa: ASYNC110  # after the end no signal is due
            await anyio.sleep(0.02)
    log = await stage.log(run_id)
    found = [event.data for event in log if isinstance(event.data, LateEvent)]
    assert len(found) == len(rows)
    return found


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("gate", ["opened while it is stopped", "opened when it is back"])
async def test_a_stopped_worker_changes_nothing_when_it_is_back(
    url: str, tmp_path: Path, gate: str
) -> None:
    """R-9.3, A4, F03, CON-01: the new attempt finishes; the old one's result is evidence, no more."""
    async with staged(url, tmp_path) as stage:
        followed = await stage.submit("gate")
        first = await stage.worker()
        await stage.began("pay_at_gate")
        await stop_between_writes(stage.url, first.send)
        second = await stage.worker()
        await followed.wait(second)
        taken_over = (await stage.row(followed.run_id)).hot.last_seq
        name = f"{followed.run_id}-1"
        if gate == "opened while it is stopped":
            stage.outside.open_gate(name)
            first.send(signal.SIGCONT)
        else:
            first.send(signal.SIGCONT)
            await anyio.sleep(0.1)
            stage.outside.open_gate(name)
        (late,) = await late_of(stage, followed.run_id)
        await first.drained()
        await second.drained()

        log = await assert_sound(stage, followed, RunState.SUCCEEDED)
        assert (late.execution, late.attempt, late.status) == (1, 1, ToolCallStatus.SUCCEEDED)
        assert late.external_ref is not None
        lost = next(e.seq for e in log if e.type == "attempt" and e.data.phase == "lost")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]  # an attempt event
        assert {e.attempt for e in log if e.seq > lost and e.type != "late"} == {2}
        assert [e.type for e in log if e.seq > taken_over] == ["late"]
        attempts = await stage.core.reader.list_attempts(followed.run_id)
        assert [row.end_reason for row in attempts] == [AttemptEnd.LEASE_LOST, AttemptEnd.FINISHED]


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_short_stop_is_not_noticed(url: str, tmp_path: Path) -> None:
    """F04: stopped for less than the lease, the worker goes on as the same attempt."""
    async with staged(url, tmp_path, lease_s=20.0) as stage:
        followed = await stage.submit("gate")
        first = await stage.worker()
        second = await stage.worker()
        await stage.began("pay_at_gate")
        for actor in (first, second):
            await stop_between_writes(stage.url, actor.send)
        stage.outside.open_gate(f"{followed.run_id}-1")
        await anyio.sleep(1.0)
        for actor in (first, second):
            actor.send(signal.SIGCONT)
        await followed.wait(first, second)
        for actor in (first, second):
            await actor.drained()
        await assert_sound(stage, followed, RunState.SUCCEEDED)
        assert len(await stage.core.reader.list_attempts(followed.run_id)) == 1
        assert await stage.core.reader.list_late(followed.run_id) == []


# ---------------------------------------------------------------- many at a time


async def swizzle(stage: Stage, rounds: int, seed: int) -> None:
    """Stop k of n workers one by one, let them go on in random order; runs come all the time."""
    chance = random.Random(seed)  # noqa: S311  # a script that can be repeated
    workers = [await stage.worker() for _ in range(WORKERS)]
    runs: list[Followed] = []
    for number in range(rounds):
        runs += [
            await stage.submit("steps", f"run-{number}-{place}", PATIENT) for place in range(4)
        ]
        gated = await stage.submit("gate", f"gate-{number}", PATIENT)
        runs.append(gated)
        await stage.began("pay_at_gate", gated.run_id)
        chosen = chance.sample(workers, chance.randint(1, WORKERS))
        for actor in chosen:
            await stop_between_writes(stage.url, actor.send)
        await anyio.sleep(stage.lease_s * 1.3)  # the fault itself: past the lease
        chance.shuffle(chosen)
        for actor in chosen:
            actor.send(signal.SIGCONT)
        stage.outside.open_gate(f"{gated.run_id}-1")
    for followed in runs:
        await followed.wait(*workers)
    for actor in workers:
        await actor.drained()
    for followed in runs:
        await assert_ended(stage, followed)
    assert await stage.findings() == []


async def assert_ended(stage: Stage, followed: Followed) -> None:
    """Fail unless the run succeeded and its follower saw all of it, up to the end."""
    row = await stage.row(followed.run_id)
    assert row.hot.state is RunState.SUCCEEDED, row.hot
    log = await stage.log(followed.run_id)
    assert followed.events == log[: len(followed.events)]
    assert {event.type for event in log[len(followed.events) :]} <= {"late"}
    keys = [line["key"] for line in stage.outside.payments()]
    assert len(keys) == len(set(keys))


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_workers_that_stop_and_go_on_lose_no_run(url: str, tmp_path: Path) -> None:
    """F05, one round."""
    async with staged(url, tmp_path) as stage:
        await swizzle(stage, 1, SEED)


@pytest.mark.crash_full
@pytest.mark.timeout(400)
async def test_workers_that_keep_stopping_and_going_on_lose_no_run(
    url: str, tmp_path: Path
) -> None:
    """F05, five rounds."""
    async with staged(url, tmp_path) as stage:
        await swizzle(stage, 5, SEED + 1)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_everything_goes_on_from_the_database_after_all_processes_died(
    url: str, tmp_path: Path
) -> None:
    """R-1.6, R-12.1, F09: kill -9 of all workers at once."""
    async with staged(url, tmp_path) as stage:
        runs = [await stage.submit("steps", f"run-{number}") for number in range(6)]
        runs += [await stage.submit("pay", f"pay-{number}") for number in range(2)]
        gated = await stage.submit("gate", "gate")
        workers = [await stage.worker() for _ in range(2)]
        await stage.began("pay_at_gate")
        for actor in workers:
            actor.send(signal.SIGKILL)
        for actor in workers:
            await actor.was_killed()
        workers = [await stage.worker() for _ in range(2)]
        for followed in [*runs, gated]:
            await followed.wait(*workers)
        for actor in workers:
            await actor.drained()
        for followed in [*runs, gated]:
            await assert_ended(stage, followed)
        assert await stage.findings() == []


# ---------------------------------------------------------------- a run that kills its worker


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_run_that_kills_its_worker_is_given_up_and_the_others_end(
    url: str, tmp_path: Path
) -> None:
    """BUD-08, F45: exactly max_attempts attempts, then RETRIES_EXHAUSTED.

    Its neighbours finish a step between two deaths. One that cannot (its step takes longer than
    the poison needs) shares the worker's faults and is given up too: the claim knows no suspects.
    """
    async with staged(url, tmp_path) as stage:
        bad = await stage.submit("poison", "bad")
        good: list[Followed] = []
        for number in range(1, MAX_ATTEMPTS_DEFAULT + 1):
            fresh = [await stage.submit("steps", f"good-{number}-{place}") for place in range(3)]
            good += fresh
            actor = await stage.worker()
            await stage.began("poison", bad.run_id, number)
            for followed in fresh:
                await followed.finished_a_step()
            stage.outside.open_gate(f"{bad.run_id}-{number}")
            assert await actor.ended() == 137, actor.said()
        survivor = await stage.worker()
        for followed in [bad, *good]:
            await followed.wait(survivor)
        await survivor.drained()

        row = await stage.row(bad.run_id)
        assert row.hot.state is RunState.FAILED
        assert row.hot.code is FailureCode.RETRIES_EXHAUSTED
        attempts = await stage.core.reader.list_attempts(bad.run_id)
        assert [row.end_reason for row in attempts] == [AttemptEnd.LEASE_LOST] * 3
        deaths = [line for line in stage.outside.executions() if line["tool"] == "poison"]
        assert len(deaths) == MAX_ATTEMPTS_DEFAULT
        for followed in good:
            await assert_ended(stage, followed)
        assert await stage.findings() == []
