"""Starting children and handing a run over: durable with the decision itself (R-13.1, R-13.2).

A child is created in its parent's commit, under its parent's fence. Its budget is taken from what
the parent has left; what it used is counted when its result comes. What cannot be started is
refused and told to the planner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.core import EngineSettings
from perdure.engine.draft import Draft
from perdure.engine.limits import over_limit, share_for_child
from perdure.engine.results import add_result, runtime_result
from perdure.engine.schema import check_schema, problem_with_value
from perdure.engine.snapshot import OpenCall
from perdure.engine.steps import finish_step, settle
from perdure.engine.values import keep, shown
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import RUNTIME_VERSION
from perdure.protocol.codec import clean, digest
from perdure.protocol.decisions import ChildRequest, Handoff, Spawn
from perdure.protocol.errors import Invalid, TooLarge
from perdure.protocol.events import ChildEvent, ChildUse, ErrorEvent, HandoffEvent, StateEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.ids import MESSAGE, RUN, THREAD
from perdure.protocol.log import NewEvent
from perdure.protocol.policies import Budget
from perdure.protocol.runs import RunOptions
from perdure.protocol.states import AttemptEnd, RunState, ToolCallStatus
from perdure.protocol.tools import ToolSpec
from perdure.protocol.values import Value
from perdure.store.commits import CallUpdate
from perdure.store.requests import NewRun

Cards = Mapping[tuple[str, str | None], AgentCard | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """How a child stands to its parent. `among`: children that share what is left, itself too."""

    key: str
    awaited: bool
    among: int
    tool_call_id: str | None = None
    position: str | None = None
    request_digest: str | None = None


def draft_spawn(draft: Draft, decision: Spawn, cards: Cards, settings: EngineSettings) -> None:
    """Draft the children of a decision, and the wait for all that are open if it asks for it."""
    draft_children(draft, decision.children, cards, settings, wait=decision.wait)
    if decision.wait:
        await_children(draft)
    settle(draft, retry_in_s=None)


def draft_children(
    draft: Draft,
    children: Sequence[ChildRequest],
    cards: Cards,
    settings: EngineSettings,
    *,
    wait: bool,
) -> None:
    """Draft children side by side, each started or refused."""
    for ordinal, request in enumerate(children):
        key = request.key or request.position or str(ordinal)
        place = _Place(
            key=key,
            awaited=wait and not request.detach,
            among=len(children) - ordinal,
            position=request.position,
            request_digest=None if request.position is None else child_digest(request),
        )
        failure = _start(draft, request, cards, settings, place)
        if failure is not None:
            draft.add(
                ChildEvent(
                    phase="refused",
                    key=key,
                    agent_id=request.agent_id,
                    detached=request.detach,
                    failure=failure,
                    position=place.position,
                    request_digest=place.request_digest,
                )
            )


def child_digest(request: ChildRequest) -> str:
    """Return the digest by which the wish for a child is known again."""
    left_out = {"position"} if request.participant is not None else {"position", "participant"}
    return digest(request.model_dump(mode="json", exclude=left_out))


def draft_call_child(
    draft: Draft,
    call: OpenCall,
    spec: ToolSpec,
    cards: Cards,
    settings: EngineSettings,
    *,
    among: int,
) -> None:
    """Draft the child that carries a call out (R-13.4); refused, the call has its result."""
    request = ChildRequest(
        agent_id=spec.agent or "",
        input=shown(call.args, call.args_ref if call.args is None else None),
    )
    place = _Place(key=call.tool_call_id, awaited=True, among=among, tool_call_id=call.tool_call_id)
    failure = _start(draft, request, cards, settings, place)
    if failure is not None:
        outcome = runtime_result(ToolCallStatus.FAILED, failure.code, failure.reason)
        add_result(draft, call, outcome, by="runtime")
        return
    created = next((row for row in draft.new_calls if row.tool_call_id == call.tool_call_id), None)
    if created is not None:
        created.status = ToolCallStatus.PENDING
    else:
        draft.call_updates.append(
            CallUpdate(tool_call_id=call.tool_call_id, status=ToolCallStatus.PENDING)
        )


def await_children(draft: Draft) -> None:
    """Draft that the step waits for every child that is open."""
    for child in list(draft.view.snapshot.open_children.values()):
        if not child.awaited:
            draft.add(ChildEvent(phase="awaited", child_run_id=child.child_run_id))


def draft_handoff(draft: Draft, decision: Handoff, cards: Cards) -> None:
    """Draft the change of agents; the run is given back, for a worker that serves the new one."""
    card = cards.get((decision.agent_id, decision.version))
    if card is None:
        draft.add(ErrorEvent(failure=_unknown_agent(decision.agent_id)))
        finish_step(draft)
        return
    draft.add(
        HandoffEvent(
            source=draft.view.agent_id,
            target=card.agent_id,
            target_version=card.version,
            reason=str(clean(decision.reason)),
            view=decision.view,
        )
    )
    finish_step(draft)
    if draft.attempt_end is None:
        draft.handed_to = (card.agent_id, card.version)
        draft.release(AttemptEnd.PARKED)
        draft.ready_in_s = 0


def _start(
    draft: Draft, request: ChildRequest, cards: Cards, settings: EngineSettings, place: _Place
) -> Failure | None:
    """Draft one child; return why it cannot be started."""
    view = draft.view
    card = cards.get((request.agent_id, request.version))
    if card is None:
        return _unknown_agent(request.agent_id)
    wish = clean(request.input)
    failure = _refusal(draft, card, wish, settings, detach=request.detach)
    if failure is not None:
        return failure
    budget = share_for_child(view, request.budget, place.among)
    if isinstance(budget, Failure):
        return budget
    try:
        new = _new_run(draft, request, card, wish, budget)
    except (TooLarge, Invalid) as error:
        return Failure(code=FailureCode.TOOL_ARGUMENT_INVALID, reason=error.message)
    draft.new_children.append(new)
    draft.add(
        ChildEvent(
            phase="spawned",
            child_run_id=new.run_id,
            key=place.key,
            agent_id=card.agent_id,
            agent_version=card.version,
            detached=request.detach,
            awaited=place.awaited,
            tool_call_id=place.tool_call_id,
            use=_kept(draft, budget),
            position=place.position,
            request_digest=place.request_digest,
            participant=request.participant,
            thread_id=None if request.participant is None else new.thread_id,
        )
    )
    return None


def _unknown_agent(agent_id: str) -> Failure:
    return Failure(
        code=FailureCode.AGENT_NOT_FOUND,
        reason=f"no agent {agent_id} of that version is registered",
        stage=Stage.PLANNING,
    )


def _refusal(
    draft: Draft, card: AgentCard, wish: JsonValue, settings: EngineSettings, *, detach: bool
) -> Failure | None:
    view = draft.view
    limits = [
        ("depth", view.facts.depth, settings.depth_max),
        ("children", len(view.snapshot.open_children), settings.children_max),
    ]
    if detach:
        started = view.snapshot.detached_children
        limits.append(("detached_children", started, settings.detached_max))
    failure = over_limit(*limits)
    if failure is not None or card.input_schema is None:
        return failure
    problem = problem_with_value(card.input_schema, wish)
    if problem is None:
        return None
    return Failure(
        code=FailureCode.TOOL_ARGUMENT_INVALID,
        reason=f"the input does not fit {card.agent_id} at {problem}",
        stage=Stage.PLANNING,
    )


def _kept(draft: Draft, budget: Budget) -> ChildUse:
    """Return what is kept from the parent's budget: only what that limits."""
    limits = draft.view.facts.options.budget
    return ChildUse(
        **{
            name: getattr(budget, name)
            for name in ChildUse.model_fields
            if getattr(limits, name) is not None
        }
    )


