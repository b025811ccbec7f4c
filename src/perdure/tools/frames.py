"""What a runner and its worker processes say to each other: JSON frames over two pipes.

A frame is four bytes of length, then JSON. The parent sends `call`; the child answers `started`
right before it runs the tool's code, then `ended` with the outcome, or `refused` when it cannot
run the tool at all.
"""

import base64
import struct
from typing import Any, Literal

from pydantic import JsonValue

from perdure.engine.ports import FieldWrite, ProducedArtifact, ToolInvocation, ToolOutcome
from perdure.protocol.base import Stored, StoredValue
from perdure.protocol.codec import clean, encode
from perdure.protocol.runs import Caller, RunContext
from perdure.protocol.states import ArtifactStatus
from perdure.protocol.tools import ToolResult, ToolSpec

HEADER = struct.Struct(">I")


class CallFrame(Stored):
    """A call as it travels to a worker process."""

    import_path: str
    kind: Literal["call", "lookup", "compensate"]
    definition_digest: str
    output_bytes_max: int
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

    def invocation(self, spec: ToolSpec) -> ToolInvocation:
        """Return the invocation as the child sees it."""
        return ToolInvocation(
            spec=spec,
            args=self.args,
            effect_key=self.effect_key,
            tool_call_id=self.tool_call_id,
            run_id=self.run_id,
            thread_id=self.thread_id,
            step_index=self.step_index,
            execution=self.execution,
            context=self.context,
            caller=self.caller,
            timeout_s=self.timeout_s,
        )


class _ArtifactFrame(Stored):
    name: str
    media_type: str
    status: ArtifactStatus
    data: str


class _WriteFrame(Stored):
    field: str
    value: StoredValue = None


class AnswerFrame(Stored):
    """What a worker process says. A lookup that cannot say ends without a result."""

    kind: Literal["started", "ended", "refused"]
    reason: str = ""
    result: ToolResult | None = None
    artifacts: tuple[_ArtifactFrame, ...] = ()
    writes: tuple[_WriteFrame, ...] = ()

    def outcome(self) -> ToolOutcome | None:
        """Return the outcome that the frame carries."""
        if self.result is None:
            return None
        artifacts = tuple(
            ProducedArtifact(
                name=artifact.name,
                media_type=artifact.media_type,
                status=artifact.status,
                data=base64.b64decode(artifact.data),
            )
            for artifact in self.artifacts
        )
        writes = tuple(FieldWrite(field=one.field, value=one.value) for one in self.writes)
        return ToolOutcome(result=self.result, artifacts=artifacts, writes=writes)


def ended_frame(outcome: ToolOutcome | None) -> AnswerFrame:
    """Return the frame of an outcome."""
    if outcome is None:
        return AnswerFrame(kind="ended")
    artifacts = tuple(
        _ArtifactFrame(
            name=artifact.name,
            media_type=artifact.media_type,
            status=artifact.status,
            data=base64.b64encode(artifact.data).decode(),
        )
        for artifact in outcome.artifacts
    )
    writes = tuple(_WriteFrame(field=one.field, value=one.value) for one in outcome.writes)
    return AnswerFrame(kind="ended", result=outcome.result, artifacts=artifacts, writes=writes)


def call_frame(
    invocation: ToolInvocation,
    import_path: str,
    output_bytes_max: int,
    *,
    kind: Literal["call", "lookup", "compensate"],
) -> CallFrame:
    """Return the frame of an invocation."""
    return CallFrame(
        import_path=import_path,
        kind=kind,
        definition_digest=invocation.spec.definition_digest,
        output_bytes_max=output_bytes_max,
        args=invocation.args,
        effect_key=invocation.effect_key,
        tool_call_id=invocation.tool_call_id,
        run_id=invocation.run_id,
        thread_id=invocation.thread_id,
        step_index=invocation.step_index,
        execution=invocation.execution,
        context=invocation.context,
        caller=invocation.caller,
        timeout_s=invocation.timeout_s,
    )


def packed(frame: Stored) -> bytes:
    """Return a frame as bytes."""
    fields: dict[str, Any] = frame.model_dump(mode="json")
    body = encode(clean(fields, depth_max=100))
    return HEADER.pack(len(body)) + body
