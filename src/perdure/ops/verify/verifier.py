"""Verifying a database run by run, in memory bounded by its largest runs and threads."""

from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime, timedelta

import anyio

from perdure.ops.verify.checks import Finding
from perdure.ops.verify.holding import AgentRecord, holdings
from perdure.ops.verify.keys import Keys
from perdure.ops.verify.left import Left, left_by
from perdure.ops.verify.live import Moment
from perdure.ops.verify.load import settled_record
from perdure.ops.verify.outside import Effects, Journal
from perdure.ops.verify.report import VerifyReport
from perdure.ops.verify.table import (
    AGENT_RULES,
    JOURNAL_RULES,
    LIVE_RULES,
    RUN_RULES,
    THREAD_RULES,
    asked_of,
)
from perdure.ops.verify.threads import settled_thread
from perdure.protocol.errors import NotFound, Unreadable
from perdure.protocol.events import CustomEvent
from perdure.protocol.runs import RunRow
from perdure.store.reader import Reader, RunFilter
from perdure.store.reading import BROKEN, OnUnreadable

RUNS_PAGE = 200
AT_ONCE = 8
"""How many runs are read at once."""
EVENTS_AT_ONCE = 20_000
"""Runs that have more events together are read one after the other."""

AGENTS_MAX = 100_000
"""So many agents are remembered, so that the fields of each are looked at once."""

GRACE_S = 60.0
UNREADABLE = (Unreadable, *BROKEN)
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
    journal: Journal | None = None,
) -> VerifyReport:
    """Check every run (of a tenant, or one run) and hand each finding to `on_finding` at once.

    With `now` the liveness checks are made too: of a database that workers are serving; `grace_s`
    is what a lease and a sweep may take. I27 and I68 are checked over whole databases or tenants
    only.
    With a `journal` C3 is checked; that nothing else took effect, over whole databases only. Of one
    run alone, effects of its retries under the same key are counted against it.
    Raises NotFound (`not_found`) for an unknown `run_id`.
    """
    work = _Verification(reader, on_finding, now, timedelta(seconds=grace_s), journal)
    if run_id is not None:
        await work.check_named(tenant_id, run_id)
        if journal is not None:
            journal.overdone(work.found)
        return work.report
    keys = Keys(work.found)
    batch: list[RunRow] = []
    async for row in work.runs(tenant_id, work.left_out):
        keys.see(row)
        if batch and sum(map(_size, [*batch, row])) > EVENTS_AT_ONCE:
            await work.check_all(batch)
            batch.clear()
        batch.append(row)
        if len(batch) == AT_ONCE:
            await work.check_all(batch)
            batch.clear()
    await work.check_all(batch)
    await work.look_again(tenant_id, keys)
    if journal is not None and work.report.read_all:
        journal.overdone(work.found)
        if tenant_id is None:
            journal.unknown(work.found)
    return work.report


def _size(row: RunRow) -> int:
    """Return how many events a run keeps."""
    return row.hot.last_seq - row.hot.retained_from_seq + 1


