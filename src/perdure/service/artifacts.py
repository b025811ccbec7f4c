"""Artifacts: the formal products of runs, and their content."""

from dataclasses import dataclass

from perdure.protocol.errors import Gone, NotFound
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import ARTIFACT
from perdure.protocol.records import ArtifactRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import ArtifactStatus
from perdure.service.base import Service, Slice, cut, known, own_run
from perdure.service.principal import Principal
from perdure.service.views import ArtifactView


@dataclass(frozen=True, slots=True)
class Content:
    """An artifact with its bytes."""

    artifact: ArtifactView
    data: bytes


async def list_artifacts(
    service: Service, principal: Principal, run_id: str, *, after: str | None, limit: int
) -> Slice[ArtifactView]:
    """Return a run's artifacts, oldest first. Raises NotFound."""
    run = await own_run(service, principal, run_id)
    found = await service.reader.list_artifacts(
        principal.tenant_id, run_id=run_id, thread_id=None, after=after, limit=limit + 1
    )
    rows, more = cut(found, limit)
    return Slice([_view(row, run) for row in rows], rows[-1].artifact_id if more else None)


async def get_artifact(service: Service, principal: Principal, identifier: str) -> ArtifactView:
    """Return one artifact. Raises NotFound."""
    row = await _find(service, principal, identifier)
    return _view(row, await own_run(service, principal, row.run_id))


async def read_content(service: Service, principal: Principal, identifier: str) -> Content:
    """Return an artifact with its bytes.

    Raises NotFound; Gone when a cancel discarded it, or when its bytes were deleted.
    """
    row = await _find(service, principal, identifier)
    if row.status is ArtifactStatus.DISCARDED:
        raise Gone("the artifact was discarded with its cancelled run")
    data = await service.reader.read_blob(principal.tenant_id, row.digest)
    if data is None:
        raise Gone("the artifact's content is no longer kept")
    return Content(_view(row, await own_run(service, principal, row.run_id)), data)


async def _find(service: Service, principal: Principal, identifier: str) -> ArtifactRow:
    known(ARTIFACT, identifier, "artifact")
    row = await service.reader.find_artifact(principal.tenant_id, identifier)
    if row is None:
        raise NotFound("there is no such artifact")
    return row


def _status(row: ArtifactRow, run: RunRow) -> ArtifactStatus:
    """Return the status as it is shown: what a cancelled run left is marked so (R-9.7)."""
    cancelled = run.hot.code is FailureCode.RUN_CANCELLED
    own = row.status in {ArtifactStatus.ADOPTED, ArtifactStatus.DISCARDED}
    return ArtifactStatus.CANCELLED if cancelled and not own else row.status


def _view(row: ArtifactRow, run: RunRow) -> ArtifactView:
    return ArtifactView.model_construct(
        artifact_id=row.artifact_id,
        run_id=row.run_id,
        thread_id=row.thread_id,
        tenant_id=row.tenant_id,
        step_index=row.step_index,
        tool_call_id=row.tool_call_id,
        name=row.name,
        version=row.version,
        media_type=row.media_type,
        digest=row.digest,
        size=row.size,
        status=_status(row, run),
        seq=row.seq,
        created_at=row.created_at,
    )
