"""Interrupts: the inbox, what is asked, and answering (R-8.2)."""

from typing import Annotated

from fastapi import APIRouter, Body, Query
from starlette.responses import Response

from perdure.protocol.ids import INTERRUPT
from perdure.protocol.states import InterruptStatus
from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, example, one, page
from perdure.server.idempotency import MADE_HEADERS, REPLAYED, NaturalKey
from perdure.server.openapi import may_answer
from perdure.server.paging import LIMIT_DEFAULT, After, Limit, read_id, write_cursor
from perdure.service import interrupts
from perdure.service.interrupts import Answered, AnswerRequest, DelegateRequest
from perdure.service.views import InterruptView, Page

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["interrupts"])

AnswerBody = Annotated[
    AnswerRequest,
    Body(
        openapi_examples={
            "approve": {"value": {"answer": "approve", "reason": "checked with sales"}},
            "edit": {"value": {"answer": "edit", "args": {"percent": 5}}},
            "respond": {"value": {"answer": "respond", "value": "only the north"}},
            "reject": {"value": {"answer": "reject", "reason": "too expensive"}},
        }
    ),
]
_RESOLVED = {
    200: {"headers": MADE_HEADERS},
    **may_answer("not_found", "conflict", "already_answered", "gone", body=True),
}


@router.get(
    "/interrupts",
    operation_id="list_interrupts",
    summary="List interrupts, oldest first",
    response_model=Page[InterruptView],
    responses=may_answer(),
)
async def list_interrupts(
    call: InCall,
    status: InterruptStatus | None = None,
    after: After = None,
    limit: Limit = LIMIT_DEFAULT,
) -> Response:
    """Return the inbox: with `status=pending`, all that waits for an answer."""
    return await _list(call, status, None, after, limit)


@router.get(
    "/runs/{run_id}/interrupts",
    operation_id="list_run_interrupts",
    summary="List a run's interrupts, oldest first",
    response_model=Page[InterruptView],
    responses=may_answer("not_found"),
)
async def list_run_interrupts(
    call: InCall,
    run_id: str,
    status: InterruptStatus | None = None,
    descendants: Annotated[
        bool, Query(description="also those of all runs below, which can be answered by their id")
    ] = False,
    after: After = None,
    limit: Limit = LIMIT_DEFAULT,
) -> Response:
    """Return all questions of a run with their answers."""
    return await _list(call, status, run_id, after, limit, descendants=descendants)


async def _list(
    call: InCall,
    status: InterruptStatus | None,
    run_id: str | None,
    after: str | None,
    limit: int,
    *,
    descendants: bool = False,
) -> Response:
    found = await interrupts.list_interrupts(
        call.service,
        call.principal,
        status=status,
        run_id=run_id,
        after=read_id("interrupts", INTERRUPT, after),
        limit=limit,
        descendants=descendants,
    )
    return page(found.items, write_cursor("interrupts", found.next))


@router.get(
    "/interrupts/{interrupt_id}",
    operation_id="get_interrupt",
    summary="Show an interrupt",
    response_model=InterruptView,
    responses=may_answer("not_found"),
)
async def get_interrupt(call: InCall, interrupt_id: str) -> Response:
    """Return what is asked, with the canonical arguments of the call it is about."""
    return one(await interrupts.get_interrupt(call.service, call.principal, interrupt_id))


@router.post(
    "/interrupts/{interrupt_id}/resolve",
    operation_id="resolve_interrupt",
    summary="Answer an interrupt",
    response_model=InterruptView,
    responses=_RESOLVED,
)
async def resolve_interrupt(
    call: InCall, interrupt_id: str, body: AnswerBody, idempotency_key: NaturalKey = None
) -> Response:
    """Answer once. The same answer again is accepted and changes nothing; another one is refused
    with the first (`details`); an interrupt that expired or was cancelled is gone."""
    del idempotency_key
    answered = await interrupts.resolve(call.service, call.principal, interrupt_id, body)
    return _answer(answered)


@router.post(
    "/interrupts/{interrupt_id}/delegate",
    operation_id="delegate_interrupt",
    summary="Hand an approval on",
    response_model=InterruptView,
    responses={
        200: {"headers": MADE_HEADERS},
        **may_answer("not_found", "conflict", "gone", "forbidden", body=True),
    },
)
async def delegate_interrupt(
    call: InCall,
    interrupt_id: str,
    body: Annotated[DelegateRequest, Body(openapi_examples=example({"to": ["ada"]}))],
    idempotency_key: NaturalKey = None,
) -> Response:
    """Let others decide an approval in the caller's place. The same again changes nothing; who,
    to whom, when and why stand in the log, and in `handling`."""
    del idempotency_key
    done = await interrupts.delegate_approval(call.service, call.principal, interrupt_id, body)
    return _answer(done)


@router.post(
    "/runs/{run_id}/resolve",
    operation_id="resolve_run",
    summary="Answer a run's only open interrupt",
    response_model=InterruptView,
    responses=_RESOLVED,
)
async def resolve_run(
    call: InCall, run_id: str, body: AnswerBody, idempotency_key: NaturalKey = None
) -> Response:
    """Answer without naming the interrupt. When several are open, or none, the answer is refused
    and `details.open_interrupts` lists them."""
    del idempotency_key
    answered = await interrupts.resolve_only(call.service, call.principal, run_id, body)
    return _answer(answered)


def _answer(answered: Answered) -> Response:
    headers = {REPLAYED: "true"} if answered.replayed else None
    return one(answered.interrupt, 200, headers)
