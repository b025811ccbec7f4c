"""The state machines of Run, Step and ToolCall, as tables and pure functions over them.

The run's table is the platform's contract (R-2.1): six states and the transitions below, no
others. Stores refuse an illegal pair by themselves; the engine asks `next_state` before it
commits. The diagram in the documentation is generated from these tables.
"""

from enum import IntFlag, StrEnum


class RunState(StrEnum):
    """Where a run stands."""

    PENDING = "pending"
    PLANNING = "planning"
    EXECUTING = "executing"
    WAITING_HUMAN = "waiting_human"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Transition(StrEnum):
    """Why a run moves."""

    START = "start"
    PLAN_READY = "plan_ready"
    PLAN_ERROR = "plan_error"
    NEXT_STEP = "next_step"
    DONE = "done"
    NEED_APPROVAL = "need_approval"
    EXEC_ERROR = "exec_error"
    APPROVED = "approved"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


TERMINAL = frozenset({RunState.SUCCEEDED, RunState.FAILED})

_S, _T = RunState, Transition

TRANSITIONS: dict[tuple[RunState, Transition], RunState] = {
    (_S.PENDING, _T.START): _S.PLANNING,
    (_S.PLANNING, _T.PLAN_READY): _S.EXECUTING,
    (_S.PLANNING, _T.PLAN_ERROR): _S.FAILED,
    (_S.EXECUTING, _T.NEXT_STEP): _S.PLANNING,
    (_S.EXECUTING, _T.DONE): _S.SUCCEEDED,
    (_S.EXECUTING, _T.NEED_APPROVAL): _S.WAITING_HUMAN,
    (_S.EXECUTING, _T.EXEC_ERROR): _S.FAILED,
    (_S.WAITING_HUMAN, _T.APPROVED): _S.EXECUTING,
    (_S.WAITING_HUMAN, _T.REJECTED): _S.FAILED,
    **{
        (state, why): _S.FAILED
        for state in (_S.PENDING, _S.PLANNING, _S.EXECUTING, _S.WAITING_HUMAN)
        for why in (_T.CANCELLED, _T.EXPIRED)
    },
}

LEGAL_PAIRS: frozenset[tuple[RunState, RunState]] = frozenset(
    (source, target) for (source, _), target in TRANSITIONS.items()
)
"""Every pair of states that one transition may join; stores refuse all others."""


class IllegalTransition(ValueError):
    """The table has no such transition. A fault of the caller's code, never of a user's input."""


def next_state(state: RunState, why: Transition) -> RunState:
    """Return the state a transition leads to; raise IllegalTransition when there is none."""
    try:
        return TRANSITIONS[state, why]
    except KeyError:
        raise IllegalTransition(f"{state} has no transition {why}") from None


class StepStatus(StrEnum):
    """Where a step stands (R-2.8)."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


STEP_TRANSITIONS: dict[StepStatus, frozenset[StepStatus]] = {
    StepStatus.PENDING: frozenset({StepStatus.RUNNING, StepStatus.FAILED, StepStatus.CANCELLED}),
    StepStatus.RUNNING: frozenset(
        {StepStatus.WAITING, StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED}
    ),
    StepStatus.WAITING: frozenset({StepStatus.RUNNING, StepStatus.FAILED, StepStatus.CANCELLED}),
    StepStatus.SUCCEEDED: frozenset(),
    StepStatus.FAILED: frozenset(),
    StepStatus.CANCELLED: frozenset(),
}


class ToolCallStatus(StrEnum):
    """Where a tool call stands; the last seven are outcomes (R-5.5) and final."""

    PROPOSED = "proposed"
    AWAITING_APPROVAL = "awaiting_approval"
    RUNNING = "running"
    PENDING = "pending"
    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    DENIED = "denied"
    UNKNOWN = "unknown"


OUTCOMES = frozenset(
    {
        ToolCallStatus.SUCCEEDED,
        ToolCallStatus.PARTIAL,
        ToolCallStatus.FAILED,
        ToolCallStatus.TIMED_OUT,
        ToolCallStatus.CANCELLED,
        ToolCallStatus.DENIED,
        ToolCallStatus.UNKNOWN,
    }
)

_OPEN = frozenset(
    {
        ToolCallStatus.PROPOSED,
        ToolCallStatus.AWAITING_APPROVAL,
        ToolCallStatus.RUNNING,
        ToolCallStatus.PENDING,
    }
)

TOOL_CALL_TRANSITIONS: dict[ToolCallStatus, frozenset[ToolCallStatus]] = {
    ToolCallStatus.PROPOSED: frozenset({ToolCallStatus.AWAITING_APPROVAL, ToolCallStatus.RUNNING})
    | OUTCOMES,
    ToolCallStatus.AWAITING_APPROVAL: frozenset({ToolCallStatus.PROPOSED, ToolCallStatus.RUNNING})
    | OUTCOMES,
    ToolCallStatus.RUNNING: frozenset({ToolCallStatus.PENDING, ToolCallStatus.RUNNING}) | OUTCOMES,
    ToolCallStatus.PENDING: frozenset({ToolCallStatus.RUNNING}) | OUTCOMES,
    **{outcome: frozenset() for outcome in OUTCOMES},
}


def is_open(status: ToolCallStatus) -> bool:
    """Tell whether a call has no outcome yet."""
    return status in _OPEN


class InterruptKind(StrEnum):
    """What an interrupt asks of a person."""

    APPROVAL = "approval"
    INPUT = "input"
    AUTH = "auth"
    OUTCOME = "outcome"
    BREAKPOINT = "breakpoint"


class InterruptStatus(StrEnum):
    """Where an interrupt stands; only `pending` can change."""

    PENDING = "pending"
    ANSWERED = "answered"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class Answer(StrEnum):
    """How an interrupt may be answered (R-8.3, R-5.7)."""

    APPROVE = "approve"
    EDIT = "edit"
    RESPOND = "respond"
    REJECT = "reject"
    HAPPENED = "happened"
    RETRY = "retry"
    SKIP = "skip"
    CONTINUE = "continue"
    STEP = "step"


ANSWERS: dict[InterruptKind, tuple[Answer, ...]] = {
    InterruptKind.APPROVAL: (Answer.APPROVE, Answer.EDIT, Answer.RESPOND, Answer.REJECT),
    InterruptKind.INPUT: (Answer.RESPOND, Answer.REJECT),
    InterruptKind.AUTH: (Answer.RESPOND, Answer.REJECT),
    InterruptKind.OUTCOME: (Answer.HAPPENED, Answer.RETRY, Answer.SKIP),
    InterruptKind.BREAKPOINT: (),
}
"""Which answers each kind of interrupt takes; a run at a breakpoint is continued (R-8.4)."""


class OnExpiry(StrEnum):
    """What happens when nobody answers in time."""

    FAIL = "fail"
    DENY = "deny"


class CancelAction(StrEnum):
    """What a cancel does: stop and keep the history, or discard the run's internal state."""

    INTERRUPT = "interrupt"
    ROLLBACK = "rollback"


