"""The writing half of the PostgreSQL store.

Commits, inserts and heartbeats have connections of their own; everything else is rare and borrows
one from the pool. A move of a run locks its row, asks `rules`, and writes what they return.
"""

from collections.abc import Callable, Sequence
from datetime import datetime

from pydantic import JsonValue

from perdure.protocol.base import from_micros
from perdure.protocol.codec import encode
from perdure.protocol.errors import Conflict
from perdure.protocol.messages import Role
from perdure.protocol.records import MessageRow, ThreadBase, ThreadRow
from perdure.protocol.runs import RunHot
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Busy, Commit, CommitResult, SweptContent
from perdure.store.postgres import moves, retention, subscriptions, threads
from perdure.store.postgres.admission import Admission, claim
from perdure.store.postgres.committing import Committer
from perdure.store.postgres.driver import Connection
from perdure.store.postgres.errors import DataRefused
from perdure.store.postgres.heartbeat import Heartbeat
from perdure.store.postgres.lanes import Access, Lane, Result, Work
from perdure.store.postgres.moving import columns
from perdure.store.postgres.statements import SQL
from perdure.store.postgres.wire import digest_out
from perdure.store.requests import (
    AgentRegistration,
    CancelWish,
    Claimed,
    ClaimWant,
    Inserted,
    LateKept,
    LateResult,
    LeaseKey,
    NewRun,
    Renewal,
    Replayed,
    RequestKey,
    Requeued,
    RetentionRule,
    Swept,
    ToolRegistration,
)

Clock = Callable[[], datetime] | None


