"""What the engine needs from the layers above it, and from the machine.

Planners, tools and policies are user code or stand for it: the engine calls them through these
ports and expects anything: errors, silence, blocking. An implementation says in its docstring on
which thread it runs (decision 15).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, Protocol, runtime_checkable

from pydantic import JsonValue

from perdure.engine.context import PlannerContext
from perdure.protocol.agents import AgentCard
from perdure.protocol.decisions import Decision, ModelUse
from perdure.protocol.failures import Failure
from perdure.protocol.fields import Slot, StateField
from perdure.protocol.plain import no_entries, value
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.runs import Caller, RunContext, RunFacts
from perdure.protocol.states import ArtifactStatus, OnExpiry
from perdure.protocol.tools import ToolResult, ToolSpec
from perdure.protocol.values import BlobRef, Value


class Clock(Protocol):
    """Time, as an argument."""

    def now(self) -> datetime:
        """Return the time of day, aware, in UTC. Never used for leases."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        ...


class Ids(Protocol):
    """Where ids come from."""

    def new(self, prefix: str) -> str:
        """Return a fresh id under a prefix: unguessable, time-ordered."""
        ...


class Chance(Protocol):
    """Where randomness comes from."""

    def random(self) -> float:
        """Return a number in [0, 1)."""
        ...


class AuthorError(Exception):
    """An error of the author's code, in words that callers may read: they are its author's."""


class PlannerFailure(Exception):
    """The planner could not decide, for a reason the engine's recovery table knows.

    `failure.retryable` lets the engine try again, after `retry_after_s` at least when given (a
    day at most).
    `model_uses` are requests that were paid for all the same.
    """

    def __init__(
        self,
        failure: Failure,
        *,
        retry_after_s: float | None = None,
        model_uses: tuple[ModelUse, ...] = (),
    ) -> None:
        super().__init__(f"{failure.code}: {failure.reason}")
        self.failure = failure
        self.retry_after_s = retry_after_s
        self.model_uses = model_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """A step of a code agent: the closure in its live function, and how it may be tried again."""

    run: Callable[[], object]
    is_async: bool
    retry: RetryPolicy
    timeout_s: float | None = None


class PlannerSession(Protocol):
    """A planner at work on one run, for one attempt: what it keeps in memory ends with it."""

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the next decision, as a planner does."""
        ...

    async def prepare(self, context: PlannerContext) -> None:
        """Bring the function to where its journal ends, without deciding.

        Raises PlannerFailure: NON_DETERMINISTIC when it does not get to what is recorded.
        """
        ...

    def step_at(self, position: str) -> LocalStep | None:
        """Return the step that the function waits for at a position; None: it is not there."""
        ...

    async def close(self) -> None:
        """Stop what still runs; waits a grace period at most."""
        ...


class SessionSurroundings(Protocol):
    """What a session may ask the engine for."""

    @property
    def clock(self) -> Clock:
        """The store's time of day, and the engine's monotonic clock."""
        ...

    async def load(self, tenant_id: str, value: Value) -> JsonValue:
        """Return a recorded value whole; raise LookupError when its content is not stored."""
        ...


@runtime_checkable
class SessionPlanner(Protocol):
    """A planner that keeps something for the length of an attempt: it is opened for each."""

    def open(self, around: SessionSurroundings) -> PlannerSession:
        """Return a session for one attempt."""
        ...


class Planner(Protocol):
    """Decides, never executes (R-4.1). Must not change the context; must be a function of it."""

    async def next_step(self, context: PlannerContext) -> Decision:
        """Return the next decision; raise PlannerFailure for a known trouble.

        Any other exception is a fault of the planner's code: the attempt fails, not the process.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducedArtifact:
    """A formal product a tool made during one execution; committed with the result."""

    name: str
    media_type: str
    data: bytes
    status: ArtifactStatus = ArtifactStatus.FINAL


@value
class FieldWrite:
    """A write of a tool to a declared field of the state; recorded with the result."""

    field: str
    value: JsonValue


@value
class ToolOutcome:
    """What an execution came to, with the artifacts it made and what it wrote to the state.

    `output_ref` stands for an output that is stored already, a child's answer. `begun` is False
    when nothing of the tool's code ran: there was no place, thread or process for it.
    """

    result: ToolResult
    artifacts: tuple[ProducedArtifact, ...] = ()
    writes: tuple[FieldWrite, ...] = ()
    output_ref: BlobRef | None = None
    begun: bool = True


@value
class ToolInvocation:
    """One execution of a call, as a tool runner gets it.

    `on_late` is called (on the engine's loop) with the outcome of an execution that was given up
    by timeout or cancel and ended afterwards all the same. `body` runs in the place of the tool's
    own code: a step of a code agent. `place` was kept for it; without one it waits for its turn.
    """

    spec: ToolSpec
    args: JsonValue
    effect_key: str
    tool_call_id: str
    run_id: str
    thread_id: str
    step_index: int
    execution: int
    context: RunContext
    caller: Caller
    timeout_s: float
    on_late: Callable[[ToolOutcome], None] = field(default=lambda _: None)
    body: LocalStep | None = None
    place: "Place | None" = None


class Place(Protocol):
    """A place that is kept for one execution, from before its row is durable."""

    def give_back(self) -> None:
        """Let others have it; a second time does nothing. The execution itself does so at its end."""
        ...


