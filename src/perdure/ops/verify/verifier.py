"""Verifying a database run by run, in memory bounded by its largest run or thread."""

from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from uuid import UUID

from perdure.ops.verify.checks import Finding
from perdure.ops.verify.keys import Keys
from perdure.ops.verify.live import Moment
from perdure.ops.verify.load import settled_record
from perdure.ops.verify.record import RunRecord
from perdure.ops.verify.report import VerifyReport
from perdure.ops.verify.table import LIVE_RULES, RUN_RULES, THREAD_RULES
from perdure.ops.verify.threads import settled_thread
from perdure.protocol.errors import NotFound
from perdure.protocol.ids import RUN, make_id, uuid_of
from perdure.protocol.runs import RunRow
from perdure.store.ports import Reader, RunFilter

RUNS_PAGE = 200
GRACE_S = 60.0
UNREADABLE = (ValueError, TypeError, LookupError)
"""What reading a damaged row may raise."""

OnFinding = Callable[[Finding], None]


async def verify(
    reader: Reader,
    *,
    tenant_id: str | None = None,
    run_id: str | None = None,
    on_finding: OnFinding,
    now: datetime | None = None,
    grace_s: float = GRACE_S,
) -> VerifyReport:
    """Check every run (of a tenant, or one run) and hand each finding to `on_finding` at once.

    With `now` the liveness checks are made too: of a database that workers are serving; `grace_s`
    is what a lease and a sweep may take. I27 is checked over whole databases or tenants only.
    Raises NotFound (`not_found`) for an unknown `run_id`.
    """
    work = _Verification(reader, on_finding, now, timedelta(seconds=grace_s))
    if run_id is not None:
        row = await reader.find_run(tenant_id, run_id)
        if row is None:
            raise NotFound("no such run", field="run_id")
        await work.check_run(row)
        await work.check_thread(row)
        return work.report
    keys = Keys(work.found)
    async for row in work.runs(tenant_id):
        keys.see(row)
        await work.check_run(row)
        if await work.is_newest(row):
            await work.check_thread(row)
    while keys.next_partition():
        async for row in work.runs(tenant_id):
            keys.see(row)
    return work.report


class _Verification:
    def __init__(
        self, reader: Reader, on_finding: OnFinding, now: datetime | None, grace: timedelta
    ) -> None:
        self.report = VerifyReport()
        self._reader = reader
        self._on_finding = on_finding
        self._now = now
        self._grace = grace
        self._unreadable: set[str] = set()

    def found(self, finding: Finding) -> None:
        """Count a finding and pass it on."""
        self.report.by_check[finding.check] += 1
        self._on_finding(finding)

    async def check_run(self, row: RunRow) -> None:
        """Check one run."""
        run_id = row.facts.run_id
        try:
            record = await settled_record(self._reader, row)
        except UNREADABLE as error:
            self._note_unreadable(run_id, f"its rows cannot be read: {error}")
            return
        if record is None:
            self.report.moving += 1
            return
        self.report.runs += 1
        self.report.events += len(record.log)
        for rule in RUN_RULES:
            for finding in rule.findings(record, run_id):
                self.found(finding)
        if self._now is not None:
            self._check_live(record, self._now)

    def _check_live(self, record: RunRecord, now: datetime) -> None:
        moment = Moment(record=record, now=now, grace=self._grace)
        for rule in LIVE_RULES:
            for finding in rule.findings(moment, record.facts.run_id):
                self.found(finding)

    async def is_newest(self, row: RunRow) -> bool:
        """Tell whether a run is the newest of its thread: then the thread is looked at."""
        where = RunFilter(thread_id=row.facts.thread_id)
        try:
            newest = await self._reader.list_runs(row.facts.tenant_id, where, after=None, limit=1)
        except UNREADABLE:
            return False
        return bool(newest) and newest[0].facts.run_id == row.facts.run_id

    async def check_thread(self, row: RunRow) -> None:
        """Check the thread of a run."""
        facts = row.facts
        try:
            record = await settled_thread(self._reader, facts.tenant_id, facts.thread_id)
        except UNREADABLE as error:
            self._note_unreadable(facts.run_id, f"its thread cannot be read: {error}")
            return
        if record is None:
            return
        self.report.threads += 1
        for rule in THREAD_RULES:
            for finding in rule.findings(record, facts.run_id):
                self.found(finding)

    async def runs(self, tenant_id: str | None) -> AsyncIterator[RunRow]:
        """Yield all runs, newest first; one whose row cannot be read is reported and left out."""
        after: str | None = None
        size = RUNS_PAGE
        while True:
            try:
                page = await self._page(tenant_id, after, size)
            except UNREADABLE as error:
                if size > 1:
                    size = 1
                    continue
                after = await self._skip(tenant_id, after)
                self._note_unreadable(after, f"its row cannot be read: {error}")
                size = RUNS_PAGE
                continue
            for row in page:
                yield row
            if len(page) < size:
                return
            after = page[-1].facts.run_id

    async def _page(self, tenant_id: str | None, after: str | None, size: int) -> list[RunRow]:
        return await self._reader.list_runs(tenant_id, RunFilter(), after=after, limit=size)

    async def _skip(self, tenant_id: str | None, after: str | None) -> str:
        """Return the id of a row that cannot be read, by bisecting the ids before `after`.

        Where several such rows lie near each other, sound ones between them may be left out.
        """
        low, high = 0, uuid_of(after).int if after is not None else 2**128 - 1
        while high - low > 1:
            middle = (low + high) // 2
            try:
                await self._page(tenant_id, _run_id(middle), 1)
                low = middle
            except UNREADABLE:
                high = middle
        return _run_id(low)

    def _note_unreadable(self, run_id: str, text: str) -> None:
        if run_id in self._unreadable:
            return
        self._unreadable.add(run_id)
        self.report.unreadable += 1
        self.found(Finding(check="C6", run_id=run_id, subject="run", text=text[:500]))


def _run_id(number: int) -> str:
    return make_id(RUN, UUID(int=number))
