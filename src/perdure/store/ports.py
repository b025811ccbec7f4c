"""The two ports of persistence: `Store` writes, `Reader` reads. Adapters are memory, SQLite and
PostgreSQL; the memory store is the readable specification and one conformance suite
(`perdure.testing.conformance`) runs on all three.

Every method of `Store` is one transaction that is durable when it returns. An adapter raises
`Unavailable` when the database cannot be reached or its answer is unknown after its own retries,
and `StoreFull` when there is no room; nothing else of the driver's errors passes its edge.

Clocks: an adapter is made with an optional clock. With one, all times come from it (tests,
simulation); without one, PostgreSQL's own clock rules and SQLite uses the system's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Protocol, Self

from pydantic import JsonValue

from perdure.protocol.events import RecordedEvent
from perdure.protocol.messages import Role
from perdure.protocol.records import (
    ArtifactRow,
    AttemptRow,
    CheckpointRow,
    ExecutionRow,
    InterruptRow,
    LateRow,
    MessageRow,
    StepRow,
    ThreadBase,
    ThreadRow,
    ToolCallRow,
)
from perdure.protocol.runs import RunHot, RunRow
from perdure.protocol.states import TERMINAL, InterruptStatus, RunState
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import (
    AgentRegistration,
    Busy,
    CancelWish,
    Claimed,
    ClaimWant,
    Commit,
    CommitResult,
    DueTimer,
    Inserted,
    LateResult,
    LeaseKey,
    NewRun,
    Renewal,
    Replayed,
    RequestKey,
    Requeued,
    RetentionRule,
    Swept,
    SweptContent,
    ToolRegistration,
    Unmoved,
)
from perdure.store.reading import OnUnreadable


class Store(Protocol):
    """The engine's atomic writes."""

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
        - *Threads*: with `unmoved_since` a commit that nothing else speaks against is Behind when
          `Reader.moved_at` tells a position of the run's thread; it is looked at under the
          thread's lock.
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

    async def record_late(self, late: LateResult) -> bool:
        """Append a `late` event, also after the end; False when it was recorded before."""
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
        self, run_id: str, token: int | None, reason: str, step_index: int | None
    ) -> bool:
        """Put a run aside (`parked_on` repair, a `repair` event); False if it is not held so.

        With a token the run that its holder found damaged; without one a run that nobody holds,
        which leaves `ready` and its closing timer. False too when it is over or put aside
        already. Without a `step_index` the event carries the row's.
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
        With a base the thread begins with what another one says up to a position; raises NotFound
        or Gone for that one, Invalid for a position that it has not reached.
        """
        ...

    async def adopt_branch(
        self, tenant_id: str, thread_id: str, branch_id: str, author: str
    ) -> ThreadBase:
        """Let a thread say what a branch of it says, instead of what it said since the fork.

        Artifacts of the branch become `adopted`. Once more is the same call again. Raises NotFound
        or Gone for either, Conflict for what is no branch of the thread, ThreadBusy while one of
        the two has an active run.
        """
        ...

    async def delete_thread(self, tenant_id: str, thread_id: str) -> bool:
        """Delete a thread; False when that was done before.

        What is left is a tombstone: its id and times. Its messages go but for those that branches
        of it say too; when such a branch goes later, they go with it. Subscriptions to its topics
        end, and one whose inbox it is. Runs, calls and artifacts
        stay; see `expire_deleted` for their history. Raises NotFound, ThreadBusy while a run of
        the thread has not ended.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Which runs to list. None leaves a field open."""

    state: RunState | None = None
    agent_id: str | None = None
    thread_id: str | None = None
    parent_run_id: str | None = None
    unfinished: bool = False
    root_run_id: str | None = None
    """All runs below this root, not itself. Takes no other filter but `unfinished`."""

    @property
    def only_unfinished(self) -> bool:
        """Tell whether no ended run is wanted: few runs are unfinished among all that are kept."""
        return self.unfinished or (self.state is not None and self.state not in TERMINAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptFilter:
    """Which interrupts to list."""

    status: InterruptStatus | None = None
    run_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredAgent:
    """One registered agent version."""

    agent_id: str
    version: str
    card: JsonValue
    registered_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredTool:
    """One registered tool version."""

    name: str
    version: str
    spec: JsonValue
    registered_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRun:
    """A run with the place of its input in its thread."""

    position: int
    row: RunRow


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueBacklog:
    """What can be claimed in a queue, and for how long the first of it could."""

    ready: int
    oldest_ready_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How much waits, for metrics. `queues` holds those in which something can be claimed."""

    queues: Mapping[str, QueueBacklog]
    open_interrupts: int
    oldest_interrupt_s: float
    runs_by_state: Mapping[str, int]

    @property
    def ready(self) -> int:
        """Return how many runs can be claimed."""
        return sum(queue.ready for queue in self.queues.values())

    @property
    def oldest_ready_s(self) -> float:
        """Return for how long the first of them could be claimed."""
        return max((queue.oldest_ready_s for queue in self.queues.values()), default=0.0)


class Reader(Protocol):
    """Pages, searches and counts. Lists run newest first unless said otherwise.

    `after` of a page is the last id of the page before. Ids of another tenant are not found.

    A damaged row raises Unreadable (`unreadable`) where it is asked for or belongs to the object
    that is; lists of runs, threads, interrupts and artifacts leave it out, and fill the page.
    """

    async def find_run(self, tenant_id: str | None, run_id: str) -> RunRow | None:
        """Return a run; `tenant_id` None is for the runtime itself."""
        ...

    async def find_run_by_key(
        self, tenant_id: str, agent_id: str, idempotency_key: str
    ) -> Inserted | None:
        """Return the run under a key as `Store.insert_run` does when it is asked again."""
        ...

    async def leases_of(self, worker_id: str, limit: int) -> list[LeaseKey]:
        """Return leases that a worker holds, expired ones too, in order of run id."""
        ...

    async def now(self) -> datetime:
        """Return the time by which the store judges leases, timers and waits."""
        ...

    async def list_runs(
        self,
        tenant_id: str | None,
        where: RunFilter,
        *,
        after: str | None,
        limit: int,
        on_unreadable: OnUnreadable | None = None,
    ) -> list[RunRow]:
        """Return a page of runs by run id, newest first; `on_unreadable` hears what is left out."""
        ...

    async def thread_runs(self, thread_id: str, *, after: int, limit: int) -> list[PlacedRun]:
        """Return a thread's runs in order of their inputs, behind a place in it.

        A run that appears later stands behind all that could be read before: places are given out
        under the thread's lock, in the transaction that makes the run.
        """
        ...

    async def events_after(self, run_id: str, seq: int, *, limit: int) -> list[RecordedEvent]:
        """Return events with a larger seq, in order."""
        ...

    async def list_attempts(self, run_id: str) -> list[AttemptRow]:
        """Return all attempts, in order."""
        ...

    async def list_steps(self, run_id: str, *, after: int, limit: int) -> list[StepRow]:
        """Return steps with a larger index (-1 for all), in order."""
        ...

    async def list_tool_calls(
        self, run_id: str, *, after: tuple[int, int] | None, limit: int
    ) -> list[ToolCallRow]:
        """Return calls in order of (step, ordinal), after that pair."""
        ...

    async def find_tool_call(self, tenant_id: str, tool_call_id: str) -> ToolCallRow | None:
        """Return one call."""
        ...

    async def list_executions(self, run_id: str) -> list[ExecutionRow]:
        """Return all executions of a run's calls."""
        ...

    async def open_executions(self, run_id: str) -> list[ExecutionRow]:
        """Return every execution of the calls that have no result, in order of number."""
        ...

    async def list_checkpoints(
        self, run_id: str, *, before: int | None, limit: int
    ) -> list[CheckpointRow]:
        """Return checkpoints with a smaller seq, newest first."""
        ...

    async def find_checkpoint(self, tenant_id: str, run_id: str, seq: int) -> CheckpointRow | None:
        """Return the checkpoint of a run at `seq`."""
        ...

    async def list_interrupts(
        self, tenant_id: str, where: InterruptFilter, *, after: str | None, limit: int
    ) -> list[InterruptRow]:
        """Return a page of interrupts by id, oldest first."""
        ...

    async def find_interrupt(self, tenant_id: str | None, interrupt_id: str) -> InterruptRow | None:
        """Return one interrupt."""
        ...

    async def list_artifacts(
        self,
        tenant_id: str,
        *,
        run_id: str | None,
        thread_id: str | None,
        after: str | None,
        limit: int,
    ) -> list[ArtifactRow]:
        """Return a page of artifacts by id, oldest first."""
        ...

    async def find_artifact(self, tenant_id: str, artifact_id: str) -> ArtifactRow | None:
        """Return one artifact."""
        ...

    async def read_blob(self, tenant_id: str, digest: str) -> bytes | None:
        """Return the content under a digest."""
        ...

    async def find_thread(self, tenant_id: str, thread_id: str) -> ThreadRow | None:
        """Return one thread."""
        ...

    async def list_threads(
        self,
        tenant_id: str,
        *,
        after: str | None,
        limit: int,
        metadata: Mapping[str, JsonValue] | None = None,
    ) -> list[ThreadRow]:
        """Return a page of threads by id, newest first, without the deleted ones.

        With `metadata` those that have each of these pairs among theirs, the values being equal.
        """
        ...

    async def moved_at(self, thread_id: str, since: int, run_id: str) -> int | None:
        """Return the first position behind `since` at which the thread says something of others
        than the run; None: it says nothing. Inputs of runs are not counted, their messages are.
        """
        ...

    async def thread_bases(self, thread_id: str) -> list[ThreadBase]:
        """Return what a thread says of other threads, in order of position."""
        ...

    async def list_branches(
        self, thread_id: str, *, after: str | None, limit: int
    ) -> list[ThreadBase]:
        """Return the forks of a thread by the id of the fork, oldest first."""
        ...

    async def find_message(self, tenant_id: str, message_id: str) -> MessageRow | None:
        """Return one message."""
        ...

    async def list_messages(
        self, thread_id: str, *, after: int, limit: int, until: int | None = None
    ) -> list[MessageRow]:
        """Return messages with a larger position (and not beyond `until`), in order."""
        ...

    async def list_subscriptions(
        self, tenant_id: str, thread_id: str, topic: str | None = None
    ) -> list[SubscriptionRow]:
        """Return the subscriptions to a thread, or to one of its topics, by topic and agent."""
        ...

    async def list_agents(self) -> list[RegisteredAgent]:
        """Return every registered version, by agent id, then by registration."""
        ...

    async def list_tools(self) -> list[RegisteredTool]:
        """Return every registered tool version, by name, then by registration."""
        ...

    async def list_late(self, run_id: str) -> list[LateRow]:
        """Return a run's late results, in order of seq."""
        ...

    async def due_timers(self, limit: int, after: DueTimer | None = None) -> list[DueTimer]:
        """Return timers that are due, of runs that nobody holds and that are not in repair.

        Kinds that only a newer release knows are left to it. Reports of children and notices of
        approvals are due also while their run is held. The longest due come first; `after` is the
        last one of the page before.
        """
        ...

    async def unmoved_runs(self, *, after: str | None, limit: int) -> Unmoved:
        """Look at up to `limit` unfinished runs with a larger id; return those that nothing moves.

        That is a run that nobody holds and that is not put aside, without an entry in `ready`, an
        open question, or a timer but for its deadline; it does not wait for children that are open,
        nor for another run of its thread (`rules.is_unmoved`), nor for what only a newer release
        knows. All is seen at one moment.
        """
        ...

    async def is_ready(self, run_id: str) -> bool:
        """Tell whether the run has an entry in `ready`."""
        ...

    async def timers_of(self, run_id: str) -> list[DueTimer]:
        """Return all timers of a run, due or not."""
        ...

    async def backlog(self) -> Backlog:
        """Return how much waits."""
        ...

    async def ping(self) -> None:
        """Return when the database answers and its schema fits; raise Unavailable otherwise."""
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
