"""The rows of one run, as the checks read them.

Events keep what the checks compare (ids, digests, states) and drop large payloads, so a record
grows with the number of events, not with what was said in them. What needs the payloads, replay
and strict JSON, is computed while the events pass by (`replay.py`).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar, cast

from perdure.engine.snapshot import RunSnapshot
from perdure.protocol.events import (
    ENDING_REPAIRS,
    ActionEvent,
    CancelEvent,
    ChildEvent,
    CustomEvent,
    DeltaEvent,
    InterruptEvent,
    LateEvent,
    MessageEvent,
    ModelEvent,
    RepairEvent,
    ResultEvent,
    ResumeEvent,
    StateEvent,
)
from perdure.protocol.fields import FIELD_EVENTS, KEPT_EVENT_NAME, Slot
from perdure.protocol.log import EventData, RecordedEvent, Unknown
from perdure.protocol.records import (
    ArtifactRow,
    AttemptRow,
    CheckpointRow,
    ExecutionRow,
    InterruptRow,
    LateRow,
    StateValueRow,
    StepRow,
    ThreadBase,
    ThreadRow,
    ToolCallRow,
)
from perdure.protocol.runs import RunFacts, RunHot, RunRow
from perdure.protocol.states import TERMINAL, InterruptStatus
from perdure.store.requests import DueTimer

SMALL_EVENT_BYTES = 512
"""Events up to this size are kept as they are."""

_PAYLOADS: dict[type, dict[str, Any]] = {
    StateEvent: {"answer": None, "effects": None},
    ActionEvent: {"args": None},
    ResultEvent: {"output": None, "done": None, "not_done": None},
    InterruptEvent: {"payload": None, "answer_schema": None, "title": ""},
    ResumeEvent: {"value": None, "effective_args": None},
    ModelEvent: {"text": ""},
    MessageEvent: {"parts": []},
    DeltaEvent: {"text": ""},
    CustomEvent: {"value": None},
    ChildEvent: {"result": None},
    LateEvent: {"output": None},
}

Data = TypeVar("Data")


_JUDGED = FIELD_EVENTS | {KEPT_EVENT_NAME}
"""Names of custom events of whose values the checks judge; these are small (8 KiB)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event without its large payloads. `data` is None when it does not fit its type."""

    seq: int
    type: str
    step_index: int
    at: datetime
    attempt: int
    epoch: int
    schema_version: int
    data: EventData | Unknown | None
    args_digest: str | None = None
    """Of an `action`: taken before its arguments are dropped."""

    @property
    def name(self) -> str:
        """Return how findings name the event."""
        return f"event {self.seq}"


def line_of(event: RecordedEvent, data: EventData | Unknown | None) -> LogLine:
    """Return what the checks keep of an event."""
    args_digest = data.args_digest if isinstance(data, ActionEvent) else None
    payloads = _PAYLOADS.get(type(data))
    if isinstance(data, CustomEvent) and data.name in _JUDGED:
        payloads = None
    if data is not None and payloads is not None and len(event.raw) > SMALL_EVENT_BYTES:
        data = data.model_copy(update=payloads)
    return LogLine(
        seq=event.seq,
        type=event.type,
        step_index=event.step_index,
        at=event.at,
        attempt=event.attempt,
        epoch=event.epoch,
        schema_version=event.schema_version,
        data=data,
        args_digest=args_digest,
    )


@dataclass(slots=True, kw_only=True)
class Replay:
    """What folding the whole log came to.

    `mismatches` are places where log and checkpoints differ, `not_strict` are stored documents
    that are no strict JSON, `speech_…` what is wrong with streamed messages; each as
    (subject, text).
    """

    snapshot: RunSnapshot = field(default_factory=RunSnapshot)
    whole: bool = True
    mismatches: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    not_strict: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    speech_places: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    speech_texts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobFacts:
    """What stands in the blob store under a digest that the run refers to."""

    digest: str
    found: bool
    is_sound: bool
    """Its content has that digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """An object that an event names and that is not among the run's rows."""

    seq: int
    kind: str
    id: str
    owner: str | None
    """The run that has it; None when no row of the run's tenant is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What a run shares with its origin, and the runs that it names."""

    artifacts: dict[str, int] = field(default_factory=dict[str, int])
    """The version of each artifact name at the place where the run begins."""
    problem: str | None = None
    """Why the shared history cannot be read."""
    origin: RunRow | None = None
    retried: RunRow | None = None
    superseded: RunRow | None = None
    bases: list[ThreadBase] = field(default_factory=list[ThreadBase])
    """What the run's thread says of others."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All rows of one run. Lists are in order of their keys; `log` and `checkpoints` of seq."""

    row: RunRow
    log: list[LogLine]
    replay: Replay
    attempts: list[AttemptRow] = field(default_factory=list[AttemptRow])
    steps: list[StepRow] = field(default_factory=list[StepRow])
    calls: list[ToolCallRow] = field(default_factory=list[ToolCallRow])
    calls_before: list[ToolCallRow] = field(default_factory=list[ToolCallRow])
    """Those whose events are no longer kept."""
    executions: list[ExecutionRow] = field(default_factory=list[ExecutionRow])
    checkpoints: list[CheckpointRow] = field(default_factory=list[CheckpointRow])
    interrupts: list[InterruptRow] = field(default_factory=list[InterruptRow])
    artifacts: list[ArtifactRow] = field(default_factory=list[ArtifactRow])
    late: list[LateRow] = field(default_factory=list[LateRow])
    timers: list[DueTimer] = field(default_factory=list[DueTimer])
    is_ready: bool = False
    thread: ThreadRow | None = None
    sharing: Sharing
    blobs: dict[str, BlobFacts] = field(default_factory=dict[str, BlobFacts])
    foreign: list[Foreign] = field(default_factory=list[Foreign])
    parent: RunRow | None = None
    children: list[RunRow] = field(default_factory=list[RunRow])
    state_values: dict[Slot, StateValueRow] = field(default_factory=dict[Slot, StateValueRow])
    """The rows of fields that the run has left a value in."""

    @property
    def facts(self) -> RunFacts:
        """The cold half of the run's row."""
        return self.row.facts

    @property
    def hot(self) -> RunHot:
        """The hot half of the run's row."""
        return self.row.hot

    @property
    def first_step(self) -> int:
        """The first step of the run's own: larger than 0 for one that shares steps of another."""
        if self.facts.origin_run_id is None:
            return 0
        if self.log and self.log[0].seq == 1:
            return self.log[0].step_index
        return min((step.index for step in self.steps), default=self.hot.step_index)

    @property
    def is_over(self) -> bool:
        """Tell whether the row says that the run has ended."""
        return self.hot.state in TERMINAL

    @cached_property
    def _by_type(self) -> dict[type, list[LogLine]]:
        found: dict[type, list[LogLine]] = defaultdict(list)
        for line in self.log:
            found[type(line.data)].append(line)
        return found

    def of(self, kind: type[Data]) -> list[tuple[LogLine, Data]]:
        """Return the events of one type, in order."""
        return [(line, cast("Data", line.data)) for line in self._by_type.get(kind, [])]

    @cached_property
    def end(self) -> LogLine | None:
        """The first terminal `state` event."""
        ends = [line for line, data in self.of(StateEvent) if data.state in TERMINAL]
        return ends[0] if ends else None

    @cached_property
    def cancelled_at(self) -> LogLine | None:
        """The first `cancel` event."""
        cancels = self.of(CancelEvent)
        return cancels[0][0] if cancels else None

    @cached_property
    def given_up_at(self) -> int:
        """The seq of the `repair` event by which a person or the policy ended the run; 0: none.

        The damage before it is told there. It is no finding any more.
        """
        return max(
            (line.seq for line, data in self.of(RepairEvent) if data.action in ENDING_REPAIRS),
            default=0,
        )

    @cached_property
    def is_told_damaged(self) -> bool:
        """Tell whether the log was damaged before the repair that ended the run for it: events are
        missing, or it does not fold to what is stored.
        """
        if not self.given_up_at:
            return False
        first = self.hot.retained_from_seq
        there = sum(line.seq < self.given_up_at for line in self.log)
        return there < self.given_up_at - first or bool(self.replay.mismatches)

    @cached_property
    def calls_by_id(self) -> dict[str, ToolCallRow]:
        """The calls by id."""
        return {call.tool_call_id: call for call in self.calls}

    @cached_property
    def actions(self) -> dict[str, list[LogLine]]:
        """The `action` events by call."""
        return _by_call(self.of(ActionEvent))

    @cached_property
    def results(self) -> dict[str, list[LogLine]]:
        """The `result` events by call."""
        return _by_call(self.of(ResultEvent))

    @cached_property
    def executions_by_call(self) -> dict[str, list[ExecutionRow]]:
        """The executions by call, in order of number."""
        found: dict[str, list[ExecutionRow]] = defaultdict(list)
        for row in sorted(self.executions, key=lambda row: row.number):
            found[row.tool_call_id].append(row)
        return found

    @cached_property
    def interrupts_by_call(self) -> dict[str, list[InterruptRow]]:
        """The interrupts about a call, by call."""
        found: dict[str, list[InterruptRow]] = defaultdict(list)
        for row in self.interrupts:
            if row.tool_call_id is not None:
                found[row.tool_call_id].append(row)
        return found

    @cached_property
    def pending(self) -> list[InterruptRow]:
        """The interrupts that nobody closed."""
        return [row for row in self.interrupts if row.status is InterruptStatus.PENDING]

    @cached_property
    def lines_by_seq(self) -> dict[int, LogLine]:
        """The events by seq."""
        return {line.seq: line for line in self.log}


def _by_call(
    lines: list[tuple[LogLine, ActionEvent]] | list[tuple[LogLine, ResultEvent]],
) -> dict[str, list[LogLine]]:
    found: dict[str, list[LogLine]] = defaultdict(list)
    for line, data in lines:
        found[data.tool_call_id].append(line)
    return found
