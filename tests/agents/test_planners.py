"""The built-in planners: what they ask the model, and what its replies become."""

import json
from typing import Any

import anyio
import pytest
from pydantic import JsonValue

from perdure.agents.loop.plan_execute import ITEMS_MAX, PlanAndExecutePlanner
from perdure.agents.loop.react import ReActPlanner
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.agents.models.port import ModelReply, ModelRequest
from perdure.agents.models.scripted import ScriptedModel, ScriptEntry, Stall, SwallowCancel
from perdure.engine.context import CallRecord, PlannerContext, Turn
from perdure.engine.ports import Planner, PlannerFailure
from perdure.protocol.decisions import Ask, CallTools, Decision, Finish, ToolRequest, UpdatePlan
from perdure.protocol.events import PlanItem, Usage
from perdure.protocol.failures import Failure, FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import ToolCallStatus
from tests.agents.contexts import LOOK, context_of, facts_of, illegalities

OBJECT: dict[str, JsonValue] = {"type": "object"}


def calling(*calls: ToolRequest, text: str = "") -> ModelReply:
    return ModelReply(text=text, calls=calls, finish="tool_calls")


def look(number: int = 1, call_id: str = "c1") -> ToolRequest:
    return ToolRequest(tool="look", args={"n": number}, call_id=call_id)


def error(code: FailureCode, *, retryable: bool = True) -> Failure:
    return Failure(code=code, reason="x", retryable=retryable)


async def decide(
    entry: ScriptEntry, context: PlannerContext | None = None, **options: Any
) -> Decision:
    return await ReActPlanner([ScriptedModel([entry])], **options).next_step(
        context or context_of()
    )


async def failure_of(entry: ScriptEntry, **options: Any) -> PlannerFailure:
    with pytest.raises(PlannerFailure) as caught:
        await decide(entry, **options)
    return caught.value


# ---------------------------------------------------------------- ReAct


async def test_a_reply_with_calls_becomes_tool_calls_with_its_text_and_use() -> None:
    """R-4.1, R-4.5."""
    reply = ModelReply(
        text="let me look",
        calls=(look(1, "c1"), look(2, "c2")),
        usage=Usage(input_tokens=5, output_tokens=2, cost=0.1),
        finish="tool_calls",
        session="s1",
    )
    decision = await decide(reply)
    assert isinstance(decision, CallTools)
    assert decision.text == "let me look"
    assert [call.call_id for call in decision.calls] == ["c1", "c2"]
    (use,) = decision.model_uses
    assert (use.model, use.session, use.usage.input_tokens) == ("scripted", "s1", 5)
    assert use.request_digest is not None


async def test_a_reply_without_calls_is_the_answer() -> None:
    """R-4.1, R-4.5."""
    assert await decide("42") == Finish(answer="42", model_uses=(await decide("42")).model_uses)


async def test_malformed_arguments_are_passed_on_with_their_problem() -> None:
    bad = ToolRequest(tool="look", args="{", problem="not JSON", call_id="c1")
    decision = await decide(calling(bad))
    assert isinstance(decision, CallTools)
    assert decision.calls == (bad,)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('{"n": 1}', {"n": 1}),
        ('```json\n{"n": 1}\n```', {"n": 1}),
        ("```\n[1]\n```", [1]),
        ("plain words", "plain words"),
        ("NaN", "NaN"),
    ],
)
async def test_an_answer_with_a_schema_is_parsed_and_otherwise_left_to_the_runtimes_check(
    text: str, answer: JsonValue
) -> None:
    decision = await decide(text, output_schema=OBJECT)
    assert isinstance(decision, Finish)
    assert decision.answer == answer


async def test_the_schema_of_the_run_goes_before_the_planners_and_is_told_to_the_model() -> None:
    model = ScriptedModel(["{}"])
    planner = ReActPlanner([model], "be brief", output_schema={"title": "planner"})
    await planner.next_step(context_of(facts=facts_of(output_schema={"title": "run"})))
    system = model.requests[0].messages[0]
    assert system.role == "system"
    assert system.text.startswith("be brief\n\n")
    assert '{"title":"run"}' in system.text


@pytest.mark.parametrize(
    ("failures", "asked"), [(0, "first"), (1, "first"), (2, "second"), (3, "second"), (9, "second")]
)
async def test_the_next_model_is_asked_after_as_many_failures_as_one_may_have(
    failures: int, asked: str
) -> None:
    """R-10.1."""
    models = [ScriptedModel(["x"], name="first"), ScriptedModel(["x"], name="second")]
    planner = ReActPlanner(models, model_retry=RetryPolicy(attempts_max=2))
    decision = await planner.next_step(context_of(model_failures=failures))
    assert decision.model_uses[0].model == asked


@pytest.mark.parametrize(
    "code", [FailureCode.MODEL_TIMEOUT, FailureCode.MODEL_ERROR, FailureCode.CONTEXT_OVERFLOW]
)
async def test_a_models_failure_reaches_the_engine_as_it_is(code: FailureCode) -> None:
    assert (await failure_of(error(code))).failure == error(code)


