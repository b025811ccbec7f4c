"""From what a tool returned or raised to a clean, bounded outcome.

Runs on the user's side of the bridge: converting a value may call code of the user, and a large
one takes time. Nothing here raises.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from pydantic import JsonValue

from perdure.engine.blame import place_in_code
from perdure.engine.ports import ProducedArtifact, ToolOutcome
from perdure.protocol.codec import clean, encode
from perdure.protocol.errors import Invalid
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.states import SideEffect, ToolCallStatus
from perdure.protocol.tools import CALLBACK_S_MAX, ToolResult, ToolSpec
from perdure.protocol.values import BLOB_BYTES_MAX
from perdure.tools.api import Returned, ToolContext, ToolError, ToolUnavailable
from perdure.tools.caught import Caught
from perdure.tools.validate import SchemaChecks

REASON_CHARACTERS_MAX = 2000
DETAILS_BYTES_MAX = 8 * 1024
GROUP_ERRORS_MAX = 20

Stop = Literal["cancel", "timeout"]

_STOPPED = (asyncio.CancelledError, KeyboardInterrupt)
"""How code ends that was asked to stop: on a loop, and in a worker process."""

_STATUSES = frozenset(
    {
        ToolCallStatus.SUCCEEDED,
        ToolCallStatus.PARTIAL,
        ToolCallStatus.FAILED,
        ToolCallStatus.UNKNOWN,
        ToolCallStatus.PENDING,
    }
)


@dataclass(slots=True)
class Checks:
    """What every result has to pass."""

    schemas: SchemaChecks = field(default_factory=SchemaChecks)
    output_bytes_max: int = BLOB_BYTES_MAX


def conclude(value: object, spec: ToolSpec, context: ToolContext, checks: Checks) -> ToolOutcome:
    """Return the outcome of an execution that returned a value."""
    result: ToolResult | None = None
    artifacts: tuple[ProducedArtifact, ...] = ()
    with Caught() as caught:  # a model's serialiser is user code
        if isinstance(value, ToolOutcome):
            value, artifacts = value.result, value.artifacts
        if isinstance(value, ToolResult):
            value = _as_returned(value)
        if not isinstance(value, Returned):
            value = Returned(status=ToolCallStatus.SUCCEEDED, output=value)
        result = _checked(value, spec, checks)
    if result is None:
        result = _invalid(_unusable(caught.error))
    outcome = _with_context(result, context)
    if not artifacts:
        return outcome
    return replace(outcome, artifacts=artifacts + outcome.artifacts)


def conclude_error(
    error: BaseException, spec: ToolSpec, context: ToolContext, stop: Stop | None
) -> ToolOutcome:
    """Return the outcome of an execution that raised; `stop` says why it was asked to stop."""
    leaves = list(_leaves(error))
    if stop is not None and all(isinstance(leaf, _STOPPED) for leaf in leaves):
        return _with_context(stopped(spec, stop), context)
    if len(leaves) == 1:
        result = _failed(_failure_of(leaves[0]))
    else:
        told = [_told(leaf) for leaf in leaves[:GROUP_ERRORS_MAX]]
        result = _failed(
            _failure(
                FailureCode.TOOL_ERROR,
                f"{len(leaves)} errors: {'; '.join(told)}",
                details={"type": type(error).__name__, "errors": cast("JsonValue", told)},
            )
        )
    return _with_context(result, context)


def stopped(spec: ToolSpec, stop: Stop) -> ToolResult:
    """Return the result of an execution that was ended from outside, in the middle.

    Whether its effect happened is not known, except that a reading tool has none.
    """
    if stop == "timeout":
        return timed_out(spec, None)
    if spec.side_effect is not SideEffect.READ:
        return unknown("it was cancelled while it ran")
    reason = "it was cancelled while it ran"
    failure = _failure(FailureCode.RUN_CANCELLED, reason)
    return ToolResult(status=ToolCallStatus.CANCELLED, error=failure)


def timed_out(spec: ToolSpec, timeout_s: float | None) -> ToolResult:
    """Return the result of an execution that was given up after its time.

    A tool that reads or may be repeated has timed out; of any other the outcome is unknown.
    """
    within = "in its time" if timeout_s is None else f"within {timeout_s:g} s"
    if spec.side_effect is not SideEffect.READ and not spec.repeatable:
        return unknown(f"the tool did not answer {within}")
    failure = _failure(
        FailureCode.TOOL_TIMEOUT, f"the tool did not answer {within}", retryable=spec.repeatable
    )
    return ToolResult(status=ToolCallStatus.TIMED_OUT, error=failure)


def crashed(spec: ToolSpec, reason: str) -> ToolResult:
    """Return the result of an execution whose process died."""
    if spec.side_effect is SideEffect.READ:
        return unavailable(reason, retryable=spec.repeatable)
    return unknown(reason)


def unknown(reason: str) -> ToolResult:
    """Return the result of an execution whose effect may have happened or not."""
    failure = _failure(FailureCode.TOOL_OUTCOME_UNKNOWN, reason)
    return ToolResult(status=ToolCallStatus.UNKNOWN, error=failure)


def unavailable(reason: str, *, retryable: bool = True) -> ToolResult:
    """Return the result of a call that certainly did not happen and may be tried again."""
    return _failed(_failure(FailureCode.TOOL_UNAVAILABLE, reason, retryable=retryable))


def too_large(problem: str) -> ToolResult:
    """Return the result of an execution whose answer is over the limit; not to be tried again."""
    return _invalid(problem)


def not_found(name: str, version: str) -> ToolResult:
    """Return the result of a call to a tool that is not here."""
    return _failed(_failure(FailureCode.TOOL_NOT_FOUND, f"no tool {name} {version} is registered"))


def _as_returned(result: ToolResult) -> Returned:
    error = result.error
    return Returned(
        status=result.status,
        output=result.output,
        code=None if error is None else error.code,
        reason="" if error is None else error.reason,
        retryable=error is not None and error.retryable,
        details={} if error is None else error.details,
        external_ref=result.external_ref,
        done=result.done,
        not_done=result.not_done,
        expires_in_s=result.expires_in_s,
    )


def _checked(returned: Returned, spec: ToolSpec, checks: Checks) -> ToolResult:
    if returned.status not in _STATUSES:
        return _invalid(f"a tool cannot report the status {returned.status}")
    wait_s = returned.expires_in_s
    if wait_s is not None and not 0 < wait_s <= CALLBACK_S_MAX:
        return _invalid("a callback is waited for more than 0 s and at most 366 days")
    output = clean(returned.output)
    ref = None if returned.external_ref is None else _text(returned.external_ref)
    problem = _problem_with(output, returned, spec, checks)
    if problem is not None:
        return _invalid(problem, external_ref=ref)
    failure = None
    if returned.status in {ToolCallStatus.FAILED, ToolCallStatus.UNKNOWN}:
        failure = _failure(
            returned.code or FailureCode.TOOL_ERROR,
            returned.reason or "the tool gave no reason",
            retryable=returned.retryable,
            details=returned.details,
        )
    return ToolResult(
        status=returned.status,
        output=output,
        error=failure,
        external_ref=ref,
        done=None if returned.done is None else _text(returned.done),
        not_done=None if returned.not_done is None else _text(returned.not_done),
        expires_in_s=returned.expires_in_s,
    )


def _problem_with(
    output: JsonValue, returned: Returned, spec: ToolSpec, checks: Checks
) -> str | None:
    if isinstance(output, str | list | dict):
        size = len(encode(output))
        if size > checks.output_bytes_max:
            return f"it is {size} bytes long; {checks.output_bytes_max} are allowed"
    if returned.status is ToolCallStatus.SUCCEEDED:
        return checks.schemas.problem_with_output(spec, output)
    return None


def _unusable(error: BaseException | None) -> str:
    if isinstance(error, Invalid):
        return error.message
    return f"it cannot be converted: {_told(error)}" if error is not None else "it is not a result"


def _with_context(result: ToolResult, context: ToolContext) -> ToolOutcome:
    ref, artifacts, writes = context.close()
    if ref is not None and result.external_ref is None:
        result = result.model_copy(update={"external_ref": _text(ref)})
    return ToolOutcome(result=result, artifacts=artifacts, writes=writes)


def _invalid(problem: str, *, external_ref: str | None = None) -> ToolResult:
    failure = _failure(
        FailureCode.TOOL_RESULT_INVALID,
        f"the tool ran, but its result cannot be used: {problem}",
    )
    return ToolResult(status=ToolCallStatus.FAILED, error=failure, external_ref=external_ref)


def _failed(failure: Failure) -> ToolResult:
    return ToolResult(status=ToolCallStatus.FAILED, error=failure)


def _failure_of(error: BaseException) -> Failure:
    name = type(error).__name__
    match error:
        case ToolError():
            return _failure(
                FailureCode.TOOL_ERROR,
                error.reason or name,
                retryable=error.retryable,
                details={"type": name, **error.details},
            )
        case ToolUnavailable():
            return _failure(
                FailureCode.TOOL_UNAVAILABLE, _told(error), retryable=True, details={"type": name}
            )
        case asyncio.CancelledError():
            reason = "CancelledError: the tool cancelled itself"
            return _failure(FailureCode.TOOL_ERROR, reason, details={"type": name})
        case _:
            place = place_in_code(error)
            details = {"type": name, "at": place} if place else {"type": name}
            return _failure(FailureCode.TOOL_ERROR, _told(error), details=details)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        for inner in group.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _told(error: BaseException) -> str:
    """Return `Type: message`; the type alone for an error without text, or whose text raises."""
    name = type(error).__name__
    text = ""
    with Caught():  # an error's __str__ is user code
        text = str(error)
    return f"{name}: {text[:REASON_CHARACTERS_MAX]}" if text.strip() else name


def _failure(
    code: FailureCode,
    reason: str,
    *,
    retryable: bool = False,
    details: Mapping[str, object] | None = None,
) -> Failure:
    return Failure(
        code=code,
        reason=_text(reason),
        retryable=retryable,
        stage=Stage.TOOL,
        details=_details(details) if details else {},
    )


def _details(details: Mapping[str, object]) -> dict[str, JsonValue]:
    try:
        cleaned = clean(details)
        if isinstance(cleaned, dict) and len(encode(cleaned)) <= DETAILS_BYTES_MAX:
            return cleaned
        problem = "left out: too large"
    except Invalid as error:
        problem = f"left out: {error.message}"
    kind = details.get("type")
    return {"details": problem} if not isinstance(kind, str) else {"type": kind, "details": problem}


def _text(text: str) -> str:
    cleaned = clean(text)
    assert isinstance(cleaned, str)
    if len(cleaned) <= REASON_CHARACTERS_MAX:
        return cleaned
    return cleaned[: REASON_CHARACTERS_MAX - 1] + "…"
