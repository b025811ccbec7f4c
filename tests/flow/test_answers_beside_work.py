"""Answers that arrive while a run is not simply waiting: nothing is lost, nothing goes on."""

from perdure.engine.context import PlannerContext
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.events import ApprovalRequestEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import Answer, RunState
from perdure.store.requests import LeaseKey
from perdure.testing.embedded import calls, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import flow


async def test_an_approval_of_a_run_that_nobody_holds_leaves_it_claimable(
    url: str, zoo: ToolZoo
) -> None:
    """R-8.2, R-12.4: drained while a sibling ran, then approved: the run goes on."""

    def decide(context: PlannerContext) -> Decision:
        if context.turns:
            return Finish(answer="both")
        return calls(("pay", {"amount": 1}), ("slow", {"seconds": 30}))

    agent = scripted("both", decide, tools=["pay", "slow"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("both", timeouts={"tool_s": 0.5})
        asked = await engine.wait_event(run_id, "approval_request")
        await zoo.wait_started("slow")
        await engine.kill_worker()
        row = await engine.run(run_id)
        assert row.hot.lease_owner is not None
        key = LeaseKey(run_id=run_id, token=row.hot.lease_token)
        assert await engine.core.store.release_runs(row.hot.lease_owner, [key]) == 1
        assert isinstance(asked.data, ApprovalRequestEvent)
        await engine.answer(asked.data.approval_id, Answer.APPROVE)
        assert await engine.core.reader.is_ready(run_id)
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert len(zoo.payments()) == 1


async def test_a_rejection_beside_running_calls_starts_no_more_of_them(
    url: str, zoo: ToolZoo
) -> None:
    """R-8.3: the run fails for the first rejection; calls that wait are not started."""

    def decide(context: PlannerContext) -> Decision:
        del context
        return calls(("pay", {"amount": 1}), ("pay_late", {"amount": 2}), ("hang", {}))

    agent = scripted("three", decide, tools=["pay", "pay_late", "hang"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("three")
        await zoo.wait_started("hang")
        first, second = await engine.pending(run_id)
        await engine.answer(first.interrupt_id, Answer.REJECT, by="ada", reason="no")
        zoo.open_gate()
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.APPROVAL_REJECTED
        closed = await engine.core.reader.find_interrupt(None, second.interrupt_id)
        assert closed is not None
        assert closed.status == "cancelled"
        end = (await engine.events(run_id))[-1].data
        assert isinstance(end, StateEvent)
        assert end.failure is not None
        assert end.failure.details == {"interrupt_id": first.interrupt_id, "by": "ada"}
        assert zoo.payments() == []
