"""Branches of threads: forking, adopting, deleting."""

from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from perdure.protocol.ids import THREAD
from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, example, one, page
from perdure.server.idempotency import (
    LOCATION,
    MADE_HEADERS,
    CreateKey,
    NaturalKey,
    key_of,
    made_headers,
)
from perdure.server.openapi import may_answer
from perdure.server.paging import LIMIT_DEFAULT, After, Limit, read_id, write_cursor
from perdure.service import thread_branches
from perdure.service.thread_branches import AdoptRequest, ThreadForkRequest
from perdure.service.views import BranchView, Page, ThreadView

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["threads"])


@router.post(
    "/threads/{thread_id}/fork",
    operation_id="fork_thread",
    summary="Fork or copy a thread",
    status_code=201,
    response_model=ThreadView,
    responses={
        201: {"headers": {**LOCATION, **MADE_HEADERS}},
        **may_answer("not_found", "gone", "conflict", "idempotency_mismatch", body=True),
    },
)
async def fork_thread(
    call: InCall,
    thread_id: str,
    body: Annotated[
        ThreadForkRequest | None,
        Body(openapi_examples=example({"title": "What if", "position": 4})),
    ] = None,
    idempotency_key: CreateKey = None,
) -> Response:
    """Create a thread that says what this one says up to a position, or all of it, and then goes
    on by itself. Nothing is copied; the thread stays as it is. The same idempotency key returns the
    same fork; with another body it is refused."""
    del idempotency_key  # read from the raw header, as bytes
    made = await thread_branches.fork_thread(
        call.service,
        call.principal,
        thread_id,
        body or ThreadForkRequest(),
        key=key_of(call.request),
    )
    headers = made_headers(f"/v1/threads/{made.thread.thread_id}", created=made.created)
    return one(made.thread, 201, headers)


@router.get(
    "/threads/{thread_id}/branches",
    operation_id="list_branches",
    summary="List a thread's branches, oldest first",
    response_model=Page[BranchView],
    responses=may_answer("not_found", "gone"),
)
async def list_branches(
    call: InCall, thread_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return the threads that were forked from this one, by hand or for a run, with the place that
    they began at; those that the thread has adopted are marked."""
    found = await thread_branches.list_branches(
        call.service,
        call.principal,
        thread_id,
        after=read_id("branches", THREAD, after),
        limit=limit,
    )
    return page(found.items, write_cursor("branches", found.next))


@router.post(
    "/threads/{thread_id}/adopt",
    operation_id="adopt_branch",
    summary="Adopt a branch of a thread",
    response_model=ThreadView,
    responses=may_answer("not_found", "gone", "conflict", "thread_busy", body=True),
)
async def adopt_branch(
    call: InCall,
    thread_id: str,
    body: Annotated[
        AdoptRequest, Body(openapi_examples=example({"branch_id": f"{THREAD}_{'0' * 32}"}))
    ],
    idempotency_key: NaturalKey = None,
) -> Response:
    """Let the thread say what a branch of it says, instead of what it said since the fork; the next
    run goes on from there, and artifacts of the branch become `adopted`. Neither may have an active
    run. The same request again changes nothing."""
    del idempotency_key
    return one(await thread_branches.adopt_branch(call.service, call.principal, thread_id, body))


@router.delete(
    "/threads/{thread_id}",
    operation_id="delete_thread",
    summary="Delete a thread",
    status_code=204,
    response_class=Response,
    responses=may_answer("not_found", "conflict", "thread_busy"),
)
async def delete_thread(
    call: InCall, thread_id: str, idempotency_key: NaturalKey = None
) -> Response:
    """Delete a thread with its messages and the history of its runs, but for what branches of it
    say and share. Its id answers 410 from then on; of its runs stays what retention leaves. Refused
    while a run of it has not ended. The same request again changes nothing."""
    del idempotency_key
    await thread_branches.delete_thread(call.service, call.principal, thread_id)
    return Response(status_code=204)
