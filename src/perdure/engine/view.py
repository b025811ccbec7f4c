"""A run as the engine works with it: its row, the folded snapshot, and what the planner sees.

Live and recovered views are built by the same `apply`, event by event; nothing is copied and
nothing is rebuilt at a step (R-7.3, R-7.5).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

from pydantic import JsonValue

from perdure.engine.context import (
    AskRecord,
    CallRecord,
    ChildRecord,
    HandoffRecord,
    PlannerContext,
    Turn,
)
from perdure.engine.fold import fold
from perdure.engine.journal import Journal
from perdure.engine.snapshot import CORRECTABLE, OpenCall, RunSnapshot
from perdure.engine.values import shown
from perdure.protocol.events import (
    ActionEvent,
    ArtifactEvent,
    ChildEvent,
    CustomEvent,
    ErrorEvent,
    HandoffEvent,
    InterruptEvent,
    ModelEvent,
    PlanEvent,
    ResultEvent,
    ResumeEvent,
    StateEvent,
)
from perdure.protocol.failures import Failure
from perdure.protocol.log import EventData, Unknown
from perdure.protocol.messages import Message
from perdure.protocol.plain import no_entries, no_items
from perdure.protocol.runs import Counters, RunFacts, RunRow
from perdure.protocol.states import Answer, InterruptKind, ToolCallStatus
from perdure.protocol.tools import ToolSpec


@dataclass(slots=True, kw_only=True)
class Executions:
    """How often a call was handed to its tool, and whether the last time has ended."""

    count: int = 0
    running: bool = False


@dataclass(slots=True, kw_only=True)
class RunView:
    """Everything the engine knows of one run while it works on it."""

    facts: RunFacts
    input: JsonValue
    snapshot: RunSnapshot
    faults: int
    waiting_ms: int
    checkpoint_seq: int | None
    messages: Sequence[Message] = ()
    turns: list[Turn] = field(default_factory=no_items)
    executions: dict[str, Executions] = field(default_factory=no_entries)
    retry_at: dict[str, float] = field(default_factory=no_entries)
    """When calls in back-off are due, by the engine's monotonic clock; from their retry events."""
    discarded: frozenset[str] = frozenset()
    """Artifacts that the run owes and shares, but that a cancel discarded, as last looked up."""
    _records: dict[str, CallRecord] = field(default_factory=no_entries)
    handoff: HandoffRecord | None = None
    _asks: dict[str, AskRecord] = field(default_factory=no_entries)
    _journal: Journal = field(default_factory=Journal)
    _children: dict[str, ChildRecord] = field(default_factory=no_entries)
    _counted: tuple[tuple[int, ...], Counters] | None = None

    def apply(self, seq: int, data: EventData | Unknown) -> None:
        """Fold the event at `seq` into the snapshot and into what the planner sees."""
        step = self.snapshot.step_index
        origin = data.origin if isinstance(data, StateEvent) else None
        if origin is not None:
            open_step = step if self.snapshot.step_open else None
            fold(self.snapshot, seq, data)
            self._journal.adopt(origin.run_id)
            self._adopt(open_step)
            return
        fold(self.snapshot, seq, data)
        show = self._SHOWS.get(type(data))
        if show is not None:
            show(self, step, data)

    def _adopt(self, open_step: int | None) -> None:
        """Leave out of the step that was cut off what is made anew or was never answered."""
        self.handoff = None  # the run begins with its own agent
        self.executions, self._records, self._asks = {}, {}, {}
        self._journal.forget_children()
        if open_step is None or not self.turns or self.turns[-1].step_index != open_step:
            return
        turn, inherited = self.turns[-1], self.snapshot.inherited
        turn.calls = [item for item in turn.calls if item.tool_call_id not in inherited]
        for ask in turn.asks:
            if ask.outcome != "answered" or ask.answer == Answer.REJECT:
                self._journal.forget(ask.interrupt_id)
        turn.asks = [
            ask for ask in turn.asks if ask.outcome == "answered" and ask.answer != Answer.REJECT
        ]
        if not (turn.calls or turn.asks or inherited):
            self.turns.pop()

    def _turn(self, step: int) -> Turn:
        if not self.turns or self.turns[-1].step_index != step:
            self.turns.append(Turn(step_index=step))
        return self.turns[-1]

    def _apply_model(self, step: int, data: ModelEvent) -> None:
        self._turn(step).text = data.text if data.text_ref is None else data.text_ref.preview
        self._journal.note(data)

    def _apply_note(self, _step: int, data: CustomEvent | ArtifactEvent | PlanEvent) -> None:
        self._journal.note(data)

    def _apply_error(self, step: int, data: ErrorEvent) -> None:
        if not data.final:
            self._turn(step).notes.append(data.failure)

    def _apply_action(self, step: int, data: ActionEvent) -> None:
        record = CallRecord(
            tool_call_id=data.tool_call_id,
            planner_call_id=data.planner_call_id,
            tool=data.tool,
            args=shown(data.args, data.args_ref),
            status=data.status,
        )
        self._turn(step).calls.append(record)
        self._records[data.tool_call_id] = record
        self._journal.note(data)

    def _apply_result(self, _step: int, data: ResultEvent) -> None:
        self._journal.close(data)
        self.executions.pop(data.tool_call_id, None)
        self.retry_at.pop(data.tool_call_id, None)
        record = self._records.pop(data.tool_call_id, None)
        if record is None:
            return
        record.status = data.status
        record.output = shown(data.output, data.output_ref)
        record.error = data.error
        record.external_ref = data.external_ref
        record.done = data.done
        record.not_done = data.not_done

    def _apply_ask(self, step: int, data: InterruptEvent) -> None:
        if data.kind is InterruptKind.BREAKPOINT or data.tool_call_id is not None:
            return
        ask = AskRecord(interrupt_id=data.interrupt_id, key=data.key, title=data.title)
        self._turn(step).asks.append(ask)
        self._asks[data.interrupt_id] = ask
        self._journal.note(data)

    def _apply_child(self, step: int, data: ChildEvent) -> None:
        """Apply what tells of another run. A call's child is seen as that call."""
        if data.tool_call_id is not None or data.topic is not None:
            return
        self._journal.note_child(data)
        if data.phase in {"spawned", "refused"}:
            child = ChildRecord(
                child_run_id=data.child_run_id,
                key=data.key,
                agent_id=data.agent_id,
                detached=data.detached,
                error=data.failure,
            )
            self._turn(step).children.append(child)
            if data.child_run_id is not None:
                self._children[data.child_run_id] = child
        if data.phase == "result":
            record = self._children.pop(data.child_run_id or "", None)
            if record is not None:
                record.state = data.state
                record.answer = shown(data.result, data.result_ref)
                record.error = data.failure

    def _apply_handoff(self, _step: int, data: HandoffEvent) -> None:
        self.handoff = HandoffRecord(source=data.source, reason=data.reason)
        if data.view == "none":
            self.turns = []

    @property
    def agent_id(self) -> str:
        """The agent that carries the run out at present."""
        return self.snapshot.agent[0] if self.snapshot.agent else self.facts.agent_id

    def _apply_answer(self, _step: int, data: ResumeEvent) -> None:
        self._journal.close(data)
        ask = self._asks.pop(data.interrupt_id, None)
        if ask is not None:
            ask.outcome = data.outcome
            ask.answer = data.answer
            ask.value = data.value
            ask.by = data.by
        record = self._records.get(data.tool_call_id or "")
        if record is not None and data.effective_digest is not None:
            record.args = data.effective_args

    def counters(self) -> Counters:
        """Return what the run has used so far."""
        snapshot = self.snapshot
        used = (snapshot.model_calls, snapshot.tool_calls, snapshot.retries, self.waiting_ms)
        if self._counted is None or self._counted[0] != used:
            counters = Counters(
                model_calls=snapshot.model_calls,
                tool_calls=snapshot.tool_calls,
                input_tokens=snapshot.input_tokens,
                output_tokens=snapshot.output_tokens,
                cost=snapshot.cost,
                waiting_ms=self.waiting_ms,
                retries=snapshot.retries,
            )
            self._counted = (used, counters)
        return self._counted[1]

    def context(self, tools: Sequence[ToolSpec], *, for_code: bool = False) -> PlannerContext:
        """Return what the planner decides upon; it shares the growing lists, not copies. Only the
        function of a code agent merges writes to the state itself, and is given them.
        """
        snapshot = self.snapshot
        return PlannerContext(
            facts=self.facts,
            input=self.input,
            messages=self.messages,
            turns=self.turns,
            step_index=snapshot.step_index,
            plan=snapshot.plan,
            state=snapshot.agent_state,
            usage=self.counters(),
            model_failures=snapshot.model_failures,
            tools=tools,
            journal=self._journal.entries,
            agent_id=self.agent_id,
            handoff=self.handoff,
            participants=snapshot.participants,
            fields_read=snapshot.fields_read if for_code else {},
            writes=snapshot.writes if for_code else {},
        )

    def executions_of(self, tool_call_id: str) -> Executions:
        """Return the executions of an open call."""
        found = self.executions.get(tool_call_id)
        if found is None:
            found = self.executions[tool_call_id] = Executions()
        return found

    def last_correctable(self) -> Failure | None:
        """Return the latest failure that the planner was told of and could have mended."""
        for turn in reversed(self.turns):
            told = [call.error for call in turn.calls if call.error is not None] + turn.notes
            for failure in reversed(told):
                if failure.code in CORRECTABLE:
                    return failure
        return None

    def runnable_calls(self) -> list[OpenCall]:
        """Return open calls that may be handed to their tool, in order of the planner's wish."""
        found = [
            call
            for call in self.snapshot.open_calls.values()
            if call.status is ToolCallStatus.PROPOSED
            and not self.executions_of(call.tool_call_id).running
        ]
        if len(found) > 1:
            found.sort(key=attrgetter("ordinal"))
        return found

    def running_calls(self) -> list[OpenCall]:
        """Return open calls whose last execution has not ended."""
        return [
            call
            for call in self.snapshot.open_calls.values()
            if self.executions_of(call.tool_call_id).running
        ]

    _SHOWS: ClassVar[dict[type, Callable[["RunView", int, Any], None]]] = {
        ModelEvent: _apply_model,
        ActionEvent: _apply_action,
        ResultEvent: _apply_result,
        InterruptEvent: _apply_ask,
        ResumeEvent: _apply_answer,
        CustomEvent: _apply_note,
        ArtifactEvent: _apply_note,
        PlanEvent: _apply_note,
        ErrorEvent: _apply_error,
        ChildEvent: _apply_child,
        HandoffEvent: _apply_handoff,
    }
    """How the event types are applied of which a planner sees something."""


def view_of(row: RunRow, run_input: JsonValue) -> RunView:
    """Return the empty view of a run, to which its events are then applied."""
    return RunView(
        facts=row.facts,
        input=run_input,
        snapshot=RunSnapshot(),
        faults=row.hot.faults,
        waiting_ms=row.hot.counters.waiting_ms,
        checkpoint_seq=row.hot.checkpoint_seq,
    )
