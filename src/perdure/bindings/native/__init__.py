"""Perdure's own HTTP API under `/v1`: thin routes over the service."""

from collections.abc import Sequence

from fastapi import APIRouter

from perdure.bindings.native import agents, artifacts, history, interrupts, runs, threads


def routers() -> Sequence[APIRouter]:
    """Return the routers of this binding, for `perdure.server.app.create_app`."""
    made = APIRouter(prefix="/v1")
    for module in (agents, threads, runs, history, interrupts, artifacts):
        made.include_router(module.router)
    return [made]
