"""Perdure's own HTTP API under `/v1`: thin routes over the service."""

from collections.abc import Sequence

from fastapi import APIRouter

from perdure.bindings.native import (
    agents,
    artifacts,
    branches,
    history,
    interrupts,
    repairs,
    runs,
    state_fields,
    thread_branches,
    threads,
    topics,
)


def routers() -> Sequence[APIRouter]:
    """Return the routers of this binding, for `perdure.server.app.create_app`."""
    modules = (
        runs,
        branches,
        repairs,
        history,
        interrupts,
        threads,
        thread_branches,
        topics,
        artifacts,
        agents,
        state_fields,
    )  # routes are tried in order
    return [module.router for module in modules]
