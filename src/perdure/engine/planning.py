"""From a decision to a commit: validated, judged by policy, and durable before anything runs.

The planner decides and never executes (R-4.1); here its decision becomes events (R-4.2). Every
decision passes `plan_ready` (decision 20).
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import assert_never

from pydantic import JsonValue

from perdure.engine.asking import add_question, draft_ask, request_approval
from perdure.engine.draft import Draft
from perdure.engine.fields_kept import draft_kept_fields
from perdure.engine.fields_written import draft_field_writes
from perdure.engine.journal import SLEEP, STEP_TOOLS
from perdure.engine.judging import Judge
from perdure.engine.limits import calls_left, calls_used_up, repeated
from perdure.engine.ports import (
    PolicyDecision,
    ProducedArtifact,
    ToolRunner,
)
from perdure.engine.replies import Replies
from perdure.engine.results import add_artifact, add_result, ask_outcome, runtime_result
from perdure.engine.schema import problem_with_value
from perdure.engine.snapshot import STATE_EVENT_NAME, OpenCall
from perdure.engine.spawning import await_children, draft_children, draft_handoff, draft_spawn
from perdure.engine.steps import fail, finish_step, settle, wait_for_person
from perdure.engine.topics import draft_publications, publishes
from perdure.engine.values import Kept, short
from perdure.engine.view import RunView
from perdure.protocol.codec import clean
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    Decision,
    DecisionBase,
    Finish,
    GiveUp,
    Handoff,
    Note,
    Operate,
    Product,
    Publish,
    Revision,
    Sleep,
    Spawn,
    ToolRequest,
    UpdatePlan,
    WriteField,
)
from perdure.protocol.errors import Invalid, TooLarge
from perdure.protocol.events import (
    ActionEvent,
    CustomEvent,
    ErrorEvent,
    ModelEvent,
    PlanEvent,
    PlanItem,
)
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.ids import MESSAGE, TOOL_CALL
from perdure.protocol.messages import Role
from perdure.protocol.records import ToolCallRow
from perdure.protocol.states import (
    AttemptEnd,
    ParkedOn,
    StepStatus,
    ToolCallStatus,
    Transition,
)
from perdure.protocol.tools import ToolSpec
from perdure.store.commits import NewMessage

PLAN_ITEMS_MAX = 200
_MADE_BEFORE = "a run with the same history may have made the call, or is to make it"


def draft_decision(
    draft: Draft, decision: Decision, judge: Judge, replies: Replies | None = None
) -> None:
    """Draft a whole decision, up to the end of the step when there is nothing to run."""
    spoken = draft_model_uses(draft, decision, replies)
    draft.move(Transition.PLAN_READY)
    draft.note_step(StepStatus.RUNNING)
    _draft_common(draft, decision, judge)
    match decision:
        case CallTools():
            _draft_calls(draft, decision, judge)
        case Finish():
            _draft_finish(draft, decision, spoken if _is_spoken(decision) else None)
        case Ask():
            draft_ask(draft, decision)
        case Operate():
            _draft_operations(draft, decision, judge)
        case UpdatePlan():
            _draft_plan(draft, decision)
        case Sleep():
            _draft_sleep(draft, decision)
        case Spawn():
            draft_spawn(draft, decision, judge.cards, judge.settings)
        case Handoff():
            draft_handoff(draft, decision, judge.cards)
        case GiveUp():
            fail(
                draft,
                Failure(
                    code=decision.code,
                    reason=short(decision.reason),
                    stage=Stage.PLANNING,
                    details=decision.details,
                ),
            )
        case _:
            assert_never(decision)


def draft_inherited(draft: Draft, calls: Sequence[OpenCall], judge: Judge) -> None:
    """Draft calls that the run takes over from its origin: judged anew, under the keys they have.

    One whose effect may have happened is not run before a person has said what became of it.
    """
    draft.move(Transition.PLAN_READY)
    draft.note_step(StepStatus.RUNNING)
    denied: Failure | None = None
    for ordinal, call in enumerate(calls):
        request = ToolRequest(
            tool=call.tool,
            args=call.args,
            version=call.version,
            call_id=call.planner_call_id,
            position=call.position,
        )
        failure = _draft_call(draft, request, ordinal, judge, over_budget=False, takes_over=call)
        denied = denied or failure
    if denied is not None:
        fail(draft, denied)


def _draft_plan(draft: Draft, decision: UpdatePlan) -> None:
    if decision.plan is None:
        raise Invalid("a decision to update the plan holds no plan")
    finish_step(draft)


def _draft_sleep(draft: Draft, decision: Sleep) -> None:
    draft.add(CustomEvent(name=SLEEP, value={"seconds": decision.duration.total_seconds()}))
    finish_step(draft)
    if not draft.is_closing:
        draft.release(AttemptEnd.PARKED, ParkedOn.TIMER)
        draft.ready_in_s = decision.duration.total_seconds()


def draft_model_uses(
    draft: Draft, decision: DecisionBase, replies: Replies | None = None
) -> str | None:
    """Draft the model requests that led to a decision, each behind the rest of its text.

    Return the id of the last one's message, if it was streamed.
    """
    message_id: str | None = None
    for use in decision.model_uses:
        said = clean(use.text)
        message_id = replies.draft_rest(draft, use, str(said)) if replies is not None else None
        text = draft.keep(said)
        draft.add(
            ModelEvent(
                model=use.model,
                text=str(text.inline or ""),
                text_ref=text.ref,
                finish=use.finish,
                usage=use.usage,
                request_digest=use.request_digest,
                session=use.session,
                duration_ms=use.duration_ms,
                message_id=message_id,
                position=use.position,
                calls=use.calls,
            )
        )
    return message_id


def _is_spoken(decision: Finish) -> bool:
    """Tell whether an answer is what its model said; that of code may be anything else."""
    last = decision.model_uses[-1] if decision.model_uses else None
    return last is not None and (last.position is None or last.text == decision.answer)


def _draft_common(draft: Draft, decision: DecisionBase, judge: Judge) -> None:
    snapshot = draft.view.snapshot
    if decision.plan is not None:
        _revise_plan(draft, decision.plan)
    if decision.state is not None:
        state = clean(decision.state)
        kept = draft.keep(state)
        if kept.ref is not None:
            raise Invalid("the agent's own state is larger than an inline value")
        if kept.digest != snapshot.agent_state_digest:
            draft.add(CustomEvent(name=STATE_EVENT_NAME, value=state))
    _draft_records(draft, decision)
    if _writes(decision) and not (
        isinstance(decision, Finish) and not stands(draft.view, decision)
    ):
        draft_field_writes(draft, decision)
    if publishes(decision, judge.agent):
        ends = isinstance(decision, Finish) and stands(draft.view, decision)
        draft_publications(draft, decision, judge.agent, judge.subscribers, judge.settings, ends)


def _writes(decision: DecisionBase) -> bool:
    return any(isinstance(record, WriteField) for record in decision.records)


def _revise_plan(draft: Draft, items: Sequence[PlanItem], position: str | None = None) -> None:
    if len(items) > PLAN_ITEMS_MAX:
        raise Invalid(f"a plan has at most {PLAN_ITEMS_MAX} items")
    revision = draft.view.snapshot.plan_revision + 1
    draft.add(PlanEvent(revision=revision, items=list(items), position=position))


def _draft_records(draft: Draft, decision: DecisionBase) -> None:
    for record in decision.records:
        match record:
            case Note():
                value = clean(record.value)
                if draft.keep(value).ref is not None:
                    raise Invalid("a reported value is larger than an inline value")
                draft.add(CustomEvent(name=record.name, value=value, position=record.position))
            case Product():
                add_artifact(
                    draft,
                    ProducedArtifact(
                        name=record.name, media_type=record.media_type, data=record.data
                    ),
                    step_index=draft.view.snapshot.step_index,
                    position=record.position,
                )
            case Revision():
                _revise_plan(draft, record.items, record.position)
            case Publish() | WriteField():
                pass  # drafted with its deliveries; and only beside what stands


def _draft_operations(draft: Draft, decision: Operate, judge: Judge) -> None:
    """Draft what the branches of a code agent wait for; a step of records alone is over."""
    if decision.calls:
        _draft_calls(draft, decision, judge)
        if draft.is_closing:
            return
    draft_children(draft, decision.children, judge.cards, judge.settings, wait=True)
    for ask in decision.asks:
        add_question(draft, ask)
    if decision.calls or decision.children:
        return
    if decision.for_person and draft.view.snapshot.open_interrupts:
        wait_for_person(draft)
        return
    finish_step(draft)
    if decision.wake_in is not None and not draft.is_closing:
        draft.release(AttemptEnd.PARKED, ParkedOn.TIMER)
        draft.ready_in_s = decision.wake_in.total_seconds()


def _draft_calls(draft: Draft, decision: CallTools | Operate, judge: Judge) -> None:
    """Draft one action for each wish, with its result at once when it may not run."""
    view = draft.view
    left = calls_left(view)
    if left == 0:
        fail(draft, calls_used_up(view))
        return
    denied: Failure | None = None
    for ordinal, request in enumerate(decision.calls):
        over = left is not None and ordinal >= left
        failure = _draft_call(draft, request, ordinal, judge, over_budget=over)
        denied = denied or failure
    if denied is not None:
        fail(draft, denied)


def _draft_call(
    draft: Draft,
    request: ToolRequest,
    ordinal: int,
    judge: Judge,
    *,
    over_budget: bool,
    takes_over: OpenCall | None = None,
) -> Failure | None:
    """Draft one call; return the failure that must end the run, if there is one."""
    args = clean(request.args)
    spec = judge.spec_of(request)
    problem = _problem(draft.view, request, args, spec, judge.tools)
    if over_budget:
        problem = problem or (ToolCallStatus.DENIED, calls_used_up(draft.view))
    in_doubt = takes_over is not None and takes_over.may_have_happened
    decision: PolicyDecision | None = None
    if spec is not None and problem is None:
        decision = _judged(draft, judge, spec, args, in_doubt=in_doubt)
    kept = draft.keep(args)
    action = _add_action(
        draft,
        request,
        ordinal,
        kept=kept,
        spec=spec,
        decision=decision,
        key=(takes_over.effect_key or None) if takes_over is not None else None,
    )
    loop = None
    if request.tool not in STEP_TOOLS:  # a loop around a step is the author's own
        loop = repeated(draft.view, request.tool, action.tool_call_id)
    if kept.ref is not None:
        draft.view.snapshot.open_calls[action.tool_call_id].args = args
    if loop is not None:
        problem = (ToolCallStatus.DENIED, loop)
    call = draft.view.snapshot.open_calls[action.tool_call_id]
    if problem is not None:
        status, failure = problem
        outcome = runtime_result(status, failure.code, failure.reason)
        add_result(draft, call, outcome, by="runtime")
        return loop
    assert spec is not None
    assert decision is not None
    if decision.effect == "deny":
        reason = decision.reason or f"rule {decision.rule}"
        outcome = runtime_result(ToolCallStatus.DENIED, FailureCode.POLICY_DENIED, reason)
        add_result(draft, call, outcome, by="policy")
        return None if judge.agent.deny_tells_planner else outcome.result.error
    _ask_first(draft, call, spec, decision, judge, in_doubt=in_doubt)
    return None


def _judged(
    draft: Draft, judge: Judge, spec: ToolSpec, args: JsonValue, *, in_doubt: bool
) -> PolicyDecision:
    """Return policy's decision; where the outcome is in doubt, that question comes first."""
    decision = judge.policy.judge(judge.agent, draft.view.facts, spec, args)
    asks = in_doubt and decision.effect == "ask"
    return replace(decision, effect="allow") if asks else decision


