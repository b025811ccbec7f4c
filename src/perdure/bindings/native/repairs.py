"""Repairing runs that are put aside."""

from typing import Annotated

from fastapi import APIRouter, Body
from starlette.responses import Response

from perdure.protocol.runs import Run
from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, example, one
from perdure.server.idempotency import NaturalKey
from perdure.server.openapi import may_answer
from perdure.service import repairs
from perdure.service.repairs import RepairRequest
from perdure.service.views import RepairView

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["runs"])


@router.get(
    "/runs/{run_id}/repair",
    operation_id="get_repair",
    summary="Look at the damage of a run that is put aside",
    response_model=RepairView,
    responses=may_answer("not_found", "conflict"),
)
async def get_repair(call: InCall, run_id: str) -> Response:
    """Return how far its log can be trusted, and what keeps it from going on from there. It changes
    nothing."""
    return one(await repairs.get_repair(call.service, call.principal, run_id))


@router.post(
    "/runs/{run_id}/repair",
    operation_id="repair_run",
    summary="Repair a run that is put aside",
    response_model=Run,
    responses=may_answer("not_found", "conflict", "gone", body=True),
)
async def repair_run(
    call: InCall,
    run_id: str,
    body: Annotated[
        RepairRequest,
        Body(openapi_examples=example({"action": "return", "reason": "a disk was replaced"})),
    ],
    idempotency_key: NaturalKey = None,
) -> Response:
    """`return`: open a run on the same thread, linked by `retry_of`, that goes on from the last
    consistent checkpoint, end this one, and return the one that goes on. Refused when a side effect
    or a child run lies behind the checkpoint. `fail`: end the run and return it. Both are recorded
    in a `repair` event with author and reason; the same request again changes nothing."""
    del idempotency_key
    return one(await repairs.repair(call.service, call.principal, run_id, body))
