"""Threads, their messages and their runs."""

from typing import Annotated

from fastapi import APIRouter, Body, Query
from pydantic import Field, JsonValue
from starlette.responses import Response

from perdure.bindings.native.starting import RUN_EXAMPLE, STARTED, start_run
from perdure.protocol.codec import parse_strict
from perdure.protocol.errors import Invalid, Malformed
from perdure.protocol.ids import RUN, THREAD
from perdure.protocol.messages import Message
from perdure.protocol.runs import Run
from perdure.server.asgi import StrictRoute
from perdure.server.call import (
    JSON,
    AcceptHeader,
    InCall,
    ThreadAfter,
    ThreadLastEventId,
    Wait,
    example,
    one,
    page,
    wants_stream,
)
from perdure.server.idempotency import (
    LOCATION,
    MADE_HEADERS,
    CreateKey,
    RunKey,
    key_of,
    made_headers,
)
from perdure.server.openapi import STREAM, may_answer
from perdure.server.paging import LIMIT_DEFAULT, After, Limit, read_id, read_number, write_cursor
from perdure.server.sse import EventStream
from perdure.service import messages, runs, thread_events, threads
from perdure.service.messages import MessageRequest
from perdure.service.runs import RunRequest
from perdure.service.threads import ThreadRequest
from perdure.service.views import Page, ThreadEventPage, ThreadView

MetadataQuery = Annotated[
    str | None,
    Query(
        max_length=5000,
        description="a JSON object of at most 5 pairs; threads whose metadata has each of them",
    ),
]

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["threads"])


class ThreadRunRequest(RunRequest):
    """A run on a thread, as it is asked for."""

    agent_id: str = Field(min_length=1, max_length=100)


@router.post(
    "/threads",
    operation_id="create_thread",
    summary="Create a thread",
    status_code=201,
    response_model=ThreadView,
    responses={
        201: {"headers": {**LOCATION, **MADE_HEADERS}},
        **may_answer("gone", "conflict", "idempotency_mismatch", body=True),
    },
)
async def create_thread(
    call: InCall,
    body: Annotated[
        ThreadRequest | None, Body(openapi_examples=example({"title": "Weekly report"}))
    ] = None,
    idempotency_key: CreateKey = None,
) -> Response:
    """Create a thread: a context for runs, never a lock. The same idempotency key returns the same
    thread, or that it was deleted; with another body it is refused."""
    del idempotency_key  # read from the raw header, as bytes
    made = await threads.create_thread(
        call.service, call.principal, body or ThreadRequest(), key=key_of(call.request)
    )
    thread = made.thread
    headers = made_headers(f"/v1/threads/{thread.thread_id}", created=made.created)
    return one(thread, 201, headers)


@router.get(
    "/threads",
    operation_id="list_threads",
    summary="List threads, newest first",
    response_model=Page[ThreadView],
    responses=may_answer(),
)
async def list_threads(
    call: InCall,
    after: After = None,
    limit: Limit = LIMIT_DEFAULT,
    metadata: MetadataQuery = None,
) -> Response:
    """Return threads, or those that have each of the named pairs in their metadata."""
    found = await threads.list_threads(
        call.service,
        call.principal,
        after=read_id("threads", THREAD, after),
        limit=limit,
        metadata=_pairs(metadata),
    )
    return page(found.items, write_cursor("threads", found.next))


def _pairs(text: str | None) -> dict[str, JsonValue] | None:
    if text is None:
        return None
    try:
        value = parse_strict(text.encode())
    except (Malformed, Invalid) as error:
        raise type(error)(f"metadata: {error}", field="metadata") from None
    if not isinstance(value, dict):
        raise Malformed("not a JSON object", field="metadata")
    return value


@router.get(
    "/threads/{thread_id}",
    operation_id="get_thread",
    summary="Show a thread",
    response_model=ThreadView,
    responses=may_answer("not_found", "gone"),
)
async def get_thread(call: InCall, thread_id: str) -> Response:
    """Return one thread."""
    return one(await threads.get_thread(call.service, call.principal, thread_id))


