"""What any process does now and then for all runs; none needs to be the only one (R-12.1).

Expired leases are taken away; timers of runs that nobody holds are acted upon: a run's total
time, an unanswered interrupt, a callback that did not come, a closing that was begun and not finished; reports of children are
delivered. Each acts once: the commit compares the run's last seq.
"""

import logging
from dataclasses import dataclass

import anyio

from perdure.engine.aside import put_aside
from perdure.engine.callbacks import expire_callback
from perdure.engine.compensation import Compensator
from perdure.engine.core import Core
from perdure.engine.expiry import expire_interrupt
from perdure.engine.load import Damaged
from perdure.engine.ports import ToolRunner
from perdure.engine.tree import close_unheld, deliver_reports
from perdure.protocol.errors import PerdureError, Unavailable, Unreadable
from perdure.signals.ports import QUEUE_TOPIC
from perdure.store.commits import DueTimer, TimerKind

log = logging.getLogger(__name__)

BATCH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """The sweeps. Without `tools` (an API server), calls that a tool can look up are left, and
    without a `compensator` what a cancelled run has to undo.
    """

    core: Core
    tools: ToolRunner | None
    compensator: Compensator | None = None

    async def run(self) -> None:
        """Sweep until cancelled."""
        interval_s = self.core.settings.maintenance_interval_s
        while True:
            try:
                busy = await self.run_once()
            except PerdureError as error:
                log.warning("maintenance failed: %s", error)
                busy = False
            if not busy:
                await anyio.sleep(interval_s * (0.75 + self.core.chance.random() / 2))

    async def run_once(self) -> bool:
        """Do one sweep; True when there may be more to do at once."""
        requeued = await self.core.store.requeue_expired(BATCH)
        if requeued:
            log.warning("%d expired leases taken away", len(requeued))
            self.core.signals.publish(QUEUE_TOPIC)
        due = await self.core.reader.due_timers(BATCH)
        acted = 0
        for timer in due:
            acted += await self._act(timer)
        return acted > 0 and (len(due) == BATCH or len(requeued) == BATCH)

    async def _act(self, timer: DueTimer) -> bool:
        try:
            match timer.kind:
                case TimerKind.EXPIRY:
                    return await expire_interrupt(
                        self.core, timer.run_id, timer.ref or "", self.tools
                    )
                case TimerKind.DEADLINE | TimerKind.CLOSE:
                    closed = await close_unheld(self.core, timer.run_id, timer.kind, self.tools)
                    if self.compensator is not None and timer.kind is TimerKind.CLOSE:
                        self.compensator.offer(timer.run_id)
                    return closed
                case TimerKind.CALLBACK:
                    return await expire_callback(self.core, timer.run_id, timer.ref or "")
                case TimerKind.CHILD:
                    return await deliver_reports(self.core, timer.run_id, self.tools)
        except Unavailable:
            raise
        except (Damaged, Unreadable) as error:
            await put_aside(self.core, timer.run_id, error)
            return False
        except Exception:  # one run's trouble must not keep the timers of all others
            log.exception("the %s of run %s could not be acted upon", timer.kind, timer.run_id)
            return False