async def test_a_reply_cut_at_the_limit_is_never_the_answer() -> None:
    caught = await failure_of(ModelReply(text="half of the ans", finish="length"))
    assert (caught.failure.code, caught.failure.retryable) == (FailureCode.MODEL_ERROR, True)
    assert [use.text for use in caught.model_uses] == [""]


async def test_a_reply_withheld_by_a_filter_is_an_error_that_stays() -> None:
    caught = await failure_of(ModelReply(text="", finish="content_filter"))
    assert (caught.failure.code, caught.failure.retryable) == (FailureCode.MODEL_ERROR, False)


async def test_the_models_time_is_the_runs_before_the_planners() -> None:
    """R-10.4."""
    model = ScriptedModel(["a", "b"])
    planner = ReActPlanner([model], timeout_s=7, idle_s=3, temperature=0.5)
    await planner.next_step(context_of())
    await planner.next_step(context_of(facts=facts_of(timeouts={"model_s": 5})))
    assert [request.timeout_s for request in model.requests] == [7, 5]
    assert model.requests[0].idle_s == 3
    assert model.requests[0].temperature == 0.5


async def test_a_person_is_asked_only_when_that_is_enabled() -> None:
    reply = calling(
        look(), ToolRequest(tool="ask_human", args={"question": "Which region?"}), text="hm"
    )
    decision = await decide(reply, ask_human=True, context=context_of(step_index=4))
    assert isinstance(decision, Ask)
    assert (decision.title, decision.key) == ("Which region?", "ask_human:4")
    assert decision.payload == {"question": "Which region?", "said": "hm"}
    plain = await decide(reply)
    assert isinstance(plain, CallTools)
    assert [call.tool for call in plain.calls] == ["look", "ask_human"]


async def test_a_long_or_malformed_question_still_asks() -> None:
    long = ToolRequest(tool="ask_human", args={"question": "?" * 900})
    decision = await decide(calling(long), ask_human=True)
    assert isinstance(decision, Ask)
    assert len(decision.title) == 500
    broken = ToolRequest(tool="ask_human", args="{", problem="not JSON")
    decision = await decide(calling(broken), ask_human=True)
    assert isinstance(decision, Ask)


async def test_asking_is_offered_beside_the_tools_but_never_shadows_one_of_that_name() -> None:
    model = ScriptedModel(["x", "y"])
    planner = ReActPlanner([model], ask_human=True)
    await planner.next_step(context_of())
    own = LOOK.model_copy(update={"name": "ask_human"})
    await planner.next_step(context_of(tools=(own,)))
    assert [tool.name for tool in model.requests[0].tools] == ["look", "ask_human"]
    assert model.requests[1].tools == (own,)


async def test_a_decision_is_the_same_from_a_planner_that_has_forgotten_everything() -> None:
    turns: list[Turn] = []
    model = ScriptedModel(lambda request: f"after {len(request.messages)}")
    planner = ReActPlanner([model], "be brief")
    for index in range(5):
        context = context_of(list(turns))
        fresh = ReActPlanner([model], "be brief")
        assert await planner.next_step(context) == await fresh.next_step(context)
        turns.append(done_turn(index))


def done_turn(index: int, status: ToolCallStatus = ToolCallStatus.SUCCEEDED) -> Turn:
    call = CallRecord(
        tool_call_id=f"tc_{index}",
        planner_call_id="c1",
        tool="look",
        args={"n": index},
        status=status,
        output=index,
    )
    return Turn(step_index=index, calls=[call])


async def test_a_swallowed_cancel_does_not_become_a_decision() -> None:
    model = ScriptedModel([SwallowCancel(ModelReply(text="too late"))])
    decided: list[Decision] = []

    async def plan() -> None:
        decided.append(await ReActPlanner([model]).next_step(context_of()))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(plan)
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
    assert decided == []


# ---------------------------------------------------------------- plan and execute


class Simulation:
    """A run in small: keeps the plan, state and turns that a planner's decisions make."""

    def __init__(self, planner: Planner, **context: Any) -> None:
        self.planner = planner
        self.turns: list[Turn] = []
        self.plan: tuple[PlanItem, ...] = ()
        self.state: JsonValue = None
        self.status = ToolCallStatus.SUCCEEDED
        self.context = context

    async def step(self) -> Decision:
        context = context_of(self.turns, plan=self.plan, state=self.state, **self.context)
        decision = await self.planner.next_step(context)
        self.plan = decision.plan if decision.plan is not None else self.plan
        self.state = decision.state if decision.state is not None else self.state
        turn = Turn(step_index=len(self.turns), text=decision.model_uses[0].text)
        if isinstance(decision, CallTools):
            turn.calls = [
                CallRecord(
                    tool_call_id=f"tc_{turn.step_index}_{index}",
                    planner_call_id=call.call_id,
                    tool=call.tool,
                    args=call.args,
                    status=self.status,
                )
                for index, call in enumerate(decision.calls)
            ]
        self.turns.append(turn)
        return decision

    @property
    def statuses(self) -> list[str]:
        return [item.status for item in self.plan]