class _Verification:
    def __init__(
        self,
        reader: Reader,
        on_finding: OnFinding,
        now: datetime | None,
        grace: timedelta,
        journal: Journal | None,
    ) -> None:
        self.report = VerifyReport()
        self._reader = reader
        self._on_finding = on_finding
        self._now = now
        self._grace = grace
        self._journal = journal
        self._left = Left()
        self._agents: set[tuple[str, str]] = set()

    def found(self, finding: Finding) -> None:
        """Count a finding and pass it on."""
        self.report.by_check[finding.check] += 1
        self._on_finding(finding)

    async def check_named(self, tenant_id: str | None, run_id: str) -> None:
        """Check one run and its thread."""
        try:
            row = await self._reader.find_run(tenant_id, run_id)
        except UNREADABLE as error:
            self.found(self._unreadable(run_id, f"its row cannot be read: {error}"))
            return
        if row is None:
            raise NotFound("there is no such run", field="run_id")
        await self.check_all([row], threads_of_newest=False)

    async def check_all(self, rows: Sequence[RunRow], *, threads_of_newest: bool = True) -> None:
        """Check a few runs at once, so that their reads overlap; tell the findings in order."""
        found: list[list[Finding]] = [[] for _ in rows]
        async with anyio.create_task_group() as group:
            for row, mine in zip(rows, found, strict=True):
                group.start_soon(self._check_one, row, mine, threads_of_newest)
        for mine in found:
            for finding in mine:
                self.found(finding)

    async def _check_one(self, row: RunRow, found: list[Finding], only_newest: bool) -> None:
        try:
            agents = await self._check_run(row, found)
            if not only_newest or await self._is_newest(row):
                await self._check_thread(row, found)
            for agent_id in sorted(agents | {row.facts.agent_id, row.facts.agent_now[0]}):
                await self._check_agent(row, agent_id, found)
        except UNREADABLE as error:
            found.append(self._unreadable(row.facts.run_id, f"it cannot be read: {error}"))

    async def _check_run(self, row: RunRow, found: list[Finding]) -> set[str]:
        """Check a run; return the agents in whose fields it has left something."""
        record = await settled_record(self._reader, row)
        if record is None:
            self.report.moving += 1
            return set()
        found += self._left.see(row, (data for _, data in record.of(CustomEvent)))
        self.report.runs += 1
        self.report.events += len(record.log)
        for rule in asked_of(record, RUN_RULES):
            found += rule.findings(record, row.facts.run_id)
        if self._now is not None:
            moment = Moment(record=record, now=self._now, grace=self._grace)
            for rule in LIVE_RULES:
                found += rule.findings(moment, row.facts.run_id)
        if self._journal is not None:
            for rule in JOURNAL_RULES:
                found += rule.findings(Effects(record, self._journal), row.facts.run_id)
        return {slot.agent for slot in record.state_values if slot.agent}

    async def _is_newest(self, row: RunRow) -> bool:
        """Tell whether a run is the newest of its thread: then the thread is looked at."""
        where = RunFilter(thread_id=row.facts.thread_id)
        newest = await self._reader.list_runs(row.facts.tenant_id, where, after=None, limit=1)
        return bool(newest) and newest[0].facts.run_id == row.facts.run_id

    async def _check_thread(self, row: RunRow, found: list[Finding]) -> None:
        facts = row.facts
        record = await settled_thread(self._reader, facts.tenant_id, facts.thread_id)
        if record is None:
            return
        self.report.threads += 1
        for rule in THREAD_RULES:
            found += rule.findings(record, facts.run_id)

    async def _check_agent(self, row: RunRow, agent_id: str, found: list[Finding]) -> None:
        """Look at an agent's fields, the first time that it is met."""
        key = row.facts.tenant_id, agent_id
        if key in self._agents:
            return
        if len(self._agents) >= AGENTS_MAX:
            self._agents.clear()
        self._agents.add(key)
        fields = await holdings(self._reader, row.facts.tenant_id, "agent", agent_id)
        record = AgentRecord(agent_id=agent_id, fields=fields)
        for rule in AGENT_RULES:
            found += rule.findings(record, row.facts.run_id)

    async def look_again(self, tenant_id: str | None, keys: Keys) -> None:
        """Look at what did not fit into memory, in as many passes over all runs as it takes."""
        while keys.next_partition():
            async for row in self.runs(tenant_id):
                keys.see(row)
        while self._left.next_partition():
            async for row in self.runs(tenant_id):
                for finding in self._left.see(row, await left_by(self._reader, row)):
                    self.found(finding)

    async def runs(
        self, tenant_id: str | None, on_unreadable: OnUnreadable | None = None
    ) -> AsyncIterator[RunRow]:
        """Yield all runs, newest first; `on_unreadable` hears of those whose row is damaged."""
        after: str | None = None
        while True:
            page = await self._reader.list_runs(
                tenant_id, RunFilter(), after=after, limit=RUNS_PAGE, on_unreadable=on_unreadable
            )
            for row in page:
                yield row
            if len(page) < RUNS_PAGE:
                return
            after = page[-1].facts.run_id

    def left_out(self, run_id: str, reason: str) -> None:
        """Report a run whose row cannot be read."""
        self.found(self._unreadable(run_id, reason))

    def _unreadable(self, run_id: str, text: str) -> Finding:
        self.report.unreadable += 1
        return Finding(check="C6", run_id=run_id, subject="run", text=text[:500])
