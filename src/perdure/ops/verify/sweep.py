"""Verification beside the work of a process: a page of runs now and then (R-7.7).

What is checked is what can be told from the rows of one run that nobody holds at the moment;
content is not read, nor are threads and long logs: those are left to `perdure verify`. Findings
are logged and counted, once each. A run whose log does not fold to what is stored, or whose rows
cannot be read, is put aside for repair.
"""

import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from perdure.engine.aside import put_aside
from perdure.engine.core import Core
from perdure.engine.load import Damaged
from perdure.engine.returning import return_by_policy
from perdure.ops.verify.checks import Finding, Rule
from perdure.ops.verify.load import settled_record
from perdure.ops.verify.record import RunRecord
from perdure.ops.verify.table import RUN_RULES, asked_of
from perdure.protocol.base import RUNTIME_VERSION
from perdure.protocol.errors import PerdureError, Unreadable
from perdure.protocol.runs import RunRow
from perdure.store.reader import RunFilter
from perdure.store.reading import BROKEN

log = logging.getLogger(__name__)

RULES: tuple[Rule[RunRecord], ...] = tuple(rule for rule in RUN_RULES if not rule.needs_content)
REPLAY = "C1"
UNREAD = "C6"
TOLD_MAX = 10_000
"""So many findings are remembered, so that they are told once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepTerms:
    """How much is looked at, and how often."""

    interval_s: float = 60.0
    runs_max: int = 20
    """Of each page."""
    events_max: int = 1000
    """Runs with a longer log are left out."""


@dataclass(slots=True, kw_only=True)
class Sweep:
    """Goes through all runs, newest first, a page at a time, and begins again."""

    core: Core
    terms: SweepTerms = SweepTerms()
    _after: str | None = None
    _told: dict[tuple[str, str, str], None] = field(
        default_factory=dict[tuple[str, str, str], None]
    )

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            jitter = 0.75 + self.core.chance.random() / 2
            await anyio.sleep(self.terms.interval_s * jitter)
            try:
                await self.run_once()
            except PerdureError as error:
                log.warning("the verification sweep failed: %s", error)
            except Exception:  # a check's own fault must not take the worker down
                log.exception("the verification sweep failed")

    async def run_once(self) -> list[Finding]:
        """Check the next page of runs; return what was found there, told before or not."""
        unread: list[Finding] = []
        limit = self.terms.runs_max
        page = await self.core.reader.list_runs(
            None,
            RunFilter(),
            after=self._after,
            limit=limit,
            on_unreadable=lambda run_id, why: unread.append(_unread(run_id, why)),
        )
        self._after = page[-1].facts.run_id if len(page) == limit else None
        found = list(unread)
        for row in page:
            if self._is_for_us(row):
                found += await self._check(row)
        for finding in found:
            self._tell(finding)
        return found

    def _is_for_us(self, row: RunRow) -> bool:
        """Tell whether a run stands still, is short, and is none of a newer release's."""
        hot = row.hot
        return (
            hot.lease_owner is None
            and hot.last_seq - hot.retained_from_seq < self.terms.events_max
            and row.facts.required_runtime <= RUNTIME_VERSION
        )

    async def _check(self, row: RunRow) -> list[Finding]:
        run_id = row.facts.run_id
        try:
            record = await settled_record(self.core.reader, row, looks_max=1, sweeping=True)
        except Unreadable as error:
            await self._put_aside(row, error.message)
            return [_unread(run_id, error.message)]
        except BROKEN as error:
            return [_unread(run_id, str(error))]
        if record is None:
            return []
        self.core.metrics.engine.verified.inc()
        found = [finding async for finding in _judged(record)]
        for finding in found:
            if finding.check == REPLAY:
                await self._put_aside(row, f"{finding.subject}: {finding.text}")
                break
        return found

    async def _put_aside(self, row: RunRow, why: str) -> None:
        run_id, damage = row.facts.run_id, Damaged(why)
        try:
            await put_aside(self.core, run_id, damage, seq=row.hot.last_seq)
            await return_by_policy(self.core, run_id, damage)
        except Unreadable as error:
            log.error("run %s cannot be put aside: %s", run_id, error)  # noqa: TRY400  # no fault of ours

    def _tell(self, finding: Finding) -> None:
        key = (finding.run_id, finding.check, finding.subject)
        if key in self._told:
            return
        self._told[key] = None
        if len(self._told) > TOLD_MAX:
            del self._told[next(iter(self._told))]
        self.core.metrics.engine.verify_findings.labels(check=finding.check).inc()
        log.error(
            "%s of run %s is broken at %s: %s",
            finding.check,
            finding.run_id,
            finding.subject,
            finding.text,
            extra={"run_id": finding.run_id},
        )


async def _judged(record: RunRecord) -> AsyncGenerator[Finding]:
    """Yield what breaks a statement; others have their turn after each."""
    for rule in asked_of(record, RULES):
        for finding in rule.findings(record, record.facts.run_id):
            yield finding
        await anyio.lowlevel.checkpoint()


def _unread(run_id: str, why: str) -> Finding:
    text = f"it cannot be read: {why}"
    return Finding(check=UNREAD, run_id=run_id, subject="run", text=text[:500])
