"""Topics of a thread: who subscribes to them."""

from typing import Annotated

from fastapi import APIRouter, Body, Path, Query
from starlette.responses import Response

from perdure.protocol.topics import SubscriptionTerms, Topic
from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, example, one, page
from perdure.server.idempotency import NaturalKey
from perdure.server.openapi import may_answer
from perdure.service import topics
from perdure.service.views import Page, SubscriptionView

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["threads"])

AgentId = Annotated[str, Path(min_length=1, max_length=100)]
TopicName = Annotated[Topic, Path(description="name of the topic")]
_PLACE = "/threads/{thread_id}/topics/{topic}/subscriptions/{agent_id}"


@router.put(
    _PLACE,
    operation_id="subscribe",
    summary="Subscribe an agent to a topic of a thread",
    response_model=SubscriptionView,
    responses={
        201: {"description": "The subscription was made", "model": SubscriptionView},
        **may_answer("not_found", "gone", "conflict", body=True),
    },
)
async def subscribe(
    call: InCall,
    thread_id: str,
    topic: TopicName,
    agent_id: AgentId,
    body: Annotated[
        SubscriptionTerms | None, Body(openapi_examples=example({"budget": {"model_calls": 20}}))
    ] = None,
    idempotency_key: NaturalKey = None,
) -> Response:
    """Give the agent a run of its own for each publication to the topic, from now on: exactly one,
    in order, one at a time, in the subscription's inbox. Sent again, it changes the terms of the
    runs to come, and nothing else."""
    del idempotency_key
    made = await topics.subscribe(
        call.service, call.principal, thread_id, topic, agent_id, body or SubscriptionTerms()
    )
    return one(made.subscription, 201 if made.created else 200)


@router.delete(
    _PLACE,
    operation_id="unsubscribe",
    summary="End a subscription",
    status_code=204,
    response_class=Response,
    responses=may_answer("not_found", "gone"),
)
async def unsubscribe(
    call: InCall,
    thread_id: str,
    topic: TopicName,
    agent_id: AgentId,
    idempotency_key: NaturalKey = None,
) -> Response:
    """Deliver nothing more to the agent. What was delivered is carried out; the inbox stays. A
    subscription that is not there is ended already."""
    del idempotency_key
    await topics.unsubscribe(call.service, call.principal, thread_id, topic, agent_id)
    return Response(status_code=204)


@router.get(
    "/threads/{thread_id}/subscriptions",
    operation_id="list_subscriptions",
    summary="List a thread's subscriptions",
    response_model=Page[SubscriptionView],
    responses=may_answer("not_found", "gone"),
)
async def list_subscriptions(
    call: InCall, thread_id: str, topic: Annotated[Topic | None, Query()] = None
) -> Response:
    """Return all of them, by topic and agent; there are at most 100."""
    found = await topics.list_subscriptions(call.service, call.principal, thread_id, topic=topic)
    return page(found, None)
