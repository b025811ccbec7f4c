"""How a run ends: when it has what it owes, and what is left of a cancelled one (R-2.2, R-9)."""

from datetime import timedelta

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.snapshot import APPROVAL_EVENT_NAME, STATE_EVENT_NAME
from perdure.protocol.decisions import Ask, Decision, Finish, Note, Sleep, UpdatePlan
from perdure.protocol.events import (
    ActionEvent,
    CancelEvent,
    CustomEvent,
    ErrorEvent,
    PlanEvent,
    PlanItem,
    ResultEvent,
    ResumeEvent,
    StateEvent,
    StepEvent,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.messages import Role
from perdure.protocol.runs import next_actions, status_of
from perdure.protocol.states import (
    Answer,
    NextAction,
    RunState,
    RunStatus,
    StepStatus,
    ToolCallStatus,
)
from perdure.testing.embedded import call, calls, scripted, unasked
from perdure.testing.tools import ToolZoo
from perdure.tools import tool
from tests.flow.world import data_of, flow


async def test_a_model_that_says_done_does_not_end_a_run_that_owes_something(
    url: str, zoo: ToolZoo
) -> None:
    """R-2.2: required artifacts and output; the planner is told what is missing and goes on."""
    told: list[str] = []

    def decide(context: PlannerContext) -> Decision:
        told.extend(note.reason for turn in context.turns[-1:] for note in turn.notes)
        match context.step_index:
            case 0:
                return Finish(answer={"total": 1})
            case 1:
                return call("draw", text="a report")
            case 2:
                return Finish(answer="done")
            case _:
                return Finish(answer={"total": 2})

    async with flow(url, [scripted("owing", decide, tools=["draw"])], zoo) as engine:
        run_id = await engine.submit(
            "owing",
            required_artifacts=["drawing.txt"],
            output_schema={"type": "object", "required": ["total"]},
        )
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert data_of(log, StateEvent)[-1].answer == {"total": 2}
        codes = [event.failure.code for event in data_of(log, ErrorEvent)]
        assert codes == [FailureCode.OUTPUT_INVALID] * 2
        assert "drawing.txt" in told[0]
        assert "output" in told[-1]
        messages = await engine.core.reader.list_messages(row.facts.thread_id, after=0, limit=9)
        assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT]


async def test_what_an_order_says_is_kept_and_followed(url: str) -> None:
    """R-3.4: version pin, metadata, tags and limits are recorded with the run."""
    agents = [
        scripted("v", [Finish(answer="old")], version="1"),
        scripted("v", [Finish(answer="new")], version="2"),
    ]
    async with flow(url, agents) as engine:
        newest = await engine.submit("v")
        pinned = await engine.submit(
            "v", agent_version="1", metadata={"team": "sales"}, tags=["q4"], max_steps=7
        )
        answers = {}
        for run_id in (newest, pinned):
            await engine.wait_terminal(run_id)
            answers[run_id] = data_of(await engine.events(run_id), StateEvent)[-1].answer
        assert answers == {newest: "new", pinned: "old"}
        options = (await engine.run(pinned)).facts.options
        assert (options.metadata, options.tags, options.max_steps) == (
            {"team": "sales"},
            ("q4",),
            7,
        )


async def test_every_kind_of_decision_is_recorded_and_carried_out(url: str, zoo: ToolZoo) -> None:
    """R-4.1, R-4.2, R-1.3: plan, calls side by side, sleep, question, finish; steps 0 to 4."""

    def decide(context: PlannerContext) -> Decision:
        match context.step_index:
            case 0:
                return UpdatePlan(plan=(PlanItem(text="work"),))
            case 1:
                return calls(("slow", {"seconds": 0.15}), ("slow", {"seconds": 0.16}))
            case 2:
                return Sleep(duration=timedelta(milliseconds=20))
            case 3:
                return Ask(title="?")
            case _:
                return Finish(answer="done")

    async with flow(url, [scripted("all", decide, tools=["slow"])], zoo) as engine:
        run_id = await engine.submit("all")
        (question,) = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert [event.index for event in data_of(log, StepEvent)] == [0, 1, 2, 3, 4]
        assert len(data_of(log, PlanEvent)) == 1
        first, second = await engine.core.reader.list_executions(run_id)
        assert first.ended_at is not None
        assert second.started_at < first.ended_at, "they ran side by side"
        actions = [event.seq for event in log if isinstance(event.data, ActionEvent)]
        results = [event.seq for event in log if isinstance(event.data, ResultEvent)]
        assert max(actions) < min(results)
        steps = await engine.core.reader.list_steps(run_id, after=-1, limit=9)
        assert [step.status for step in steps] == [StepStatus.SUCCEEDED] * 5