@router.get(
    "/threads/{thread_id}/messages",
    operation_id="list_messages",
    summary="List a thread's messages, in order",
    response_model=Page[Message],
    responses=may_answer("not_found", "gone"),
)
async def list_messages(
    call: InCall, thread_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return messages with their typed parts, each attributed."""
    found = await messages.list_messages(
        call.service,
        call.principal,
        thread_id,
        after=read_number("messages", after) or 0,
        limit=limit,
    )
    return page(found.items, write_cursor("messages", found.next))


@router.post(
    "/threads/{thread_id}/messages",
    operation_id="append_message",
    summary="Append a message",
    status_code=201,
    response_model=Message,
    responses={
        201: {"headers": {**LOCATION, **MADE_HEADERS}},
        **may_answer("not_found", "gone", "conflict", "idempotency_mismatch", body=True),
    },
)
async def append_message(
    call: InCall,
    thread_id: str,
    body: Annotated[
        MessageRequest,
        Body(
            openapi_examples=example(
                {"role": "user", "parts": [{"type": "text", "text": "And the week before?"}]}
            )
        ),
    ],
    idempotency_key: CreateKey = None,
) -> Response:
    """Append a message that belongs to no run; the next run of the thread sees it. The same
    idempotency key returns the same message; with another body it is refused."""
    del idempotency_key  # read from the raw header, as bytes
    made = await messages.append_message(
        call.service, call.principal, thread_id, body, key=key_of(call.request)
    )
    message = made.message
    headers = made_headers(f"/v1/messages/{message.message_id}", created=made.created)
    return one(message, 201, headers)


@router.get(
    "/messages/{message_id}",
    operation_id="get_message",
    summary="Show a message",
    response_model=Message,
    responses=may_answer("not_found"),
)
async def get_message(call: InCall, message_id: str) -> Response:
    """Return one message with its typed parts."""
    return one(await messages.get_message(call.service, call.principal, message_id))


@router.post(
    "/threads/{thread_id}/runs",
    operation_id="create_thread_run",
    summary="Start a run on a thread",
    status_code=202,
    response_model=Run,
    responses={**STARTED, **may_answer("gone")},
)
async def create_thread_run(
    call: InCall,
    thread_id: str,
    body: Annotated[
        ThreadRunRequest, Body(openapi_examples=example({"agent_id": "sales", **RUN_EXAMPLE}))
    ],
    wait: Wait = 0,
    idempotency_key: RunKey = None,
    accept: AcceptHeader = None,
) -> Response:
    """Create one run on a thread, as for an agent. Whether it waits for the thread's active run,
    is refused, cancels it or runs on a branch is `options.multitask_strategy`; `supersedes` in the
    answer names the run that was cancelled, `branch` what its own thread was branched from."""
    del idempotency_key  # read from the raw header, as bytes
    return await start_run(call, body.agent_id, body, thread_id=thread_id, wait=wait, accept=accept)


@router.get(
    "/threads/{thread_id}/events",
    operation_id="follow_thread",
    summary="Follow all runs of a thread, or read their events",
    response_model=ThreadEventPage,
    responses={
        200: {
            "description": "A stream (the default), or a page for `Accept: application/json`",
            "content": STREAM,
        },
        **may_answer("not_found", "gone", "not_acceptable", "history_reset"),
    },
)
async def follow_thread(
    call: InCall,
    thread_id: str,
    after: ThreadAfter = None,
    limit: Limit = LIMIT_DEFAULT,
    last_event_id: ThreadLastEventId = None,
    accept: AcceptHeader = None,
) -> Response:
    """Return the events of every run of the thread, those to come as well: in order within each
    run, each with its `run_id`. The stream's `id` is a place to resume from, to be sent back as it
    is; the stream does not end by itself. Subscribing never starts, changes or holds a run."""
    start = await thread_events.thread_start(
        call.service, call.principal, thread_id, after or "", last_event_id=last_event_id or ""
    )
    if wants_stream(accept, default=True):
        return EventStream(lambda: thread_events.follow(call.service, start), call.state.streams)
    found = await thread_events.read_page(call.service, start, limit=limit)
    return Response(found.body(), media_type=JSON)


@router.get(
    "/threads/{thread_id}/runs",
    operation_id="list_thread_runs",
    summary="List a thread's runs, newest first",
    response_model=Page[Run],
    responses=may_answer("not_found", "gone"),
)
async def list_thread_runs(
    call: InCall, thread_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return the runs of a thread."""
    found = await runs.list_thread_runs(
        call.service,
        call.principal,
        thread_id,
        after=read_id("thread_runs", RUN, after),
        limit=limit,
    )
    return page(found.items, write_cursor("thread_runs", found.next))
