"""`/metrics`, for Prometheus: what engine and server counted, and how much waits in the store."""

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from perdure.protocol.states import TERMINAL, RunState
from perdure.server.openapi import problems
from perdure.service.base import Service
from perdure.telemetry.metrics import CONTENT_TYPE, Metrics


def metrics_routes(service: Service, metrics: Metrics) -> APIRouter:
    """Return the route. The backlog is read from the store at each scrape."""
    router = APIRouter(tags=["health"])

    async def scrape() -> Response:
        await _read_backlog(service, metrics)
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    router.add_api_route(
        "/metrics",
        scrape,
        response_class=PlainTextResponse,
        operation_id="metrics",
        summary="Metrics in the Prometheus text format",
        responses=problems({"forbidden", "internal", "unavailable", "unreadable"}),
    )
    return router


async def _read_backlog(service: Service, metrics: Metrics) -> None:
    backlog = await service.backlog()
    runs = metrics.runs
    for state in RunState:
        if state not in TERMINAL:
            runs.by_state.labels(state).set(backlog.runs_by_state.get(state, 0))
    runs.ready.set(backlog.ready)
    runs.ready_age_s.set(backlog.oldest_ready_s)
    runs.queue_ready.clear()
    runs.queue_ready_age_s.clear()
    for name, queue in backlog.queues.items():
        runs.queue_ready.labels(name).set(queue.ready)
        runs.queue_ready_age_s.labels(name).set(queue.oldest_ready_s)
    runs.open_interrupts.set(backlog.open_interrupts)
    runs.open_interrupts_age_s.set(backlog.oldest_interrupt_s)
