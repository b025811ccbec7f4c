"""The reading half of the memory store."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Literal, TypeVar

from pydantic import JsonValue

from perdure.protocol.errors import Unavailable
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import (
    ArtifactRow,
    AttemptRow,
    CheckpointRow,
    ExecutionRow,
    InterruptRow,
    LateRow,
    MessageRow,
    StateValueRow,
    StepRow,
    ThreadBase,
    ThreadRow,
    ToolCallRow,
)
from perdure.protocol.runs import RunFacts, RunHot, RunRow
from perdure.protocol.states import TERMINAL, InterruptStatus, ParkedOn, is_open
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Unmoved
from perdure.store.lineage import tags_of
from perdure.store.memory import state_values, threads
from perdure.store.memory.subscriptions import listed
from perdure.store.memory.tables import Run, Tables
from perdure.store.reader import (
    Backlog,
    InterruptFilter,
    PlacedRun,
    QueueBacklog,
    RegisteredAgent,
    RegisteredTool,
    RunFilter,
)
from perdure.store.reading import OnUnreadable
from perdure.store.requests import DueTimer, Inserted, LeaseKey, TimerKind
from perdure.store.rules import is_unmoved

Row = TypeVar("Row")


def _newest(
    rows: Iterable[Row], key: Callable[[Row], str], after: str | None, limit: int
) -> list[Row]:
    found = [row for row in rows if after is None or key(row) < after]
    return sorted(found, key=key, reverse=True)[:limit]


def _oldest(
    rows: Iterable[Row], key: Callable[[Row], str], after: str | None, limit: int
) -> list[Row]:
    found = [row for row in rows if after is None or key(row) > after]
    return sorted(found, key=key)[:limit]


class MemoryReader:
    """The `Reader` port over dicts."""

    def __init__(self, tables: Tables, is_usable: Callable[[], bool]) -> None:
        self._tables = tables
        self._is_usable = is_usable

    def _run(self, tenant_id: str | None, run_id: str) -> Run | None:
        run = self._tables.runs.get(run_id)
        if run is None or tenant_id not in {None, run.facts.tenant_id}:
            return None
        return run

    async def find_run(self, tenant_id: str | None, run_id: str) -> RunRow | None:
        """See `Reader.find_run`."""
        run = self._run(tenant_id, run_id)
        return None if run is None else run.row

    async def find_run_by_key(
        self, tenant_id: str, agent_id: str, idempotency_key: str
    ) -> Inserted | None:
        """See `Reader.find_run_by_key`."""
        run_id = self._tables.keys.get((tenant_id, agent_id, idempotency_key))
        run = None if run_id is None else self._tables.runs[run_id]
        if run is None:
            return None
        return Inserted(row=run.row, created=False, fingerprint=run.fingerprint)

    async def leases_of(self, worker_id: str, limit: int) -> list[LeaseKey]:
        """See `Reader.leases_of`."""
        held = [
            LeaseKey(run_id=run.facts.run_id, token=run.hot.lease_token)
            for run in self._tables.runs.values()
            if run.hot.lease_owner == worker_id
        ]
        return sorted(held, key=lambda lease: lease.run_id)[:limit]

    async def now(self) -> datetime:
        """See `Reader.now`."""
        return self._tables.clock()

    async def list_runs(
        self,
        tenant_id: str | None,
        where: RunFilter,
        *,
        after: str | None,
        limit: int,
        on_unreadable: OnUnreadable | None = None,
    ) -> list[RunRow]:
        """See `Reader.list_runs`. Every row can be read."""
        rows = [
            run.row
            for run in self._tables.runs.values()
            if tenant_id in {None, run.facts.tenant_id} and _matches(run, where)
        ]
        return _newest(rows, lambda row: row.facts.run_id, after, limit)

    async def thread_runs(self, thread_id: str, *, after: int, limit: int) -> list[PlacedRun]:
        """See `Reader.thread_runs`."""
        placed = [
            PlacedRun(position=run.input_position, row=run.row)
            for run in self._tables.runs.values()
            if run.facts.thread_id == thread_id and run.input_position > after
        ]
        return sorted(placed, key=lambda item: item.position)[:limit]

    async def events_after(self, run_id: str, seq: int, *, limit: int) -> list[RecordedEvent]:
        """See `Reader.events_after`."""
        log = self._tables.events.get(run_id, [])
        start = max(0, seq - log[0].seq + 1) if log else 0
        return log[start : start + limit]

    async def list_attempts(self, run_id: str) -> list[AttemptRow]:
        """See `Reader.list_attempts`."""
        rows = [row for row in self._tables.attempts.values() if row.run_id == run_id]
        return sorted(rows, key=lambda row: row.attempt)

    async def list_steps(self, run_id: str, *, after: int, limit: int) -> list[StepRow]:
        """See `Reader.list_steps`."""
        rows = [
            row for row in self._tables.steps.values() if row.run_id == run_id and row.index > after
        ]
        return sorted(rows, key=lambda row: row.index)[:limit]

    def _calls(self, run_id: str) -> list[ToolCallRow]:
        rows = [row for row in self._tables.calls.values() if row.run_id == run_id]
        return sorted(rows, key=lambda row: (row.step_index, row.ordinal))

    async def list_tool_calls(
        self, run_id: str, *, after: tuple[int, int] | None, limit: int
    ) -> list[ToolCallRow]:
        """See `Reader.list_tool_calls`."""
        rows = self._calls(run_id)
        found = [row for row in rows if after is None or (row.step_index, row.ordinal) > after]
        return found[:limit]

    async def find_tool_call(self, tenant_id: str, tool_call_id: str) -> ToolCallRow | None:
        """See `Reader.find_tool_call`."""
        row = self._tables.calls.get(tool_call_id)
        return row if row is not None and self._run(tenant_id, row.run_id) else None

    async def list_executions(self, run_id: str) -> list[ExecutionRow]:
        """See `Reader.list_executions`. In order of number, then of call."""
        rows = [row for row in self._tables.executions.values() if row.run_id == run_id]
        return sorted(rows, key=lambda row: (row.number, row.tool_call_id))

    async def open_executions(self, run_id: str) -> list[ExecutionRow]:
        """See `Reader.open_executions`."""
        unfinished = {row.tool_call_id for row in self._calls(run_id) if is_open(row.status)}
        return [row for row in await self.list_executions(run_id) if row.tool_call_id in unfinished]

    async def list_checkpoints(
        self, run_id: str, *, before: int | None, limit: int
    ) -> list[CheckpointRow]:
        """See `Reader.list_checkpoints`."""
        rows = [
            row
            for row in self._tables.checkpoints.values()
            if row.run_id == run_id and (before is None or row.seq < before)
        ]
        return sorted(rows, key=lambda row: row.seq, reverse=True)[:limit]

    async def find_checkpoint(self, tenant_id: str, run_id: str, seq: int) -> CheckpointRow | None:
        """See `Reader.find_checkpoint`."""
        row = self._tables.checkpoints.get((run_id, seq))
        return row if row is not None and self._run(tenant_id, row.run_id) else None

    async def list_interrupts(
        self, tenant_id: str, where: InterruptFilter, *, after: str | None, limit: int
    ) -> list[InterruptRow]:
        """See `Reader.list_interrupts`."""
        rows = [
            row
            for row in self._tables.interrupts.values()
            if row.tenant_id == tenant_id
            and where.status in {None, row.status}
            and where.run_id in {None, row.run_id}
        ]
        return _oldest(rows, lambda row: row.interrupt_id, after, limit)

    async def find_interrupt(self, tenant_id: str | None, interrupt_id: str) -> InterruptRow | None:
        """See `Reader.find_interrupt`."""
        row = self._tables.interrupts.get(interrupt_id)
        return row if row is not None and tenant_id in {None, row.tenant_id} else None

    async def list_artifacts(
        self,
        tenant_id: str,
        *,
        run_id: str | None,
        thread_id: str | None,
        after: str | None,
        limit: int,
    ) -> list[ArtifactRow]:
        """See `Reader.list_artifacts`."""
        rows = [
            row
            for row in self._tables.artifacts.values()
            if row.tenant_id == tenant_id
            and run_id in {None, row.run_id}
            and thread_id in {None, row.thread_id}
        ]
        return _oldest(rows, lambda row: row.artifact_id, after, limit)

    async def find_artifact(self, tenant_id: str, artifact_id: str) -> ArtifactRow | None:
        """See `Reader.find_artifact`."""
        row = self._tables.artifacts.get(artifact_id)
        return row if row is not None and row.tenant_id == tenant_id else None

    async def read_blob(self, tenant_id: str, digest: str) -> bytes | None:
        """See `Reader.read_blob`."""
        blob = self._tables.blobs.get((tenant_id, digest))
        return None if blob is None else blob.data

    async def find_thread(self, tenant_id: str, thread_id: str) -> ThreadRow | None:
        """See `Reader.find_thread`."""
        row = self._tables.threads.get(thread_id)
        return row if row is not None and row.tenant_id == tenant_id else None

    async def list_threads(
        self,
        tenant_id: str,
        *,
        after: str | None,
        limit: int,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> list[ThreadRow]:
        """See `Reader.list_threads`."""
        wanted = tags_of(metadata or {})
        rows = [
            row
            for row in self._tables.threads.values()
            if row.tenant_id == tenant_id
            and row.deleted_at is None
            and wanted <= tags_of(row.metadata)
        ]
        return _newest(rows, lambda row: row.thread_id, after, limit)

    async def moved_at(self, thread_id: str, since: int, run_id: str) -> int | None:
        """See `Reader.moved_at`."""
        return threads.moved_at(self._tables, thread_id, since, run_id)

    async def thread_bases(self, thread_id: str) -> list[ThreadBase]:
        """See `Reader.thread_bases`."""
        return threads.bases_of(self._tables, thread_id)

    async def list_branches(
        self, thread_id: str, *, after: str | None, limit: int
    ) -> list[ThreadBase]:
        """See `Reader.list_branches`."""
        found = threads.branches_of(self._tables, thread_id)
        return [base for base in found if after is None or base.thread_id > after][:limit]

    async def find_message(self, tenant_id: str, message_id: str) -> MessageRow | None:
        """See `Reader.find_message`."""
        row = self._tables.messages.get(message_id)
        return row if row is not None and row.tenant_id == tenant_id else None

    async def list_messages(
        self, thread_id: str, *, after: int, limit: int, until: int | None = None
    ) -> list[MessageRow]:
        """See `Reader.list_messages`."""
        rows = [
            row
            for row in self._tables.messages.values()
            if row.thread_id == thread_id
            and row.position > after
            and (until is None or row.position <= until)
        ]
        return sorted(rows, key=lambda row: row.position)[:limit]

    async def list_subscriptions(
        self, tenant_id: str, thread_id: str, topic: str | None = None
    ) -> list[SubscriptionRow]:
        """See `Reader.list_subscriptions`."""
        return listed(self._tables, tenant_id, thread_id, topic)

    async def list_state_values(
        self,
        tenant_id: str,
        scope: Literal["thread", "agent"],
        scope_id: str,
        *,
        after: str | None,
        limit: int,
    ) -> list[StateValueRow]:
        """See `Reader.list_state_values`."""
        return state_values.listed(self._tables, tenant_id, scope, scope_id, after)[:limit]

    async def list_agents(self) -> list[RegisteredAgent]:
        """See `Reader.list_agents`. Versions registered at one time are in order of version."""
        rows = [
            RegisteredAgent(agent_id=agent_id, version=version, card=row.body, registered_at=row.at)
            for (agent_id, version), row in self._tables.agents.items()
        ]
        return sorted(rows, key=lambda row: (row.agent_id, row.registered_at, row.version))

    async def list_tools(self) -> list[RegisteredTool]:
        """See `Reader.list_tools`. Versions registered at one time are in order of version."""
        rows = [
            RegisteredTool(name=name, version=version, spec=row.body, registered_at=row.at)
            for (name, version), row in self._tables.tools.items()
        ]
        return sorted(rows, key=lambda row: (row.name, row.registered_at, row.version))

    async def list_late(self, run_id: str) -> list[LateRow]:
        """See `Reader.list_late`."""
        rows = [row for row in self._tables.late.values() if row.run_id == run_id]
        return sorted(rows, key=lambda row: row.seq)

    async def due_timers(self, limit: int, after: DueTimer | None = None) -> list[DueTimer]:
        """See `Reader.due_timers`."""
        now, runs = self._tables.clock(), self._tables.runs
        due = [timer for timer in self._timers() if timer.due_at <= now]
        found = [timer for timer in due if after is None or _place(timer) > _place(after)]
        return [timer for timer in found if _may_fire(timer, runs[timer.run_id].hot)][:limit]

    def _timers(self) -> list[DueTimer]:
        """Return all timers by time, then run, kind and interrupt."""
        timers = [
            DueTimer(run_id=run_id, kind=kind, ref=ref, due_at=at)
            for (run_id, kind, ref), at in self._tables.timers.items()
        ]
        return sorted(timers, key=_place)

    async def unmoved_runs(self, *, after: str | None, limit: int) -> Unmoved:
        """See `Reader.unmoved_runs`."""
        going_on = sorted(
            run_id
            for run_id, run in self._tables.runs.items()
            if run.hot.finished_at is None and (after is None or run_id > after)
        )
        page = going_on[:limit]
        runs = self._tables.runs
        found = {run_id: runs[run_id].hot.last_seq for run_id in page if self._is_unmoved(run_id)}
        return Unmoved(seqs=found, after=page[-1] if len(page) == limit else None)

    def _is_unmoved(self, run_id: str) -> bool:
        tables, run = self._tables, self._tables.runs[run_id]
        thread = tables.threads.get(run.facts.thread_id)
        active = thread.active_run_id if thread is not None else None
        return is_unmoved(
            run.hot,
            is_ready=run_id in tables.ready,
            timers=[kind for of, kind, _ in tables.timers if of == run_id],
            is_behind=active not in {None, run_id},
        )

    async def is_ready(self, run_id: str) -> bool:
        """See `Reader.is_ready`. An entry whose time has not come counts."""
        return run_id in self._tables.ready

    async def timers_of(self, run_id: str) -> list[DueTimer]:
        """See `Reader.timers_of`. The first due first."""
        return [timer for timer in self._timers() if timer.run_id == run_id]

    async def backlog(self) -> Backlog:
        """See `Reader.backlog`. `ready` counts what can be claimed, `runs_by_state` what goes on."""
        now, tables = self._tables.clock(), self._tables
        ready: dict[str, list[datetime]] = {}
        for run_id, at in tables.ready.items():
            if at <= now:
                ready.setdefault(tables.runs[run_id].queue, []).append(at)
        asked = [
            row.created_at
            for row in tables.interrupts.values()
            if row.status is InterruptStatus.PENDING
        ]
        states = Counter(
            str(run.hot.state) for run in tables.runs.values() if run.hot.state not in TERMINAL
        )
        return Backlog(
            queues={
                name: QueueBacklog(ready=len(times), oldest_ready_s=_age_s(times, now))
                for name, times in ready.items()
            },
            open_interrupts=len(asked),
            oldest_interrupt_s=_age_s(asked, now),
            runs_by_state=dict(states),
        )

    async def ping(self) -> None:
        """See `Reader.ping`. A database that was not entered, or was left, is unavailable."""
        if not self._is_usable():
            raise Unavailable("the memory database is not open")


def _matches(run: Run, where: RunFilter) -> bool:
    facts, hot = run.facts, run.hot
    return (
        where.state in {None, hot.state}
        and where.agent_id in {None, facts.agent_id}
        and where.thread_id in {None, facts.thread_id}
        and where.parent_run_id in {None, facts.parent_run_id}
        and where.origin_run_id in {None, facts.origin_run_id}
        and (where.root_run_id is None or _is_below(facts, where.root_run_id))
        and not (where.unfinished and hot.state in TERMINAL)
    )


def _is_below(facts: RunFacts, root_run_id: str) -> bool:
    return facts.root_run_id == root_run_id and facts.parent_run_id is not None


def _age_s(times: list[datetime], now: datetime) -> float:
    return max(0.0, (now - min(times)).total_seconds()) if times else 0.0


def _place(timer: DueTimer) -> tuple[datetime, str, TimerKind, str]:
    return (timer.due_at, timer.run_id, timer.kind, timer.ref or "")


def _may_fire(timer: DueTimer, hot: RunHot) -> bool:
    """Tell whether a timer is acted upon: the run is not in repair, and nobody holds it, or the
    timer is one that does not care.
    """
    free = hot.lease_owner is None or timer.kind in {TimerKind.CHILD, TimerKind.NOTICE}
    return free and hot.parked_on is not ParkedOn.REPAIR
