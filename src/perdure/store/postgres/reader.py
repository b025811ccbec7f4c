"""The reading half of the PostgreSQL store: pages by key over the pool."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Literal, TypeVar

from pydantic import JsonValue

from perdure.protocol.errors import Unavailable, Unreadable
from perdure.protocol.ids import ARTIFACT, INTERRUPT, RUN, THREAD, hex_of, is_id
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
from perdure.protocol.runs import RunRow
from perdure.protocol.states import InterruptStatus
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Unmoved
from perdure.store.lineage import tags_of
from perdure.store.postgres import rows
from perdure.store.postgres.driver import Pool, Row
from perdure.store.postgres.lanes import Access
from perdure.store.postgres.state_values import state_value_of
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.subscriptions import subscription_of
from perdure.store.postgres.together import Together
from perdure.store.postgres.wire import digest_out, id_in, id_out, text_out
from perdure.store.reader import (
    Backlog,
    InterruptFilter,
    PlacedRun,
    QueueBacklog,
    RegisteredAgent,
    RegisteredTool,
    RunFilter,
)
from perdure.store.reading import OnUnreadable, log_unreadable
from perdure.store.requests import DueTimer, Inserted, LeaseKey, TimerKind

_T = TypeVar("_T")


class PostgresReader:
    """The `Reader` port over PostgreSQL."""

    def __init__(
        self,
        pool: Pool,
        access: Access,
        clock: Callable[[], datetime] | None,
        check: Callable[[int | None], Awaitable[None]],
    ) -> None:
        self._pool = pool
        self._access = access
        self._clock = clock
        self._check = check
        self._runs = Together(self._load_runs)

    async def _fetch(self, name: str, *args: object) -> Sequence[Row]:
        return await self._access.fetch(SQL[name], *args)

    async def _first(self, name: str, *args: object) -> Row | None:
        found = await self._fetch(name, *args)
        return found[0] if found else None

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()

    async def find_run(self, tenant_id: str | None, run_id: str) -> RunRow | None:
        """See `Reader.find_run`."""
        row = await self._runs.find(hex_of(run_id)) if is_id(RUN, run_id) else None
        if row is None or tenant_id not in {None, row["tenant_id"]}:
            return None
        return rows.run_of(row)

    async def _load_runs(self, ids: Sequence[str]) -> dict[str, Row]:
        found = await self._fetch("find_runs", ids)
        return {row["run_id"].hex: row for row in found}

    async def find_run_by_key(
        self, tenant_id: str, agent_id: str, idempotency_key: str
    ) -> Inserted | None:
        """See `Reader.find_run_by_key`."""
        key = (tenant_id, agent_id, text_out(idempotency_key))
        row = await self._first("find_idempotent_run", None, *key)
        return None if row is None else rows.keyed_run_of(row)

    async def leases_of(self, worker_id: str, limit: int) -> list[LeaseKey]:
        """See `Reader.leases_of`."""
        found = await self._fetch("leases_of", worker_id, limit)
        return [
            LeaseKey(run_id=id_in(RUN, row["run_id"]), token=row["lease_token"]) for row in found
        ]

    async def now(self) -> datetime:
        """See `Reader.now`."""
        row = await self._first("read_clock", self._now())
        assert row is not None, "a statement without a table has a row"
        return row["now"]

    async def _page(
        self,
        name: str,
        values: Callable[[object, int], Sequence[object]],
        start: object,
        limit: int,
        *,
        key: tuple[str, str],
        convert: Callable[[Row], _T],
        on_unreadable: OnUnreadable = log_unreadable,
    ) -> list[_T]:
        """Return a page of a list without its damaged rows; `key` is the prefix and the column.

        `values` gives the statement's values for the key to go on after and the rows wanted.
        """
        prefix, column = key
        found: list[_T] = []
        while (wanted := limit - len(found)) > 0:
            page = await self._fetch(name, *values(start, wanted))
            for row in page:
                try:
                    found.append(convert(row))
                except Unreadable as error:
                    on_unreadable(id_in(prefix, row[column]), error.message)
            if len(page) < wanted:
                break
            start = page[-1][column]
        return found

    async def list_runs(
        self,
        tenant_id: str | None,
        where: RunFilter,
        *,
        after: str | None,
        limit: int,
        on_unreadable: OnUnreadable | None = None,
    ) -> list[RunRow]:
        """See `Reader.list_runs`."""
        on_unreadable = on_unreadable or log_unreadable
        if where.root_run_id is not None:
            root, only = id_out(where.root_run_id), where.unfinished
            return await self._page(
                "list_tree_runs",
                lambda start, wanted: (start, tenant_id, root, only, wanted),
                id_out(after),
                limit,
                key=(RUN, "run_id"),
                convert=rows.run_of,
                on_unreadable=on_unreadable,
            )
        name, chosen = _run_statement(tenant_id, where)
        return await self._page(
            name,
            lambda start, wanted: (start, *chosen, wanted),
            id_out(after),
            limit,
            key=(RUN, "run_id"),
            convert=rows.run_of,
            on_unreadable=on_unreadable,
        )

    async def thread_runs(self, thread_id: str, *, after: int, limit: int) -> list[PlacedRun]:
        """See `Reader.thread_runs`."""
        found = await self._fetch("thread_runs", hex_of(thread_id), after, limit)
        return [PlacedRun(position=row["place"], row=rows.run_of(row)) for row in found]

    async def events_after(self, run_id: str, seq: int, *, limit: int) -> list[RecordedEvent]:
        """See `Reader.events_after`."""
        found = await self._fetch("events_after", hex_of(run_id), seq, limit)
        return [rows.event_of(run_id, row) for row in found]

    async def list_attempts(self, run_id: str) -> list[AttemptRow]:
        """See `Reader.list_attempts`."""
        return [rows.attempt_of(row) for row in await self._fetch("list_attempts", hex_of(run_id))]

    async def list_steps(self, run_id: str, *, after: int, limit: int) -> list[StepRow]:
        """See `Reader.list_steps`."""
        found = await self._fetch("list_steps", hex_of(run_id), after, limit)
        return [rows.step_of(run_id, row) for row in found]

    async def list_tool_calls(
        self, run_id: str, *, after: tuple[int, int] | None, limit: int
    ) -> list[ToolCallRow]:
        """See `Reader.list_tool_calls`."""
        step_index, ordinal = (-1, -1) if after is None else after
        found = await self._fetch("list_tool_calls", hex_of(run_id), step_index, ordinal, limit)
        return [rows.call_of(row) for row in found]

    async def find_tool_call(self, tenant_id: str, tool_call_id: str) -> ToolCallRow | None:
        """See `Reader.find_tool_call`."""
        row = await self._first("find_tool_call", hex_of(tool_call_id), tenant_id)
        return None if row is None else rows.call_of(row)

    async def list_executions(self, run_id: str) -> list[ExecutionRow]:
        """See `Reader.list_executions`. In order of number, then of call."""
        found = await self._fetch("list_executions", hex_of(run_id))
        return [rows.execution_of(run_id, row) for row in found]

    async def open_executions(self, run_id: str) -> list[ExecutionRow]:
        """See `Reader.open_executions`."""
        found = await self._fetch("open_executions", hex_of(run_id))
        return [rows.execution_of(run_id, row) for row in found]

    async def list_checkpoints(
        self, run_id: str, *, before: int | None, limit: int
    ) -> list[CheckpointRow]:
        """See `Reader.list_checkpoints`."""
        found = await self._fetch("list_checkpoints", hex_of(run_id), before, limit)
        return [rows.checkpoint_of(row) for row in found]

    async def find_checkpoint(self, tenant_id: str, run_id: str, seq: int) -> CheckpointRow | None:
        """See `Reader.find_checkpoint`."""
        row = await self._first("find_checkpoint", hex_of(run_id), seq, tenant_id)
        return None if row is None else rows.checkpoint_of(row)

    async def list_interrupts(
        self, tenant_id: str, where: InterruptFilter, *, after: str | None, limit: int
    ) -> list[InterruptRow]:
        """See `Reader.list_interrupts`."""
        name, chosen = "list_interrupts", tuple[object, ...]((where.status,))
        if where.run_id is not None:
            name, chosen = "list_run_interrupts", (id_out(where.run_id), where.status)
        elif where.status is InterruptStatus.PENDING:
            name, chosen = "list_pending_interrupts", ()
        return await self._page(
            name,
            lambda start, wanted: (tenant_id, start, *chosen, wanted),
            id_out(after),
            limit,
            key=(INTERRUPT, "interrupt_id"),
            convert=rows.interrupt_of,
        )

    async def find_interrupt(self, tenant_id: str | None, interrupt_id: str) -> InterruptRow | None:
        """See `Reader.find_interrupt`."""
        row = await self._first("find_interrupt", hex_of(interrupt_id), tenant_id)
        return None if row is None else rows.interrupt_of(row)

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
        name, chosen = "list_artifacts", tuple[object, ...]()
        if run_id is not None:
            name, chosen = "list_run_artifacts", (id_out(run_id), id_out(thread_id))
        elif thread_id is not None:
            name, chosen = "list_thread_artifacts", (id_out(thread_id),)
        return await self._page(
            name,
            lambda start, wanted: (tenant_id, start, *chosen, wanted),
            id_out(after),
            limit,
            key=(ARTIFACT, "artifact_id"),
            convert=rows.artifact_of,
        )

    async def find_artifact(self, tenant_id: str, artifact_id: str) -> ArtifactRow | None:
        """See `Reader.find_artifact`."""
        row = await self._first("find_artifact", hex_of(artifact_id), tenant_id)
        return None if row is None else rows.artifact_of(row)

    async def read_blob(self, tenant_id: str, digest: str) -> bytes | None:
        """See `Reader.read_blob`."""
        row = await self._first("read_blob", tenant_id, digest_out(digest))
        return None if row is None else row["data"]

    async def find_thread(self, tenant_id: str, thread_id: str) -> ThreadRow | None:
        """See `Reader.find_thread`."""
        row = await self._first("find_thread", hex_of(thread_id), tenant_id)
        return None if row is None else rows.thread_of(row)

    async def list_threads(
        self,
        tenant_id: str,
        *,
        after: str | None,
        limit: int,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> list[ThreadRow]:
        """See `Reader.list_threads`."""
        tags = [digest_out(tag) for tag in sorted(tags_of(metadata or {}))]
        return await self._page(
            "list_tagged_threads" if tags else "list_threads",
            lambda start, wanted: (tenant_id, start, wanted, *([tags] if tags else ())),
            id_out(after),
            limit,
            key=(THREAD, "thread_id"),
            convert=rows.thread_of,
        )

    async def moved_at(self, thread_id: str, since: int, run_id: str) -> int | None:
        """See `Reader.moved_at`."""
        row = await self._first("moved_at", hex_of(thread_id), since, hex_of(run_id))
        return None if row is None else row["place"]

    async def thread_bases(self, thread_id: str) -> list[ThreadBase]:
        """See `Reader.thread_bases`."""
        return [rows.base_of(row) for row in await self._fetch("thread_bases", hex_of(thread_id))]

    async def list_branches(
        self, thread_id: str, *, after: str | None, limit: int
    ) -> list[ThreadBase]:
        """See `Reader.list_branches`."""
        found = await self._fetch("list_branches", hex_of(thread_id), id_out(after), limit)
        return [rows.base_of(row) for row in found]

    async def find_message(self, tenant_id: str, message_id: str) -> MessageRow | None:
        """See `Reader.find_message`."""
        row = await self._first("find_message", hex_of(message_id), tenant_id)
        return None if row is None else rows.message_of(row)

    async def list_messages(
        self, thread_id: str, *, after: int, limit: int, until: int | None = None
    ) -> list[MessageRow]:
        """See `Reader.list_messages`."""
        found = await self._fetch("list_messages", hex_of(thread_id), after, until, limit)
        return [rows.message_of(row) for row in found]

    async def list_subscriptions(
        self, tenant_id: str, thread_id: str, topic: str | None = None
    ) -> list[SubscriptionRow]:
        """See `Reader.list_subscriptions`."""
        found = await self._fetch("list_subscriptions", tenant_id, hex_of(thread_id), topic)
        return [subscription_of(row) for row in found]

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
        where = (tenant_id, scope, scope_id, after or "", limit)
        return [state_value_of(row) for row in await self._fetch("list_state_values", *where)]

    async def list_agents(self) -> list[RegisteredAgent]:
        """See `Reader.list_agents`. Versions registered at one time are in order of version."""
        return [rows.agent_of(row) for row in await self._fetch("list_agents")]

    async def list_tools(self) -> list[RegisteredTool]:
        """See `Reader.list_tools`. Versions registered at one time are in order of version."""
        return [rows.tool_of(row) for row in await self._fetch("list_tools")]

    async def list_late(self, run_id: str) -> list[LateRow]:
        """See `Reader.list_late`."""
        return [rows.late_of(row) for row in await self._fetch("list_late", hex_of(run_id))]

    async def due_timers(self, limit: int, after: DueTimer | None = None) -> list[DueTimer]:
        """See `Reader.due_timers`."""
        found = await self._fetch("due_timers", self._now(), *_place(after), [*TimerKind], limit)
        return [rows.timer_of(row) for row in found]

    async def unmoved_runs(self, *, after: str | None, limit: int) -> Unmoved:
        """See `Reader.unmoved_runs`."""
        start = "0" * 32 if after is None else hex_of(after)
        page = await self._fetch("unmoved_runs", start, limit)
        found = {id_in(RUN, row["run_id"]): row["last_seq"] for row in page if row["unmoved"]}
        last = id_in(RUN, page[-1]["run_id"]) if len(page) == limit else None
        return Unmoved(seqs=found, after=last)

    async def is_ready(self, run_id: str) -> bool:
        """See `Reader.is_ready`. An entry whose time has not come counts."""
        return await self._first("is_ready", hex_of(run_id)) is not None

    async def timers_of(self, run_id: str) -> list[DueTimer]:
        """See `Reader.timers_of`. The first due first."""
        return [rows.timer_of(row) for row in await self._fetch("timers_of", hex_of(run_id))]

    async def backlog(self) -> Backlog:
        """See `Reader.backlog`. `ready` counts what can be claimed, `runs_by_state` what goes on."""
        now = self._now()
        ready = await self._fetch("count_ready", now)
        (asked,) = await self._fetch("count_interrupts", now)
        states = await self._fetch("count_states")
        return Backlog(
            queues={
                row["queue"]: QueueBacklog(ready=row["ready"], oldest_ready_s=row["oldest_s"])
                for row in ready
            },
            open_interrupts=asked["pending"],
            oldest_interrupt_s=asked["oldest_s"] or 0.0,
            runs_by_state={row["state"]: row["runs"] for row in states},
        )

    async def ping(self) -> None:
        """See `Reader.ping`. A database that was not entered, or was left, is unavailable."""
        if not self._pool.is_open:
            raise Unavailable("the database is not open")
        row = await self._first("ping_runs")
        await self._check(None if row is None else row["version"])


def _place(after: DueTimer | None) -> tuple[object, ...]:
    """Return the key of the timer behind which a page begins."""
    if after is None:
        return (None, None, None, None)
    ref = hex_of(after.ref or after.run_id)
    return (after.due_at, hex_of(after.run_id), after.kind, ref)


def _run_statement(tenant_id: str | None, where: RunFilter) -> tuple[str, tuple[object, ...]]:
    """Return the statement whose index fits the narrowest filter, and its values."""
    if where.origin_run_id is not None:
        return "list_runs_from", (tenant_id, id_out(where.origin_run_id))
    thread, parent = id_out(where.thread_id), id_out(where.parent_run_id)
    chosen = (tenant_id, where.state, where.agent_id, thread, parent, where.only_unfinished)
    if where.parent_run_id is not None:
        return "list_child_runs", chosen
    if where.thread_id is not None:
        return "list_thread_runs", chosen
    if where.only_unfinished:
        return "list_unfinished_runs", chosen
    if tenant_id is None:
        return "list_all_runs", (where.state, where.agent_id)
    return "list_runs", (tenant_id, where.state, where.agent_id)
