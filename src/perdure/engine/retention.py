"""Dropping what is no longer to be kept (R-6.8): explicit, in small transactions, by any worker.

A sweep goes through all runs by id, a page at a time, and drops the history of ended ones whose
rule says so; then content that nothing uses any more. Readers that come later are told of the gap.
"""

import logging
from dataclasses import dataclass

import anyio

from perdure.engine.core import Core
from perdure.protocol.errors import PerdureError

log = logging.getLogger(__name__)

PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The sweep. Without rules only what deleted threads have left goes."""

    core: Core

    async def run(self) -> None:
        """Sweep now and then until cancelled."""
        settings = self.core.settings
        while True:
            try:
                await self.run_once()
            except PerdureError as error:
                log.warning("the retention sweep failed: %s", error)
            jitter = 0.75 + self.core.chance.random() / 2
            await anyio.sleep(settings.retention_interval_s * jitter)

    async def run_once(self) -> int:
        """Go through all runs once; return how many lost their history."""
        core, after, dropped, deleted = self.core, None, 0, 0
        settings = core.settings
        while settings.retention:
            swept = await core.store.expire_history(settings.retention, after=after, limit=PAGE)
            dropped += swept.runs
            after = swept.after
            if after is None:
                break
        place: str | None = None
        while True:
            swept = await core.store.expire_deleted(None, after=place, limit=PAGE)
            deleted += swept.runs
            place = swept.after
            if place is None:
                break
        while True:
            content = await core.store.expire_blobs(settings.blobs_kept_s, after=place, limit=PAGE)
            place = content.after
            if place is None:
                break
        if dropped:
            log.info("the history of %d ended runs was dropped: it was kept long enough", dropped)
        if deleted:
            log.info("the history of %d runs of deleted threads was dropped", deleted)
        return dropped + deleted
