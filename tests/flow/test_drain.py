"""A worker that is told to stop hands its runs back; nothing is lost and nothing twice (R-12.4)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.errors import Unavailable
from perdure.protocol.states import AttemptEnd, RunState
from perdure.store.ports import Store
from perdure.store.requests import Claimed, ClaimWant, LeaseKey
from perdure.testing.embedded import SETTINGS, call, new_worker, scripted, unasked
from perdure.testing.tools import ToolZoo
from tests.flow.world import flow

RUNS = 10
STEPS = 6


def walking(context: PlannerContext) -> Decision:
    """Pay once a step."""
    step = context.step_index
    return Finish(answer=step) if step == STEPS else call("pay", amount=step)


@pytest.mark.slow
async def test_deploys_under_load_lose_nothing(url: str, zoo: ToolZoo) -> None:
    """R-12.4, R-12.1, F06: workers come and go while runs are under way; each step happens once."""
    agent = scripted("walker", walking, tools=unasked("pay"))
    async with flow(url, [agent], zoo) as engine:
        run_ids = [await engine.submit("walker") for _ in range(RUNS)]
        for number in range(3):
            await zoo.wait_started("pay", (number + 1) * 5)
            old = engine.worker
            await engine.start_worker()
            await engine.drain(old)
            assert old.held_runs == []
        rows = [await engine.wait_terminal(run_id) for run_id in run_ids]
        assert {row.hot.state for row in rows} == {RunState.SUCCEEDED}
        assert {row.hot.faults for row in rows} == {0}
        assert len(zoo.payments()) == RUNS * STEPS
        assert len({line["key"] for line in zoo.payments()}) == RUNS * STEPS
        ends = {
            attempt.end_reason
            for run_id in run_ids
            for attempt in await engine.core.reader.list_attempts(run_id)
        }
        assert ends <= {AttemptEnd.DRAINED, AttemptEnd.FINISHED}


async def test_a_call_in_flight_is_let_finish_and_recorded(url: str, zoo: ToolZoo) -> None:
    """R-12.4: within the grace period the result is committed before the run is handed back."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="done") if context.turns else call("hang")

    async with flow(url, [scripted("one", decide, tools=["hang"])], zoo) as engine:
        run_id = await engine.submit("one")
        await zoo.wait_started("hang")
        async with anyio.create_task_group() as group:
            group.start_soon(engine.drain, engine.worker)
            await anyio.lowlevel.checkpoint()
            zoo.open_gate()
        (first,) = await engine.core.reader.list_attempts(run_id)
        assert first.end_reason is AttemptEnd.DRAINED
        (held,) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=5)
        assert held.result_seq is not None
        assert await engine.core.reader.is_ready(run_id)
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert zoo.executions == {"hang": 1}


class LateAnswers:
    """A store whose claims are durable at once and answered when the test says so."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.claimed = anyio.Event()
        self.answer = anyio.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """Claim, and keep the answer back."""
        found = await self._inner.claim_runs(want)
        if found:
            self.claimed.set()
            await self.answer.wait()
        return found


async def test_a_claim_under_way_is_not_forgotten(url: str) -> None:
    """R-12.4, R-12.1: what is claimed while the worker drains is handed back, not left to expire."""
    async with flow(url, [scripted("one", [Finish(answer="done")])], start=False) as engine:
        store = LateAnswers(engine.core.store)
        core = replace(engine.core, store=cast("Store", store))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        run_id = await engine.submit("one")
        await store.claimed.wait()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.drain, engine.worker)
            await anyio.lowlevel.checkpoint()
            store.answer.set()
        row = await engine.run(run_id)
        assert (row.hot.lease_owner, row.hot.faults) == (None, 0)
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


class Troubled:
    """A store whose first claim answers late, and whose first releases find rows locked or fail."""

    def __init__(self, store: Store, troubles: Sequence[str], *, claim_late_s: float = 0) -> None:
        self._store = store
        self._troubles = [*troubles]
        self._late_s = claim_late_s
        self.releases = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    async def claim_runs(self, want: ClaimWant) -> Sequence[Claimed]:
        """Claim at once, and tell of it late."""
        claimed = await self._store.claim_runs(want)
        if claimed:
            late_s, self._late_s = self._late_s, 0
            await anyio.sleep(late_s)
        return claimed

    async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
        """Meet the next trouble, if there is one left."""
        self.releases += 1
        if not self._troubles:
            return await self._store.release_runs(worker_id, leases)
        if self._troubles.pop(0) == "away":
            raise Unavailable("the store is away")
        return 0


async def test_a_run_whose_row_is_locked_while_it_is_handed_back_is_not_left_to_run_out(
    url: str, zoo: ToolZoo
) -> None:
    """R-12.4: nobody could take it for the rest of the lease, and that counted as a fault of it."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="done") if context.turns else call("hang")

    settings = replace(SETTINGS, drain_grace_s=0.05)
    agent = scripted("one", decide, tools=["hang"])
    async with flow(url, [agent], zoo, settings=settings, start=False) as engine:
        store = Troubled(engine.core.store, ["busy"] * 3)
        core = replace(engine.core, store=cast("Store", store))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        run_id = await engine.submit("one")
        await zoo.wait_started("hang")
        await engine.drain()
        row = await engine.run(run_id)
        assert (row.hot.lease_owner, row.hot.faults, store.releases) == (None, 0, 4)
        assert await engine.core.reader.is_ready(run_id)


@pytest.mark.parametrize("trouble", ["busy", "away"])
async def test_a_claim_that_is_told_too_late_is_handed_back_though_the_store_is_in_trouble(
    url: str, zoo: ToolZoo, trouble: str
) -> None:
    """R-7.2: its lease ran out, and that counted as a fault of a run that was never tried."""
    settings = replace(SETTINGS, lease_ttl_s=2.0, lease_margin_s=0.5, heartbeat_s=0.5)
    agent = scripted("one", [Finish(answer="done")])
    async with flow(url, [agent], zoo, settings=settings, start=False) as engine:
        troubles = [trouble] * (1 if trouble == "away" else 4)
        store = Troubled(engine.core.store, troubles, claim_late_s=1.2)
        core = replace(engine.core, store=cast("Store", store))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        run_id = await engine.submit("one")
        await engine.wait_terminal(run_id)
        attempts = await engine.core.reader.list_attempts(run_id)
        assert [one.end_reason for one in attempts] == [AttemptEnd.DRAINED, AttemptEnd.FINISHED]
