"""Putting a run aside that nobody holds and that is damaged (R-7.7): no timer tries it again."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from perdure.engine.core import Core
from perdure.engine.load import Damaged
from perdure.protocol.errors import Conflict
from perdure.signals.ports import run_topic

log = logging.getLogger(__name__)


async def put_aside(core: Core, run_id: str, why: Exception) -> None:
    """Leave a damaged run to an operator, unless somebody holds it or has done so already."""
    if await core.store.quarantine(run_id, None, str(why)[:1000], None):
        log.error("run %s is put aside for repair: %s", run_id, why)
        core.signals.publish(run_topic(run_id))


@asynccontextmanager
async def damage_put_aside(core: Core, run_id: str) -> AsyncGenerator[None]:
    """Put the run aside when what is done here finds it damaged, and tell the caller so."""
    damaged: Damaged | None = None
    try:
        yield
    except Damaged as error:
        damaged = error
    if damaged is not None:
        await put_aside(core, run_id, damaged)
        raise needs_repair(run_id, damaged) from damaged


def needs_repair(run_id: str, why: Exception) -> Conflict:
    """Return what the caller is told whose request met the damage."""
    return Conflict(
        f"the run is damaged and put aside for repair: {why}", details={"run_id": run_id}
    )