def plan_of(*items: str) -> str:
    return json.dumps({"items": items})


async def test_a_plan_is_made_worked_through_and_answered() -> None:
    """R-4.1, R-4.5."""
    model = ScriptedModel(
        [plan_of("find", "report"), calling(look()), "found it", "reported it", "all is well"]
    )
    run = Simulation(PlanAndExecutePlanner([model], "be brief"))
    assert isinstance(await run.step(), UpdatePlan)
    assert run.statuses == ["in_progress", "pending"]
    assert isinstance(await run.step(), CallTools)
    assert isinstance(await run.step(), UpdatePlan)
    assert run.statuses == ["done", "in_progress"]
    assert isinstance(await run.step(), UpdatePlan)
    assert run.statuses == ["done", "done"]
    last = await run.step()
    assert isinstance(last, Finish)
    assert last.answer == "all is well"
    assert model.requests[0].tools == ()
    assert model.requests[1].tools == (LOOK,)
    for request in model.requests:
        assert illegalities(request.messages) == []


async def test_a_plan_is_revised_when_a_call_failed_and_what_is_done_stays() -> None:
    model = ScriptedModel([plan_of("a", "b"), "did a", calling(look()), plan_of("c", "d"), "did c"])
    run = Simulation(PlanAndExecutePlanner([model]))
    await run.step()
    await run.step()
    run.status = ToolCallStatus.FAILED
    await run.step()
    revised = await run.step()
    assert isinstance(revised, UpdatePlan)
    assert [(item.text, item.status) for item in run.plan] == [
        ("a", "done"),
        ("c", "in_progress"),
        ("d", "pending"),
    ]
    assert run.state == {"revisions": 1}
    await run.step()
    assert run.statuses == ["done", "done", "in_progress"]


async def test_a_plan_is_revised_five_times_and_no_more() -> None:
    def script(request: ModelRequest) -> ScriptEntry:
        return calling(look()) if request.tools else plan_of("again")

    run = Simulation(PlanAndExecutePlanner([ScriptedModel(script)]))
    run.status = ToolCallStatus.TIMED_OUT
    kinds = [(await run.step()).kind for _ in range(16)]
    assert kinds == ["update_plan", "call_tools"] * 6 + ["call_tools"] * 4


@pytest.mark.parametrize("text", ["no plan", "{}", '{"items": []}', '{"items": [1, ""]}', "[]"])
async def test_a_reply_that_is_no_plan_is_the_models_error(text: str) -> None:
    planner = PlanAndExecutePlanner([ScriptedModel([text])])
    with pytest.raises(PlannerFailure) as caught:
        await planner.next_step(context_of())
    assert caught.value.failure.code is FailureCode.MODEL_ERROR
    assert caught.value.failure.retryable
    assert len(caught.value.model_uses) == 1


async def test_a_plan_is_cut_to_its_limits() -> None:
    texts = [{"text": "x" * 5000} for _ in range(200)]
    planner = PlanAndExecutePlanner([ScriptedModel([json.dumps(texts)])])
    decision = await planner.next_step(context_of())
    assert decision.plan is not None
    assert len(decision.plan) == ITEMS_MAX
    assert len(decision.plan[0].text) == 1000


# ---------------------------------------------------------------- scripts


async def test_a_scripted_planner_decides_by_the_step_alone() -> None:
    planner = ScriptedPlanner([Finish(answer=0), Finish(answer=1)])
    assert await planner.next_step(context_of(step_index=1)) == Finish(answer=1)
    assert await planner.next_step(context_of(step_index=0)) == Finish(answer=0)
    with pytest.raises(PlannerFailure) as caught:
        await planner.next_step(context_of(step_index=2))
    assert caught.value.failure.code is FailureCode.INTERNAL
    by_function = ScriptedPlanner(lambda context: Finish(answer=context.input))
    assert await by_function.next_step(context_of(input="x")) == Finish(answer="x")


async def test_a_scripted_model_can_follow_the_conversation_instead_of_its_calls() -> None:
    planner = ReActPlanner([ScriptedModel(["first", "second"], position="conversation")])
    context = context_of([Turn(step_index=0, text="said")])
    for _ in range(2):  # as a restarted process would ask
        decision = await planner.next_step(context)
        assert isinstance(decision, Finish)
        assert decision.answer == "second"


async def test_a_scripted_model_stalls_until_its_time_is_over_and_ends_after_its_script() -> None:
    model = ScriptedModel([Stall("and then ")])
    request = ModelRequest(messages=(), idle_s=0.01)
    with pytest.raises(PlannerFailure) as caught:
        await model.complete(request)
    assert caught.value.failure.code is FailureCode.MODEL_TIMEOUT
    with pytest.raises(PlannerFailure, match="1 replies, not more"):
        await model.complete(request)
