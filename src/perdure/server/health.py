"""Health for probes: alive, and ready to serve."""

from typing import Literal

from fastapi import APIRouter
from starlette.responses import Response

from perdure.protocol.base import Stored
from perdure.protocol.errors import Unavailable
from perdure.server.openapi import problems
from perdure.server.stopping import Stopping
from perdure.service.base import Service


class Health(Stored):
    """The status code decides; this is for people."""

    status: Literal["ok"] = "ok"


_OK = Health().model_dump_json()


def _ok() -> Response:
    return Response(_OK, media_type="application/json")


def health_routes(service: Service, stopping: Stopping) -> APIRouter:
    """Return the routes: `/livez` checks nothing outside, `/readyz` the store and draining."""
    router = APIRouter(tags=["health"])

    async def live() -> Response:
        return _ok()

    async def ready() -> Response:
        if stopping.is_set():
            raise Unavailable("the server is stopping")
        await service.ping()
        return _ok()

    router.add_api_route(
        "/livez",
        live,
        response_model=Health,
        operation_id="livez",
        summary="Is it alive?",
        responses=problems({"internal"}),
    )
    for path in ("/readyz", "/healthz"):
        router.add_api_route(
            path,
            ready,
            response_model=Health,
            operation_id=path.strip("/"),
            summary="Can it serve?",
            responses=problems({"internal", "unavailable"}),
        )
    return router
