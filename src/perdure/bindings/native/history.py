"""What a run did: events (stream or pages), attempts, steps, tool calls, checkpoints; and the
callback that tells a call's result.
"""

from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from perdure.bindings.native.starting import stream_of
from perdure.protocol.event_views import EventView
from perdure.protocol.granularity import wanted_types
from perdure.server.asgi import StrictRoute
from perdure.server.call import (
    JSON,
    AcceptHeader,
    EventGranularity,
    EventsAfter,
    EventTypes,
    InCall,
    LastEventId,
    event_cursor,
    names_in,
    one,
    page,
    wants_stream,
)
from perdure.server.idempotency import MADE_HEADERS, REPLAYED, NaturalKey
from perdure.server.openapi import STREAM, may_answer
from perdure.server.paging import (
    LIMIT_DEFAULT,
    After,
    Limit,
    read_number,
    read_pair,
    write_cursor,
)
from perdure.service import attempts, checkpoints, events, steps, tool_calls
from perdure.service.tool_calls import CallbackRequest
from perdure.service.views import (
    AttemptView,
    CheckpointDiff,
    CheckpointState,
    CheckpointView,
    EventPage,
    LateView,
    Page,
    StepView,
    ToolCallView,
)

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["history"])

CallbackBody = Annotated[
    CallbackRequest,
    Body(
        openapi_examples={
            "succeeded": {"value": {"status": "succeeded", "output": {"rows": 12}}},
            "failed": {"value": {"status": "failed", "error": {"reason": "no such table"}}},
        }
    ),
]


@router.get(
    "/runs/{run_id}/events",
    operation_id="follow_run",
    summary="Follow a run, or read its events",
    response_model=EventPage,
    responses={
        200: {
            "description": "A stream (the default), or a page for `Accept: application/json`",
            "content": STREAM,
        },
        204: {"description": "The run is terminal and nothing is after the cursor"},
        **may_answer("not_found", "not_acceptable", "history_reset"),
    },
)
async def follow_run(
    call: InCall,
    run_id: str,
    after: EventsAfter = None,
    limit: Limit = LIMIT_DEFAULT,
    types: EventTypes = None,
    granularity: EventGranularity = None,
    last_event_id: LastEventId = None,
    accept: AcceptHeader = None,
) -> Response:
    """Return the run's events after a seq. The stream's `id` is the seq and each `data` is one
    event as JSON; there is no `event:` line, the type stands in the data. It ends after the
    terminal event; an end without one means: come again with `Last-Event-ID`. Subscribing never
    starts, changes or holds a run. `types` and `granularity` leave events out, not their place:
    a stream tells the seq of what it left out as an `id` alone and always has the terminal event;
    a page's `next` goes behind what it left out."""
    place = event_cursor(last_event_id, after)
    only = wanted_types(names_in(types), names_in(granularity))
    if wants_stream(accept, default=True):
        return await stream_of(call, run_id, place, only=only)
    found = await events.read_page(
        call.service, call.principal, run_id, after=place, limit=limit, only=only
    )
    return Response(found.body(), media_type=JSON)


@router.get(
    "/events/{event_id}",
    operation_id="get_event",
    summary="Show an event",
    response_model=EventView,
    responses=may_answer("not_found"),
)
async def get_event(call: InCall, event_id: str) -> Response:
    """Return one event."""
    found = await events.get_event(call.service, call.principal, event_id)
    return Response(found.body, media_type=JSON)


@router.get(
    "/runs/{run_id}/attempts",
    operation_id="list_attempts",
    summary="List a run's attempts",
    response_model=Page[AttemptView],
    responses=may_answer("not_found"),
)
async def list_attempts(call: InCall, run_id: str) -> Response:
    """Return which workers held the run and how each hold ended, in order."""
    return page(await attempts.list_attempts(call.service, call.principal, run_id), None)