def _ask_first(
    draft: Draft,
    call: OpenCall,
    spec: ToolSpec,
    decision: PolicyDecision,
    judge: Judge,
    *,
    in_doubt: bool,
) -> None:
    """Draft the question that a person has to answer before the call runs, if there is one."""
    if in_doubt:
        ask_outcome(draft, call, _MADE_BEFORE)
    elif decision.effect == "ask":
        request_approval(draft, call.tool_call_id, spec, decision, judge)


def _problem(
    view: RunView,
    request: ToolRequest,
    args: JsonValue,
    spec: ToolSpec | None,
    tools: ToolRunner,
) -> tuple[ToolCallStatus, Failure] | None:
    if spec is None:
        reason = f"{request.tool} is not among the tools of {view.agent_id}"
        failure = Failure(code=FailureCode.TOOL_NOT_FOUND, reason=short(reason), stage=Stage.TOOL)
        return ToolCallStatus.FAILED, failure
    problem = request.problem or tools.problem_with_args(spec, args)
    if problem is None:
        return None
    failure = Failure(
        code=FailureCode.TOOL_ARGUMENT_INVALID, reason=short(problem), stage=Stage.TOOL
    )
    return ToolCallStatus.FAILED, failure


def _add_action(
    draft: Draft,
    request: ToolRequest,
    ordinal: int,
    *,
    kept: Kept,
    spec: ToolSpec | None,
    decision: PolicyDecision | None,
    key: str | None,
) -> ActionEvent:
    tool_call_id = draft.ids.new(TOOL_CALL)
    version = spec.version if spec is not None else None
    status = ToolCallStatus.PROPOSED
    if decision is not None and decision.effect == "ask":
        status = ToolCallStatus.AWAITING_APPROVAL
    action = ActionEvent(
        tool_call_id=tool_call_id,
        ordinal=ordinal,
        tool=request.tool,
        version=version,
        args=kept.inline,
        args_ref=kept.ref,
        effect_key=key or effect_key(draft.view, tool_call_id, request.tool, version),
        side_effect=spec.side_effect if spec is not None else None,
        repeatable=spec.repeatable if spec is not None else True,
        status=status,
        policy_effect=decision.effect if decision is not None else "allow",
        policy_rule=decision.rule if decision is not None else "",
        policy_version=decision.version if decision is not None else "",
        planner_call_id=request.call_id,
        position=request.position,
    )
    seq = draft.add(action)
    args_digest = draft.view.snapshot.open_calls[tool_call_id].args_digest
    draft.new_calls.append(
        ToolCallRow(
            tool_call_id=tool_call_id,
            run_id=draft.view.facts.run_id,
            step_index=draft.view.snapshot.step_index,
            ordinal=ordinal,
            tool=request.tool,
            version=version,
            side_effect=action.side_effect,
            repeatable=action.repeatable,
            needs_approval=status is ToolCallStatus.AWAITING_APPROVAL,
            status=status,
            args_digest=args_digest,
            effective_digest=args_digest,
            effect_key=action.effect_key,
            action_seq=seq,
        )
    )
    return action


