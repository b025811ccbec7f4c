"""A run that kills whatever worker takes it does not exhaust its neighbours (F45)."""

from dataclasses import dataclass, field

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import AttemptEnd, RunState
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded
from tests.flow.world import flow

GOOD = 20


@dataclass(slots=True)
class Beside:
    """Plans for the poison and its neighbours: none beside the poison gets to decide anything."""

    engine: Embedded | None = None
    poison: str = ""
    struck: anyio.Event = field(default_factory=anyio.Event)

    async def next_step(self, context: PlannerContext) -> Decision:
        """Finish, unless the poison is in the same worker's hands: then the worker is doomed."""
        if context.facts.run_id == self.poison:
            self.struck.set()
        assert self.engine is not None
        if self.poison in self.engine.worker.held_runs:
            await anyio.sleep_forever()
        return Finish(answer="done")


@pytest.mark.slow
async def test_a_run_that_kills_its_workers_costs_its_neighbours_one_attempt(url: str) -> None:
    """F45, R-10.2, TIM-09: it ends after its own attempts; of 20 others each loses at most one."""
    planner = Beside()
    agent = HostedAgent(card=AgentCard(agent_id="any", version="1"), planner=planner)
    clock = ShiftingClock()
    async with flow(url, [agent], clock=clock, start=False) as engine:
        planner.engine = engine
        await engine.drain(await engine.start_worker())  # the agent is known from now on
        planner.poison = await engine.submit("any", max_attempts=3)
        good = [await engine.submit("any", max_attempts=3) for _ in range(GOOD)]
        for _ in range(3):
            planner.struck = anyio.Event()
            await engine.start_worker()
            with anyio.fail_after(30):
                await planner.struck.wait()
            await engine.kill_worker()
            clock.advance(60)  # its leases run out
        await engine.start_worker()
        row = await engine.wait_terminal(planner.poison)
        assert (row.hot.state, row.hot.code) == (RunState.FAILED, FailureCode.RETRIES_EXHAUSTED)
        for run_id in good:
            row = await engine.wait_terminal(run_id)
            assert row.hot.state is RunState.SUCCEEDED
            attempts = await engine.core.reader.list_attempts(run_id)
            lost = [one for one in attempts if one.end_reason is AttemptEnd.LEASE_LOST]
            assert len(lost) <= 1
        listed = await engine.core.reader.list_runs(None, RunFilter(), after=None, limit=50)
        assert len(listed) == 1 + GOOD, "no work was added anew"
