"""Artifacts and their content."""

import re
from urllib.parse import quote

from fastapi import APIRouter
from starlette.responses import Response

from perdure.protocol.ids import ARTIFACT
from perdure.server.asgi import StrictRoute
from perdure.server.call import InCall, one, page
from perdure.server.openapi import header, may_answer
from perdure.server.paging import LIMIT_DEFAULT, After, Limit, read_id, write_cursor
from perdure.service import artifacts
from perdure.service.views import ArtifactView, Page

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["artifacts"])

_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,100}/[A-Za-z0-9!#$&^_.+-]{1,100}")
_ANY_BYTES = "application/octet-stream"


@router.get(
    "/runs/{run_id}/artifacts",
    operation_id="list_artifacts",
    summary="List a run's artifacts, oldest first",
    response_model=Page[ArtifactView],
    responses=may_answer("not_found"),
)
async def list_artifacts(
    call: InCall, run_id: str, after: After = None, limit: Limit = LIMIT_DEFAULT
) -> Response:
    """Return what the run produced."""
    found = await artifacts.list_artifacts(
        call.service,
        call.principal,
        run_id,
        after=read_id("artifacts", ARTIFACT, after),
        limit=limit,
    )
    return page(found.items, write_cursor("artifacts", found.next))


@router.get(
    "/artifacts/{artifact_id}",
    operation_id="get_artifact",
    summary="Show an artifact",
    response_model=ArtifactView,
    responses=may_answer("not_found"),
)
async def get_artifact(call: InCall, artifact_id: str) -> Response:
    """Return an artifact's description."""
    return one(await artifacts.get_artifact(call.service, call.principal, artifact_id))


@router.get(
    "/artifacts/{artifact_id}/content",
    operation_id="get_artifact_content",
    summary="Download an artifact",
    response_class=Response,
    responses={
        200: {
            "description": "The bytes, always as an attachment, in the artifact's media type",
            "content": {"*/*": {"schema": {"type": "string", "format": "binary"}}},
            "headers": {
                "Content-Disposition": header("`attachment`, with the artifact's name"),
                "ETag": header("the content's digest, in quotes"),
            },
        },
        **may_answer("not_found", "gone"),
    },
)
async def get_artifact_content(call: InCall, artifact_id: str) -> Response:
    """Return the content, to be saved: it is never shown as a page of this server."""
    found = await artifacts.read_content(call.service, call.principal, artifact_id)
    media_type = found.artifact.media_type
    headers = {
        "Content-Type": media_type if _MEDIA_TYPE.fullmatch(media_type) else _ANY_BYTES,
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(found.artifact.name, safe='')}",
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "ETag": f'"{found.artifact.digest}"',
    }
    return Response(found.data, headers=headers)
