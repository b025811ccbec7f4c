"""Breakpoints (R-8.4): pauses that ask nothing, allow nothing, and survive a restart."""

import pytest
from pydantic import JsonValue

from perdure.engine.breakpoints import Mode, continue_run
from perdure.protocol.breakpoints import Breakpoint
from perdure.protocol.decisions import Ask, Finish
from perdure.protocol.errors import AlreadyAnswered, Conflict, Gone, Invalid
from perdure.protocol.failures import FailureCode
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import next_actions, status_of
from perdure.protocol.states import (
    Answer,
    CancelAction,
    InterruptKind,
    NextAction,
    RunState,
    RunStatus,
)
from perdure.testing.embedded import Embedded, call, calls, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import flow

WALK = [
    calls(("echo", {"value": 1}), ("echo", {"value": 2})),
    call("echo", value=3),
    Finish(answer="done"),
]


async def paused(engine: Embedded, run_id: str) -> tuple[InterruptRow, str]:
    """Return the breakpoint a run is paused at, and its point."""
    (row,) = await engine.wait_waiting(run_id)
    assert row.kind is InterruptKind.BREAKPOINT
    return row, (row.key or "").split(":")[0]


async def go_on(
    engine: Embedded,
    run_id: str,
    mode: Mode = "next",
    *,
    at: str | None = None,
    breakpoints: tuple[Breakpoint, ...] | None = None,
) -> str:
    """Continue a paused run, whose breakpoint is then another one; return where it stood."""
    row, point = await paused(engine, run_id)
    await continue_run(
        engine.core,
        engine.tenant_id,
        run_id,
        at or row.interrupt_id,
        mode=mode,
        by="ada",
        breakpoints=breakpoints,
    )
    return point


async def begun(engine: Embedded, run_id: str) -> int:
    """Return how often calls of a run were handed to their tools."""
    return len(await engine.core.reader.list_executions(run_id))


def on(at: str, **more: JsonValue) -> dict[str, JsonValue]:
    """Return a breakpoint as it is given."""
    return {"at": at, **more}


async def test_each_point_pauses_once_and_a_restart_changes_nothing(url: str, zoo: ToolZoo) -> None:
    points = [on("before_step"), on("after_tool", tool="echo"), on("after_step")]
    async with flow(url, [scripted("walker", WALK, tools=["echo"])], zoo) as engine:
        run_id = await engine.submit("walker", breakpoints=points)
        row, _ = await paused(engine, run_id)
        run = await engine.run(run_id)
        assert await begun(engine, run_id) == 0
        assert (status_of(run.hot), run.hot.lease_owner) == (RunStatus.INPUT_REQUIRED, None)
        assert next_actions(run.hot) == [NextAction.CONTINUE, NextAction.CANCEL]
        await engine.drain()
        await engine.start_worker()
        found = [await go_on(engine, run_id) for _ in range(7)]
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert found == [
            *("before_step", "after_tool", "after_tool", "after_step"),
            *("before_step", "after_tool", "after_step"),
        ]
        assert await begun(engine, run_id) == 3
        again = (engine.core, engine.tenant_id, run_id, row.interrupt_id)
        await continue_run(*again, mode="next", by="ada")
        with pytest.raises(AlreadyAnswered):
            await continue_run(*again, mode="step", by="ada")


async def test_a_condition_on_arguments_single_steps_and_new_breakpoints(
    url: str, zoo: ToolZoo
) -> None:
    second = [
        on("before_tool", tool="echo", pointer="/value", equals=2),
        on("before_tool", tool="x"),
    ]
    async with flow(url, [scripted("walker", WALK, tools=["echo"])], zoo) as engine:
        run_id = await engine.submit("walker", breakpoints=second)
        assert await go_on(engine, run_id, "step") == "before_tool"
        none = tuple[Breakpoint, ...]()
        assert await go_on(engine, run_id, "step", breakpoints=none) == "after_step"
        third = (Breakpoint(at="before_tool", pointer="/value", equals=3),)
        assert await go_on(engine, run_id, breakpoints=third) == "after_step"
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        run_id = await engine.submit("walker", breakpoints=[on("before_tool", equals=2)])
        assert await go_on(engine, run_id, breakpoints=third) == "before_tool"
        assert await go_on(engine, run_id) == "before_tool"
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_a_breakpoint_is_no_approval_no_question_and_no_cancel(
    url: str, zoo: ToolZoo
) -> None:
    """The operations of R-8.4 side by side: none can be taken for another."""
    agents = [
        scripted("payer", [call("pay", amount=1), Finish(answer="paid")], tools=["pay"]),
        scripted("asker", [Ask(title="Where?"), Finish(answer="there")]),
        scripted("walker", WALK, tools=["echo"]),
    ]
    async with flow(url, agents, zoo) as engine:
        run_id = await engine.submit("payer", breakpoints=[on("before_tool"), on("after_step")])
        (approval,) = await engine.wait_waiting(run_id)
        assert approval.kind is InterruptKind.APPROVAL
        with pytest.raises(Conflict):
            await continue_run(
                engine.core, engine.tenant_id, run_id, approval.interrupt_id, mode="next", by="ada"
            )
        await engine.answer(approval.interrupt_id, Answer.APPROVE)
        await engine.wait_until(
            run_id, lambda row: row.hot.waiting_kind is InterruptKind.BREAKPOINT
        )
        row, point = await paused(engine, run_id)
        assert (point, await begun(engine, run_id)) == ("before_tool", 0), "approved, and not begun"
        for answer in (Answer.APPROVE, Answer.RESPOND, Answer.CONTINUE):
            with pytest.raises(Invalid):
                await engine.answer(row.interrupt_id, answer)
        await go_on(engine, run_id)
        await engine.wait_event(run_id, "result")
        row, point = await paused(engine, run_id)
        assert (point, await begun(engine, run_id)) == ("after_step", 1)
        await engine.cancel(run_id)
        ended = await engine.wait_terminal(run_id)
        assert ended.hot.code is FailureCode.RUN_CANCELLED
        assert status_of(ended.hot) is RunStatus.INTERRUPTED
        with pytest.raises(Gone):
            await continue_run(
                engine.core, engine.tenant_id, run_id, row.interrupt_id, mode="next", by="ada"
            )
        run_id = await engine.submit("asker", breakpoints=[on("after_step")])
        (question,) = await engine.wait_waiting(run_id)
        assert question.kind is InterruptKind.INPUT
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="here")
        await engine.wait_until(
            run_id, lambda row: row.hot.waiting_kind is InterruptKind.BREAKPOINT
        )
        assert await go_on(engine, run_id) == "after_step"
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        run_id = await engine.submit("walker", breakpoints=[on("before_tool")])
        await paused(engine, run_id)
        await engine.cancel(run_id, CancelAction.ROLLBACK)
        assert status_of((await engine.wait_terminal(run_id)).hot) is RunStatus.CANCELED
