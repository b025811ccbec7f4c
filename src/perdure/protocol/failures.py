"""Failure codes of runs and calls: a closed, versioned list, with the default recovery of each.

The list grows, it never changes meaning (R-2.4). The recovery table is R-10.1; agents and tools
may override it.
"""

from enum import StrEnum

from pydantic import Field, JsonValue

from perdure.protocol.base import Stored


class FailureCode(StrEnum):
    """Why a run or a call failed."""

    MODEL_TIMEOUT = "MODEL_TIMEOUT"
    MODEL_ERROR = "MODEL_ERROR"
    TOOL_UNAVAILABLE = "TOOL_UNAVAILABLE"
    TOOL_TIMEOUT = "TOOL_TIMEOUT"
    TOOL_ERROR = "TOOL_ERROR"
    TOOL_ARGUMENT_INVALID = "TOOL_ARGUMENT_INVALID"
    TOOL_NOT_FOUND = "TOOL_NOT_FOUND"
    TOOL_OUTCOME_UNKNOWN = "TOOL_OUTCOME_UNKNOWN"
    TOOL_RESULT_INVALID = "TOOL_RESULT_INVALID"
    CONTEXT_OVERFLOW = "CONTEXT_OVERFLOW"
    LOOP_DETECTED = "LOOP_DETECTED"
    MAX_STEPS = "MAX_STEPS"
    BUDGET_EXCEEDED = "BUDGET_EXCEEDED"
    POLICY_DENIED = "POLICY_DENIED"
    GUARDRAIL_BLOCKED = "GUARDRAIL_BLOCKED"
    APPROVAL_REJECTED = "APPROVAL_REJECTED"
    APPROVAL_TIMEOUT = "APPROVAL_TIMEOUT"
    RUN_TIMEOUT = "RUN_TIMEOUT"
    RUN_CANCELLED = "RUN_CANCELLED"
    RETRIES_EXHAUSTED = "RETRIES_EXHAUSTED"
    NON_DETERMINISTIC = "NON_DETERMINISTIC"
    CHECKPOINT_INCOMPATIBLE = "CHECKPOINT_INCOMPATIBLE"
    OUTPUT_INVALID = "OUTPUT_INVALID"
    CONFLICT = "CONFLICT"
    QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
    AGENT_NOT_FOUND = "AGENT_NOT_FOUND"
    ORPHANED = "ORPHANED"
    INTERNAL = "INTERNAL"


class Recovery(StrEnum):
    """What the runtime does by itself when a code occurs."""

    RETRY = "retry"
    RETRY_IF_IDEMPOTENT = "retry_if_idempotent"
    FALLBACK_MODEL = "fallback_model"
    TELL_PLANNER = "tell_planner"
    COMPRESS = "compress"
    ASK_PERSON = "ask_person"
    FAIL = "fail"


class Stage(StrEnum):
    """The part of the loop in which a failure arose."""

    SUBMIT = "submit"
    PLANNING = "planning"
    TOOL = "tool"
    WAITING = "waiting"
    RECOVERY = "recovery"
    OUTPUT = "output"
    RUNTIME = "runtime"


class Failure(Stored):
    """A failure as it is recorded and shown. `reason` is for people, `code` for programs."""

    code: FailureCode
    reason: str
    retryable: bool = False
    stage: Stage = Stage.RUNTIME
    details: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])


MEANING: dict[FailureCode, tuple[str, tuple[Recovery, ...]]] = {
    FailureCode.MODEL_TIMEOUT: (
        "the model gave no progress in time",
        (Recovery.RETRY, Recovery.FALLBACK_MODEL, Recovery.FAIL),
    ),
    FailureCode.MODEL_ERROR: (
        "the model's service failed or answered nonsense",
        (Recovery.RETRY, Recovery.FALLBACK_MODEL, Recovery.FAIL),
    ),
    FailureCode.TOOL_UNAVAILABLE: (
        "the tool or its server could not be reached",
        (Recovery.RETRY_IF_IDEMPOTENT, Recovery.TELL_PLANNER),
    ),
    FailureCode.TOOL_TIMEOUT: (
        "the tool did not answer in its time",
        (Recovery.RETRY_IF_IDEMPOTENT, Recovery.TELL_PLANNER),
    ),
    FailureCode.TOOL_ERROR: ("the tool raised an error", (Recovery.TELL_PLANNER,)),
    FailureCode.TOOL_ARGUMENT_INVALID: (
        "the arguments do not fit the tool's schema",
        (Recovery.TELL_PLANNER, Recovery.FAIL),
    ),
    FailureCode.TOOL_NOT_FOUND: (
        "no such tool is granted to the agent",
        (Recovery.TELL_PLANNER, Recovery.FAIL),
    ),
    FailureCode.TOOL_OUTCOME_UNKNOWN: (
        "whether the side effect happened is not known",
        (Recovery.RETRY_IF_IDEMPOTENT, Recovery.ASK_PERSON),
    ),
    FailureCode.TOOL_RESULT_INVALID: (
        "the result is too large, not JSON, or against the tool's schema",
        (Recovery.TELL_PLANNER,),
    ),
    FailureCode.CONTEXT_OVERFLOW: (
        "the conversation no longer fits the model",
        (Recovery.COMPRESS, Recovery.FAIL),
    ),
    FailureCode.LOOP_DETECTED: (
        "the same call was repeated beyond the limit",
        (Recovery.FAIL,),
    ),
    FailureCode.MAX_STEPS: ("the step limit was reached", (Recovery.FAIL,)),
    FailureCode.BUDGET_EXCEEDED: ("a budget was used up", (Recovery.FAIL,)),
    FailureCode.POLICY_DENIED: ("policy forbids the action", (Recovery.FAIL,)),
    FailureCode.GUARDRAIL_BLOCKED: ("a guardrail blocked the content", (Recovery.FAIL,)),
    FailureCode.APPROVAL_REJECTED: ("a person rejected the action", (Recovery.FAIL,)),
    FailureCode.APPROVAL_TIMEOUT: ("nobody answered in time", (Recovery.FAIL,)),
    FailureCode.RUN_TIMEOUT: ("the run's total time is over", (Recovery.FAIL,)),
    FailureCode.RUN_CANCELLED: ("the run was cancelled", (Recovery.FAIL,)),
    FailureCode.RETRIES_EXHAUSTED: (
        "the attempts of the run are used up",
        (Recovery.FAIL,),
    ),
    FailureCode.NON_DETERMINISTIC: (
        "the code no longer matches the run's journal",
        (Recovery.FAIL,),
    ),
    FailureCode.CHECKPOINT_INCOMPATIBLE: (
        "the stored state cannot be read by this version, or is damaged",
        (Recovery.FAIL,),
    ),
    FailureCode.OUTPUT_INVALID: (
        "the answer does not fit the required output",
        (Recovery.TELL_PLANNER, Recovery.FAIL),
    ),
    FailureCode.CONFLICT: ("another writer changed the same state", (Recovery.FAIL,)),
    FailureCode.QUOTA_EXCEEDED: ("the tenant's quota is used up", (Recovery.FAIL,)),
    FailureCode.AGENT_NOT_FOUND: ("no such agent is registered", (Recovery.FAIL,)),
    FailureCode.ORPHANED: (
        "the run did not answer its parent's cancel in time",
        (Recovery.FAIL,),
    ),
    FailureCode.INTERNAL: (
        "a fault of the runtime or of the agent's code",
        (Recovery.RETRY, Recovery.FAIL),
    ),
}
