"""Attempts: which workers held a run, and how each hold ended."""

from perdure.service.base import Service, own_run
from perdure.service.principal import Principal
from perdure.service.views import AttemptView


async def list_attempts(service: Service, principal: Principal, run_id: str) -> list[AttemptView]:
    """Return all attempts of a run, in order. Raises NotFound."""
    row = await own_run(service, principal, run_id)
    return [
        AttemptView.model_construct(
            run_id=attempt.run_id,
            tenant_id=row.facts.tenant_id,
            attempt=attempt.attempt,
            worker_id=attempt.worker_id,
            started_at=attempt.started_at,
            ended_at=attempt.ended_at,
            end_reason=attempt.end_reason,
        )
        for attempt in await service.reader.list_attempts(run_id)
    ]