def _new_run(
    draft: Draft, request: ChildRequest, card: AgentCard, wish: JsonValue, budget: Budget
) -> NewRun:
    facts = draft.view.facts
    kept = keep(wish)
    if request.output_schema is not None:
        check_schema(request.output_schema)
    options: dict[str, object] = {
        "agent_version": request.version,
        "budget": budget,
        "timeouts": request.timeouts,
        "output_schema": request.output_schema,
        "metadata": request.metadata,
        "tags": request.tags,
        "queue": facts.options.queue,
        "priority": facts.options.priority,
    }
    if request.max_steps is not None:
        options["max_steps"] = request.max_steps
    if request.max_attempts is not None:
        options["max_attempts"] = request.max_attempts
    run_id = draft.ids.new(RUN)
    lasting = draft.view.snapshot.participants.get(request.participant or "")
    return NewRun(
        run_id=run_id,
        tenant_id=facts.tenant_id,
        agent_id=card.agent_id,
        agent_version=card.version,
        thread_id=lasting or draft.ids.new(THREAD),
        creates_thread=lasting is None,
        message_id=draft.ids.new(MESSAGE),
        input=Value(inline=kept.inline, ref=kept.ref),
        context=facts.context,
        options=RunOptions().model_copy(update=options),
        caller=facts.caller,
        trace_id=facts.trace_id,
        required_runtime=RUNTIME_VERSION,
        idempotency_key=None,
        fingerprint=digest([facts.run_id, run_id]),
        event=NewEvent(data=StateEvent(state=RunState.PENDING), step_index=0),
        blobs=kept.blobs,
        queue=facts.options.queue,
        priority=facts.options.priority,
        parent_run_id=facts.run_id,
        root_run_id=facts.root_run_id,
        depth=facts.depth + 1,
        detached=request.detach,
    )
