"""Going on from a run's history, and updating a waiting run's state by hand."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from perdure.bindings.native.starting import STARTED, answer_with
from perdure.protocol.runs import Run
from perdure.server.asgi import StrictRoute
from perdure.server.call import AcceptHeader, InCall, Wait, example, one
from perdure.server.idempotency import (
    LOCATION,
    MADE_HEADERS,
    CreateKey,
    RunKey,
    key_of,
    made_headers,
)
from perdure.server.openapi import may_answer
from perdure.service import branches, state_updates
from perdure.service.branches import ForkRequest, RetryRequest
from perdure.service.state_updates import StateRequest
from perdure.service.views import CheckpointView

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["runs"])


@router.post(
    "/runs/{run_id}/retry",
    operation_id="retry_run",
    summary="Retry a failed run",
    status_code=202,
    response_model=Run,
    responses={**STARTED, **may_answer("gone")},
)
async def retry_run(
    call: InCall,
    run_id: str,
    body: Annotated[
        RetryRequest | None,
        Body(openapi_examples=example({"reason": "the model is back", "redrive": False})),
    ] = None,
    wait: Wait = 0,
    idempotency_key: RunKey = None,
    accept: AcceptHeader = None,
) -> Response:
    """Open a new run on the same thread, linked by `retry_of`, that goes on where the failed one
    ended: finished steps and calls are shared and not run again. Only for runs that failed, also
    cancelled ones, but not after a rollback. The run itself stays as it is."""
    del idempotency_key  # read from the raw header, as bytes
    make = partial(branches.retry, call.service, call.principal, run_id, body or RetryRequest())
    return await answer_with(call, make, wait=wait, accept=accept)


@router.post(
    "/runs/{run_id}/state",
    operation_id="update_run_state",
    summary="Update the agent's state by hand",
    status_code=201,
    response_model=CheckpointView,
    responses={
        201: {"headers": {**LOCATION, **MADE_HEADERS}},
        **may_answer("not_found", "conflict", "idempotency_mismatch", body=True),
    },
)
async def update_run_state(
    call: InCall,
    run_id: str,
    body: Annotated[
        StateRequest,
        Body(openapi_examples=example({"state": {"region": "north"}, "reason": "wrong region"})),
    ],
    idempotency_key: CreateKey = None,
) -> Response:
    """Replace the agent's own state of a run that waits for a person, as at a breakpoint, by a new
    checkpoint that names its author. The run goes on waiting; its planner sees the state when it is
    asked next. Refused while a worker holds the run and once it has ended: fork it then."""
    del idempotency_key  # read from the raw header, as bytes
    made = await state_updates.update(
        call.service, call.principal, run_id, body, key=key_of(call.request)
    )
    found = made.checkpoint
    headers = made_headers(f"/v1/checkpoints/{found.checkpoint_id}", created=made.created)
    return one(found, 201, headers)


@router.post(
    "/runs/{run_id}/fork",
    operation_id="fork_run",
    summary="Fork a run from a checkpoint",
    status_code=202,
    response_model=Run,
    responses={**STARTED, **may_answer("gone")},
)
async def fork_run(
    call: InCall,
    run_id: str,
    body: Annotated[
        ForkRequest | None,
        Body(openapi_examples=example({"input": {"question": "And by region?"}})),
    ] = None,
    wait: Wait = 0,
    idempotency_key: RunKey = None,
    accept: AcceptHeader = None,
) -> Response:
    """Open a new run on a thread of its own, linked by `forked_from`, that goes on from a
    checkpoint of this one with another input or agent state, if wanted. What was finished there is
    shared and not run again; the run itself stays as it is and may go on beside."""
    del idempotency_key  # read from the raw header, as bytes
    make = partial(branches.fork, call.service, call.principal, run_id, body or ForkRequest())
    return await answer_with(call, make, wait=wait, accept=accept)