@router.get(
    "/runs/{run_id}/steps",
    operation_id="list_steps",
    summary="List a run's steps",
    response_model=Page[StepView],
    responses=may_answer("not_found"),
)
async def list_steps(
    call: InCall, run_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return steps in order, each with its ordered, typed items."""
    place = read_number("steps", after)
    found = await steps.list_steps(
        call.service, call.principal, run_id, after=-1 if place is None else place, limit=limit
    )
    return page(found.items, write_cursor("steps", found.next))


@router.get(
    "/steps/{step_id}",
    operation_id="get_step",
    summary="Show a step",
    response_model=StepView,
    responses=may_answer("not_found"),
)
async def get_step(call: InCall, step_id: str) -> Response:
    """Return one step with its items."""
    return one(await steps.get_step(call.service, call.principal, step_id))


@router.get(
    "/runs/{run_id}/tool_calls",
    operation_id="list_tool_calls",
    summary="List a run's tool calls",
    response_model=Page[ToolCallView],
    responses=may_answer("not_found"),
)
async def list_tool_calls(
    call: InCall, run_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return calls in order of step and place; large values as references."""
    found = await tool_calls.list_tool_calls(
        call.service,
        call.principal,
        run_id,
        after=read_pair("tool_calls", after),
        limit=limit,
    )
    return page(found.items, write_cursor("tool_calls", found.next))


@router.get(
    "/tool_calls/{tool_call_id}",
    operation_id="get_tool_call",
    summary="Show a tool call",
    response_model=ToolCallView,
    responses=may_answer("not_found"),
)
async def get_tool_call(call: InCall, tool_call_id: str) -> Response:
    """Return one call with its arguments, executions and result, whole."""
    return one(await tool_calls.get_tool_call(call.service, call.principal, tool_call_id))


@router.post(
    "/tool_calls/{tool_call_id}/result",
    operation_id="give_tool_call_result",
    summary="Give the result of a pending tool call",
    response_model=ToolCallView,
    responses={
        200: {"headers": MADE_HEADERS},
        **may_answer("not_found", "conflict", "already_answered", "gone", body=True),
    },
)
async def give_tool_call_result(
    call: InCall, tool_call_id: str, body: CallbackBody, idempotency_key: NaturalKey = None
) -> Response:
    """Give the result of a call whose tool answered `pending`; its run goes on. The same result
    again is accepted and changes nothing. What comes after the call has another result, after its
    time or after the end of its run is kept as late evidence (`late_results`) and refused."""
    del idempotency_key
    given = await tool_calls.give_result(call.service, call.principal, tool_call_id, body)
    return one(given.call, 200, {REPLAYED: "true"} if given.replayed else None)


@router.get(
    "/runs/{run_id}/late_results",
    operation_id="list_late_results",
    summary="List a run's late results",
    response_model=Page[LateView],
    responses=may_answer("not_found"),
)
async def list_late_results(call: InCall, run_id: str) -> Response:
    """Return results of executions whose worker had lost the run: evidence, never merged."""
    return page(await tool_calls.list_late(call.service, call.principal, run_id), None)


@router.get(
    "/runs/{run_id}/checkpoints",
    operation_id="list_checkpoints",
    summary="List a run's checkpoints, newest first",
    response_model=Page[CheckpointView],
    responses=may_answer("not_found"),
)
async def list_checkpoints(
    call: InCall, run_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return the chain of checkpoints from its end."""
    found = await checkpoints.list_checkpoints(
        call.service,
        call.principal,
        run_id,
        before=read_number("checkpoints", after),
        limit=limit,
    )
    return page(found.items, write_cursor("checkpoints", found.next))


@router.get(
    "/checkpoints/{checkpoint_id}",
    operation_id="get_checkpoint",
    summary="Show a checkpoint",
    response_model=CheckpointView,
    responses=may_answer("not_found"),
)
async def get_checkpoint(call: InCall, checkpoint_id: str) -> Response:
    """Return one checkpoint."""
    return one(await checkpoints.get_checkpoint(call.service, call.principal, checkpoint_id))


@router.get(
    "/checkpoints/{checkpoint_id}/state",
    operation_id="get_checkpoint_state",
    summary="Show the state of a run at a checkpoint",
    response_model=CheckpointState,
    responses=may_answer("not_found", "gone", "conflict"),
)
async def get_checkpoint_state(call: InCall, checkpoint_id: str) -> Response:
    """Return what the log says of the run at that place: state, plan, agent state, turns, and what
    was open."""
    return one(await checkpoints.get_state(call.service, call.principal, checkpoint_id))


@router.get(
    "/checkpoints/{checkpoint_id}/diff/{other_id}",
    operation_id="diff_checkpoints",
    summary="Compare the states at two checkpoints",
    response_model=CheckpointDiff,
    responses=may_answer("not_found", "gone", "conflict"),
)
async def diff_checkpoints(call: InCall, checkpoint_id: str, other_id: str) -> Response:
    """Return the JSON Patch (RFC 6902) that turns the first state into the other; the checkpoints
    may be of different runs, as of a run and its fork."""
    return one(await checkpoints.diff(call.service, call.principal, checkpoint_id, other_id))
