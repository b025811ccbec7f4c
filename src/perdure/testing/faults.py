"""Faults at the commit boundaries: a store that kills its process, or loses an answer, once.

`FaultyStore` wraps any `Store`. What crosses the port tells which boundary it is (fault catalogue
§3.1; B4 to B6 are one commit, and so are B8 and B9). B7, the effect itself, lies in the tool: the
tool springs the same `Trap`. The trap leaves its report before it springs, so that the parent
knows that the boundary was met: a fault that never happens must fail its test.
"""

import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue

from perdure.protocol.base import Model
from perdure.protocol.errors import Unavailable
from perdure.protocol.events import ResultEvent, StateEvent
from perdure.protocol.messages import Role
from perdure.protocol.records import MessageRow, ThreadBase, ThreadRow
from perdure.protocol.runs import RunHot
from perdure.protocol.states import TERMINAL, Transition
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Busy, Commit, CommitResult, SweptContent
from perdure.store.ports import Store
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

T = TypeVar("T")


class Boundary(StrEnum):
    """The boundaries that exist by now; B18 and B19 belong to features that do not."""

    CREATE = "B1"
    CLAIM = "B2"
    HEARTBEAT = "B3"
    START = "start"
    """pending to planning: a commit of its own, in no row of the catalogue."""

    DECISION = "B4-B6"
    EFFECT = "B7"
    RESULT = "B8-B9"
    INTERRUPT = "B10"
    SPAWN = "B12"
    REPORT = "B13"
    ANSWER = "B11"
    ARTIFACT = "B14"
    CANCEL = "B15"
    END = "B16"
    RECLAIM = "B17"


class When(StrEnum):
    """Where the fault lies: before it is durable, after, or after with a living process."""

    BEFORE = "before"
    AFTER = "after"
    ACK_LOST = "ack_lost"


class Plan(Model):
    """One fault: at the `nth` time the boundary is met. `tool` names the effect of B7."""

    boundary: Boundary
    when: When
    report: Path
    nth: int = 1
    tool: str | None = None


