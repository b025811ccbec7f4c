"""The two ports of persistence: `Store` writes, `Reader` reads. Adapters are memory, SQLite and
PostgreSQL; the memory store is the readable specification and one conformance suite
(`perdure.testing.conformance`) runs on all three.

Every method of `Store` is one transaction that is durable when it returns. An adapter raises
`Unavailable` when the database cannot be reached or its answer is unknown after its own retries,
and `StoreFull` when there is no room; nothing else of the driver's errors passes its edge.

Clocks: an adapter is made with an optional clock. With one, all times come from it (tests,
simulation); without one, PostgreSQL's own clock rules and SQLite uses the system's.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from pydantic import JsonValue

from perdure.protocol.messages import Role
from perdure.protocol.records import (
    MessageRow,
    ThreadBase,
    ThreadRow,
)
from perdure.protocol.runs import RunHot
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Busy, Commit, CommitResult, SweptContent
from perdure.store.reader import Reader
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


class Store(Protocol):
    """The engine's atomic writes."""

    @property
    def writes_aside(self) -> bool:
        """Whether another process writes the commits, so that this one can work meanwhile."""
        ...

    async def insert_run(self, new: NewRun) -> Inserted:
        """Create a run, or return the one under (tenant, agent, idempotency key).

        The run gets its first event, its input message and, unless an earlier run of its thread
        is unfinished (then `parked_on` thread), its entry in `ready`: for now, or for its
        `start_at` when that is to come (then `parked_on` timer). A run that is both has its entry
        once its turn has come, and still not before its time. It stands in the step of its
        first event: later than 0 when it shares the steps of an origin. Concurrent calls with one
        key create one run. Raises Gone when the history of its origin is no longer whole, NotFound
        for a thread that is not the tenant's, Gone for a deleted one, ThreadBusy when the options
        say `reject` and the thread has an active run. When they say `optimistic` then, the run is
        claimable at once; the thread keeps its active run, and such a run takes no turn in it.
        When they say `fork` then, the run gets the
        new thread `branch_thread_id`, which begins with what the thread said before the active run.

        When they say `interrupt` or `rollback`, the thread's active run gets that cancel in the
        same transaction, as by `request_cancel` (its children too), the answer and the new run's first event name
        it; the runs that wait are left alone, and the new one goes behind them. A run that ends or
        has a cancel as strong is left as it is. A call that finds its run cancels nothing.
        """
        ...

    async def claim_runs(self, want: ClaimWant) -> list[Claimed]:
        """Take up to `limit` runs: the larger priority first, then first come first served.

        Of runs that are suspected of killing their worker (faults ≥ 1) at most `suspects_max`:
        a worker holds one of them at a time, so that a run that does kill it takes no other
        suspected run with it, and an innocent neighbour loses one attempt and no more (F45).

        Each gets token + 1, attempt + 1, an attempts row and an `attempt` event (`claimed`, or
        `recovered` when an earlier attempt was lost). Rows that are busy are left for later.
        Only agents and versions in `serves` and runs whose `required_runtime` is not higher.
        A run whose row cannot be read is put aside (`quarantine`) and not claimed.
        """
        ...

    async def renew_leases(
        self, worker_id: str, leases: Sequence[LeaseKey], ttl_s: float
    ) -> list[Renewal]:
        """Prolong leases; one answer for each, in order, with the run's cancel epoch.

        No lease waits for the row of another one: a row that stays locked is answered as `busy`.
        """
        ...

    async def commit(self, commits: Sequence[Commit]) -> Sequence[CommitResult | Busy]:
        """Write a batch: at most one commit a run (else ValueError); one answer for each, in order.

        Each commit is all or nothing and independent of the others: what one meets changes no
        other's answer, and none waits for another's row. `rules.judge` says what is answered.

        - *Sent again*: a commit whose `commit_id` is the row's last one answers Committed with
          the seq of the first time and writes nothing; `at` is later when somebody else wrote
          since. Only a holder's commit leaves its id on the row: one without a token that is sent
          again is Behind.
        - *Busy*: another writer has locked the row, or the thread of a new child. Stores with one
          writer never answer it.
        - *Damaged*: a commit that has to be judged by a row that cannot be read is Refused.
        - *`ready`*: a run that is held or over after the commit has no entry. Any other has one
          exactly when the commit sets `ready_in_s`, which replaces the entry that was there.
        - *Leases*: no commit prolongs one (`renew_leases` does); `attempt_end` gives it up.
        - *Order*: the events get the numbers behind `expected_seq` in the order given, rows refer
          to events of the same commit, and the commit's last checkpoint counts.
        - *End*: on a terminal state timers and `ready` are cleared, and the thread's next
          unfinished run, by the place of its input, becomes claimable.
        - *Children* are created with their parent's commit or not at all. A child's end leaves a
          report (a timer of kind `child`, due at once) with its parent in the same transaction,
          until a commit of the parent names it in `reported`. A run does not end while one that
          is not detached is unfinished, and makes none after a cancel: such a commit is Refused.
          A child that does not make its thread joins it as by `insert_run`, behind its active run;
          Refused when the thread is not there. The commit of an end may hold detached ones.
        - *Threads*: with `unmoved_since` a commit that the run's row does not speak against is
          Behind when `Reader.moved_at` tells a position of the run's thread; it is looked at under
          the thread's lock, before what would be Refused.
        - *State that outlives the run*: `state_values` take the place of the rows of their fields.
          A commit that the run's row does not speak against is Behind when a row is at another
          version than it expects, also when it would be Refused; then none of them is written.
          Their position is that of the thread behind the commit's messages, 0 for an agent's.
        - *Callbacks*: `new_callbacks` sets a timer of kind `callback` for each call, or moves it;
          `callbacks_over` removes them. A call named in both has none.
        - *Notices*: `notices` sets, moves or removes a timer of kind `notice` for each approval;
          one whose interrupt is closed has none. It is due also while the run is held.
        """
        ...

    async def request_cancel(self, run_id: str, wish: CancelWish) -> RunHot | None:
        """Accept a cancel: epoch + 1 and a `cancel` event; return the new hot row.

        In the same transaction it reaches every unfinished run below that is not detached, by its
        children's rows as they are once their parents are locked: a child that is being created
        is either there, or its parent's commit meets the new epoch. Of a child whose row cannot be
        read nothing is known: it is left.

        A terminal run, or one with the same or a stronger cancel accepted, is returned unchanged.
        A run that nobody holds leaves `ready` and gets a closing timer that is due at once.
        None when there is no such run.
        """
        ...

    async def take_away(self, run_id: str, reason: str) -> bool:
        """Take a held run from its holder as if its lease had expired; False: nobody holds it.

        Token + 1, faults + 1, attempt ended `lease_lost`, a `lost` event with the reason, and a
        closing timer that is due at once.
        """
        ...

    async def record_late(self, late: LateResult) -> LateKept:
        """Append a `late` event, also after the end, unless it says what another of its execution
        said (`keeping.late_digest`), or `LATE_PER_EXECUTION_MAX` of it are kept.
        """
        ...

    async def requeue_expired(self, limit: int) -> list[Requeued]:
        """Take expired leases away: token + 1, faults + 1, attempt ended `lease_lost`, event.

        The run becomes claimable after a back-off with jitter (`rules.lose`); but when its faults
        have reached `max_attempts`, or a cancel was accepted, it gets a closing timer instead.
        """
        ...

    async def release_runs(self, worker_id: str, leases: Sequence[LeaseKey]) -> int:
        """Hand back runs at shutdown: attempt ended `drained`, claimable at once; how many.

        A row that is busy or cannot be read is left, and keeps nobody from the others.
        """
        ...

    async def quarantine(
        self,
        run_id: str,
        token: int | None,
        reason: str,
        step_index: int | None,
        *,
        seq: int | None = None,
    ) -> bool:
        """Put a run aside (`parked_on` repair, a `repair` event); False if it is not held so.

        With a token the run that its holder found damaged; without one a run that nobody holds,
        which leaves `ready` and its closing timer. False too when it is over or put aside
        already, and with a `seq` when that is not its last one any more: somebody has written
        since it was looked at. Without a `step_index` the event carries the row's.
        Raises Unreadable for a row that cannot be read.
        """
        ...

    async def expire_history(
        self, keep: Sequence[RetentionRule], *, after: str | None, limit: int
    ) -> Swept:
        """Look at up to `limit` runs with a larger id and drop the history of those that are due.

        A store may pass over runs that cannot be due without counting them, and stops early when
        many events are to go (`rules.histories_at_once`): each transaction stays short.

        Of an ended run that its rule no longer keeps, and whose history no other run shares that
        has its own still, the events before the terminal one and all
        checkpoints go, `retained_from_seq` becomes the terminal seq, and content that only they
        referred to is no longer in use. The row, the terminal event, attempts, steps, calls with
        their external references, interrupts, artifacts and messages stay (R-6.8). A row that
        is busy or cannot be read is left.
        """
        ...

    async def expire_blobs(
        self, older_than_s: float, *, after: str | None, limit: int
    ) -> SweptContent:
        """Delete, of the next `limit` pieces of content, what no run uses and nobody referred to for
        so long. However much is kept, one transaction looks at no more than that.
        """
        ...

    async def create_thread(
        self, row: ThreadRow, key: RequestKey | None = None, base: ThreadBase | None = None
    ) -> Replayed | None:
        """Create a thread, or return what stands under (tenant, scope, key), and create none.

        The same row again is the same call sent again. Raises Conflict when the id is another's.
        With a base the thread begins with what another one says up to a position, and with those of
        its fields that were written last up to there (of one written later nothing); raises
        NotFound or Gone for that one, Invalid for a position that it has not reached.
        """
        ...

    async def adopt_branch(
        self, tenant_id: str, thread_id: str, branch_id: str, author: str
    ) -> ThreadBase:
        """Let a thread say what a branch of it says, instead of what it said since the fork.

        Artifacts of the branch become `adopted`. The thread's fields hold what the branch's hold, or
        nothing when that has none and they were written since the fork; their versions go on. Once
        more is the same call again. Raises NotFound or Gone for either, Conflict for what is no
        branch of the thread, ThreadBusy while one of the two has an active run.
        """
        ...

    async def delete_thread(self, tenant_id: str, thread_id: str) -> bool:
        """Delete a thread; False when that was done before.

        What is left is a tombstone: its id and times. Its messages go but for those that branches
        of it say too; when such a branch goes later, they go with it. Its fields' values go.
        Subscriptions to its topics end, and one whose inbox it is. Runs, calls and artifacts
        stay; see `expire_deleted` for their history. Raises NotFound, ThreadBusy while a run of
        the thread has not ended, or the parent of one that it did not detach: it may speak there
        again, and undoes what was done there from its history.
        """
        ...

    async def expire_deleted(
        self, thread_id: str | None, *, after: str | None, limit: int
    ) -> Swept:
        """Drop the history of runs of the next `limit` deleted threads, or of that thread.

        Of one call at most so many runs lose it; the place to go on at is then the one before, as
        long as there is more. What goes and stays is as in `expire_history`; a history that is
        shared stays for now.
        """
        ...

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
        """Append a message that belongs to no run, or return what stands under its key.

        The same message again is the same call sent again. Raises NotFound for an unknown thread,
        Conflict when the message's id is another's.
        """
        ...

    async def put_subscription(self, row: SubscriptionRow, inbox: ThreadRow) -> SubscriptionRow:
        """Subscribe an agent to a topic of a thread; return the subscription.

        One that is there keeps its inbox and its time, and gets the terms and the caller of `row`;
        a new one gets `inbox` as a thread. Raises NotFound for a thread that is not the tenant's,
        Conflict when the thread has as many as it may.
        """
        ...

    async def delete_subscription(
        self, tenant_id: str, thread_id: str, topic: str, agent_id: str
    ) -> bool:
        """End a subscription; False when there is none. Its inbox stays."""
        ...

    async def register(
        self, agents: Sequence[AgentRegistration], tools: Sequence[ToolRegistration]
    ) -> None:
        """Record what a worker serves; a known version with another digest is replaced."""
        ...


class Database(Protocol):
    """An open store with its reader. Entering applies pending migrations or refuses to start."""

    @property
    def store(self) -> Store:
        """The writing port."""
        ...

    @property
    def reader(self) -> Reader:
        """The reading port."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