def effect_key(view: RunView, tool_call_id: str, tool: str, version: str | None) -> str:
    """Return the key of a side effect: from run, call, tool and version (R-5.6, decision 28)."""
    text = "\x1f".join((view.facts.run_id, tool_call_id, tool, version or ""))
    return f"eff_{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _draft_finish(draft: Draft, decision: Finish, spoken: str | None) -> None:
    """Draft the end, unless what the run owes is missing: then the planner is told.

    The answer is the message `spoken`, when it was streamed as one.
    """
    answer = clean(decision.answer)
    if draft.view.snapshot.open_children:
        await_children(draft)
        settle(draft, retry_in_s=None)
        return
    problem = _answer_problem(draft.view, answer)
    if problem is not None:
        failure = Failure(code=FailureCode.OUTPUT_INVALID, reason=problem, stage=Stage.OUTPUT)
        draft.add(ErrorEvent(failure=failure))
        finish_step(draft)
        return
    try:
        kept = draft.keep(answer)
    except TooLarge as error:
        fail(draft, Failure(code=FailureCode.OUTPUT_INVALID, reason=error.message))
        return
    draft.end_step("succeeded")
    draft_kept_fields(draft)
    seq = draft.move(Transition.DONE, answer=kept)
    draft.messages.append(
        NewMessage(
            message_id=spoken or draft.ids.new(MESSAGE),
            seq=seq,
            role=Role.ASSISTANT,
            author=draft.view.agent_id,
        )
    )
    draft.release(AttemptEnd.FINISHED)


def stands(view: RunView, decision: Finish) -> bool:
    """Tell whether a `Finish` ends the run, with what it makes itself."""
    made = {record.name for record in decision.records if isinstance(record, Product)}
    problem = _answer_problem(view, clean(decision.answer), made)
    return not view.snapshot.open_children and problem is None


def _answer_problem(view: RunView, answer: JsonValue, made: Collection[str] = ()) -> str | None:
    options = view.facts.options
    there = (view.snapshot.artifacts.keys() - view.discarded).union(made)
    missing = [name for name in options.required_artifacts if name not in there]
    if missing:
        return f"required artifacts are missing: {', '.join(missing)}"
    if options.output_schema is None:
        return None
    problem = problem_with_value(options.output_schema, answer)
    return f"the answer does not fit the required output at {problem}" if problem else None