class Trap:
    """Springs once, at the planned moment. Without a plan it never does."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self._left = plan.nth if plan is not None else 0
        self._sprung = threading.Event()

    def wait(self, timeout_s: float) -> None:
        """Block until it has sprung; for a tool that waits for it in a thread."""
        self._sprung.wait(timeout_s)

    def before(self, boundary: Boundary, tool: str | None = None) -> None:
        """Pass the moment before a boundary: die here when it is planned."""
        if self._is_met(boundary, tool, When.BEFORE):
            self._die()

    def after(self, boundary: Boundary, tool: str | None = None) -> bool:
        """Pass the moment after: die here, or return True when the answer is to be lost."""
        if self._is_met(boundary, tool, When.AFTER):
            self._die()
        return self._is_met(boundary, tool, When.ACK_LOST)

    def _is_met(self, boundary: Boundary, tool: str | None, when: When) -> bool:
        plan = self.plan
        if plan is None or self._left == 0:
            return False
        if (plan.boundary, plan.when, plan.tool) != (boundary, when, tool):
            return False
        self._left -= 1
        if self._left > 0:
            return False
        plan.report.write_text(f"{boundary} {when}", encoding="utf-8")
        self._sprung.set()
        return True

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def boundaries_of(commit: Commit) -> list[Boundary]:
    """Return which boundaries a commit is; one commit may be several."""
    held = commit.guard.token is not None
    states = [event.data for event in commit.events if isinstance(event.data, StateEvent)]
    is_it = {
        Boundary.START: any(state.why is Transition.START for state in states),
        Boundary.DECISION: bool(commit.new_calls),
        Boundary.RESULT: held and any(isinstance(e.data, ResultEvent) for e in commit.events),
        Boundary.INTERRUPT: bool(commit.new_interrupts) and commit.attempt_end is not None,
        Boundary.ANSWER: not held and bool(commit.interrupt_closes),
        Boundary.ARTIFACT: bool(commit.artifacts),
        Boundary.SPAWN: bool(commit.new_children),
        Boundary.REPORT: bool(commit.reported),
        Boundary.END: commit.hot.state in TERMINAL,
    }
    return [boundary for boundary, found in is_it.items() if found]


class BusyStore:
    """Passes all on to a store, but finds the rows of the next `left` commits locked.

    `only` says which commits these are.
    """

    def __init__(
        self, store: Store, left: int, only: Callable[[Commit], bool] | None = None
    ) -> None:
        self._store = store
        self._only = only
        self.left = left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult | Busy]:
        """Write what is not locked."""
        locked = {commit.commit_id for commit in commits if self._is_locked(commit)}
        free = [commit for commit in commits if commit.commit_id not in locked]
        written = iter(await self._store.commit(free) if free else ())
        return [Busy() if one.commit_id in locked else next(written) for one in commits]

    def _is_locked(self, commit: Commit) -> bool:
        if self.left <= 0 or (self._only is not None and not self._only(commit)):
            return False
        self.left -= 1
        return True


class FaultyStore:
    """A store with one trap in it. `ack_lost` raises Unavailable after the work was done."""

    def __init__(self, inner: Store, trap: Trap) -> None:
        self._inner = inner
        self._trap = trap

    @property
    def writes_aside(self) -> bool:
        """See the port."""
        return self._inner.writes_aside

    async def _cross(
        self,
        boundaries: Sequence[Boundary],
        work: Callable[[], Awaitable[T]],
        counts: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Do the work between its two moments; an empty one (`counts`) has no second."""
        for boundary in boundaries:
            self._trap.before(boundary)
        done = await work()
        lost = counts(done) and [b for b in boundaries if self._trap.after(b)]
        if lost:
            raise Unavailable("the answer was lost on the way (a fault of the test)")
        return done

    # ---------------------------------------------------------------- with a boundary

    async def insert_run(self, new: NewRun) -> Inserted:
        """See the port. B1."""
        return await self._cross([Boundary.CREATE], lambda: self._inner.insert_run(new))

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """See the port. B2, once something is claimed."""
        return await self._cross([Boundary.CLAIM], lambda: self._inner.claim_runs(want), bool)

    async def renew_leases(
        self, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
    ) -> list[Renewal]:
        """See the port. B3."""
        return await self._cross(
            [Boundary.HEARTBEAT], lambda: self._inner.renew_leases(worker_id, leases, ttl_s)
        )

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult | Busy]:
        """See the port. What is in the commits says which boundaries these are."""
        found = dict.fromkeys(b for commit in commits for b in boundaries_of(commit))
        return await self._cross(list(found), lambda: self._inner.commit(commits))

    async def request_cancel(self, run_id: str, wish: CancelWish) -> RunHot | None:
        """See the port. B15."""
        return await self._cross(
            [Boundary.CANCEL], lambda: self._inner.request_cancel(run_id, wish)
        )

    async def requeue_expired(self, limit: int) -> list[Requeued]:
        """See the port. B17, once something is taken away."""
        return await self._cross(
            [Boundary.RECLAIM], lambda: self._inner.requeue_expired(limit), bool
        )

    async def take_away(self, run_id: str, reason: str) -> bool:
        """See the port. B17."""
        return await self._cross(
            [Boundary.RECLAIM], lambda: self._inner.take_away(run_id, reason), bool
        )

    # ---------------------------------------------------------------- without

    async def record_late(self, late: LateResult) -> LateKept:
        """See the port."""
        return await self._inner.record_late(late)

    async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
        """See the port."""
        return await self._inner.release_runs(worker_id, leases)

    async def quarantine(
        self,
        run_id: str,
        token: int | None,
        reason: str,
        step_index: int | None,
        *,
        seq: int | None = None,
    ) -> bool:
        """See the port."""
        return await self._inner.quarantine(run_id, token, reason, step_index, seq=seq)

    async def expire_history(
        self, keep: Sequence[RetentionRule], *, after: str | None, limit: int
    ) -> Swept:
        """See the port."""
        return await self._inner.expire_history(keep, after=after, limit=limit)

    async def expire_blobs(
        self, older_than_s: float, *, after: str | None, limit: int
    ) -> SweptContent:
        """See the port."""
        return await self._inner.expire_blobs(older_than_s, after=after, limit=limit)

    async def create_thread(
        self, row: ThreadRow, key: RequestKey | None = None, base: ThreadBase | None = None
    ) -> Replayed | None:
        """See the port."""
        return await self._inner.create_thread(row, key, base)

    async def adopt_branch(
        self, tenant_id: str, thread_id: str, branch_id: str, author: str
    ) -> ThreadBase:
        """See the port."""
        return await self._inner.adopt_branch(tenant_id, thread_id, branch_id, author)

    async def delete_thread(self, tenant_id: str, thread_id: str) -> bool:
        """See the port."""
        return await self._inner.delete_thread(tenant_id, thread_id)

    async def expire_deleted(
        self, thread_id: str | None, *, after: str | None, limit: int
    ) -> Swept:
        """See the port."""
        return await self._inner.expire_deleted(thread_id, after=after, limit=limit)

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
        """See the port."""
        return await self._inner.append_message(
            tenant_id=tenant_id,
            thread_id=thread_id,
            message_id=message_id,
            role=role,
            author=author,
            body=body,
            key=key,
        )

    async def put_subscription(self, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
        """See the port."""
        return await self._inner.put_subscription(row, inbox)

    async def delete_subscription(
        self, tenant_id: str, thread_id: str, topic: str, agent_id: str
    ) -> bool:
        """See the port."""
        return await self._inner.delete_subscription(tenant_id, thread_id, topic, agent_id)

    async def register(
        self, agents: Sequence[AgentRegistration], tools: Sequence[ToolRegistration]
    ) -> None:
        """See the port."""
        await self._inner.register(agents, tools)
