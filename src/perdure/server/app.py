"""The application: the door, the errors, health, metrics, documentation, and the bindings' routes.

Which bindings there are is the composition root's choice; their routers are handed in.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import cast

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from perdure.protocol.errors import PerdureError
from perdure.server import problems
from perdure.server.asgi import BodyDoor, Boundary, HostCheck, OriginCheck, Outer
from perdure.server.docs import docs_routes
from perdure.server.health import health_routes
from perdure.server.metrics import metrics_routes
from perdure.server.openapi import install_openapi
from perdure.server.settings import ServerSettings
from perdure.server.sse import StreamContext
from perdure.server.stopping import Stopping
from perdure.service.base import Service
from perdure.telemetry.metrics import Metrics

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """What routes work with, on `app.state.perdure`."""

    service: Service
    settings: ServerSettings
    stopping: Stopping
    metrics: Metrics
    streams: StreamContext = field(init=False)

    def __post_init__(self) -> None:
        context = StreamContext(
            settings=self.settings, stopping=self.stopping, metrics=self.metrics.server
        )
        object.__setattr__(self, "streams", context)


def state_of(connection: HTTPConnection) -> ServerState:
    """Return the state of the application that a request came to; usable as a dependency."""
    return cast("ServerState", connection.app.state.perdure)


def create_app(
    service: Service,
    settings: ServerSettings,
    *,
    routers: Sequence[APIRouter] = (),
    stopping: Stopping | None = None,
    metrics: Metrics | None = None,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """Return the ASGI application. `routers` are those of the bindings that are served."""
    stopping = stopping or Stopping()
    metrics = metrics or service.core.metrics
    app = FastAPI(
        title="Perdure",
        summary="A durable runtime for agents.",
        version="1",
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        exception_handlers={
            PerdureError: problems.on_perdure_error,
            HTTPException: problems.on_http_error,
            RequestValidationError: problems.on_validation_error,
        },
    )
    app.state.perdure = ServerState(
        service=service, settings=settings, stopping=stopping, metrics=metrics
    )
    for router in (
        *routers,
        health_routes(service, stopping),
        metrics_routes(service, metrics),
        docs_routes(),
    ):
        # the routes themselves, not `include_router`, which builds each of them a second time
        app.router.routes.extend(router.routes)
    install_openapi(app)
    _add_door(app, service, settings, metrics)
    return app


def _add_door(app: FastAPI, service: Service, settings: ServerSettings, metrics: Metrics) -> None:
    """Put the door before the routes; the middleware that is added last is the outermost."""
    app.add_middleware(
        BodyDoor, bytes_max=settings.body_bytes_max, timeout_s=settings.body_timeout_s
    )
    app.add_middleware(OriginCheck, settings=settings)
    app.add_middleware(HostCheck, settings=settings)
    app.add_middleware(Boundary)
    app.add_middleware(
        Outer,
        new_id=service.new_request_id,
        metrics=metrics.server,
        access_log=settings.access_log,
    )
