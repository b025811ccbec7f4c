"""The journal of a code agent: its recorded operations by position, folded from the log (R-4.6).

An operation stands where its event is: a tool call and a step in their `action`, a question in its
`interrupt`, a model request in its `model`, a value in its `custom` event. Events without a
position belong to no journal, so runs of other agents fold nothing here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from perdure.engine.context import Entry
from perdure.protocol.codec import digest
from perdure.protocol.decisions import DecisionBase, Note
from perdure.protocol.events import (
    ActionEvent,
    ArtifactEvent,
    ChildEvent,
    CustomEvent,
    InterruptEvent,
    ModelEvent,
    PlanEvent,
    PlanItem,
    ResultEvent,
    ResumeEvent,
)
from perdure.protocol.fields import FIELD_EVENT_NAME
from perdure.protocol.plain import no_entries
from perdure.protocol.values import RESERVED, Value

STEP_TOOLS = frozenset({"perdure.step", "perdure.step_once"})
"""The built-in tools whose code is a closure in a code agent's function."""

SLEEP = "perdure.sleep"
NOW = "perdure.now"
PATCHED = "perdure.patched"
CODE = "perdure.code"
"""Names of the custom events that the runtime writes for operations of code agents; a sleep that a
planner decides leaves one as well, without a position."""

_NAMES_OF_CODE = frozenset({SLEEP, NOW, PATCHED, CODE, FIELD_EVENT_NAME})

Opening = (
    ActionEvent | InterruptEvent | ModelEvent | CustomEvent | ArtifactEvent | PlanEvent | ChildEvent
)


def reserved_name(decision: DecisionBase, *, is_code: bool) -> str | None:
    """Return the name of a note that its planner may not write, as it is the runtime's own."""
    allowed = _NAMES_OF_CODE if is_code else frozenset[str]()
    names = [record.name for record in decision.records if isinstance(record, Note)]
    return next((name for name in names if name.startswith(RESERVED) and name not in allowed), None)


@dataclass(slots=True)
class Journal:
    """The operations of one run by position, growing with its log."""

    entries: dict[str, Entry] = field(default_factory=no_entries)
    _open: dict[str, Entry] = field(default_factory=no_entries)
    _asked: dict[str, str] = field(default_factory=no_entries)

    def note(self, data: Opening) -> None:
        """Take an event that records an operation."""
        if data.position is None:
            self._note_write(data)
            return
        entry = _entry_of(data, data.position)
        before = self.entries.get(entry.position)
        if before is not None and isinstance(data, ActionEvent):
            # a call that is taken over from another run: maybe with arguments that a person has
            # edited there, and still the one that the function asked for
            entry.digest, entry.run_id = before.digest, before.run_id
        self.entries[entry.position] = entry
        match data:
            case ActionEvent():
                self._open[data.tool_call_id] = entry
            case InterruptEvent():
                self._open[data.interrupt_id] = entry
                self._asked[data.interrupt_id] = entry.position
            case ChildEvent(phase="spawned", detached=False):
                self._open[data.child_run_id or ""] = entry
            case _:
                entry.done = True

    def _note_write(self, data: Opening) -> None:
        """Take what a tool wrote to the state: its call's function sees it with the result."""
        if not isinstance(data, CustomEvent) or data.name != FIELD_EVENT_NAME:
            return
        write = data.value
        entry = self._open.get(str(write.get("call"))) if isinstance(write, dict) else None
        if entry is not None and isinstance(write, dict):
            entry.writes[str(write["at"])] = write

    def note_child(self, data: ChildEvent) -> None:
        """Take an event of a child: its beginning, or its result."""
        if data.phase == "result":
            self.close(data)
        else:
            self.note(data)

    def adopt(self, run_id: str) -> None:
        """Take all that is recorded so far as recorded by a run whose history is shared."""
        for entry in self.entries.values():
            entry.run_id = entry.run_id or run_id

    def forget(self, interrupt_id: str) -> None:
        """Leave out a question that is to be asked anew."""
        self._open.pop(interrupt_id, None)
        self.entries.pop(self._asked.get(interrupt_id, ""), None)

    def forget_children(self) -> None:
        """Leave out children without a result: they ended with the run that spawned them."""
        for entry in [entry for entry in self._open.values() if entry.kind == "child"]:
            del self.entries[entry.position]
        self._open = {key: entry for key, entry in self._open.items() if entry.kind != "child"}

    def close(self, data: ResultEvent | ResumeEvent | ChildEvent) -> None:
        """Take the event that ends an operation."""
        match data:
            case ResultEvent():
                entry = self._open.pop(data.tool_call_id, None)
                if entry is not None:
                    entry.value = Value(inline=data.output, ref=data.output_ref)
                    entry.outcome = data.status
                    entry.error = data.error
            case ResumeEvent():
                entry = self._open.pop(data.interrupt_id, None)
                if entry is not None:
                    entry.value = Value(inline=data.value)
                    entry.outcome = data.outcome
                    entry.answer = data.answer
            case ChildEvent():
                entry = self._open.pop(data.child_run_id or "", None)
                if entry is not None:
                    entry.value = Value(inline=data.result, ref=data.result_ref)
                    entry.outcome = data.state
                    entry.error = data.failure
        if entry is not None:
            entry.done = True


def plan_digest(items: Sequence[PlanItem]) -> str:
    """Return what a revision of the plan is recognised by."""
    return digest([[item.text, item.status] for item in items])


def _entry_of(data: Opening, position: str) -> Entry:
    match data:
        case ActionEvent():
            step = data.tool in STEP_TOOLS
            return Entry(
                position=position,
                kind="step" if step else "tool",
                name=(data.planner_call_id or "") if step else data.tool,
                digest=data.args_digest,
            )
        case InterruptEvent():
            payload = data.payload_ref.digest if data.payload_ref else digest(data.payload)
            return Entry(
                position=position,
                kind="interrupt",
                name=data.key or "",
                digest=question_digest(data.kind, data.title, payload, data.answer_schema),
            )
        case ChildEvent():
            return Entry(
                position=position,
                kind="child",
                name=data.agent_id or "",
                digest=data.request_digest or "",
                value=Value(inline=data.child_run_id),
                outcome=data.phase,
                error=data.failure,
            )
        case ModelEvent():
            return Entry(
                position=position,
                kind="model",
                name="",
                digest=data.request_digest or "",
                value=Value(inline=data.text, ref=data.text_ref),
                finish=data.finish,
                calls=data.calls or (),
            )
        case PlanEvent():
            return Entry(position=position, kind="plan", name="", digest=plan_digest(data.items))
        case CustomEvent():
            own = data.name in {SLEEP, NOW, PATCHED, CODE}
            return Entry(
                position=position,
                kind="value",
                name=data.name,
                digest="" if own else digest(data.value),
                value=Value(inline=data.value),
            )
        case ArtifactEvent():
            return Entry(
                position=position,
                kind="artifact",
                name=data.name,
                digest=digest([data.media_type, data.digest]),
            )


def question_digest(
    kind: str, title: str, payload_digest: str, answer_schema: dict[str, JsonValue] | None
) -> str:
    """Return the digest of what is asked, by which a question is known again."""
    return digest([kind, title, payload_digest, answer_schema])