async def test_what_was_done_stands_in_the_end_of_a_cancelled_run(url: str, zoo: ToolZoo) -> None:
    """R-9.4, R-9.7, R-9.2: who, why, effects; the queued call is dropped, products stay."""

    @tool(parallel=False)
    def after_the_others() -> str:
        """Run alone."""
        zoo.begin("after_the_others")
        return "ran"

    zoo.registry.add(after_the_others)

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return calls(("pay", {"amount": 5}), ("draw", {"text": "x"}))
        return calls(("hang", {}), ("after_the_others", {}))

    names = ("pay", "draw", "hang", "after_the_others")
    async with flow(url, [scripted("busy", decide, tools=unasked(*names))], zoo) as engine:
        run_id = await engine.submit("busy")
        await zoo.wait_started("hang")
        await engine.cancel(run_id, by="ada")
        row = await engine.wait_terminal(run_id)
        log = await engine.events(run_id)
        assert (row.hot.state, row.hot.code) == (RunState.FAILED, FailureCode.RUN_CANCELLED)
        assert status_of(row.hot) is RunStatus.INTERRUPTED
        assert row.hot.finished_at is not None
        assert next_actions(row.hot) == [NextAction.RETRY, NextAction.FORK]
        (cancel,) = data_of(log, CancelEvent)
        assert (cancel.by, cancel.reason, cancel.epoch) == ("ada", "enough", 1)
        end = data_of(log, StateEvent)[-1]
        assert end.effects is not None
        assert [(effect["tool"], effect["status"]) for effect in end.effects] == [
            ("pay", "succeeded")
        ]
        statuses = [result.status for result in data_of(log, ResultEvent)]
        assert statuses[2:] == [ToolCallStatus.CANCELLED] * 2
        assert "after_the_others" not in zoo.executions
        tenant = row.facts.tenant_id
        (product,) = await engine.core.reader.list_artifacts(
            tenant, run_id=run_id, thread_id=None, after=None, limit=9
        )
        assert await engine.core.reader.read_blob(tenant, product.digest) == b"x"


@pytest.mark.parametrize("answered_first", [False, True])
async def test_two_open_questions_are_answered_one_by_one(
    url: str, zoo: ToolZoo, *, answered_first: bool
) -> None:
    """R-8.2, R-8.1, decision 21: the run stays waiting until the last one; any order."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return calls(("pay", {"amount": 1}), ("pay", {"amount": 2}))
        return Finish(answer=[record.output for record in context.turns[0].calls])

    async with flow(url, [scripted("two", decide, tools=["pay"])], zoo) as engine:
        run_id = await engine.submit("two")
        questions = await engine.wait_waiting(run_id)
        assert len(questions) == 2
        await engine.kill_worker()
        first, second = questions if answered_first else reversed(questions)
        await engine.answer(first.interrupt_id, Answer.APPROVE)
        assert (await engine.run(run_id)).hot.state is RunState.WAITING_HUMAN
        assert zoo.payments() == []
        await engine.start_worker()
        await anyio.lowlevel.checkpoint()
        await engine.answer(second.interrupt_id, Answer.APPROVE)
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert sorted(line["amount"] for line in zoo.payments()) == [1, 2]
        closings = data_of(await engine.events(run_id), ResumeEvent)
        assert [item.outcome for item in closings] == ["answered", "answered"]


@pytest.mark.parametrize("name", [STATE_EVENT_NAME, APPROVAL_EVENT_NAME, "perdure.now"])
async def test_a_planner_writes_nothing_under_the_names_of_the_runtime(url: str, name: str) -> None:
    """R-4.1, R-11.3: neither the agent's state nor an approval's history; its author is told."""
    note = Note(position="0", name=name, value={"all": "mine"})
    forger = scripted("forger", [UpdatePlan(plan=(), records=(note,))])
    async with flow(url, [forger]) as engine:
        run_id = await engine.submit("forger", max_attempts=1)
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.INTERNAL
        events = await engine.events(run_id)
        assert data_of(events, CustomEvent) == []
        failure = data_of(events, StateEvent)[-1].failure
        assert failure is not None
        assert name in failure.reason
