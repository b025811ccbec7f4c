"""Retry and redrive: a failed run goes on in a new one, and nothing that was done is done again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import anyio
import pytest
from pydantic import JsonValue
from pydantic_core import to_json

from perdure.agents.code import Context, agent
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.ops.verify import verify
from perdure.ops.verify.checks import Finding
from perdure.ops.verify.outside import read_journal
from perdure.protocol.decisions import Ask, Decision, Finish, GiveUp, ModelUse
from perdure.protocol.errors import Conflict, IdempotencyMismatch, Invalid
from perdure.protocol.events import ActionEvent, ArtifactEvent, PlanItem, StateEvent, Usage
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import Run, RunOptions, next_actions
from perdure.protocol.states import Answer, CancelOption, NextAction, RunState, ToolCallStatus
from perdure.service.base import Service
from perdure.service.branches import RetryRequest, retry
from perdure.service.principal import LOCAL
from perdure.testing.embedded import Embedded, call, calls, scripted, unasked
from perdure.testing.tools import WRITE, ToolZoo
from perdure.tools import FunctionTool, ToolContext, ToolError, tool
from tests.flow.world import data_of, flow
from tests.waiting import eventually


async def again(engine: Embedded, run_id: str, key: str | None = None, **wish: Any) -> Run:
    """Retry a run as a caller would."""
    made = await retry(
        Service(core=engine.core), LOCAL, run_id, RetryRequest(**wish), header_key=key
    )
    return made.run


@dataclass(slots=True)
class Moody:
    """A planner that gives up in one of its steps until it is told otherwise; notes what it saw."""

    script: list[Decision]
    fails_at: int
    well: bool = False
    seen: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])

    def __call__(self, context: PlannerContext) -> Decision:
        shown = asdict(context)
        for name in ("facts", "usage", "tools"):
            del shown[name]
        self.seen.append((context.step_index, to_json(shown)))
        if context.step_index == self.fails_at and not self.well:
            return GiveUp(code=FailureCode.MODEL_ERROR, reason="no idea")
        return self.script[context.step_index]


def moody(planner: Moody, *grants: ToolGrant) -> HostedAgent:
    """An agent with such a planner."""
    return scripted("moody", cast("Callable[[PlannerContext], Decision]", planner), tools=grants)


async def test_a_retry_shares_finished_steps_and_asks_the_planner_again(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3, R-7.5, RES-02: the payment stands once; the planner sees what it saw, byte for byte;
    a retry of the retry shares both histories, and so does a worker that takes over."""
    first = call("pay", amount=7).model_copy(
        update={
            "state": {"paid": 7},
            "plan": (PlanItem(text="pay", status="done"),),
            "model_uses": (ModelUse(model="m", text="I pay", usage=Usage(input_tokens=9)),),
        }
    )
    planner = Moody([first, call("draw", text="a"), call("draw", text="b"), Finish(answer="ok")], 2)
    agent = moody(planner, *unasked("pay"), ToolGrant(name="draw"))
    async with flow(url, [agent], zoo) as engine:
        earlier = await engine.submit("moody", "before", max_steps=1)
        thread = (await engine.wait_terminal(earlier)).facts.thread_id
        run_id = await engine.submit("moody", {"go": 1}, thread_id=thread)
        failed = await engine.wait_terminal(run_id)
        assert (failed.hot.code, failed.hot.step_index) == (FailureCode.MODEL_ERROR, 3)
        assert next_actions(failed.hot) == [NextAction.RETRY, NextAction.FORK]
        second = await engine.wait_terminal((await again(engine, run_id, reason="hm")).run_id)
        assert second.hot.code is FailureCode.MODEL_ERROR
        planner.well = True
        await engine.kill_worker()
        third = await again(engine, second.facts.run_id)
        await engine.start_worker()
        row = await engine.wait_terminal(third.run_id)
        assert (row.hot.state, row.hot.step_index) == (RunState.SUCCEEDED, 4)
        assert (row.facts.retry_of, row.facts.thread_id) == (second.facts.run_id, thread)
        assert row.facts.origin_run_id == second.facts.run_id
        assert row.hot.counters.tool_calls == 1, "a run counts its own use"
        assert len(zoo.payments()) == 2, "one for the run before, one for this one"
        at_step_2 = {seen for step, seen in planner.seen if step == 2}
        assert len(at_step_2) == 1, "every try saw the same"
        (artifact,) = data_of(await engine.events(third.run_id), ArtifactEvent)
        assert artifact.version == 2
        (first_event, *_) = data_of(await engine.events(second.facts.run_id), StateEvent)
        assert first_event.origin is not None
        assert (first_event.origin.run_id, first_event.origin.reason) == (run_id, "hm")
        later = await engine.submit("moody", "after", thread_id=thread)
        await engine.wait_terminal(later)
        inputs = [seen for step, seen in planner.seen if step == 0][-1]
        assert inputs.count(b'"run_id":"' + run_id.encode()) == 0, "retried inputs are told once"
        assert inputs.count(third.run_id.encode()) == 2, "the input and the answer of the last try"


