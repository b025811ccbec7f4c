"""The reading half of the SQLite adapter. A text that is no id of the kind finds nothing."""

import json
import sqlite3
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Final, Literal

from pydantic import JsonValue

from perdure.protocol.base import from_micros, to_micros
from perdure.protocol.errors import Unavailable
from perdure.protocol.ids import (
    ARTIFACT,
    INTERRUPT,
    MESSAGE,
    RUN,
    THREAD,
    TOOL_CALL,
    is_id,
)
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
from perdure.store.lineage import TAGS_MAX, tags_of
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
from perdure.store.sqlite import rows
from perdure.store.sqlite.connection import SQL
from perdure.store.sqlite.readers import Readers
from perdure.store.sqlite.rows import pack_digest, pack_id
from perdure.store.sqlite.schema import known_migrations, pending_migrations
from perdure.store.sqlite.state_values import read_state_value
from perdure.store.sqlite.subscriptions import read_subscription

_FIRST: Final = b""
_LAST: Final = b"\xff" * 17
_KINDS: Final = json.dumps(list(TimerKind))
"""What this release can act upon; other timers are left to those that know them."""
_SEQ_MAX: Final = 2**63 - 1


def _key(prefix: str, text: str) -> bytes | None:
    """Return the bytes of an id, or None, which equals no key."""
    return pack_id(text) if is_id(prefix, text) else None


def _after(prefix: str, text: str | None, start: bytes) -> bytes | None:
    return start if text is None else _key(prefix, text)


def _place(after: DueTimer | None) -> tuple[int, bytes, str, bytes]:
    """Return the key of the timer behind which a page begins, one before all others for None."""
    if after is None:
        return (-_SEQ_MAX, _FIRST, "", _FIRST)
    ref = _FIRST if after.ref is None else pack_id(after.ref)
    return (to_micros(after.due_at), pack_id(after.run_id), after.kind.value, ref)


def _told(prefix: str, on_unreadable: OnUnreadable | None = None) -> OnUnreadable:
    """Return who hears of a damaged row by the digits of its key: the caller, or the log."""
    tell = on_unreadable or log_unreadable
    return lambda digits, reason: tell(f"{prefix}_{digits}", reason)