class CancelOption(IntFlag):
    """What a cancel asks for besides its action; a later cancel may add, and takes nothing back."""

    NONE = 0
    COMPENSATE = 1
    DISCARD_ARTIFACTS = 2

    @classmethod
    def of(cls, *, compensate: bool, discard_artifacts: bool) -> "CancelOption":
        """Return what is asked for."""
        asked = cls.COMPENSATE if compensate else cls.NONE
        return asked | (cls.DISCARD_ARTIFACTS if discard_artifacts else cls.NONE)


class ParkedOn(StrEnum):
    """Why a run without a holder is not waiting for a worker alone (decision 20)."""

    THREAD = "thread"
    TIMER = "timer"
    RETRY = "retry"
    CHILD = "child"
    CALLBACK = "callback"
    REPAIR = "repair"
    CLOSING = "closing"


class WaitingOn(StrEnum):
    """What a run waits for at the moment, for people (R-2.7)."""

    NOTHING = "nothing"
    QUEUE = "queue"
    MODEL = "model"
    TOOL = "tool"
    CALLBACK = "callback"
    PERSON = "person"
    CHILD = "child"
    TIMER = "timer"
    RETRY = "retry"
    RECOVERY = "recovery"
    REPAIR = "repair"


class RunStatus(StrEnum):
    """The protocol status of a run, a projection of its row (R-2.3)."""

    SUBMITTED = "SUBMITTED"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    INPUT_REQUIRED = "INPUT_REQUIRED"
    AUTH_REQUIRED = "AUTH_REQUIRED"
    CANCEL_REQUESTED = "CANCEL_REQUESTED"
    CANCELED = "CANCELED"
    INTERRUPTED = "INTERRUPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    TIMED_OUT = "TIMED_OUT"


class NextAction(StrEnum):
    """What a caller may do next with a run."""

    ANSWER_INTERRUPT = "answer_interrupt"
    AUTHORISE = "authorise"
    CONTINUE = "continue"
    CANCEL = "cancel"
    WAIT = "wait"
    RETRY = "retry"
    FORK = "fork"
    REPAIR = "repair"


class AttemptEnd(StrEnum):
    """Why an attempt ended."""

    FINISHED = "finished"
    PARKED = "parked"
    DRAINED = "drained"
    LEASE_LOST = "lease_lost"
    ERROR = "error"
    CANCELLED = "cancelled"


FAULT_ENDS = frozenset({AttemptEnd.LEASE_LOST, AttemptEnd.ERROR})
"""Ends that count against the bound on attempts (decision 11)."""


class SideEffect(StrEnum):
    """What a tool may do to the world."""

    READ = "read"
    WRITE = "write"
    EXTERNAL = "external"


class ArtifactStatus(StrEnum):
    """Where an artifact stands. Content of discarded ones is no longer given out."""

    DRAFT = "draft"
    FINAL = "final"
    ADOPTED = "adopted"
    CANCELLED = "cancelled"
    DISCARDED = "discarded"
