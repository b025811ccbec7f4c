"""What the two routes that create a run share: waiting, streaming, replays."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.responses import Response

from perdure.protocol.runs import Run
from perdure.protocol.states import TERMINAL
from perdure.server.call import Call, one, trace_of, wants_stream
from perdure.server.idempotency import LOCATION, MADE_HEADERS, key_of, made_headers
from perdure.server.openapi import STREAM, Responses, may_answer
from perdure.server.sse import EventStream
from perdure.server.stopping import while_wanted
from perdure.service import events, runs
from perdure.service.runs import RunMade, RunRequest

_HEADERS = {**LOCATION, **MADE_HEADERS}

STARTED: Responses = {
    202: {"model": Run, "description": "The run is durable and goes on", "headers": _HEADERS},
    200: {
        "model": Run,
        "description": "The run is terminal (`wait`), or its events (`Accept`)",
        "headers": _HEADERS,
        "content": STREAM,
    },
    **may_answer(
        "not_found",
        "not_acceptable",
        "conflict",
        "idempotency_mismatch",
        "thread_busy",
        "quota_exceeded",
        body=True,
    ),
}

RUN_EXAMPLE = {
    "input": {"question": "Which products are falling?"},
    "context": {"user_id": "ada", "scope": ["sales:read"]},
    "options": {"idempotency_key": "order-4711", "max_steps": 20},
}


async def start_run(
    call: Call,
    agent_id: str,
    request: RunRequest,
    *,
    thread_id: str | None,
    wait: float,
    accept: str | None,
) -> Response:
    """Create a run and answer in the form that was asked for."""
    make = partial(
        runs.create_run, call.service, call.principal, agent_id, request, thread_id=thread_id
    )
    return await answer_with(call, make, wait=wait, accept=accept)


async def answer_with(
    call: Call, make: Callable[..., Awaitable[RunMade]], *, wait: float, accept: str | None
) -> Response:
    """Make a run under the request's key, and answer with it in the form that was asked for.

    `make` takes `header_key` and `trace_id`. A form that there is not is refused before.
    """
    as_stream = wants_stream(accept, default=False)
    made = await make(header_key=key_of(call.request), trace_id=trace_of(call.request))
    headers = made_headers(f"/v1/runs/{made.run.run_id}", created=made.created)
    if as_stream:
        return await stream_of(call, made.run.run_id, 0, headers)
    run = await ended_or_not(call, made.run, wait)
    return one(run, 200 if run.state in TERMINAL else 202, headers)


async def ended_or_not(call: Call, run: Run, wait: float) -> Run:
    """Return the run at its end, or as it stands when the time or the patience is over."""
    if wait <= 0 or run.state in TERMINAL:
        return run

    async def work() -> Run:
        return await runs.wait_for_run(call.service, call.principal, run.run_id, wait)

    waited = await while_wanted(call.request, call.state.stopping, work)
    return waited or run


async def stream_of(
    call: Call,
    run_id: str,
    after: int,
    headers: Mapping[str, str] | None = None,
    only: frozenset[str] | None = None,
) -> Response:
    """Return the stream of a run's events; 204 when it is over and nothing comes after."""
    start = await events.starting_point(call.service, call.principal, run_id, after)
    if start.is_over:
        return Response(status_code=204)
    return EventStream(
        lambda: events.follow_run(call.service, start, live=True, only=only),
        call.state.streams,
        headers=headers,
    )
