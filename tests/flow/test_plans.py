"""Plans: revised by whoever plans, durable and streamed, resumed where they stood (R-15.1)."""

from perdure.agents.code import AgentFailed, Context, PlanItem, agent
from perdure.engine.states import state_at
from perdure.protocol.events import PlanEvent
from perdure.testing.clock import ShiftingClock
from perdure.testing.tools import ToolZoo
from tests.flow.test_code_agents import answer_of, failure_of
from tests.flow.test_retry import again
from tests.flow.world import data_of, flow

STAGES = ("load", "compute", "tell")


@agent("stages", "1", tools=["echo", "hang"])
async def stages(ctx: Context, input: object) -> object:
    """Go through the stages, and revise the plan before each."""
    for here, name in enumerate(STAGES):
        ctx.plan(
            [
                *[PlanItem(text=past, status="done") for past in STAGES[:here]],
                PlanItem(text=name, status="in_progress"),
                *STAGES[here + 1 :],
            ]
        )
        await ctx.tool("hang" if name == "compute" else "echo", **_args(name))
        if name == input:
            raise AgentFailed("as asked")
    ctx.plan([PlanItem(text=name, status="done") for name in STAGES])
    return "told"


def _args(name: str) -> dict[str, object]:
    return {} if name == "compute" else {"value": name}


async def test_a_plan_goes_on_where_it_stood_when_its_worker_dies(url: str, zoo: ToolZoo) -> None:
    """R-15.1: each revision once, in order; the checkpoint shows the last one."""
    clock = ShiftingClock()
    async with flow(url, [stages], zoo, clock=clock) as engine:
        run_id = await engine.submit("stages")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        assert await answer_of(engine, run_id) == "told"
        plans = data_of(await engine.events(run_id), PlanEvent)
        assert [plan.revision for plan in plans] == [1, 2, 3, 4]
        assert [[item.status for item in plan.items] for plan in plans] == [
            ["in_progress", "pending", "pending"],
            ["done", "in_progress", "pending"],
            ["done", "done", "in_progress"],
            ["done", "done", "done"],
        ]
        row = await engine.run(run_id)
        state = await state_at(engine.core, row, row.hot.last_seq)
        assert state["plan"] == [{"text": name, "status": "done"} for name in STAGES]


async def test_a_retry_goes_on_with_the_plan_of_its_origin(url: str, zoo: ToolZoo) -> None:
    """R-15.1, R-10.3: what was revised is not revised again."""
    zoo.open_gate()
    async with flow(url, [stages], zoo) as engine:
        run_id = await engine.submit("stages", "compute")
        await failure_of(engine, run_id)
        made = await again(engine, run_id)
        await failure_of(engine, made.run_id)
        assert data_of(await engine.events(made.run_id), PlanEvent) == []
        row = await engine.run(made.run_id)
        plan = (await state_at(engine.core, row, row.hot.last_seq))["plan"]
        assert isinstance(plan, list)
        assert plan[1] == {"text": "compute", "status": "in_progress"}
