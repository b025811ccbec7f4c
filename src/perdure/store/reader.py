"""The reading port of a store, and what its questions and answers are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol

from pydantic import JsonValue

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
from perdure.protocol.states import TERMINAL, InterruptStatus, RunState
from perdure.protocol.topics import SubscriptionRow
from perdure.store.commits import Unmoved
from perdure.store.reading import OnUnreadable
from perdure.store.requests import DueTimer, Inserted, LeaseKey


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
    origin_run_id: str | None = None
    """Runs that begin with this run's log: its retries and forks. Takes no other filter."""

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

    async def list_state_values(
        self,
        tenant_id: str,
        scope: Literal["thread", "agent"],
        scope_id: str,
        *,
        after: str | None,
        limit: int,
    ) -> list[StateValueRow]:
        """Return what the fields of a thread or an agent hold, by name, with a larger one.

        Those that an adoption took back are among them.
        """
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
