"""Runs: create, list, look, cancel."""

from typing import Annotated

from fastapi import APIRouter, Body, Query
from pydantic import Field
from starlette.responses import Response

from perdure.bindings.native.starting import RUN_EXAMPLE, STARTED, ended_or_not, start_run
from perdure.protocol.base import Model
from perdure.protocol.ids import INTERRUPT, RUN, THREAD
from perdure.protocol.runs import Run
from perdure.protocol.states import TERMINAL, CancelAction, RunState
from perdure.server.asgi import StrictRoute
from perdure.server.call import AcceptHeader, InCall, Wait, example, one, page
from perdure.server.idempotency import NaturalKey, RunKey
from perdure.server.openapi import may_answer
from perdure.server.paging import LIMIT_DEFAULT, After, Limit, read_id, write_cursor
from perdure.service import runs, trees
from perdure.service.runs import ContinueRequest, RunRequest
from perdure.service.trees import CancelledMany, CancelManyRequest
from perdure.service.views import Page

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["runs"])


class CancelRequest(Model):
    """How to cancel a run."""

    action: CancelAction | None = Field(
        default=None,
        description="`interrupt` stops and keeps the history; after `rollback` the thread is as "
        "before the run: later runs do not see its messages, nothing goes on from its state; "
        "left out: what the run's `cancel_policy` says",
    )
    compensate: bool = Field(
        default=False,
        description="before the run ends, what its tools did is undone where they can, the last "
        "call first; the runs below it do the same. The terminal event tells what remains",
    )
    discard_artifacts: bool = Field(
        default=False,
        description="when the run ends, its artifacts and those of the runs that end with it become "
        "`discarded`: their content is not given out any more, also to forks and retries that share it, and is "
        "deleted in time",
    )
    reason: str | None = Field(default=None, max_length=5000, description="why, for people")


@router.post(
    "/agents/{agent_id}/run",
    operation_id="create_run",
    summary="Start a run on a thread of its own",
    status_code=202,
    response_model=Run,
    responses=STARTED,
)
async def create_run(
    call: InCall,
    agent_id: str,
    body: Annotated[RunRequest, Body(openapi_examples=example(RUN_EXAMPLE))],
    wait: Wait = 0,
    idempotency_key: RunKey = None,
    accept: AcceptHeader = None,
) -> Response:
    """Create one run; it is durable before the answer. The same idempotency key returns the same
    run; with another body it is refused. With `Accept: text/event-stream` the answer is the run's
    events from the first."""
    del idempotency_key  # read from the raw header, as bytes
    return await start_run(call, agent_id, body, thread_id=None, wait=wait, accept=accept)


@router.get(
    "/runs",
    operation_id="list_runs",
    summary="List runs, newest first",
    response_model=Page[Run],
    responses=may_answer(),
)
async def list_runs(
    call: InCall,
    state: RunState | None = None,
    agent_id: Annotated[str | None, Query(max_length=100)] = None,
    thread_id: Annotated[str | None, Query(pattern=f"^{THREAD}_[0-9a-f]{{32}}$")] = None,
    parent_run_id: Annotated[str | None, Query(pattern=f"^{RUN}_[0-9a-f]{{32}}$")] = None,
    unfinished: Annotated[bool, Query(description="only runs that are not terminal")] = False,
    after: After = None,
    limit: Limit = LIMIT_DEFAULT,
) -> Response:
    """Return runs by filter. Values that are held by reference are not fetched in a list."""
    found = await runs.list_runs(
        call.service,
        call.principal,
        state=state,
        agent_id=agent_id,
        thread_id=thread_id,
        parent_run_id=parent_run_id,
        unfinished=unfinished,
        after=read_id("runs", RUN, after),
        limit=limit,
    )
    return page(found.items, write_cursor("runs", found.next))


@router.get(
    "/runs/{run_id}",
    operation_id="get_run",
    summary="Show a run",
    response_model=Run,
    responses=may_answer("not_found"),
)
async def get_run(call: InCall, run_id: str, wait: Wait = 0) -> Response:
    """Return a run as it stands, input and answer whole. Following its events from `last_seq` is
    exact."""
    run = await runs.get_run(call.service, call.principal, run_id)
    return one(await ended_or_not(call, run, wait))


@router.post(
    "/runs/{run_id}/cancel",
    operation_id="cancel_run",
    summary="Cancel a run",
    response_model=Run,
    responses={
        200: {"description": "The run is terminal"},
        202: {
            "model": Run,
            "description": "The cancel is durable; the run shows CANCEL_REQUESTED until it ends",
        },
        **may_answer("not_found", "conflict", body=True),
    },
)
async def cancel_run(
    call: InCall,
    run_id: str,
    body: Annotated[
        CancelRequest | None, Body(openapi_examples=example({"reason": "not needed any more"}))
    ] = None,
    wait: Wait = 0,
    idempotency_key: NaturalKey = None,
) -> Response:
    """Accept a cancel, durably, and answer at once with the new `cancel_epoch`; with `wait`, at
    the run's end or after that time. Idempotent; a terminal run is returned unchanged."""
    del idempotency_key
    wish = body or CancelRequest()
    run = await runs.cancel_run(
        call.service,
        call.principal,
        run_id,
        action=wish.action,
        reason=wish.reason,
        compensate=wish.compensate,
        discard_artifacts=wish.discard_artifacts,
    )
    run = await ended_or_not(call, run, wait)
    return one(run, 200 if run.state in TERMINAL else 202)


@router.post(
    "/runs/{run_id}/continue",
    operation_id="continue_run",
    summary="Continue a run from a breakpoint",
    response_model=Run,
    responses=may_answer("not_found", "conflict", "already_answered", "gone", body=True),
)
async def continue_run(
    call: InCall,
    run_id: str,
    body: Annotated[
        ContinueRequest,
        Body(openapi_examples=example({"interrupt_id": f"{INTERRUPT}_{'0' * 32}", "mode": "step"})),
    ],
    idempotency_key: NaturalKey = None,
) -> Response:
    """Let a run that is paused at a breakpoint go on: to its next breakpoint, or to the end of one
    step. It takes no value and is never an approval. The same request again changes nothing."""
    del idempotency_key
    return one(await runs.continue_run(call.service, call.principal, run_id, body))


@router.get(
    "/runs/{run_id}/children",
    operation_id="list_children",
    summary="List a run's child runs, newest first",
    response_model=Page[Run],
    responses=may_answer("not_found"),
)
async def list_children(
    call: InCall,
    run_id: str,
    unfinished: Annotated[bool, Query(description="only runs that are not terminal")] = False,
    after: After = None,
    limit: Limit = LIMIT_DEFAULT,
) -> Response:
    """Return the runs that a run started, detached ones too."""
    found = await runs.list_children(
        call.service,
        call.principal,
        run_id,
        unfinished=unfinished,
        after=read_id("runs", RUN, after),
        limit=limit,
    )
    return page(found.items, write_cursor("runs", found.next))


@router.post(
    "/runs/cancel",
    operation_id="cancel_runs",
    summary="Cancel many runs",
    response_model=CancelledMany,
    responses=may_answer(body=True),
)
async def cancel_runs(
    call: InCall,
    body: Annotated[
        CancelManyRequest, Body(openapi_examples=example({"agent_id": "research", "tag": "trial"}))
    ],
    idempotency_key: NaturalKey = None,
) -> Response:
    """Cancel unfinished runs by filter, newest first, each durably. With `more` in the answer, the
    same request goes on with what is left."""
    del idempotency_key
    return one(await trees.cancel_many(call.service, call.principal, body))
