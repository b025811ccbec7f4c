"""What any process does now and then for all runs; none needs to be the only one (R-12.1).

Expired leases are taken away; timers of runs that nobody holds are acted upon: a run's total
time, an unanswered interrupt, a closing that was begun and not finished. Each acts once: the
commit compares the run's last seq.
"""

import logging
from dataclasses import dataclass

import anyio

from perdure.engine.aside import put_aside
from perdure.engine.closing import (
    CANCELLED,
    TIMED_OUT,
    close_run,
    end_transition,
    finished_effects,
    look_up_open,
)
from perdure.engine.committer import announce
from perdure.engine.core import Core
from perdure.engine.counting import count_draft
from perdure.engine.draft import Draft
from perdure.engine.expiry import expire_interrupt
from perdure.engine.load import Damaged, load_view
from perdure.engine.ports import ToolRunner
from perdure.engine.rowview import view_from_rows
from perdure.engine.unheld import unheld_draft
from perdure.engine.view import RunView
from perdure.protocol.errors import PerdureError, Unavailable, Unreadable
from perdure.protocol.events import TimeoutEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.runs import RunRow
from perdure.protocol.schema import Incompatible
from perdure.protocol.states import TERMINAL
from perdure.signals.ports import QUEUE_TOPIC
from perdure.store.commits import Committed, DueTimer, TimerKind

log = logging.getLogger(__name__)

BATCH = 100
LOOKUP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """The sweeps. Without `tools` (an API server), calls that a tool can look up are left."""

    core: Core
    tools: ToolRunner | None

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
                    return await expire_interrupt(self.core, timer.run_id, timer.ref or "")
                case TimerKind.DEADLINE | TimerKind.CLOSE:
                    return await close_unheld(self.core, timer.run_id, timer.kind, self.tools)
        except Unavailable:
            raise
        except (Damaged, Unreadable) as error:
            await put_aside(self.core, timer.run_id, error)
            return False
        except Exception:  # one run's trouble must not keep the timers of all others
            log.exception("the %s of run %s could not be acted upon", timer.kind, timer.run_id)
            return False


async def close_unheld(core: Core, run_id: str, due: TimerKind, tools: ToolRunner | None) -> bool:
    """End a run that nobody holds and whose end is due; True when this call ended it.

    False when it is held, ended already, or has a call that only a worker can look up.
    """
    row = await core.reader.find_run(None, run_id)
    if row is None or row.hot.lease_owner is not None or row.hot.state in TERMINAL:
        return False
    failure = _due_failure(row, due)
    if failure is None:
        return False
    view, whole = await _view(core, row)
    if tools is None and any(not call.repeatable for call in view.running_calls()):
        return False
    known = await look_up_open(view, tools, LOOKUP_TIMEOUT_S) if tools is not None else {}
    effects = await finished_effects(core, view)
    draft = unheld_draft(core, view, row)
    draft.with_checkpoint = whole
    _note_timeout(draft, failure)
    why = end_transition(row.hot.state, failure)
    close_run(draft, why, failure, known=known, effects=effects)
    commit = draft.build()
    (result,) = await core.store.commit([commit])
    if not isinstance(result, Committed):
        return False
    announce(core, commit)
    count_draft(core, draft)
    return True


async def _view(core: Core, row: RunRow) -> tuple[RunView, bool]:
    """Return the run's view, and whether its log could be folded: what is owed can always be told."""
    try:
        return await load_view(core, row), True
    except Incompatible:
        return await view_from_rows(core, row), False


def _due_failure(row: RunRow, due: TimerKind) -> Failure | None:
    hot, options = row.hot, row.facts.options
    if hot.cancel_epoch > 0:
        return CANCELLED
    if due is TimerKind.DEADLINE:
        return TIMED_OUT
    if hot.faults < options.max_attempts:
        return None
    return Failure(
        code=FailureCode.RETRIES_EXHAUSTED,
        reason=f"{hot.faults} attempts were lost since the last committed step",
        stage=Stage.RECOVERY,
    )


def _note_timeout(draft: Draft, failure: Failure) -> None:
    if failure.code is FailureCode.RUN_TIMEOUT:
        limit_s = draft.view.facts.options.timeouts.run_s or 0
        draft.add(TimeoutEvent(subject="run", limit_ms=round(limit_s * 1000)))
