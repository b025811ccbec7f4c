"""Cancelling: durable first, then signalled; closed at once when nobody holds the run (R-9)."""

import logging
from contextlib import suppress
from dataclasses import replace

from perdure.engine.aside import damage_put_aside
from perdure.engine.core import Core
from perdure.engine.ports import ToolRunner
from perdure.engine.tree import close_unheld
from perdure.protocol.errors import Conflict, NotFound, PerdureError, Unreadable
from perdure.protocol.runs import RunRow
from perdure.protocol.states import ParkedOn
from perdure.signals.ports import CANCEL_TOPIC, run_topic
from perdure.store.reader import RunFilter
from perdure.store.requests import CancelWish, TimerKind

log = logging.getLogger(__name__)

CLOSED_AT_ONCE_MAX = 50


async def cancel_run(
    core: Core, tenant_id: str, run_id: str, wish: CancelWish, *, tools: ToolRunner | None = None
) -> RunRow:
    """Accept a cancel and return the run as it stands; idempotent, a terminal run is unchanged.

    A run that nobody holds is ended before this returns, unless it needs a worker to look up
    what became of a call; a held one is ended by its holder. The cancel reaches all that is below
    the run and not detached; the run ends after them. Raises NotFound, and Conflict for a damaged
    run: the cancel stands, but the run is put aside for repair.
    """
    row = await core.reader.find_run(tenant_id, run_id)
    if row is None:
        raise NotFound("no such run", field="run_id")
    hot = await core.store.request_cancel(run_id, wish)
    if hot is not None and hot.finished_at is None:
        await _carry_out(core, replace(row, hot=hot), tools)
    after = await core.reader.find_run(tenant_id, run_id)
    return after or row


async def finish_superseded(core: Core, tenant_id: str, run_id: str) -> None:
    """Signal the cancel that another run of the thread came with, and end the run where nobody
    holds it. The cancel is durable: what does not succeed here, sweeps repeat.
    """
    try:
        row = await core.reader.find_run(tenant_id, run_id)
        if row is not None and row.hot.finished_at is None:
            await _carry_out(core, row, None)
    except PerdureError as error:
        log.warning("%s was superseded and is not ended yet: %s", run_id, error.message)


async def _carry_out(core: Core, row: RunRow, tools: ToolRunner | None) -> None:
    """Signal an accepted cancel, and end at once what nobody holds."""
    core.signals.publish(run_topic(row.facts.run_id))
    core.signals.publish(CANCEL_TOPIC)
    if row.hot.open_children > 0:
        await _close_below(core, row, tools)
    if row.hot.lease_owner is None:
        await _close_at_once(core, row.facts.run_id, tools)


async def _close_below(core: Core, row: RunRow, tools: ToolRunner | None) -> None:
    """End what waits below the run, newest first: children before their parents. Not all of a
    large tree: sweeps do the rest."""
    where = RunFilter(root_run_id=row.facts.root_run_id, unfinished=True)
    tree = await core.reader.list_runs(None, where, after=None, limit=CLOSED_AT_ONCE_MAX)
    for below in tree:
        hot = below.hot
        closing = hot.cancel_epoch > 0 and hot.parked_on is ParkedOn.CLOSING
        if closing and hot.lease_owner is None and below.facts.run_id != row.facts.run_id:
            core.signals.publish(run_topic(below.facts.run_id))
            with suppress(Conflict, Unreadable):  # one is put aside; the deadline ends it
                await _close_at_once(core, below.facts.run_id, tools)


async def _close_at_once(core: Core, run_id: str, tools: ToolRunner | None) -> None:
    async with damage_put_aside(core, run_id):
        await close_unheld(core, run_id, TimerKind.CLOSE, tools)
