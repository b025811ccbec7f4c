"""What any process does now and then for all runs; none needs to be the only one (R-12.1).

Expired leases are taken away; timers of runs that nobody holds are acted upon: a run's total
time, an unanswered interrupt, a callback that did not come, a closing that was begun and not
finished; reports of children are delivered. Each acts once: the commit compares the run's last seq.
A run that nothing would ever move is put aside for repair.

Two of the tasks, so that what a timer waits for (a tool that is asked what became of a call) keeps no
lease from being taken away. Timers are read in pages that go on where the last one ended, and one
that cannot be acted upon rests for a while: neither keeps the others from their turn.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby

import anyio

from perdure.engine.aside import put_aside
from perdure.engine.callbacks import expire_callback
from perdure.engine.compensation import Compensator
from perdure.engine.core import Core
from perdure.engine.expiry import expire_interrupt
from perdure.engine.load import Damaged
from perdure.engine.notices import Notices
from perdure.engine.ports import ToolRunner
from perdure.engine.returning import return_by_policy
from perdure.engine.tree import close_unheld, deliver_reports
from perdure.engine.unheld import NotCarriedOn
from perdure.protocol.base import RUNTIME_VERSION
from perdure.protocol.errors import PerdureError, StoreFull, Unavailable, Unreadable
from perdure.protocol.schema import Incompatible
from perdure.signals.ports import QUEUE_TOPIC
from perdure.store.requests import DueTimer, TimerKind

log = logging.getLogger(__name__)

BATCH = 100
PAGES_MAX = 20
"""So many pages of timers are looked at between two pauses."""
ACTS_MAX = 8
"""So many runs are acted upon at once."""
UNMOVED_EVERY_S = 60.0
"""So long is the pause after all unfinished runs were asked what moves them, a page at a time."""
UNMOVED_PAGE = 500
UNMOVED = Damaged(
    "nothing moves it: nobody holds it, it has no entry in `ready`, no question, no timer, "
    "no open child and no run before it in its thread"
)
RESTING_MAX = 10_000
REST_S_MAX = 60.0


@dataclass(slots=True, kw_only=True)
class Maintenance:
    """The sweeps. Without `tools` (an API server), calls that a tool can look up are left, and
    without a `compensator` what a cancelled run has to undo.
    """

    core: Core
    tools: ToolRunner | None
    compensator: Compensator | None = None
    notices: Notices | None = None
    _after: DueTimer | None = None
    _looked: str | None = None
    _resting: dict[tuple[DueTimer, datetime], "_Rest"] = field(
        default_factory=dict[tuple[DueTimer, datetime], "_Rest"]
    )

    async def run(self) -> None:
        """Sweep until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._sweep, self.take_away_expired)
            group.start_soon(self._sweep, self.act_on_timers)
            group.start_soon(self._watch)

    async def _watch(self) -> None:
        """Look for runs that nothing moves, a page at a time, until cancelled."""
        while True:
            settings = self.core.settings
            pause_s = settings.maintenance_interval_s if self._looked else UNMOVED_EVERY_S
            await anyio.sleep(pause_s * (0.75 + self.core.chance.random() / 2))
            try:
                await self.put_unmoved_aside()
            except PerdureError as error:
                log.warning("maintenance failed: %s", error)

    async def put_unmoved_aside(self) -> list[str]:
        """Put runs of the next page aside that nothing moves any more, and return them.

        No write of ours leaves a run so; what did is for a person to find out (RES-08).
        """
        page = await self.core.reader.unmoved_runs(after=self._looked, limit=UNMOVED_PAGE)
        self._looked = page.after
        for run_id, seq in page.seqs.items():
            await put_aside(self.core, run_id, UNMOVED, seq=seq)
        return list(page.seqs)

    async def _sweep(self, once: Callable[[], Awaitable[bool]]) -> None:
        pages = 0
        while True:
            try:
                busy = await once()
            except PerdureError as error:
                log.warning("maintenance failed: %s", error)
                busy = False
            pages += 1
            if not busy or pages % PAGES_MAX == 0:
                interval_s = self.core.settings.maintenance_interval_s
                await anyio.sleep(interval_s * (0.75 + self.core.chance.random() / 2))

    async def run_once(self) -> bool:
        """Do one sweep of both; True when there may be more to do at once."""
        requeued = await self.take_away_expired()
        return await self.act_on_timers() or requeued

    async def take_away_expired(self) -> bool:
        """Take a page of expired leases away; True when there may be more."""
        requeued = await self.core.store.requeue_expired(BATCH)
        if requeued:
            log.warning("%d expired leases taken away", len(requeued))
            self.core.signals.publish(QUEUE_TOPIC)
        return len(requeued) == BATCH

    async def act_on_timers(self) -> bool:
        """Act on a page of due timers, each run's in order; True when there may be more."""
        due = await self.core.reader.due_timers(BATCH, self._after)
        self._after = due[-1] if len(due) == BATCH else None
        now_s = self.core.clock.monotonic()
        awake = [timer for timer in due if not self._rests(timer, now_s)]
        by_run = sorted(awake, key=lambda timer: timer.run_id)  # stable: due first stays first
        away: list[PerdureError] = []
        slots = anyio.Semaphore(ACTS_MAX)
        async with anyio.create_task_group() as group:

            async def act_on(timers: Sequence[DueTimer]) -> None:
                async with slots:
                    try:
                        for timer in timers:
                            self._note(timer, acted=await self._act(timer))
                    except (Unavailable, StoreFull) as error:
                        away.append(error)
                        group.cancel_scope.cancel()

            for _, timers in groupby(by_run, key=lambda timer: timer.run_id):
                group.start_soon(act_on, list(timers))
        if away:
            raise away[0]
        return len(due) == BATCH

    def _rests(self, timer: DueTimer, now_s: float) -> bool:
        rest = self._resting.get((timer, timer.due_at))
        return rest is not None and now_s < rest.until_s

    def _note(self, timer: DueTimer, *, acted: bool) -> None:
        """Let a timer that could not be acted upon rest, longer each time."""
        key = (timer, timer.due_at)
        rest = self._resting.pop(key, None)
        if acted:
            return
        before_s = rest.for_s if rest is not None else self.core.settings.maintenance_interval_s / 2
        for_s = min(2 * before_s, REST_S_MAX)
        self._resting[key] = _Rest(for_s=for_s, until_s=self.core.clock.monotonic() + for_s)
        if len(self._resting) > RESTING_MAX:
            del self._resting[next(iter(self._resting))]

    async def _act(self, timer: DueTimer) -> bool:
        try:
            return await self._do(timer)
        except (Unavailable, StoreFull):
            raise
        except Exception:  # one run's trouble must not keep the timers of all others
            log.exception("the %s of run %s could not be acted upon", timer.kind, timer.run_id)
            return False

    async def _do(self, timer: DueTimer) -> bool:
        try:
            return await self._do_or_end(timer)
        except (Damaged, Unreadable) as error:
            await put_aside(self.core, timer.run_id, error)
            if isinstance(error, Damaged):
                await return_by_policy(self.core, timer.run_id, error)
            return False

    async def _do_or_end(self, timer: DueTimer) -> bool:
        try:
            return await self._carry_out(timer)
        except (Incompatible, NotCarriedOn) as error:
            return await self._end_incompatible(timer.run_id, error)

    async def _carry_out(self, timer: DueTimer) -> bool:
        core, run_id, ref = self.core, timer.run_id, timer.ref or ""
        match timer.kind:
            case TimerKind.EXPIRY:
                return await expire_interrupt(core, run_id, ref, self.tools)
            case TimerKind.DEADLINE | TimerKind.CLOSE:
                return await self._close(timer)
            case TimerKind.NOTICE:
                return self._give_notice(timer)
            case TimerKind.CALLBACK:
                return await expire_callback(core, run_id, ref)
            case TimerKind.CHILD:
                return await deliver_reports(core, run_id, self.tools)

    async def _end_incompatible(self, run_id: str, error: Exception) -> bool:
        """End a run that this release cannot carry on, or put it aside, as a worker does.

        One that asks for a newer release is left to it.
        """
        row = await self.core.reader.find_run(None, run_id)
        if row is None or row.facts.required_runtime > RUNTIME_VERSION:
            return False
        if self.core.settings.on_incompatible == "repair":
            await put_aside(self.core, run_id, error)
            return True
        return await close_unheld(self.core, run_id, TimerKind.CLOSE, self.tools)

    async def _close(self, timer: DueTimer) -> bool:
        closed = await close_unheld(self.core, timer.run_id, timer.kind, self.tools)
        if self.compensator is not None and timer.kind is TimerKind.CLOSE:
            self.compensator.offer(timer.run_id)
        return closed

    def _give_notice(self, timer: DueTimer) -> bool:
        if self.notices is not None:
            self.notices.offer(timer.run_id, timer.ref or "")
        return False  # what comes of it is not waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rest:
    """How long a timer is left alone, and until when."""

    for_s: float
    until_s: float
