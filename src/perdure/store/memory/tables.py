"""The tables of the memory store: plain dicts, and the few moves that every write shares.

Nothing here awaits, so each call of the store is one critical section on an event loop.
"""

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from pydantic import JsonValue

from perdure.protocol.log import EventData, NewEvent, RecordedEvent
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
from perdure.protocol.states import TERMINAL, AttemptEnd, ParkedOn
from perdure.protocol.topics import SubscriptionRow
from perdure.store.beginning import takes_no_turn
from perdure.store.requests import NewBlob, Replayed, RequestKey, TimerKind
from perdure.store.rules import Kept, next_in_thread

Clock = Callable[[], datetime]


@dataclass(slots=True, kw_only=True)
class Run:
    """A run with what stores keep beside its row."""

    facts: RunFacts
    kept: Kept
    queue: str
    priority: int
    fingerprint: str
    input_position: int

    @property
    def hot(self) -> RunHot:
        """The hot row."""
        return self.kept.hot

    @hot.setter
    def hot(self, hot: RunHot) -> None:
        self.kept = replace(self.kept, hot=hot)

    @property
    def row(self) -> RunRow:
        """The row as it is shown."""
        return RunRow(facts=self.facts, hot=self.kept.hot)


@dataclass(slots=True, kw_only=True)
class Blob:
    """Content with the time it was last referenced."""

    data: bytes
    media_type: str
    last_referenced_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A registered agent or tool version: its JSON, digest and first registration."""

    body: JsonValue
    digest: str
    at: datetime


TimerKey = tuple[str, TimerKind, str | None]


@dataclass(slots=True)
class Tables:
    """All data. Keys are the primary keys that the SQL stores have."""

    clock: Clock
    runs: dict[str, Run] = field(default_factory=dict[str, Run])
    keys: dict[tuple[str, str, str], str] = field(default_factory=dict[tuple[str, str, str], str])
    ready: dict[str, datetime] = field(default_factory=dict[str, datetime])
    timers: dict[TimerKey, datetime] = field(default_factory=dict[TimerKey, datetime])
    events: dict[str, list[RecordedEvent]] = field(default_factory=dict[str, list[RecordedEvent]])
    attempts: dict[tuple[str, int], AttemptRow] = field(
        default_factory=dict[tuple[str, int], AttemptRow]
    )
    steps: dict[tuple[str, int], StepRow] = field(default_factory=dict[tuple[str, int], StepRow])
    calls: dict[str, ToolCallRow] = field(default_factory=dict[str, ToolCallRow])
    executions: dict[tuple[str, int], ExecutionRow] = field(
        default_factory=dict[tuple[str, int], ExecutionRow]
    )
    checkpoints: dict[tuple[str, int], CheckpointRow] = field(
        default_factory=dict[tuple[str, int], CheckpointRow]
    )
    interrupts: dict[str, InterruptRow] = field(default_factory=dict[str, InterruptRow])
    artifacts: dict[str, ArtifactRow] = field(default_factory=dict[str, ArtifactRow])
    blobs: dict[tuple[str, str], Blob] = field(default_factory=dict[tuple[str, str], Blob])
    blob_uses: dict[tuple[str, str, str], bool] = field(
        default_factory=dict[tuple[str, str, str], bool]
    )
    """By (tenant, digest, run); True: also once the run's history is gone."""
    threads: dict[str, ThreadRow] = field(default_factory=dict[str, ThreadRow])
    bases: list[ThreadBase] = field(default_factory=list[ThreadBase])
    messages: dict[str, MessageRow] = field(default_factory=dict[str, MessageRow])
    request_keys: dict[tuple[str, str, str], Replayed] = field(
        default_factory=dict[tuple[str, str, str], Replayed]
    )
    state_values: dict[tuple[str, str, str, str], StateValueRow] = field(
        default_factory=dict[tuple[str, str, str, str], StateValueRow]
    )
    """What fields that outlive their runs hold, by tenant, scope, its id, and name."""
    subscriptions: dict[tuple[str, str, str], SubscriptionRow] = field(
        default_factory=dict[tuple[str, str, str], SubscriptionRow]
    )
    """By (thread, topic, agent)."""
    late: dict[tuple[str, int, str], LateRow] = field(
        default_factory=dict[tuple[str, int, str], LateRow]
    )
    """By (call, execution, digest)."""
    agents: dict[tuple[str, str], Registered] = field(
        default_factory=dict[tuple[str, str], Registered]
    )
    tools: dict[tuple[str, str], Registered] = field(
        default_factory=dict[tuple[str, str], Registered]
    )

    def append(self, run: Run, events: Iterable[NewEvent]) -> None:
        """Append events to a run's log; its hot row is already as they leave it."""
        log = self.events.setdefault(run.facts.run_id, [])
        for event in events:
            log.append(
                RecordedEvent(
                    run_id=run.facts.run_id,
                    seq=log[-1].seq + 1 if log else 1,
                    type=event.data.type,
                    step_index=event.step_index,
                    at=run.hot.updated_at,
                    attempt=run.hot.attempt,
                    epoch=run.hot.cancel_epoch,
                    raw=event.encoded(),
                )
            )

    def append_one(self, run: Run, data: EventData, step_index: int | None = None) -> None:
        """Append one event of the store's own, by default at the run's step."""
        index = run.hot.step_index if step_index is None else step_index
        self.append(run, (NewEvent(data=data, step_index=index),))

    def end_attempt(self, run: Run, reason: AttemptEnd) -> None:
        """End the running attempt, with the last commit that its holder wrote."""
        key = (run.facts.run_id, run.hot.attempt)
        self.attempts[key] = replace(
            self.attempts[key],
            ended_at=run.hot.updated_at,
            end_reason=reason,
            last_commit_id=run.hot.last_commit_id,
        )

    def set_timer(self, run_id: str, kind: TimerKind, at: datetime, ref: str | None = None) -> None:
        """Set a timer or move it."""
        self.timers[run_id, kind, ref] = at

    def drop_timer(self, run_id: str, kind: TimerKind, ref: str | None = None) -> None:
        """Remove a timer that may be there."""
        self.timers.pop((run_id, kind, ref), None)

    def sync_deadline(self, run: Run) -> None:
        """Give the deadline timer the row's time; without one it goes."""
        at = run.hot.deadline_at
        if at is None:
            self.drop_timer(run.facts.run_id, TimerKind.DEADLINE)
        else:
            self.set_timer(run.facts.run_id, TimerKind.DEADLINE, at)

    def begin_closing(self, run: Run, now: datetime) -> None:
        """Leave a run that nobody holds to the closing timer."""
        self.ready.pop(run.facts.run_id, None)
        self.set_timer(run.facts.run_id, TimerKind.CLOSE, now)

    def keep_blobs(
        self, run: Run, blobs: Iterable[NewBlob], lasting: Container[str], now: datetime
    ) -> None:
        """Keep content once by digest; what is there is only touched. The run uses it now."""
        tenant_id = run.facts.tenant_id
        for blob in blobs:
            use = (tenant_id, blob.digest, run.facts.run_id)
            self.blob_uses[use] = blob.digest in lasting or self.blob_uses.get(use, False)
            known = self.blobs.get((tenant_id, blob.digest))
            if known is None:
                self.blobs[tenant_id, blob.digest] = Blob(
                    data=blob.data, media_type=blob.media_type, last_referenced_at=now
                )
            else:
                known.last_referenced_at = max(now, known.last_referenced_at)

    def take_key(self, tenant_id: str, key: RequestKey | None, object_id: str) -> Replayed | None:
        """Record that an object stands under a key, or return another that does."""
        if key is None:
            return None
        mine = Replayed(object_id=object_id, fingerprint=key.fingerprint)
        known = self.request_keys.setdefault((tenant_id, key.scope, key.key), mine)
        return None if known.object_id == object_id else known

    def add_message(self, message: MessageRow) -> None:
        """Add a message at the end of its thread; its `position` is given here."""
        thread = self.threads[message.thread_id]
        position = thread.last_position + 1
        self.messages[message.message_id] = replace(message, position=position)
        self.threads[thread.thread_id] = replace(
            thread,
            last_position=position,
            updated_at=max(thread.updated_at, message.created_at),
        )

    def end_run(self, run: Run, now: datetime) -> None:
        """Clear what an ended run leaves: timers, its entry in `ready`, its place in the thread."""
        run_id = run.facts.run_id
        self.ready.pop(run_id, None)
        for key in [key for key in self.timers if key[0] == run_id]:
            del self.timers[key]
        thread = self.threads[run.facts.thread_id]
        if thread.active_run_id == run_id:
            self._hand_over(thread, now)

    def _hand_over(self, thread: ThreadRow, now: datetime) -> None:
        """Make the thread's oldest unfinished run the active one, and claimable if it queued."""
        waiting = [
            run
            for run in self.runs.values()
            if run.facts.thread_id == thread.thread_id
            and run.hot.state not in TERMINAL
            and not takes_no_turn(run.facts.options)
        ]
        following = min(waiting, key=lambda run: run.input_position, default=None)
        self.threads[thread.thread_id] = replace(
            thread, active_run_id=following.facts.run_id if following else None
        )
        if following is not None and following.hot.parked_on is ParkedOn.THREAD:
            following.hot = next_in_thread(following.hot, now)
            self.ready[following.facts.run_id] = following.hot.wake_at or now
