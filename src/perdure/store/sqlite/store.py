"""The writing half of the SQLite adapter: every method is one job of the writer thread."""

from collections.abc import Sequence
from functools import partial

from pydantic import JsonValue

from perdure.protocol.base import from_micros
from perdure.protocol.ids import RUN, is_id
from perdure.protocol.messages import Role
from perdure.protocol.records import MessageRow, ThreadBase, ThreadRow
from perdure.protocol.runs import RunHot
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Commit, CommitResult, Refused, SweptContent
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
from perdure.store.rules import check_batch
from perdure.store.sqlite import admission, moves, retention, subscriptions, threads
from perdure.store.sqlite.prepared import Prepared, prepare
from perdure.store.sqlite.transaction import Transaction
from perdure.store.sqlite.writer import Writer


class SqliteStore:
    """The `Store` port over one writer thread."""

    writes_aside = False  # the writer thread and the loop share the interpreter's lock

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    async def insert_run(self, new: NewRun) -> Inserted:
        """See `Store.insert_run`. A run id that exists is the same call sent again."""
        return await self._writer.run(lambda tx: admission.insert_run(tx, new))

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """See `Store.claim_runs`."""
        return await self._writer.run(lambda tx: moves.claim_runs(tx, want))

    async def renew_leases(
        self, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
    ) -> list[Renewal]:
        """See `Store.renew_leases`. It goes before all work that waits."""

        def renew(tx: Transaction) -> list[Renewal]:
            return moves.renew_leases(tx, worker_id, leases, ttl_s)

        return await self._writer.run(renew, urgent=True)

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """See `Store.commit`. Raises ValueError for a batch that names a run twice."""
        check_batch(commits)
        encoded = [_prepared(commit) for commit in commits]
        fit = [one for one in encoded if isinstance(one, Prepared)]
        written = iter(await self._writer.commit(fit) if fit else ())
        return [one if isinstance(one, Refused) else next(written) for one in encoded]

    async def request_cancel(self, run_id: str, wish: CancelWish) -> RunHot | None:
        """See `Store.request_cancel`."""
        if not is_id(RUN, run_id):
            return None
        return await self._writer.run(lambda tx: moves.request_cancel(tx, run_id, wish))

    async def take_away(self, run_id: str, reason: str) -> bool:
        """See `Store.take_away`."""
        return await self._writer.run(lambda tx: moves.take_away(tx, run_id, reason))

    async def record_late(self, late: LateResult) -> LateKept:
        """See `Store.record_late`. Raises NotFound for a run that does not exist."""
        return await self._writer.run(lambda tx: moves.record_late(tx, late))

    async def requeue_expired(self, limit: int) -> list[Requeued]:
        """See `Store.requeue_expired`. The longest expired first."""
        return await self._writer.run(lambda tx: moves.requeue_expired(tx, limit))

    async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
        """See `Store.release_runs`. A run with an accepted cancel goes to its closing instead."""
        return await self._writer.run(lambda tx: moves.release_runs(tx, worker_id, leases))

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

        def put_aside(tx: Transaction) -> bool:
            return moves.quarantine(tx, run_id, token, reason, step_index, seq)

        return await self._writer.run(put_aside)

    async def expire_history(
        self, keep: Sequence[RetentionRule], *, after: str | None, limit: int
    ) -> Swept:
        """See `Store.expire_history`."""
        return await self._writer.run(lambda tx: retention.expire_history(tx, keep, after, limit))

    async def expire_blobs(
        self, older_than_s: float, *, after: str | None, limit: int
    ) -> SweptContent:
        """See `Store.expire_blobs`."""
        return await self._writer.run(
            lambda tx: retention.expire_blobs(tx, older_than_s, after, limit)
        )

    async def create_thread(
        self, row: ThreadRow, key: RequestKey | None = None, base: ThreadBase | None = None
    ) -> Replayed | None:
        """See `Store.create_thread`."""
        return await self._writer.run(lambda tx: threads.create_thread(tx, row, key, base))

    async def adopt_branch(
        self, tenant_id: str, thread_id: str, branch_id: str, author: str
    ) -> ThreadBase:
        """See `Store.adopt_branch`."""
        return await self._writer.run(
            lambda tx: threads.adopt_branch(tx, tenant_id, thread_id, branch_id, author)
        )

    async def delete_thread(self, tenant_id: str, thread_id: str) -> bool:
        """See `Store.delete_thread`."""
        return await self._writer.run(lambda tx: threads.delete_thread(tx, tenant_id, thread_id))

    async def expire_deleted(
        self, thread_id: str | None, *, after: str | None, limit: int
    ) -> Swept:
        """See `Store.expire_deleted`."""
        return await self._writer.run(
            lambda tx: threads.expire_deleted(tx, thread_id, after, limit)
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
        return await self._writer.run(partial(threads.append_message, message=message, key=key))

    async def put_subscription(self, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
        """See `Store.put_subscription`."""
        return await self._writer.run(lambda tx: subscriptions.put_subscription(tx, row, inbox))

    async def delete_subscription(
        self, tenant_id: str, thread_id: str, topic: str, agent_id: str
    ) -> bool:
        """See `Store.delete_subscription`."""
        key = (thread_id, topic, agent_id)
        return await self._writer.run(
            lambda tx: subscriptions.delete_subscription(tx, tenant_id, key)
        )

    async def register(
        self, agents: Sequence[AgentRegistration], tools: Sequence[ToolRegistration]
    ) -> None:
        """See `Store.register`. What is replaced keeps the time of its first registration."""
        await self._writer.run(lambda tx: admission.register(tx, agents, tools))


def _prepared(commit: Commit) -> Prepared | Refused:
    """Encode a commit on the caller's side, so that bad data never reaches a shared transaction."""
    try:
        return prepare(commit)
    except (ValueError, TypeError) as error:
        return Refused(reason=f"the commit cannot be encoded: {error}")
