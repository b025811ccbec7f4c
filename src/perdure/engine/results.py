"""Recording what became of a tool call: exactly one `result`, with its artifacts (R-5.5)."""

from typing import Literal

from pydantic import JsonValue

from perdure.engine.draft import Draft
from perdure.engine.fields_written import draft_tool_writes
from perdure.engine.ports import ProducedArtifact, ToolOutcome
from perdure.engine.snapshot import PENDING_EVENT_NAME, OpenCall
from perdure.engine.values import short
from perdure.protocol.codec import digest_bytes
from perdure.protocol.errors import TooLarge
from perdure.protocol.events import (
    ArtifactEvent,
    CustomEvent,
    InterruptEvent,
    ResultEvent,
    RetryEvent,
)
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.ids import ARTIFACT, INTERRUPT
from perdure.protocol.plain import value
from perdure.protocol.states import Answer, InterruptKind, ToolCallStatus
from perdure.protocol.tools import ToolResult
from perdure.store.commits import CallUpdate, ExecutionEnd, NewArtifact, NewCallback, NewInterrupt
from perdure.store.requests import NewBlob

ResultSource = Literal["tool", "lookup", "person", "runtime", "policy", "callback", "child"]

UNKNOWN_TOOL = "unknown"
"""How tools that nobody registered are counted."""


@value
class Known:
    """The outcome of a call that has not ended in the log yet, and who knows it."""

    outcome: ToolOutcome
    by: ResultSource


def runtime_result(status: ToolCallStatus, code: FailureCode, reason: str) -> ToolOutcome:
    """Return an outcome that the runtime itself states."""
    return ToolOutcome(
        result=ToolResult(
            status=status, error=Failure(code=code, reason=short(reason), stage=Stage.TOOL)
        )
    )


def add_result(draft: Draft, call: OpenCall, outcome: ToolOutcome, *, by: ResultSource) -> None:
    """Draft the one result of an open call, and the end of its execution if one runs."""
    executions = draft.view.executions_of(call.tool_call_id)
    result = outcome.result
    count = executions.count
    running = executions.running
    if outcome.writes:
        outcome = _with_writes(draft, call, outcome)
        result = outcome.result
    if draft.view.snapshot.cancel_epoch == 0:  # after a cancel nothing new is made
        for artifact in outcome.artifacts:
            add_artifact(
                draft, artifact, step_index=call.step_index, tool_call_id=call.tool_call_id
            )
    try:
        kept = draft.keep(result.output)
    except TooLarge as error:
        outcome = runtime_result(
            ToolCallStatus.FAILED, FailureCode.TOOL_RESULT_INVALID, error.message
        )
        result = outcome.result
        kept = draft.keep(None)
    if running:
        end_execution(draft, call, result.status)
    if call.by_callback:
        draft.callbacks_over.append(call.tool_call_id)
    external_ref = result.external_ref or call.external_ref
    seq = draft.add(
        ResultEvent(
            tool_call_id=call.tool_call_id,
            status=result.status,
            output=kept.inline,
            output_ref=outcome.output_ref or kept.ref,
            error=result.error,
            external_ref=external_ref,
            done=result.done,
            not_done=result.not_done,
            executions=count,
            by=by,
        )
    )
    known = call.version is not None  # a name that a model made up makes no series of its own
    draft.ended_calls.append((call.tool if known else UNKNOWN_TOOL, result.status))
    draft.call_updates.append(
        CallUpdate(
            tool_call_id=call.tool_call_id,
            status=result.status,
            external_ref=external_ref,
            result_seq=seq,
        )
    )


def _with_writes(draft: Draft, call: OpenCall, outcome: ToolOutcome) -> ToolOutcome:
    """Draft what a call that worked wrote to the state; what does not fit makes its result invalid.

    Also after a cancel: whoever goes on from the run has this result and does not call again.
    """
    worked = outcome.result.status in {ToolCallStatus.SUCCEEDED, ToolCallStatus.PARTIAL}
    if not worked:
        return outcome
    problem = draft_tool_writes(draft, call.tool_call_id, outcome.writes)
    if problem is None:
        return outcome
    refused = runtime_result(ToolCallStatus.FAILED, FailureCode.TOOL_RESULT_INVALID, problem)
    ref = outcome.result.external_ref
    return ToolOutcome(result=refused.result.model_copy(update={"external_ref": ref}))


def did_not_happen(result: ToolResult) -> bool:
    """Tell whether a lookup answered that the effect certainly did not happen: it may be run."""
    error = result.error
    return (
        result.status is ToolCallStatus.FAILED
        and error is not None
        and error.code is FailureCode.TOOL_UNAVAILABLE
        and error.details.get("happened") is False
    )


