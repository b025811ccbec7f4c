"""Cancelling: durable first, then signalled; closed at once when nobody holds the run (R-9)."""

from perdure.engine.aside import needs_repair, put_aside
from perdure.engine.core import Core
from perdure.engine.load import Damaged
from perdure.engine.maintenance import close_unheld
from perdure.engine.ports import ToolRunner
from perdure.protocol.errors import NotFound
from perdure.protocol.runs import RunRow
from perdure.signals.ports import CANCEL_TOPIC, run_topic
from perdure.store.commits import CancelWish, TimerKind


async def cancel_run(
    core: Core, tenant_id: str, run_id: str, wish: CancelWish, *, tools: ToolRunner | None = None
) -> RunRow:
    """Accept a cancel and return the run as it stands; idempotent, a terminal run is unchanged.

    A run that nobody holds is ended before this returns, unless it needs a worker to look up
    what became of a call; a held one is ended by its holder. Raises NotFound, and Conflict for a
    damaged run: the cancel stands, but the run is put aside for repair.
    """
    row = await core.reader.find_run(tenant_id, run_id)
    if row is None:
        raise NotFound("no such run", field="run_id")
    hot = await core.store.request_cancel(run_id, wish)
    if hot is not None and hot.finished_at is None:
        core.signals.publish(run_topic(run_id))
        core.signals.publish(CANCEL_TOPIC)
        if hot.lease_owner is None:
            await _close_at_once(core, run_id, tools)
    after = await core.reader.find_run(tenant_id, run_id)
    return after or row


async def _close_at_once(core: Core, run_id: str, tools: ToolRunner | None) -> None:
    try:
        await close_unheld(core, run_id, TimerKind.CLOSE, tools)
    except Damaged as error:
        await put_aside(core, run_id, error)
        raise needs_repair(run_id, error) from error
