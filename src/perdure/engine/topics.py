"""Publishing to the topics of a thread (R-4.8).

A publication is a `custom` event of the run that publishes. In the same commit every subscriber
gets a run of its own for it: a detached child, in the subscription's inbox, so that each agent has
one at a time and the failure of one is nobody else's. So nothing is delivered twice or lost, and
nothing has to be swept up. Runs below a run publish to the topics of the tree's root; the limit on
depth ends two agents that answer each other for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.core import Core, EngineSettings
from perdure.engine.draft import Draft
from perdure.engine.limits import over_limit
from perdure.engine.ports import HostedAgent
from perdure.engine.schema import problem_with_value
from perdure.engine.values import Kept, shown
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import RUNTIME_VERSION
from perdure.protocol.codec import clean, digest
from perdure.protocol.decisions import DecisionBase, Finish, Publish
from perdure.protocol.events import ChildEvent, CustomEvent, StateEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.ids import MESSAGE, RUN
from perdure.protocol.log import NewEvent
from perdure.protocol.runs import RunContext, RunFacts, RunOptions
from perdure.protocol.states import RunState
from perdure.protocol.topics import PUBLISHED_EVENT_NAME, SubscriptionRow
from perdure.protocol.values import Value
from perdure.store.requests import NewRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """A subscription with the card of its agent; None: the version is not registered."""

    row: SubscriptionRow
    card: AgentCard | None


def publishes(decision: DecisionBase, agent: HostedAgent) -> bool:
    """Tell whether a decision has something to publish."""
    if agent.publishes is not None and isinstance(decision, Finish):
        return True
    records = decision.records
    return bool(records) and any(isinstance(record, Publish) for record in records)


def published(topic: str, kept: Kept) -> dict[str, JsonValue]:
    """Return what the event of a publication says; large values by reference."""
    return {"topic": topic, "value": shown(kept.inline, kept.ref)}


async def find_subscribers(
    core: Core, facts: RunFacts, decision: DecisionBase, agent: HostedAgent
) -> list[Subscriber]:
    """Return who subscribes to the topics of a decision, in the thread of the run's root."""
    thread_id = facts.thread_id
    if facts.root_run_id != facts.run_id:
        root = await core.reader.find_run(facts.tenant_id, facts.root_run_id)
        thread_id = root.facts.thread_id if root is not None else thread_id
    found: list[Subscriber] = []
    for topic in {publication.topic for publication in _publications(decision, agent)}:
        for row in await core.reader.list_subscriptions(facts.tenant_id, thread_id, topic):
            card = await core.directory.find(row.agent_id, row.terms.agent_version)
            found.append(Subscriber(row=row, card=card))
    return found


def draft_publications(
    draft: Draft,
    decision: DecisionBase,
    agent: HostedAgent,
    subscribers: Sequence[Subscriber],
    settings: EngineSettings,
    stands: bool,
) -> None:
    """Draft what a decision publishes, each with the runs of its subscribers.

    `stands`: the decision is a `Finish` that ends the run. One that does not publishes only what
    has a position, which is not published again.
    """
    for publication in _publications(decision, agent):
        if isinstance(decision, Finish) and not stands and publication.position is None:
            continue
        kept = draft.keep(clean(publication.value))
        seq = draft.add(
            CustomEvent(
                name=PUBLISHED_EVENT_NAME,
                value=published(publication.topic, kept),
                position=publication.position,
            )
        )
        for subscriber in subscribers:
            if subscriber.row.topic == publication.topic:
                _deliver(draft, subscriber, kept, seq, settings)


def _publications(decision: DecisionBase, agent: HostedAgent) -> list[Publish]:
    found = [record for record in decision.records if isinstance(record, Publish)]
    if agent.publishes is not None and isinstance(decision, Finish):
        found.append(Publish(topic=agent.publishes, value=decision.answer))
    return found


def _deliver(
    draft: Draft, subscriber: Subscriber, kept: Kept, seq: int, settings: EngineSettings
) -> None:
    """Draft a subscriber's run; what speaks against it is recorded in its place."""
    row, card = subscriber.row, subscriber.card
    event = ChildEvent(
        phase="refused",
        agent_id=row.agent_id,
        detached=True,
        topic=row.topic,
        published_seq=seq,
        thread_id=row.inbox_thread_id,
        failure=_refusal(draft, subscriber, kept, settings),
    )
    if card is not None and event.failure is None:
        new = _new_run(draft, row, card, kept, seq)
        draft.new_children.append(new)
        told = {"phase": "spawned", "child_run_id": new.run_id, "agent_version": card.version}
        event = event.model_copy(update=told)
    draft.add(event)


def _refusal(
    draft: Draft, subscriber: Subscriber, kept: Kept, settings: EngineSettings
) -> Failure | None:
    row, card, view = subscriber.row, subscriber.card, draft.view
    if card is None:
        return Failure(
            code=FailureCode.AGENT_NOT_FOUND,
            reason=f"no agent {row.agent_id} of that version is registered",
            stage=Stage.PLANNING,
        )
    failure = over_limit(
        ("depth", view.facts.depth, settings.depth_max),
        ("detached_children", view.snapshot.detached_children, settings.detached_max),
    )
    if failure is not None or card.input_schema is None or kept.ref is not None:
        return failure
    problem = problem_with_value(card.input_schema, kept.inline)
    if problem is None:
        return None
    return Failure(
        code=FailureCode.TOOL_ARGUMENT_INVALID,
        reason=f"what was published does not fit {row.agent_id} at {problem}",
        stage=Stage.PLANNING,
    )


def _new_run(draft: Draft, row: SubscriptionRow, card: AgentCard, kept: Kept, seq: int) -> NewRun:
    facts, terms = draft.view.facts, row.terms
    options: dict[str, object] = {
        "agent_version": terms.agent_version,
        "budget": terms.budget,
        "timeouts": terms.timeouts,
        "queue": terms.queue,
        "priority": terms.priority,
        "metadata": {"topic": row.topic, "published_by": facts.run_id, "published_seq": seq},
    }
    bounds = {"max_steps": terms.max_steps, "max_attempts": terms.max_attempts}
    options |= {name: bound for name, bound in bounds.items() if bound is not None}
    run_id = draft.ids.new(RUN)
    return NewRun(
        run_id=run_id,
        tenant_id=facts.tenant_id,
        agent_id=card.agent_id,
        agent_version=card.version,
        thread_id=row.inbox_thread_id,
        creates_thread=False,
        message_id=draft.ids.new(MESSAGE),
        input=Value(inline=kept.inline, ref=kept.ref),
        context=RunContext(),
        options=RunOptions().model_copy(update=options),
        caller=row.caller,
        trace_id=facts.trace_id,
        required_runtime=RUNTIME_VERSION,
        idempotency_key=None,
        fingerprint=digest([facts.run_id, run_id]),
        event=NewEvent(data=StateEvent(state=RunState.PENDING), step_index=0),
        blobs=kept.blobs,
        queue=terms.queue,
        priority=terms.priority,
        parent_run_id=facts.run_id,
        root_run_id=facts.root_run_id,
        depth=facts.depth + 1,
        detached=True,
    )