class PostgresStore:
    """The `Store` port over PostgreSQL."""

    writes_aside = True

    def __init__(self, dsn: str, access: Access, clock: Clock) -> None:
        self._commits = Lane(dsn, shared=True)
        self._inserts = Lane(dsn, shared=True)
        self._committer = Committer(self._commits, clock)
        self._admission = Admission(self._inserts, clock)
        self._heartbeat = Heartbeat(dsn, clock)
        self._access = access
        self._clock = clock

    async def close(self) -> None:
        """Close the connections that are not the pool's."""
        await self._heartbeat.close()
        await self._inserts.close()
        await self._commits.close()

    def _now(self) -> datetime | None:
        return None if self._clock is None else self._clock()

    async def _move(self, work: Work[Result]) -> Result:
        """Do one transaction's work; what is refused here is a conflict of the caller's."""
        try:
            return await self._access.run(work)
        except DataRefused as error:
            raise Conflict(str(error)) from error

    async def insert_run(self, new: NewRun) -> Inserted:
        """See `Store.insert_run`. A run id that exists is the same call sent again."""
        return await self._admission.insert_run(new)

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """See `Store.claim_runs`."""
        if want.limit <= 0 or not want.serves:
            return []
        return await self._move(lambda c: claim(c, want, self._now()))

    async def renew_leases(
        self, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
    ) -> list[Renewal]:
        """See `Store.renew_leases`. May be called from any event loop."""
        return await self._heartbeat.renew(worker_id, leases, ttl_s)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult | Busy]:
        """See `Store.commit`. Raises ValueError for a batch that names a run twice."""
        return await self._committer.commit(commits)

    async def request_cancel(self, run_id: str, wish: CancelWish) -> RunHot | None:
        """See `Store.request_cancel`."""
        return await self._move(lambda c: moves.cancel(c, run_id, wish, self._now()))

    async def take_away(self, run_id: str, reason: str) -> bool:
        """See `Store.take_away`."""
        return await self._move(lambda c: moves.take_away(c, run_id, reason, self._now()))

    async def record_late(self, late: LateResult) -> LateKept:
        """See `Store.record_late`. Raises NotFound for a run that does not exist."""
        return await self._move(lambda c: moves.record_late(c, late, self._now()))

    async def requeue_expired(self, limit: int) -> list[Requeued]:
        """See `Store.requeue_expired`. The longest expired first; busy rows are left."""
        return await self._move(lambda c: moves.requeue_expired(c, limit, self._now()))

    async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
        """See `Store.release_runs`. A run with an accepted cancel goes to its closing instead."""
        if not leases:
            return 0
        return await self._move(lambda c: moves.release(c, worker_id, leases, self._now()))

    async def quarantine(
        self,
        run_id: str,
        token: int | None,
        reason: str,
        step_index: int | None,
        *,
        seq: int | None = None,
    ) -> bool:
        """See `Store.quarantine`."""
        return await self._move(
            lambda c: moves.quarantine(c, run_id, token, reason, step_index, seq, self._now())
        )

    async def expire_history(
        self, keep: Sequence[RetentionRule], *, after: str | None, limit: int
    ) -> Swept:
        """See `Store.expire_history`."""
        return await self._move(
            lambda c: retention.expire_history(c, keep, after, limit, self._now())
        )

    async def expire_blobs(
        self, older_than_s: float, *, after: str | None, limit: int
    ) -> SweptContent:
        """See `Store.expire_blobs`."""
        return await self._move(
            lambda c: retention.expire_blobs(c, older_than_s, after, limit, self._now())
        )

    async def create_thread(
        self, row: ThreadRow, key: RequestKey | None = None, base: ThreadBase | None = None
    ) -> Replayed | None:
        """See `Store.create_thread`."""
        return await self._move(lambda c: threads.create_thread(c, row, key, base, self._now()))

    async def adopt_branch(
        self, tenant_id: str, thread_id: str, branch_id: str, author: str
    ) -> ThreadBase:
        """See `Store.adopt_branch`."""
        return await self._move(
            lambda c: threads.adopt_branch(c, tenant_id, thread_id, branch_id, author, self._now())
        )

    async def delete_thread(self, tenant_id: str, thread_id: str) -> bool:
        """See `Store.delete_thread`."""
        return await self._move(
            lambda c: threads.delete_thread(c, tenant_id, thread_id, self._now())
        )

    async def expire_deleted(
        self, thread_id: str | None, *, after: str | None, limit: int
    ) -> Swept:
        """See `Store.expire_deleted`."""
        return await self._move(
            lambda c: threads.expire_deleted(c, thread_id, after, limit, self._now())
        )

    async def append_message(
        self,
        *,
        tenant_id: str,
        thread_id: str,
        message_id: str,
        role: Role,
        author: str,
        body: JsonValue,
        key: RequestKey | None = None,
    ) -> MessageRow | Replayed:
        """See `Store.append_message`."""
        message = MessageRow(
            message_id=message_id,
            thread_id=thread_id,
            tenant_id=tenant_id,
            position=0,
            run_id=None,
            seq=None,
            role=role,
            author=author,
            body=body,
            created_at=from_micros(0),
        )
        return await self._move(lambda c: threads.append_message(c, message, key, self._now()))

    async def put_subscription(self, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
        """See `Store.put_subscription`."""
        return await self._move(lambda c: subscriptions.put_subscription(c, row, inbox))

    async def delete_subscription(
        self, tenant_id: str, thread_id: str, topic: str, agent_id: str
    ) -> bool:
        """See `Store.delete_subscription`."""
        key = (thread_id, topic, agent_id)
        return await self._move(lambda c: subscriptions.delete_subscription(c, tenant_id, key))

    async def register(
        self, agents: Sequence[AgentRegistration], tools: Sequence[ToolRegistration]
    ) -> None:
        """See `Store.register`. What is replaced keeps the time of its first registration."""
        cards = {
            (one.agent_id, one.version): (
                one.agent_id,
                one.version,
                digest_out(one.digest),
                encode(one.card),
            )
            for one in agents
        }
        specs = {
            (one.name, one.version): (
                one.name,
                one.version,
                digest_out(one.digest),
                encode(one.spec),
            )
            for one in tools
        }
        now = self._now()

        async def work(connection: Connection) -> None:
            if cards:
                ordered = [cards[key] for key in sorted(cards)]
                await connection.execute(SQL["register_agents"], now, *columns(ordered))
            if specs:
                ordered = [specs[key] for key in sorted(specs)]
                await connection.execute(SQL["register_tools"], now, *columns(ordered))

        await self._move(work)
