"""What is read of a run in several steps is shown as it was at one moment, never mixed (R-1.1)."""

from perdure.protocol.decisions import Ask, Finish
from perdure.protocol.states import Answer, NextAction, RunStatus
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.runs import get_run, list_runs
from perdure.service.steps import list_steps
from perdure.service.tool_calls import get_tool_call, list_tool_calls
from perdure.testing.embedded import call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.meanwhile import disturbed
from tests.flow.world import flow


async def test_a_run_that_is_answered_while_it_is_read_is_shown_as_it_is_then(url: str) -> None:
    """R-1.1, R-8.1: a run that waits for a person names what is asked; lists say so as well."""
    script = [Ask(title="one"), Ask(title="two"), Ask(title="three"), Finish(answer=1)]
    async with flow(url, [scripted("asker", script)]) as engine:
        run_id = await engine.submit("asker")

        async def answer_and_stop() -> None:
            await engine.stop()
            (asked,) = await engine.pending(run_id)
            await engine.answer(asked.interrupt_id, Answer.RESPOND, value=1)

        await engine.wait_waiting(run_id)
        (first,) = await engine.pending(run_id)
        service = disturbed(engine, "list_interrupts", answer_and_stop)
        shown = await get_run(service, LOCAL, run_id)
        assert first.interrupt_id not in shown.open_interrupts
        assert (shown.status, shown.open_interrupts) == (RunStatus.QUEUED, [])
        assert NextAction.ANSWER_INTERRUPT not in shown.next_actions

        await engine.start_worker()
        await engine.wait_waiting(run_id)
        service = disturbed(engine, "list_interrupts", answer_and_stop)
        (shown,) = (await list_runs(service, LOCAL, limit=5)).items
        assert (shown.status, shown.open_interrupts) == (RunStatus.QUEUED, [])


async def test_calls_and_steps_are_shown_as_they_were_at_one_moment(url: str, zoo: ToolZoo) -> None:
    """R-1.3: a call that waits has no execution; a step that is over has no open items."""
    script = [call("pay", amount=1), Ask(title="?"), Finish(answer=1)]
    async with flow(url, [scripted("payer", script, tools=["pay"])], zoo) as engine:
        for_list, for_one, for_steps = [await engine.submit("payer") for _ in range(3)]

        async def approve(run_id: str) -> None:
            (asked,) = await engine.pending(run_id)
            await engine.answer(asked.interrupt_id, Answer.APPROVE)
            await engine.wait_until(run_id, lambda row: row.hot.step_index > before)

        for run_id in (for_list, for_one, for_steps):
            await engine.wait_waiting(run_id)
        before = (await engine.run(for_list)).hot.step_index

        service = disturbed(engine, "list_executions", lambda: approve(for_list))
        (shown,) = (await list_tool_calls(service, LOCAL, for_list, after=None, limit=5)).items
        assert (shown.status, len(shown.executions)) == ("succeeded", 1)
        assert shown.output is not None

        (waits,) = (
            await list_tool_calls(Service(core=engine.core), LOCAL, for_one, after=None, limit=5)
        ).items
        service = disturbed(engine, "list_executions", lambda: approve(for_one))
        shown = await get_tool_call(service, LOCAL, waits.tool_call_id)
        assert (shown.status, len(shown.executions)) == ("succeeded", 1)

        service = disturbed(engine, "list_steps", lambda: approve(for_steps))
        steps = (await list_steps(service, LOCAL, for_steps, after=-1, limit=5)).items
        closed = [step for step in steps if step.last_seq is not None]
        assert closed
        assert all(item.end_seq is not None for step in closed for item in step.items)