async def test_calls_that_were_cut_off_are_made_anew_and_finished_ones_are_not(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3, RES-05, CKP-04: of one step's calls, the paid one stands and the hanging one runs
    again, under its old key; a killed worker changes nothing."""

    def decide(context: PlannerContext) -> Decision:
        if context.turns:
            return Finish(answer=[item.output for item in context.turns[-1].calls])
        return calls(("pay", {"amount": 3}), ("hang", {}))

    agent = scripted("pair", decide, tools=[*unasked("pay"), "hang"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("pair")
        await zoo.wait_started("hang")
        await engine.wait_until(run_id, lambda row: row.hot.open_calls == 1)
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        zoo.open_gate()
        made = await again(engine, run_id)
        row = await engine.wait_terminal(made.run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert len(zoo.payments()) == 1
        (anew,) = data_of(await engine.events(made.run_id), ActionEvent)
        keys = {
            event.data.tool: event.data.effect_key
            for event in await engine.events(run_id)
            if isinstance(event.data, ActionEvent)
        }
        assert (anew.tool, anew.effect_key) == ("hang", keys["hang"])


@pytest.mark.parametrize("answer", [Answer.HAPPENED, Answer.RETRY])
async def test_a_call_of_unknown_outcome_is_asked_about_before_anything_runs(
    url: str, zoo: ToolZoo, answer: Answer
) -> None:
    """R-5.7, R-10.3: a retry never doubles an effect in silence."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="ok") if context.turns else call("pay_late", amount=9)

    agent = scripted("payer", decide, tools=["pay_late"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("payer")
        (approval,) = await engine.wait_waiting(run_id)
        await engine.answer(approval.interrupt_id, Answer.APPROVE)
        await zoo.wait_started("pay_late")
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        made = await again(engine, run_id)
        (question,) = await engine.wait_waiting(made.run_id)
        assert (question.kind, len(zoo.payments())) == ("outcome", 0)
        zoo.open_gate()
        await engine.answer(question.interrupt_id, answer)
        row = await engine.wait_terminal(made.run_id)
        assert row.hot.state is RunState.SUCCEEDED
        executions = await engine.core.reader.list_executions(made.run_id)
        assert len(executions) == (1 if answer is Answer.RETRY else 0)
        await eventually(lambda: len(zoo.payments()) == 1 + len(executions))
        found: list[Finding] = []  # each execution stands in another run, under one key
        journal = read_journal(zoo.journal)
        await verify(engine.core.reader, on_finding=found.append, journal=journal)
        assert not found


async def test_a_redrive_runs_the_failed_calls_again_and_a_retry_asks_the_planner(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3: redrive undoes what the planner decided upon a failure that has been mended."""
    broken = True

    @tool
    def fragile(value: str, context: ToolContext) -> str:
        """Work once it is mended."""
        zoo.begin("fragile")
        if broken:
            raise ToolError("the disk is full")
        return value

    zoo.registry.add(cast("FunctionTool[..., Any]", fragile))

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return calls(("fragile", {"value": "x" * 9000}), ("echo", {"value": 1}))
        failed = [item for item in context.turns[0].calls if item.error is not None]
        if failed:
            return GiveUp(reason="it does not work")
        return Finish(answer=len(context.turns[0].calls))

    agent = scripted("fixer", decide, tools=["fragile", "echo"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("fixer")
        await engine.wait_terminal(run_id)
        asked = await again(engine, run_id)
        assert (await engine.wait_terminal(asked.run_id)).hot.state is RunState.FAILED
        assert await engine.core.reader.list_tool_calls(asked.run_id, after=None, limit=9) == []
        broken = False
        redriven = await again(engine, asked.run_id, redrive=True)
        row = await engine.wait_terminal(redriven.run_id)
        assert row.hot.state is RunState.SUCCEEDED
        made = await engine.core.reader.list_tool_calls(redriven.run_id, after=None, limit=9)
        assert [(item.tool, item.status) for item in made] == [
            ("fragile", ToolCallStatus.SUCCEEDED)
        ]
        assert redriven.origin_run_id == run_id, "where the failed call stands"


async def test_a_retry_may_begin_at_a_named_checkpoint_of_its_history(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3, R-7.4; refused: a checkpoint of another history, a run that has not failed."""
    planner = Moody([call("echo", value=1), call("echo", value=2), Finish(answer="ok")], 2)
    agent = moody(planner, ToolGrant(name="echo"))
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("moody")
        await engine.wait_terminal(run_id)
        rows = await engine.core.reader.list_checkpoints(run_id, before=None, limit=50)
        first_step_over = min((row for row in rows if row.step_index == 1), key=lambda row: row.seq)
        planner.well = True
        made = await again(engine, run_id, checkpoint_id=first_step_over.checkpoint_id)
        row = await engine.wait_terminal(made.run_id)
        assert row.hot.state is RunState.SUCCEEDED
        assert [
            item.step_index
            for item in await engine.core.reader.list_tool_calls(made.run_id, after=None, limit=9)
        ] == [1]
        with pytest.raises(Conflict):
            await again(engine, made.run_id)
        other = await engine.submit("moody", max_steps=1)
        await engine.wait_terminal(other)
        with pytest.raises(Invalid):
            await again(engine, other, checkpoint_id=first_step_over.checkpoint_id)
        end = max(rows, key=lambda row: row.seq)
        with pytest.raises(Invalid):
            await again(engine, run_id, checkpoint_id=end.checkpoint_id)


async def test_an_unanswered_or_rejected_question_is_asked_again(url: str, zoo: ToolZoo) -> None:
    """R-10.3, HITL-02: open questions are not taken over; an answer that was given is."""

    def decide(context: PlannerContext) -> Decision:
        given = [ask for turn in context.turns for ask in turn.asks]
        if len(given) < 2:
            return Ask(title=f"question {len(given)}")
        return Finish(answer=[ask.value for ask in given])

    async with flow(url, [scripted("asking", decide)], zoo) as engine:
        run_id = await engine.submit("asking")
        (question,) = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="one")
        await engine.wait_until(run_id, lambda row: row.hot.step_index == 1)
        (question,) = await engine.wait_waiting(run_id)
        await engine.answer(question.interrupt_id, Answer.REJECT, reason="no")
        assert (await engine.wait_terminal(run_id)).hot.code is FailureCode.APPROVAL_REJECTED
        made = await again(engine, run_id)
        (question,) = await engine.wait_waiting(made.run_id)
        await engine.cancel(made.run_id)
        await engine.wait_terminal(made.run_id)
        made = await again(engine, made.run_id)
        (question,) = await engine.wait_waiting(made.run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="two")
        await engine.wait_terminal(made.run_id)
        (end,) = [
            event.answer
            for event in data_of(await engine.events(made.run_id), StateEvent)
            if event.state is RunState.SUCCEEDED
        ]
        assert end == ["one", "two"]


async def test_a_retry_is_made_once_per_key_with_options_of_its_own(url: str, zoo: ToolZoo) -> None:
    """R-3.2, DUP-01: the same key is the same retry; limits that ended the run can be raised."""
    agent = scripted("looper", lambda _: call("echo", value=1), tools=["echo"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("looper", max_steps=2, idempotency_key="first")
        assert (await engine.wait_terminal(run_id)).hot.code is FailureCode.MAX_STEPS
        wish: dict[str, JsonValue] = {"options": {"max_steps": 1, "tags": ["again"]}}
        made = await again(engine, run_id, "k1", **wish)
        assert (await again(engine, run_id, "k1", **wish)).run_id == made.run_id
        with pytest.raises(IdempotencyMismatch):
            await again(engine, run_id, "k1")
        row = await engine.wait_terminal(made.run_id)
        assert (row.hot.code, row.hot.step_index) == (FailureCode.MAX_STEPS, 3)
        assert row.facts.options == RunOptions(
            max_steps=1, tags=("again",), idempotency_key="k1", agent_version="1"
        )


async def test_the_function_of_a_code_agent_goes_on_where_it_stood(url: str, zoo: ToolZoo) -> None:
    """R-10.3, R-4.6: recorded operations are not done again; the cut-off step runs in its place."""
    logged: list[str] = []
    held = True

    @agent("coder", "1")
    async def coder(ctx: Context, input: object) -> object:
        await ctx.step(logged.append, "first")
        answer = await ctx.interrupt({"n": 1}, title="go on?")

        async def second() -> object:
            logged.append("second")
            if held:
                await anyio.sleep_forever()
            return answer

        return await ctx.step(second)

    async with flow(url, [coder], zoo) as engine:
        run_id = await engine.submit("coder")
        await engine.wait_waiting(run_id)
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        made = await again(engine, run_id)
        (question,) = await engine.wait_waiting(made.run_id)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="yes")
        row = await engine.wait_until(made.run_id, lambda row: row.hot.open_calls == 1)
        await engine.cancel(made.run_id)
        await engine.wait_terminal(made.run_id)
        held = False
        last = await again(engine, made.run_id)
        row = await engine.wait_terminal(last.run_id)
        (end,) = data_of(await engine.events(last.run_id), StateEvent)[-1:]
        assert (row.hot.state, end.answer, logged.count("first")) == (RunState.SUCCEEDED, "yes", 1)


async def test_a_call_of_code_that_a_person_edited_is_taken_over_as_the_one_it_asked_for(
    url: str, zoo: ToolZoo
) -> None:
    """R-10.3, R-4.6: found by the simulation (seeds 405 and 431). It ended NON_DETERMINISTIC."""

    @agent("editing", "1", tools=["pay"])
    async def editing(ctx: Context, _: Any) -> object:
        first = round(ctx.random() * 100)
        return await ctx.gather(ctx.tool("pay", amount=first), ctx.tool("pay", amount=2))

    async with flow(url, [editing], zoo) as engine:
        run_id = await engine.submit("editing")
        one, _ = await engine.wait_waiting(run_id)
        await engine.answer(one.interrupt_id, Answer.EDIT, args={"amount": 7})
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        made = await again(engine, run_id)
        for asked in await engine.wait_waiting(made.run_id):
            await engine.answer(asked.interrupt_id, Answer.APPROVE)
        row = await engine.wait_terminal(made.run_id)
        assert row.hot.state is RunState.SUCCEEDED, row.hot.code
        actions = data_of(await engine.events(made.run_id), ActionEvent)
        assert sorted(str(action.args) for action in actions) == ["{'amount': 2}", "{'amount': 7}"]


@pytest.mark.parametrize("end", ["cancelled while it ran", "failed"])
async def test_arguments_that_a_call_was_begun_with_are_not_edited(
    url: str, zoo: ToolZoo, end: str
) -> None:
    """R-5.6, R-8.2: a tool that heeds keys would answer with the effect of the first arguments. The
    call is approved as it is or rejected; one that was not begun may be edited."""
    begun: list[tuple[str, str]] = []

    @tool(idempotent=True, **WRITE)
    async def order(item: str, context: ToolContext) -> str:
        """Order an item, once for each key."""
        begun.append((context.effect_key, item))
        if item == "bad":
            raise ToolError("no such item")
        if item == "slow" and len(begun) == 1:
            zoo.begin("order")
            await anyio.sleep_forever()
        return item

    zoo.registry.add(order)
    item = "bad" if end == "failed" else "slow"

    def orders(context: PlannerContext) -> Decision:
        if context.step_index == 0:
            return call("order", item=item)
        told = context.turns[0].calls[0]
        return GiveUp(reason="no") if told.error else Finish(answer=told.output)

    agent = scripted("orders", orders, tools=[ToolGrant(name="order")])
    async with flow(url, [agent], zoo) as engine:
        unbegun = await engine.submit("orders")
        await engine.wait_waiting(unbegun)
        await engine.cancel(unbegun)
        await engine.wait_terminal(unbegun)
        (asked,) = await engine.wait_waiting((await again(engine, unbegun)).run_id)
        await engine.answer(asked.interrupt_id, Answer.EDIT, args={"item": "other"})
        await engine.wait_terminal(asked.run_id)
        run_id = await engine.submit("orders")
        begun.clear()
        (asked,) = await engine.wait_waiting(run_id)
        await engine.answer(asked.interrupt_id, Answer.APPROVE)
        if end != "failed":
            await zoo.wait_started("order", 1)
            await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        made = await again(engine, run_id, redrive=end == "failed")
        (asked,) = await engine.wait_waiting(made.run_id)
        with pytest.raises(Conflict) as refused:
            await engine.answer(asked.interrupt_id, Answer.EDIT, args={"item": "good"})
        assert (refused.value.field, refused.value.details["run_id"]) == ("/args", run_id)
        await engine.answer(asked.interrupt_id, Answer.APPROVE)
        await engine.wait_terminal(made.run_id)
    assert [one for _, one in begun] == [item, item]
    assert len({key for key, _ in begun}) == 1


async def test_a_retry_makes_anew_what_it_owes_and_what_was_discarded(
    url: str, zoo: ToolZoo
) -> None:
    """R-9.7, R-10.3: a required artifact whose only copies are discarded is missing; also in a
    retry of the retry, and when it was discarded after that one had begun."""

    def decide(context: PlannerContext) -> Decision:
        notes: list[JsonValue] = [note.reason for turn in context.turns for note in turn.notes]
        made = [name for turn in context.turns for name in turn.calls]
        if not made:
            return call("draw", text="first")
        if not any(turn.asks for turn in context.turns):
            return Ask(title="?")
        return call("draw", text="anew") if notes and len(made) == 1 else Finish(answer=notes)

    async with flow(url, [scripted("owes", decide, tools=["draw"])], zoo) as engine:
        first = await engine.submit("owes", required_artifacts=("drawing.txt",))
        await engine.wait_waiting(first)
        await engine.cancel(first, options=CancelOption.DISCARD_ARTIFACTS)
        await engine.wait_terminal(first)
        second = (await again(engine, first)).run_id
        await engine.wait_waiting(second)
        await engine.cancel(second)
        await engine.wait_terminal(second)
        third = (await again(engine, second)).run_id
        (question,) = await engine.wait_waiting(third)
        await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
        row = await engine.wait_terminal(third)
        assert row.hot.state is RunState.SUCCEEDED
        log = await engine.events(third)
        assert [item.version for item in data_of(log, ArtifactEvent)] == [2]
        told = data_of(log, StateEvent)[-1].answer
        assert told == ["required artifacts are missing: drawing.txt"]
