"""Results that came after their worker had lost the run: evidence, never merged (decision 27)."""

import logging
from collections import deque
from dataclasses import dataclass, field

import anyio

from perdure.engine.core import Core
from perdure.engine.held import Finished
from perdure.engine.lease import Lease
from perdure.engine.values import keep
from perdure.engine.view import RunView
from perdure.protocol.errors import PerdureError, StoreFull, TooLarge, Unavailable
from perdure.store.requests import LateKept, LateResult

log = logging.getLogger(__name__)

LATE_MAX = 10_000
"""So many late results wait for the store at most; the oldest is given up."""


@dataclass(slots=True)
class LateResults:
    """Results that came too late to be their calls', on their way to the store as evidence."""

    core: Core
    waiting: deque[LateResult] = field(default_factory=deque[LateResult])
    _bell: anyio.Event = field(default_factory=anyio.Event)

    def keep(self, item: Finished, view: RunView, lease: Lease) -> None:
        """Take a late result; `run` writes it."""
        if len(self.waiting) >= LATE_MAX:
            lost = self.waiting.popleft()
            log.error("a late result of %s is given up: the store takes none", lost.run_id)
        self.waiting.append(late_result(item, view, lease))
        self._bell.set()

    async def run(self) -> None:
        """Write what comes, until cancelled."""
        while True:
            await self.flush()
            self._bell = anyio.Event()
            if not self.waiting:
                await self._bell.wait()

    async def flush(self) -> None:
        """Write what waits; what is left when the store is away is tried again by `run`."""
        while self.waiting:
            late = self.waiting[0]
            try:
                kept = await self.core.store.record_late(late)
                if kept is LateKept.RECORDED:
                    self.core.metrics.engine.late_writes.inc()
                elif kept is LateKept.LEFT_OUT:
                    log.warning(
                        "a late result of %s is left out, as too many are kept of its execution: %s %s",
                        *(late.run_id, late.status, late.external_ref or ""),
                    )
            except (Unavailable, StoreFull) as error:
                log.warning("a late result waits for the store: %s", error)
                await anyio.sleep(self.core.settings.poll_interval_s)
                return
            except PerdureError:
                log.exception("a late result of %s cannot be recorded", late.run_id)
            if self.waiting and self.waiting[0] is late:
                self.waiting.popleft()


def late_result(item: Finished, view: RunView, lease: Lease) -> LateResult:
    """Return the record of a late result; an output over the limit is left out."""
    result = item.outcome.result
    try:
        kept = keep(result.output)
    except TooLarge:
        kept = keep(None)
    return LateResult(
        run_id=view.facts.run_id,
        tool_call_id=item.call.tool_call_id,
        execution=item.execution,
        attempt=view.snapshot.attempt,
        epoch=lease.epoch,
        status=result.status,
        output=kept.inline,
        output_ref=kept.ref,
        external_ref=result.external_ref,
        step_index=item.call.step_index,
        blobs=kept.blobs,
    )
