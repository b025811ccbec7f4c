"""Going on from a run's history."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from perdure.bindings.native.starting import STARTED, answer_with
from perdure.protocol.runs import Run
from perdure.server.asgi import StrictRoute
from perdure.server.call import AcceptHeader, InCall, Wait, example
from perdure.server.idempotency import RunKey
from perdure.server.openapi import may_answer
from perdure.service import branches
from perdure.service.branches import ForkRequest, RetryRequest

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
