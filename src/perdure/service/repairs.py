"""Repairing runs that are put aside: looking at the damage, returning to a checkpoint, ending (R-7.7)."""

from typing import Annotated, Literal

from pydantic import Field

from perdure.engine.returning import RepairWish, assess, fail_run, return_run
from perdure.protocol.base import Model
from perdure.protocol.errors import Conflict, Gone
from perdure.protocol.runs import Run, RunRow
from perdure.protocol.states import ParkedOn
from perdure.service.base import Service, check_storable, own_run
from perdure.service.principal import Principal
from perdure.service.runs import view_of
from perdure.service.views import RepairView

REASON_CHARACTERS_MAX = 2000


class RepairRequest(Model):
    """What is to be done about a run that is put aside."""

    action: Literal["return", "fail"] = Field(
        description="`return`: go on from its last consistent checkpoint as a new run; `fail`: end it"
    )
    reason: Annotated[str, Field(min_length=1, max_length=REASON_CHARACTERS_MAX)] = Field(
        description="why; kept in the log"
    )


async def get_repair(service: Service, principal: Principal, run_id: str) -> RepairView:
    """Return how far the log of a run that is put aside can be trusted, and what lies behind.

    Raises NotFound, Conflict for a run that is not put aside.
    """
    row = await own_run(service, principal, run_id)
    if row.hot.parked_on is not ParkedOn.REPAIR:
        raise Conflict("the run is not put aside for repair")
    found = await assess(service.core, row)
    checkpoint = found.checkpoint
    return RepairView(
        run_id=run_id,
        damage=found.damage,
        checkpoint_id=None if checkpoint is None else checkpoint.checkpoint_id,
        seq=None if checkpoint is None else checkpoint.seq,
        can_return=found.can_return,
        obstacles=list(found.obstacles),
    )


async def repair(
    service: Service, principal: Principal, run_id: str, request: RepairRequest
) -> Run:
    """Repair a run that is put aside; return the run that goes on, or the one that was ended.

    The same request again changes nothing. Raises NotFound, Gone (its input is no longer kept),
    Conflict: it is not put aside, or must not be returned (details list the obstacles).
    """
    check_storable(request.reason, "/reason")
    row = await own_run(service, principal, run_id)
    wish = RepairWish(by=principal.name, reason=request.reason)
    return await view_of(service, await _done(service, row, request.action, wish), whole=True)


async def _done(
    service: Service, row: RunRow, action: Literal["return", "fail"], wish: RepairWish
) -> RunRow:
    if action == "fail":
        return await fail_run(service.core, row, wish)
    try:
        return await return_run(service.core, row, wish)
    except LookupError as error:
        raise Gone(f"the run's input is no longer kept: {error}") from error
