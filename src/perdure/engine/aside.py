"""Putting a run aside that nobody holds and that is damaged (R-7.7): no timer tries it again."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from perdure.engine.core import Core
from perdure.engine.load import Damaged
from perdure.protocol.errors import Conflict, Unreadable
from perdure.protocol.states import TERMINAL, ParkedOn
from perdure.signals.ports import run_topic

log = logging.getLogger(__name__)


async def put_aside(core: Core, run_id: str, why: Exception, *, seq: int | None = None) -> None:
    """Leave a damaged run to an operator, unless somebody holds it or has done so already.

    With the last seq that was seen of it, not when somebody has written since. A run whose row
    cannot be read either stays as it is, for whoever can read it.
    """
    try:
        is_aside = await core.store.quarantine(run_id, None, str(why)[:1000], None, seq=seq)
    except Unreadable as error:
        log.error("run %s cannot be put aside (%s): %s", run_id, error, why)  # noqa: TRY400  # `why` tells all
        return
    if is_aside:
        log.error("run %s is put aside for repair: %s", run_id, why)
        core.signals.publish(run_topic(run_id))


@asynccontextmanager
async def damage_put_aside(core: Core, run_id: str) -> AsyncGenerator[None]:
    """Put the run aside when what is done here finds it damaged, and tell the caller so.

    A run that is over by now was read while its history was dropped: nothing is to be done any more.
    """
    damaged: Damaged | None = None
    try:
        yield
    except Damaged as error:
        damaged = error
    if damaged is not None:
        await put_aside_unless_over(core, run_id, damaged)


async def put_aside_unless_over(
    core: Core, run_id: str, damaged: Damaged, *, seq: int | None = None
) -> None:
    """Put a damaged run aside and raise what its caller is told, as `put_aside` does.

    Returns when the run is over or deleted by now: it was read while its history was dropped.
    """
    await put_aside(core, run_id, damaged, seq=seq)
    now = await core.reader.find_run(None, run_id)
    if now is None or now.hot.state in TERMINAL:
        return
    if now.hot.parked_on is not ParkedOn.REPAIR:  # somebody holds it, or has written to it
        raise Conflict(f"the run could not be read, try again: {damaged}") from damaged
    raise needs_repair(run_id, damaged) from damaged


def needs_repair(run_id: str, why: Exception) -> Conflict:
    """Return what the caller is told whose request met the damage."""
    return Conflict(
        f"the run is damaged and put aside for repair: {why}", details={"run_id": run_id}
    )
