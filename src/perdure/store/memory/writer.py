"""The writing half of the memory store."""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import JsonValue

from perdure.protocol.errors import Conflict, NotFound
from perdure.protocol.messages import Role
from perdure.protocol.records import LateRow, MessageRow, ThreadBase, ThreadRow
from perdure.protocol.runs import RunHot
from perdure.protocol.states import AttemptEnd
from perdure.protocol.topics import SubscriptionRow
from perdure.store import keeping, rules
from perdure.store.commits import Commit, CommitResult, SweptContent
from perdure.store.memory import subscriptions, threads
from perdure.store.memory.admission import claim, insert
from perdure.store.memory.applying import apply
from perdure.store.memory.cancelling import cancel
from perdure.store.memory.retention import expire_blobs, expire_history
from perdure.store.memory.tables import Registered, Run, Tables
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
    TimerKind,
    ToolRegistration,
)


class MemoryStore:
    """The `Store` port over dicts. No method awaits, so each is atomic on its loop."""

    writes_aside = True  # as if: simulations have it so

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    async def insert_run(self, new: NewRun) -> Inserted:
        """See `Store.insert_run`. A run id that exists is the same call sent again."""
        return insert(self._tables, new, self._tables.clock())

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """See `Store.claim_runs`."""
        return claim(self._tables, want, self._tables.clock())

    async def renew_leases(
        self, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
    ) -> list[Renewal]:
        """See `Store.renew_leases`. An expired lease that nobody took away is prolonged."""
        expires_at = rules.after(self._tables.clock(), ttl_s)
        answers: list[Renewal] = []
        for lease in leases:
            run = self._tables.runs.get(lease.run_id)
            held = run is not None and rules.holds(run.hot, worker_id, lease.token)
            if run is not None and held:
                run.hot = replace(run.hot, lease_expires_at=expires_at)
            epoch = 0 if run is None else run.hot.cancel_epoch
            answers.append(Renewal(run_id=lease.run_id, held=held, cancel_epoch=epoch))
        return answers

    async def commit(self, commits: Sequence[Commit]) -> list[CommitResult]:
        """See `Store.commit`. Raises ValueError for a batch that names a run twice."""
        rules.check_batch(commits)
        now = self._tables.clock()
        return [apply(self._tables, commit, now) for commit in commits]

    async def request_cancel(self, run_id: str, wish: CancelWish) -> RunHot | None:
        """See `Store.request_cancel`."""
        run = self._tables.runs.get(run_id)
        if run is None:
            return None
        if not rules.accepts_cancel(run.hot, wish):
            return run.hot
        cancel(self._tables, run, wish, self._tables.clock())
        return run.hot

    async def take_away(self, run_id: str, reason: str) -> bool:
        """See `Store.take_away`."""
        run = self._tables.runs.get(run_id)
        if run is None or run.hot.lease_owner is None:
            return False
        now, before = self._tables.clock(), run.hot
        run.hot = rules.lose(run_id, before, now, closing=True)
        self._tables.append_one(run, rules.lost_event(before, reason))
        self._tables.end_attempt(run, AttemptEnd.LEASE_LOST)
        self._tables.begin_closing(run, now)
        return True

    async def record_late(self, late: LateResult) -> LateKept:
        """See `Store.record_late`. Raises NotFound for a run that does not exist."""
        tables = self._tables
        run = tables.runs.get(late.run_id)
        if run is None:
            raise NotFound("no such run")
        execution, given = (late.tool_call_id, late.execution), keeping.late_digest(late)
        known = [key[2] for key in tables.late if key[:2] == execution]
        kept = keeping.what_of_late(known, given)
        if kept is not LateKept.RECORDED:
            return kept
        now = tables.clock()
        run.hot = rules.note_late(run.hot, now)
        tables.append_one(run, rules.late_event(late), late.step_index)
        tables.keep_blobs(run, late.blobs, {blob.digest for blob in late.blobs}, now)
        tables.late[*execution, given] = LateRow(
            tool_call_id=late.tool_call_id,
            execution=late.execution,
            run_id=late.run_id,
            attempt=late.attempt,
            epoch=late.epoch,
            seq=run.hot.last_seq,
            status=late.status,
            external_ref=late.external_ref,
            recorded_at=run.hot.updated_at,
        )
        return kept

    async def requeue_expired(self, limit: int) -> list[Requeued]:
        """See `Store.requeue_expired`. The longest expired first."""
        now = self._tables.clock()
        expired = [
            (run.hot.lease_expires_at, run.facts.run_id, run)
            for run in self._tables.runs.values()
            if run.hot.lease_expires_at is not None and rules.is_expired(run.hot, now)
        ]
        expired.sort(key=lambda item: item[:2])
        return [self._take_away(run) for _, _, run in expired[:limit]]

    def _take_away(self, run: Run) -> Requeued:
        tables, now, before = self._tables, self._tables.clock(), run.hot
        exhausted = rules.is_exhausted(before, run.facts.options.faults_max)
        cancelled = before.cancel_epoch > 0
        run.hot = rules.lose(run.facts.run_id, before, now, closing=exhausted or cancelled)
        tables.append_one(run, rules.lost_event(before))
        tables.end_attempt(run, AttemptEnd.LEASE_LOST)
        if exhausted or cancelled:
            tables.begin_closing(run, now)
        else:
            tables.ready[run.facts.run_id] = run.hot.wake_at or now
        return Requeued(run_id=run.facts.run_id, exhausted=exhausted, cancel_requested=cancelled)

    async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
        """See `Store.release_runs`. A run with an accepted cancel goes to its closing instead."""
        tables, now, count = self._tables, self._tables.clock(), 0
        for lease in leases:
            run = tables.runs.get(lease.run_id)
            if run is None or not rules.holds(run.hot, worker_id, lease.token):
                continue
            run.hot = rules.give_back(run.hot, now)
            tables.end_attempt(run, AttemptEnd.DRAINED)
            if run.hot.cancel_epoch > 0:
                tables.begin_closing(run, now)
            else:
                tables.ready[lease.run_id] = now
            count += 1
        return count

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
        run = self._tables.runs.get(run_id)
        if run is None or not rules.may_put_aside(run.hot, token, seq):
            return False
        run.hot = rules.put_aside(run.hot, self._tables.clock())
        step_index = run.hot.step_index if step_index is None else step_index
        self._tables.append_one(run, rules.repair_event(reason), step_index)
        if token is not None:
            self._tables.end_attempt(run, AttemptEnd.ERROR)
        self._tables.ready.pop(run_id, None)
        self._tables.drop_timer(run_id, TimerKind.CLOSE)
        return True

    async def expire_history(
        self, keep: Sequence[RetentionRule], *, after: str | None, limit: int
    ) -> Swept:
        """See `Store.expire_history`."""
        return expire_history(self._tables, keep, after, limit)

    async def expire_blobs(
        self, older_than_s: float, *, after: str | None, limit: int
    ) -> SweptContent:
        """See `Store.expire_blobs`."""
        return expire_blobs(self._tables, older_than_s, after, limit)

    async def create_thread(
        self, row: ThreadRow, key: RequestKey | None = None, base: ThreadBase | None = None
    ) -> Replayed | None:
        """See `Store.create_thread`."""
        return threads.create(self._tables, row, key, base)

    async def adopt_branch(
        self, tenant_id: str, thread_id: str, branch_id: str, author: str
    ) -> ThreadBase:
        """See `Store.adopt_branch`."""
        return threads.adopt(self._tables, tenant_id, thread_id, branch_id, author)

    async def delete_thread(self, tenant_id: str, thread_id: str) -> bool:
        """See `Store.delete_thread`."""
        return threads.delete(self._tables, tenant_id, thread_id)

    async def expire_deleted(
        self, thread_id: str | None, *, after: str | None, limit: int
    ) -> Swept:
        """See `Store.expire_deleted`."""
        return threads.expire_deleted(self._tables, thread_id, after, limit)

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
        tables = self._tables
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
            created_at=tables.clock(),
        )
        found = tables.messages.get(message_id)
        if found is not None and not keeping.is_same_message(found, message):
            raise Conflict("the message exists")
        threads.find_live(tables, tenant_id, thread_id)
        known = tables.take_key(tenant_id, key, message_id)
        if known is not None:
            return known
        if found is None:
            tables.add_message(message)
        return tables.messages[message_id]

    async def put_subscription(self, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
        """See `Store.put_subscription`."""
        return subscriptions.put(self._tables, row, inbox)

    async def delete_subscription(
        self, tenant_id: str, thread_id: str, topic: str, agent_id: str
    ) -> bool:
        """See `Store.delete_subscription`."""
        return subscriptions.remove(self._tables, tenant_id, (thread_id, topic, agent_id))

    async def register(
        self, agents: Sequence[AgentRegistration], tools: Sequence[ToolRegistration]
    ) -> None:
        """See `Store.register`. What is replaced keeps the time of its first registration."""
        tables, now = self._tables, self._tables.clock()
        for agent in agents:
            key = (agent.agent_id, agent.version)
            at = tables.agents[key].at if key in tables.agents else now
            tables.agents[key] = Registered(body=agent.card, digest=agent.digest, at=at)
        for tool in tools:
            key = (tool.name, tool.version)
            at = tables.tools[key].at if key in tables.tools else now
            tables.tools[key] = Registered(body=tool.spec, digest=tool.digest, at=at)