class ToolRunner(Protocol):
    """Finds and runs tools. One gate for every kind of tool."""

    def reserve(self, spec: ToolSpec, timeout_s: float) -> Place | None:
        """Keep a place for an execution of a tool; None: all are taken, or its rate lets it wait.

        So no call waits in a queue whose row says that it was begun: one that was cut off there
        would be taken for one that may have had its effect (decision 23).
        """
        ...

    async def wait_for_place(self, spec: ToolSpec, wait_s: float) -> None:
        """Return once there may be a place for a tool, or after a time."""
        ...

    def find(self, name: str, version: str | None) -> ToolSpec | None:
        """Return a tool's declaration; None for the version means the newest."""
        ...

    def problem_with_args(self, spec: ToolSpec, args: JsonValue) -> str | None:
        """Return what is wrong with arguments by the tool's schema, or None."""
        ...

    async def invoke(self, invocation: ToolInvocation) -> ToolOutcome:
        """Run a tool to an outcome. Never raises for what the tool does (R-5.8).

        Ends by itself at `timeout_s` with `timed_out`. When its caller is cancelled, it asks the
        tool to stop, waits the grace period at most, and abandons it. Results are clean JSON,
        checked against the output schema and the size limit.
        """
        ...

    async def lookup(self, invocation: ToolInvocation) -> ToolOutcome | None:
        """Ask the tool what became of an earlier execution under this key; None: it cannot say.

        TOOL_UNAVAILABLE with the detail `happened: false` says that it certainly did not happen.
        """
        ...

    async def compensate(self, invocation: ToolInvocation) -> ToolOutcome:
        """Have a tool undo a call of its, to an outcome, as `invoke` does.

        The arguments are the fields of what the call did, the effect key the compensation's own.
        """
        ...


@value
class PolicyDecision:
    """Whether a call may run, by which rule of which policy version (R-14.1)."""

    effect: Literal["allow", "ask", "deny"]
    rule: str
    version: str
    reason: str = ""
    approvers: tuple[str, ...] = ()
    expires_in_s: float | None = None
    on_expiry: OnExpiry = OnExpiry.FAIL
    escalate_after_s: float | None = None
    escalate_to: tuple[str, ...] = ()


class Policy(Protocol):
    """Judges every tool call before it runs. An error or None means deny."""

    def judge(
        self, agent: "HostedAgent", facts: RunFacts, spec: ToolSpec, args: JsonValue
    ) -> PolicyDecision:
        """Return the decision for one call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalNotice:
    """What approvers are told: who may decide what, until when, and why they hear of it now.

    `number` counts the tries to tell them. No arguments: they are read where the answer is given.
    """

    interrupt_id: str
    run_id: str
    thread_id: str
    tenant_id: str
    agent_id: str
    tool: str
    approvers: tuple[str, ...]
    expires_at: datetime | None
    escalated: bool
    number: int


class Notifier(Protocol):
    """Tells approvers that they are asked. At least once each time others may decide."""

    async def notify(self, notice: ApprovalNotice) -> None:
        """Tell them; raise when that failed: it is tried again, and recorded."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrant:
    """A tool an agent may use. `approve` "never" lets a write or external tool run unasked.

    `approvers` may decide an approval (nobody named: whoever may answer), and `escalate_to` in
    their place once it was open for `escalate_after_s`.
    """

    name: str
    version: str | None = None
    approve: Literal["policy", "always", "never"] = "policy"
    approvers: tuple[str, ...] = ()
    escalate_after_s: float | None = None
    escalate_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        after, others = self.escalate_after_s, self.escalate_to
        if (after is None) != (not others) or (after is not None and after <= 0):
            raise ValueError(f"grant of {self.name}: escalating needs a time above 0, and others")


class FieldMerger(Protocol):
    """Merges writes to fields of which some have reducers, which are code of the author."""

    async def __call__(
        self, writes: Mapping[str, JsonValue], over: Mapping[Slot, JsonValue]
    ) -> dict[Slot, JsonValue]:
        """Return what the fields hold after the writes, by place, over what they held before.

        Raises ValueError for a write that a rule does not take, AuthorError for what else a
        reducer raises and when it does not return in time, PlannerFailure (INTERNAL, retryable)
        when it cannot be asked now.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedAgent:
    """An agent version that this process can run.

    `models` is how many models the planner can fall back through: after `model_retry.attempts_max`
    failures of one the next is asked (the planner sees the count of failures). `replaces` names
    versions that are gone: their runs, which nobody would take, end CHECKPOINT_INCOMPATIBLE.
    """

    card: AgentCard
    planner: Planner
    grants: tuple[ToolGrant, ...] = ()
    model_retry: RetryPolicy = RetryPolicy()
    models: int = 1
    deny_tells_planner: bool = False
    replaces: tuple[str, ...] = ()
    continues: bool = False
    """The runs of the versions that it replaces go on as new runs of this one."""
    publishes: str | None = None
    """The topic to which its answers are published."""
    fields: Mapping[str, StateField] = field(default_factory=no_entries)
    """The fields of state that it declares, by name."""
    merger: FieldMerger | None = None
    """Set when some of them have reducers."""


class AgentCatalog(Protocol):
    """The agents and tools of this process (decision 18)."""

    def find(self, agent_id: str, version: str) -> HostedAgent | None:
        """Return an agent version."""
        ...

    def served(self) -> Sequence[HostedAgent]:
        """Return all agent versions."""
        ...

    def replaced(self) -> Mapping[tuple[str, str], HostedAgent]:
        """Return what took the place of versions that are gone and are not served here."""
        ...

    def tool_specs(self) -> Sequence[ToolSpec]:
        """Return all tool versions."""
        ...
