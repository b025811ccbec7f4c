"""What a planner sees: a view of the run that grows by appending and is rebuilt from the log.

The live attempt and recovery build it by the same fold, so that a recovered planner sees what an
undisturbed one would have seen, byte for byte (R-7.3).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from pydantic import JsonValue

from perdure.protocol.events import PlanItem
from perdure.protocol.failures import Failure
from perdure.protocol.fields import Slot
from perdure.protocol.messages import Message
from perdure.protocol.plain import no_entries, no_items
from perdure.protocol.runs import Counters, RunFacts
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.protocol.tools import ToolSpec
from perdure.protocol.values import Value

OperationKind = Literal["tool", "step", "interrupt", "model", "value", "artifact", "plan", "child"]


@dataclass(slots=True, kw_only=True)
class CallRecord:
    """A tool call of a turn with its result. Large values are shown as references (R-5.9)."""

    tool_call_id: str
    planner_call_id: str | None
    tool: str
    args: JsonValue
    status: ToolCallStatus
    output: JsonValue = None
    error: Failure | None = None
    external_ref: str | None = None
    done: str | None = None
    not_done: str | None = None


@dataclass(slots=True, kw_only=True)
class AskRecord:
    """A question the planner asked, with its answer."""

    interrupt_id: str
    key: str | None
    title: str
    outcome: str | None = None
    answer: str | None = None
    value: JsonValue = None
    by: str | None = None


@dataclass(slots=True, kw_only=True)
class ChildRecord:
    """A child run that the planner asked for. `state` is None while it is unfinished.

    One that was refused has no `child_run_id` and an error; large answers are references.
    """

    child_run_id: str | None
    key: str | None
    agent_id: str | None
    detached: bool
    state: RunState | None = None
    answer: JsonValue = None
    error: Failure | None = None


@dataclass(slots=True, kw_only=True)
class HandoffRecord:
    """How the agent that decides came to the run: from whom, and why."""

    source: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Turn:
    """One step as the planner sees it: what it said, called and asked; what it was told."""

    step_index: int
    text: str = ""
    calls: list[CallRecord] = field(default_factory=no_items)
    asks: list[AskRecord] = field(default_factory=no_items)
    children: list[ChildRecord] = field(default_factory=no_items)
    notes: list[Failure] = field(default_factory=no_items)


class OpenMessage(Protocol):
    """A message of the planner under way: the reply of one model request."""

    @property
    def message_id(self) -> str:
        """The id that a `ModelUse` names for this text to count; empty: nothing is streamed."""
        ...

    def say(self, text: str) -> None:
        """Pass on the next piece; never blocks, never raises."""
        ...


@dataclass(slots=True, kw_only=True)
class Entry:
    """An operation of a code agent as it is recorded: what it was, and what it came to.

    `digest` is that of its arguments; `value` is its result, by reference when it is large.
    `outcome` is the word of a question that was closed (`answered`, `expired`) and of a call that
    has its result (`succeeded`, `failed`, …). `run_id` is set when another run recorded it, whose
    history this one shares.
    """

    position: str
    kind: OperationKind
    name: str
    digest: str
    done: bool = False
    value: Value = field(default_factory=Value)
    outcome: str | None = None
    answer: str | None = None
    error: Failure | None = None
    finish: str = ""
    calls: tuple[dict[str, JsonValue], ...] = ()
    run_id: str = ""
    writes: dict[str, JsonValue] = field(default_factory=no_entries)
    """What a tool wrote to declared fields of the state, by place."""


@dataclass(slots=True, kw_only=True)
class PlannerContext:
    """Everything a decision may depend on.

    `model_failures` counts failed model requests of this step; `tools` are those granted to the
    agent; `messages` are the thread's messages before this run's input; `journal` holds the
    operations of a code agent by position. `agent_id` is the agent that decides: after a
    `handoff` not the one that the run was started with. `participants` are the threads of those
    who have spoken in this run, by name.

    `fields` is what the agent's declared fields hold. A code agent's function merges them itself:
    it alone gets what was `fields_read` when the run began, and `writes` of others, by place.

    `open_message` is there when the run is to be streamed: each call begins a message whose pieces
    followers get at once. No decision depends on it.
    """

    facts: RunFacts
    input: JsonValue
    messages: Sequence[Message]
    turns: Sequence[Turn]
    step_index: int
    plan: Sequence[PlanItem]
    state: JsonValue
    usage: Counters
    model_failures: int
    tools: Sequence[ToolSpec]
    journal: Mapping[str, Entry] = field(default_factory=no_entries)
    agent_id: str = ""
    handoff: HandoffRecord | None = None
    participants: Mapping[str, str] = field(default_factory=no_entries)
    fields: Mapping[str, JsonValue] = field(default_factory=no_entries)
    fields_read: Mapping[Slot, JsonValue] = field(default_factory=no_entries)
    writes: Mapping[str, JsonValue] = field(default_factory=no_entries)
    open_message: Callable[[], OpenMessage] | None = field(default=None, compare=False, repr=False)