def end_execution(draft: Draft, call: OpenCall, outcome: ToolCallStatus) -> None:
    """Draft the end of a call's running execution."""
    executions = draft.view.executions_of(call.tool_call_id)
    executions.running = False
    draft.execution_ends.append(
        ExecutionEnd(tool_call_id=call.tool_call_id, number=executions.count, outcome=outcome)
    )


def add_retry(draft: Draft, call: OpenCall, outcome: ToolOutcome, delay_s: float) -> None:
    """Draft that an execution failed and the call is tried again later, with the same key."""
    failure = outcome.result.error or Failure(code=FailureCode.TOOL_ERROR, reason="failed")
    if draft.view.executions_of(call.tool_call_id).running:
        end_execution(draft, call, outcome.result.status)
    draft.add(
        RetryEvent(
            subject="tool",
            failed=call.failed_executions + 1,
            failure=failure,
            delay_ms=round(delay_s * 1000),
            tool_call_id=call.tool_call_id,
        )
    )


def add_pending(draft: Draft, call: OpenCall, outcome: ToolOutcome, wait_s: float) -> None:
    """Draft that a call's result comes by callback: it stays open without a worker (R-5.10)."""
    result = outcome.result
    for artifact in outcome.artifacts:
        add_artifact(draft, artifact, step_index=call.step_index, tool_call_id=call.tool_call_id)
    if draft.view.executions_of(call.tool_call_id).running:
        end_execution(draft, call, ToolCallStatus.PENDING)
    external_ref = result.external_ref or call.external_ref
    draft.add(
        CustomEvent(
            name=PENDING_EVENT_NAME,
            value={
                "tool_call_id": call.tool_call_id,
                "external_ref": external_ref,
                "expires_in_s": wait_s,
            },
        )
    )
    draft.new_callbacks.append(NewCallback(tool_call_id=call.tool_call_id, expires_in_s=wait_s))
    draft.call_updates.append(
        CallUpdate(
            tool_call_id=call.tool_call_id,
            status=ToolCallStatus.PENDING,
            external_ref=external_ref,
        )
    )


def ask_outcome(draft: Draft, call: OpenCall, reason: str) -> None:
    """Draft the question whether a side effect happened; the call stays open (R-5.7)."""
    if draft.view.executions_of(call.tool_call_id).running:
        end_execution(draft, call, ToolCallStatus.UNKNOWN)
    interrupt_id = draft.ids.new(INTERRUPT)
    payload: dict[str, JsonValue] = {
        "tool_call_id": call.tool_call_id,
        "tool": call.tool,
        "effect_key": call.effect_key,
        "reason": short(reason),
        "answers": [Answer.HAPPENED, Answer.RETRY, Answer.SKIP],
    }
    seq = draft.add(
        InterruptEvent(
            interrupt_id=interrupt_id,
            kind=InterruptKind.OUTCOME,
            title=f"Did {call.tool} take effect?",
            payload=payload,
            tool_call_id=call.tool_call_id,
        )
    )
    draft.new_interrupts.append(
        NewInterrupt(
            interrupt_id=interrupt_id,
            kind=InterruptKind.OUTCOME,
            opened_seq=seq,
            tool_call_id=call.tool_call_id,
            args_digest=call.args_digest,
        )
    )


def add_artifact(
    draft: Draft,
    artifact: ProducedArtifact,
    *,
    step_index: int,
    tool_call_id: str | None = None,
    position: str | None = None,
) -> None:
    """Draft an artifact of a call, or of a code agent's own."""
    digest = digest_bytes(artifact.data)
    version = draft.view.snapshot.artifacts.get(artifact.name, 0) + 1
    artifact_id = draft.ids.new(ARTIFACT)
    draft.blobs.append(NewBlob(digest=digest, media_type=artifact.media_type, data=artifact.data))
    seq = draft.add(
        ArtifactEvent(
            artifact_id=artifact_id,
            name=artifact.name,
            version=version,
            media_type=artifact.media_type,
            digest=digest,
            size=len(artifact.data),
            status=artifact.status,
            tool_call_id=tool_call_id,
            position=position,
        )
    )
    draft.artifacts.append(
        NewArtifact(
            artifact_id=artifact_id,
            name=artifact.name,
            version=version,
            media_type=artifact.media_type,
            digest=digest,
            size=len(artifact.data),
            status=artifact.status,
            step_index=step_index,
            tool_call_id=tool_call_id,
            seq=seq,
        )
    )


def add_no_tool(draft: Draft, call: OpenCall) -> None:
    """Draft the result of a call whose tool this worker does not have."""
    outcome = runtime_result(
        ToolCallStatus.FAILED,
        FailureCode.TOOL_NOT_FOUND,
        f"this worker has no {call.tool} of version {call.version}",
    )
    add_result(draft, call, outcome, by="runtime")