class SqliteReader:
    """The `Reader` port over a pool of read connections."""

    def __init__(self, readers: Readers, now: Callable[[], datetime]) -> None:
        self._readers = readers
        self._now = now

    async def find_run(self, tenant_id: str | None, run_id: str) -> RunRow | None:
        """See `Reader.find_run`."""
        key = _key(RUN, run_id)
        return await self._readers.row("find_run", key, tenant_id, convert=rows.read_run)

    async def find_run_by_key(
        self, tenant_id: str, agent_id: str, idempotency_key: str
    ) -> Inserted | None:
        """See `Reader.find_run_by_key`."""
        key = (tenant_id, agent_id, idempotency_key)
        return await self._readers.row("find_idempotent_run", *key, convert=rows.read_keyed_run)

    async def leases_of(self, worker_id: str, limit: int) -> list[LeaseKey]:
        """See `Reader.leases_of`."""
        return await self._readers.rows("leases_of", worker_id, limit, convert=rows.read_lease)

    async def now(self) -> datetime:
        """See `Reader.now`."""
        return self._now()

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
        thread = None if where.thread_id is None else _key(THREAD, where.thread_id)
        parent = None if where.parent_run_id is None else _key(RUN, where.parent_run_id)
        if where.root_run_id is not None:
            root, only = _key(RUN, where.root_run_id), int(where.unfinished)
            return await self._readers.page(
                "list_tree_runs",
                lambda start, wanted: (start, tenant_id, root, only, wanted),
                _after(RUN, after, _LAST),
                limit,
                convert=rows.read_run,
                on_unreadable=_told(RUN, on_unreadable),
            )
        name = "list_unfinished_runs" if where.only_unfinished else "list_runs"
        if where.thread_id is not None:
            name = "list_thread_runs"
        if where.parent_run_id is not None:
            name = "list_child_runs"
        state = None if where.state is None else where.state.value
        chosen: tuple[bytes | str | int | None, ...]
        chosen = (tenant_id, state, where.agent_id, thread, parent, int(where.unfinished))
        if where.origin_run_id is not None:
            name, chosen = "list_runs_from", (tenant_id, _key(RUN, where.origin_run_id))
        return await self._readers.page(
            name,
            lambda start, wanted: (start, *chosen, wanted),
            _after(RUN, after, _LAST),
            limit,
            convert=rows.read_run,
            on_unreadable=_told(RUN, on_unreadable),
        )

    async def thread_runs(self, thread_id: str, *, after: int, limit: int) -> list[PlacedRun]:
        """See `Reader.thread_runs`."""
        key = _key(THREAD, thread_id)
        return await self._readers.rows(
            "thread_runs", key, after, limit, convert=rows.read_placed_run
        )

    async def events_after(self, run_id: str, seq: int, *, limit: int) -> list[RecordedEvent]:
        """See `Reader.events_after`."""
        convert = partial(rows.read_event, run_id)
        key = _key(RUN, run_id)
        return await self._readers.rows("events_after", key, seq, limit, convert=convert)

    async def list_attempts(self, run_id: str) -> list[AttemptRow]:
        """See `Reader.list_attempts`."""
        key = _key(RUN, run_id)
        return await self._readers.rows("list_attempts", key, convert=rows.read_attempt)

    async def list_steps(self, run_id: str, *, after: int, limit: int) -> list[StepRow]:
        """See `Reader.list_steps`."""
        convert = partial(rows.read_step, run_id)
        key = _key(RUN, run_id)
        return await self._readers.rows("list_steps", key, after, limit, convert=convert)

    async def list_tool_calls(
        self, run_id: str, *, after: tuple[int, int] | None, limit: int
    ) -> list[ToolCallRow]:
        """See `Reader.list_tool_calls`."""
        step, ordinal = (-_SEQ_MAX, -_SEQ_MAX) if after is None else after
        return await self._readers.rows(
            "list_tool_calls", _key(RUN, run_id), step, ordinal, limit, convert=rows.read_call
        )

    async def find_tool_call(self, tenant_id: str, tool_call_id: str) -> ToolCallRow | None:
        """See `Reader.find_tool_call`."""
        key = _key(TOOL_CALL, tool_call_id)
        return await self._readers.row("find_tool_call", key, tenant_id, convert=rows.read_call)

    async def list_executions(self, run_id: str) -> list[ExecutionRow]:
        """See `Reader.list_executions`. In order of number, then of call."""
        convert = partial(rows.read_execution, run_id)
        return await self._readers.rows("list_executions", _key(RUN, run_id), convert=convert)

    async def open_executions(self, run_id: str) -> list[ExecutionRow]:
        """See `Reader.open_executions`."""
        convert = partial(rows.read_execution, run_id)
        return await self._readers.rows("open_executions", _key(RUN, run_id), convert=convert)

    async def list_checkpoints(
        self, run_id: str, *, before: int | None, limit: int
    ) -> list[CheckpointRow]:
        """See `Reader.list_checkpoints`."""
        seq = _SEQ_MAX if before is None else before
        return await self._readers.rows(
            "list_checkpoints", _key(RUN, run_id), seq, limit, convert=rows.read_checkpoint
        )

    async def find_checkpoint(self, tenant_id: str, run_id: str, seq: int) -> CheckpointRow | None:
        """See `Reader.find_checkpoint`."""
        return await self._readers.row(
            "find_checkpoint", _key(RUN, run_id), seq, tenant_id, convert=rows.read_checkpoint
        )

    async def list_interrupts(
        self, tenant_id: str, where: InterruptFilter, *, after: str | None, limit: int
    ) -> list[InterruptRow]:
        """See `Reader.list_interrupts`."""
        status = None if where.status is None else where.status.value
        chosen: tuple[object, ...] = (status,)
        name = "list_interrupts"
        if where.run_id is not None:
            name, chosen = "list_run_interrupts", (_key(RUN, where.run_id), status)
        elif where.status is InterruptStatus.PENDING:
            name, chosen = "list_pending_interrupts", ()
        return await self._readers.page(
            name,
            lambda start, wanted: (tenant_id, start, *chosen, wanted),
            _after(INTERRUPT, after, _FIRST),
            limit,
            convert=rows.read_interrupt,
            on_unreadable=_told(INTERRUPT),
        )

    async def find_interrupt(self, tenant_id: str | None, interrupt_id: str) -> InterruptRow | None:
        """See `Reader.find_interrupt`."""
        key = _key(INTERRUPT, interrupt_id)
        return await self._readers.row(
            "find_interrupt", key, tenant_id, convert=rows.read_interrupt
        )

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
        thread = None if thread_id is None else _key(THREAD, thread_id)
        chosen: tuple[object, ...] = ()
        name = "list_artifacts"
        if run_id is not None:
            name, chosen = "list_run_artifacts", (_key(RUN, run_id), thread)
        elif thread_id is not None:
            name, chosen = "list_thread_artifacts", (thread,)
        return await self._readers.page(
            name,
            lambda start, wanted: (tenant_id, start, *chosen, wanted),
            _after(ARTIFACT, after, _FIRST),
            limit,
            convert=rows.read_artifact,
            on_unreadable=_told(ARTIFACT),
        )

    async def find_artifact(self, tenant_id: str, artifact_id: str) -> ArtifactRow | None:
        """See `Reader.find_artifact`."""
        key = _key(ARTIFACT, artifact_id)
        return await self._readers.row("find_artifact", key, tenant_id, convert=rows.read_artifact)

    async def read_blob(self, tenant_id: str, digest: str) -> bytes | None:
        """See `Reader.read_blob`."""
        key = pack_digest(digest)
        return await self._readers.row("read_blob", tenant_id, key, convert=lambda row: row[0])

    async def find_thread(self, tenant_id: str, thread_id: str) -> ThreadRow | None:
        """See `Reader.find_thread`."""
        key = _key(THREAD, thread_id)
        return await self._readers.row("find_thread", key, tenant_id, convert=rows.read_thread)

    async def list_threads(
        self,
        tenant_id: str,
        *,
        after: str | None,
        limit: int,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> list[ThreadRow]:
        """See `Reader.list_threads`."""
        tags = [pack_digest(tag) for tag in sorted(tags_of(metadata or {}))]
        padded = [*tags, *[None] * (TAGS_MAX - len(tags))]
        return await self._readers.page(
            "list_tagged_threads" if tags else "list_threads",
            lambda start, wanted: (tenant_id, start, wanted, *(padded if tags else ())),
            _after(THREAD, after, _LAST),
            limit,
            convert=rows.read_thread,
            on_unreadable=_told(THREAD),
        )

    async def moved_at(self, thread_id: str, since: int, run_id: str) -> int | None:
        """See `Reader.moved_at`."""
        values = (_key(THREAD, thread_id), since, _key(RUN, run_id))
        return await self._readers.row("moved_at", *values, convert=lambda row: row[0])

    async def thread_bases(self, thread_id: str) -> list[ThreadBase]:
        """See `Reader.thread_bases`."""
        key = _key(THREAD, thread_id)
        return await self._readers.rows("thread_bases", key, convert=rows.read_base)

    async def list_branches(
        self, thread_id: str, *, after: str | None, limit: int
    ) -> list[ThreadBase]:
        """See `Reader.list_branches`."""
        key, start = _key(THREAD, thread_id), _after(THREAD, after, _FIRST)
        return await self._readers.rows("list_branches", key, start, limit, convert=rows.read_base)

    async def find_message(self, tenant_id: str, message_id: str) -> MessageRow | None:
        """See `Reader.find_message`."""
        key = _key(MESSAGE, message_id)
        return await self._readers.row("find_message", key, tenant_id, convert=rows.read_message)

    async def list_messages(
        self, thread_id: str, *, after: int, limit: int, until: int | None = None
    ) -> list[MessageRow]:
        """See `Reader.list_messages`."""
        end = _SEQ_MAX if until is None else until
        key = _key(THREAD, thread_id)
        return await self._readers.rows(
            "list_messages", key, after, end, limit, convert=rows.read_message
        )

    async def list_subscriptions(
        self, tenant_id: str, thread_id: str, topic: str | None = None
    ) -> list[SubscriptionRow]:
        """See `Reader.list_subscriptions`."""
        key = _key(THREAD, thread_id)
        return await self._readers.rows(
            "list_subscriptions", tenant_id, key, topic, convert=read_subscription
        )

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
        return await self._readers.rows("list_state_values", *where, convert=read_state_value)

    async def list_agents(self) -> list[RegisteredAgent]:
        """See `Reader.list_agents`. Versions registered at one time are in order of version."""
        return await self._readers.rows("list_agents", convert=rows.read_agent)

    async def list_tools(self) -> list[RegisteredTool]:
        """See `Reader.list_tools`. Versions registered at one time are in order of version."""
        return await self._readers.rows("list_tools", convert=rows.read_tool)

    async def list_late(self, run_id: str) -> list[LateRow]:
        """See `Reader.list_late`."""
        return await self._readers.rows("list_late", _key(RUN, run_id), convert=rows.read_late)

    async def due_timers(self, limit: int, after: DueTimer | None = None) -> list[DueTimer]:
        """See `Reader.due_timers`."""
        now, start = to_micros(self._now()), _place(after)
        values = (now, *start, _KINDS, limit)
        return await self._readers.rows("due_timers", *values, convert=rows.read_timer)

    async def unmoved_runs(self, *, after: str | None, limit: int) -> Unmoved:
        """See `Reader.unmoved_runs`."""
        start = _after(RUN, after, _FIRST)
        page = await self._readers.rows("unmoved_runs", start, limit, convert=_unmoved)
        found = {run_id: seq for run_id, seq, unmoved in page if unmoved}
        return Unmoved(seqs=found, after=page[-1][0] if len(page) == limit else None)

    async def is_ready(self, run_id: str) -> bool:
        """See `Reader.is_ready`. An entry whose time has not come counts."""
        found = await self._readers.row("is_ready", _key(RUN, run_id), convert=bool)
        return found is not None

    async def timers_of(self, run_id: str) -> list[DueTimer]:
        """See `Reader.timers_of`. The first due first."""
        return await self._readers.rows("timers_of", _key(RUN, run_id), convert=rows.read_timer)

    async def backlog(self) -> Backlog:
        """See `Reader.backlog`. `ready` counts what can be claimed, `runs_by_state` what goes on."""
        now = self._now()

        def count(db: sqlite3.Connection) -> Backlog:
            ready = db.execute(SQL["count_ready"], (to_micros(now),)).fetchall()
            asked, oldest_asked = db.execute(SQL["count_open_interrupts"]).fetchall()[0]
            return Backlog(
                queues={
                    name: QueueBacklog(ready=count, oldest_ready_s=_age_s(oldest, now))
                    for name, count, oldest in ready
                },
                open_interrupts=asked,
                oldest_interrupt_s=_age_s(oldest_asked, now),
                runs_by_state=dict(db.execute(SQL["count_states"]).fetchall()),
            )

        return await self._readers.read(count)

    async def ping(self) -> None:
        """See `Reader.ping`."""
        await self._readers.read(_check_schema)


def _check_schema(db: sqlite3.Connection) -> None:
    if pending_migrations(db, known_migrations()):
        raise Unavailable("the database's schema is older than this code")
    db.execute(SQL["ping_runs"]).fetchall()


def _age_s(oldest: int | None, now: datetime) -> float:
    return 0.0 if oldest is None else max(0.0, (now - from_micros(oldest)).total_seconds())


def _unmoved(row: rows.Row) -> tuple[str, int, bool]:
    return f"run_{row[0].hex()}", row[1], bool(row[2])
