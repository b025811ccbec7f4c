"""Checkpoints: positions in the log from which a run can be rebuilt."""

from perdure.protocol.errors import NotFound
from perdure.protocol.ids import CHECKPOINT
from perdure.protocol.records import CheckpointRow
from perdure.service.base import Service, Slice, cut, known, own_run
from perdure.service.principal import Principal
from perdure.service.views import CheckpointView


async def list_checkpoints(
    service: Service, principal: Principal, run_id: str, *, before: int | None, limit: int
) -> Slice[CheckpointView]:
    """Return a run's checkpoints, newest first. Raises NotFound."""
    await own_run(service, principal, run_id)
    found = await service.reader.list_checkpoints(run_id, before=before, limit=limit + 1)
    rows, more = cut(found, limit)
    views = [_view(principal, row) for row in rows]
    return Slice(views, str(rows[-1].seq) if more else None)


async def get_checkpoint(service: Service, principal: Principal, identifier: str) -> CheckpointView:
    """Return one checkpoint. Raises NotFound."""
    known(CHECKPOINT, identifier, "checkpoint")
    row = await service.reader.find_checkpoint(principal.tenant_id, identifier)
    if row is None:
        raise NotFound("there is no such checkpoint")
    return _view(principal, row)


def _view(principal: Principal, row: CheckpointRow) -> CheckpointView:
    return CheckpointView.model_construct(
        checkpoint_id=row.checkpoint_id,
        run_id=row.run_id,
        tenant_id=principal.tenant_id,
        seq=row.seq,
        parent_seq=row.parent_seq,
        step_index=row.step_index,
        attempt=row.attempt,
        cancel_epoch=row.epoch,
        schema_version=row.schema_version,
        agent_state=row.agent_state,
        digest=row.digest,
        created_at=row.created_at,
    )
