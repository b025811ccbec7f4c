"""Drafting a commit: events are applied to the view as they are added, rows beside them.

When the store answers anything but Committed the view is stale and is loaded again; the draft is
thrown away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Literal

from pydantic import JsonValue

from perdure.engine.ports import Ids
from perdure.engine.snapshot import snapshot_digest
from perdure.engine.values import Kept, keep
from perdure.engine.view import RunView
from perdure.protocol.errors import TooLarge
from perdure.protocol.events import StateEvent, StepEvent
from perdure.protocol.failures import Failure
from perdure.protocol.fields import StateField
from perdure.protocol.ids import COMMIT
from perdure.protocol.log import EventData, NewEvent
from perdure.protocol.plain import no_entries, no_items
from perdure.protocol.records import ToolCallRow
from perdure.protocol.states import (
    TERMINAL,
    AttemptEnd,
    InterruptKind,
    ParkedOn,
    RunState,
    StepStatus,
    ToolCallStatus,
    Transition,
    next_state,
)
from perdure.protocol.values import EVENT_DATA_BYTES_MAX
from perdure.store.commits import (
    CallUpdate,
    Commit,
    ExecutionEnd,
    Guard,
    HotUpdate,
    InterruptClose,
    NewArtifact,
    NewCallback,
    NewCheckpoint,
    NewExecution,
    NewInterrupt,
    NewMessage,
    NewStateValue,
    NoticeDue,
    StepChange,
)
from perdure.store.requests import NewBlob, NewRun


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptField:
    """What a run leaves in a field that outlives it: what its log says, and the row."""

    told: dict[str, JsonValue]
    value: NewStateValue


@dataclass(slots=True, kw_only=True)
class Draft:
    """A commit in the making, for a holder (`token`) or for a writer without the lease."""

    view: RunView
    ids: Ids
    token: int | None
    any_holder: bool = False
    events: list[NewEvent] = field(default_factory=no_items)
    steps: list[StepChange] = field(default_factory=no_items)
    new_calls: list[ToolCallRow] = field(default_factory=no_items)
    call_updates: list[CallUpdate] = field(default_factory=no_items)
    new_executions: list[NewExecution] = field(default_factory=no_items)
    execution_ends: list[ExecutionEnd] = field(default_factory=no_items)
    new_interrupts: list[NewInterrupt] = field(default_factory=no_items)
    interrupt_closes: list[InterruptClose] = field(default_factory=no_items)
    messages: list[NewMessage] = field(default_factory=no_items)
    artifacts: list[NewArtifact] = field(default_factory=no_items)
    blobs: list[NewBlob] = field(default_factory=no_items)
    new_children: list[NewRun] = field(default_factory=no_items)
    reported: list[str] = field(default_factory=no_items)
    handed_to: tuple[str, str] | None = None
    new_callbacks: list[NewCallback] = field(default_factory=no_items)
    callbacks_over: list[str] = field(default_factory=no_items)
    notices: list[NoticeDue] = field(default_factory=no_items)
    ended_calls: list[tuple[str, ToolCallStatus]] = field(default_factory=no_items)
    attempt_end: AttemptEnd | None = None
    parked_on: ParkedOn | None = None
    ready_in_s: float | None = None
    close_in_s: float | None = None
    now: datetime | None = None
    """The store's time, where a change is made beside no holder and the run waits for a time."""
    with_checkpoint: bool = True
    unmoved_since: int | None = None
    discards: frozenset[str] | None = None
    fields: Mapping[str, StateField] = field(default_factory=no_entries)
    """The fields that the agent declares."""
    keeps: Sequence[KeptField] = ()
    """What is left in fields that outlive the run, if the draft ends it in success."""
    state_values: tuple[NewStateValue, ...] = ()
    is_closing: bool = False
    """Set when the run is brought to its end, at once or after its children."""
    _from_state: RunState = field(init=False)
    _from_seq: int = field(init=False)
    _from_epoch: int = field(init=False)

    def __post_init__(self) -> None:
        snapshot = self.view.snapshot
        self._from_state = snapshot.state
        self._from_seq = snapshot.last_seq
        self._from_epoch = snapshot.cancel_epoch

    def add(self, data: EventData) -> int:
        """Add an event, apply it to the view, and return its seq.

        Raises TooLarge for one whose data is over the limit (decision 37); the parts that may be
        large are kept as blobs. Not so for a `state` event: the end of a run tells all it has left,
        which is bounded in number, and is never refused.
        """
        snapshot = self.view.snapshot
        seq = snapshot.last_seq + 1
        event = NewEvent(data=data, step_index=snapshot.step_index)
        if len(event.encoded()) > EVENT_DATA_BYTES_MAX and not isinstance(data, StateEvent):
            raise TooLarge(
                f"the data of a {data.type} event has at most {EVENT_DATA_BYTES_MAX} bytes"
            )
        self.events.append(event)
        self.view.apply(seq, data)
        return seq

    def keep_field(self, kept: KeptField, seq: int) -> None:
        """Write what a field holds from the event at `seq` on."""
        self.state_values = (*self.state_values, replace(kept.value, seq=seq))

    def move(
        self,
        why: Transition,
        *,
        answer: Kept | None = None,
        failure: Failure | None = None,
        effects: list[dict[str, JsonValue]] | None = None,
        history_position: int | None = None,
    ) -> int:
        """Add the `state` event of a transition and return its seq; IllegalTransition if none."""
        state = self.view.snapshot.state
        return self.add(
            StateEvent(
                state=next_state(state, why),
                from_state=state,
                why=why,
                answer=answer.inline if answer is not None else None,
                answer_ref=answer.ref if answer is not None else None,
                failure=failure,
                effects=effects,
                history_position=history_position,
            )
        )

    def keep(self, value: JsonValue) -> Kept:
        """Return a value as an event carries it, its blob noted. Raises TooLarge."""
        kept = keep(value)
        self.blobs.extend(kept.blobs)
        return kept

    def note_step(self, status: StepStatus) -> None:
        """Record where the open step stands."""
        snapshot = self.view.snapshot
        self.steps = [
            StepChange(
                index=snapshot.step_index,
                status=status,
                first_seq=snapshot.step_first_seq or snapshot.last_seq,
            )
        ]

    def end_step(self, status: Literal["succeeded", "failed", "cancelled"]) -> None:
        """Add the `step` event that closes the open step."""
        snapshot = self.view.snapshot
        index, first = snapshot.step_index, snapshot.step_first_seq
        last = self.add(StepEvent(index=index, status=status))
        self.steps = [
            StepChange(
                index=index,
                status=StepStatus(status),
                first_seq=first or last,
                last_seq=last,
            )
        ]

    def release(self, end: AttemptEnd, parked_on: ParkedOn | None = None) -> None:
        """Give the lease up in this commit."""
        self.attempt_end = end
        self.parked_on = parked_on

    def build(self) -> Commit:
        """Return the commit. It shares the lists of the draft, which is used no further."""
        snapshot = self.view.snapshot
        checkpoint = self._checkpoint() if self.with_checkpoint and self.events else None
        if checkpoint is not None:
            self.view.checkpoint_seq = checkpoint.seq
        return Commit(
            run_id=self.view.facts.run_id,
            commit_id=self.ids.new(COMMIT),
            guard=Guard(
                token=self.token,
                epoch=self._from_epoch,
                from_state=self._from_state,
                expected_seq=self._from_seq,
                any_holder=self.any_holder,
            ),
            hot=HotUpdate(
                state=snapshot.state,
                step_index=snapshot.step_index,
                faults=self.view.faults,
                parked_on=self.parked_on,
                waiting_kind=self._waiting_kind(),
                code=snapshot.code if snapshot.state is RunState.FAILED else None,
                open_calls=len(snapshot.open_calls),
                open_interrupts=len(snapshot.open_interrupts),
                open_children=len(snapshot.open_children),
                counters=self.view.counters(),
                checkpoint_seq=self.view.checkpoint_seq,
            ),
            events=self.events,
            steps=self.steps,
            new_calls=self.new_calls,
            call_updates=self.call_updates,
            new_executions=self.new_executions,
            execution_ends=self.execution_ends,
            checkpoint=checkpoint,
            new_interrupts=self.new_interrupts,
            interrupt_closes=self.interrupt_closes,
            messages=self.messages,
            artifacts=self.artifacts,
            blobs=self.blobs,
            attempt_end=self.attempt_end,
            ready_in_s=self.ready_in_s,
            close_in_s=self.close_in_s,
            new_children=self.new_children,
            reports_to=self.reports_to,
            reported=self.reported,
            handed_to=self.handed_to,
            new_callbacks=self.new_callbacks,
            callbacks_over=self.callbacks_over,
            unmoved_since=self.unmoved_since,
            notices=self.notices,
            discards=self.discards,
            state_values=self.state_values,
        )

    def _checkpoint(self) -> NewCheckpoint:
        snapshot = self.view.snapshot
        return NewCheckpoint(
            seq=snapshot.last_seq,
            parent_seq=self.view.checkpoint_seq,
            step_index=snapshot.step_index,
            agent_state=snapshot.agent_state,
            digest=snapshot_digest(snapshot),
        )

    def _waiting_kind(self) -> InterruptKind | None:
        if self.view.snapshot.state is not RunState.WAITING_HUMAN:
            return None
        kinds = [item.kind for item in self.view.snapshot.open_interrupts.values()]
        if InterruptKind.AUTH in kinds:
            return InterruptKind.AUTH
        return next((kind for kind in kinds if kind is not InterruptKind.BREAKPOINT), kinds[0])

    @property
    def reports_to(self) -> str | None:
        """The parent that is to be told of the end which this commit brings."""
        facts = self.view.facts
        return facts.parent_run_id if self.ends_run and not facts.detached else None

    @property
    def ends_run(self) -> bool:
        """Tell whether the commit brings the run to its end."""
        return self.view.snapshot.state in TERMINAL
