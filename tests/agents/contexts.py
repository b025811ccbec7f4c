"""Planner contexts for tests, and what a strict provider demands of a conversation."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from pydantic import JsonValue

from perdure.agents.models.port import ChatMessage
from perdure.engine.context import PlannerContext, Turn
from perdure.protocol.events import PlanItem
from perdure.protocol.messages import Message
from perdure.protocol.runs import Caller, Counters, RunContext, RunFacts, RunOptions
from perdure.protocol.tools import ToolSpec
from perdure.protocol.values import Value

LOOK = ToolSpec(name="look", input_schema={"type": "object"})
AT = datetime(2026, 1, 1, tzinfo=UTC)


def facts_of(run_id: str = "run_1", **options: Any) -> RunFacts:
    return RunFacts(
        run_id=run_id,
        tenant_id="default",
        agent_id="a",
        agent_version="1",
        thread_id="thr_1",
        root_run_id=run_id,
        parent_run_id=None,
        retry_of=None,
        input=Value(inline="task"),
        context=RunContext(),
        options=RunOptions.model_validate(options),
        caller=Caller(tenant_id="default", principal="p"),
        trace_id="0" * 32,
        created_at=AT,
        required_runtime=1,
        schema_version=1,
    )


def context_of(
    turns: Sequence[Turn] = (),
    *,
    input: JsonValue = "task",
    messages: Sequence[Message] = (),
    plan: Sequence[PlanItem] = (),
    state: JsonValue = None,
    model_failures: int = 0,
    tools: Sequence[ToolSpec] = (LOOK,),
    step_index: int | None = None,
    facts: RunFacts | None = None,
) -> PlannerContext:
    return PlannerContext(
        facts=facts or facts_of(),
        input=input,
        messages=messages,
        turns=turns,
        step_index=len(turns) if step_index is None else step_index,
        plan=plan,
        state=state,
        usage=Counters(),
        model_failures=model_failures,
        tools=tools,
    )


def illegalities(messages: Sequence[ChatMessage]) -> list[str]:
    """Return what a strict provider would refuse in a conversation."""
    found = _wrong_results(messages) + _wrong_calls(messages)
    for before, message in pairwise(messages):
        if message.role == "system" and before.role != "system":
            found.append("a system message after the conversation began")
    if any(not message.text and not message.calls for message in messages if _speaks(message)):
        found.append("an empty message")
    if not messages or messages[-1].role == "assistant":
        found.append("the conversation ends with the assistant")
    return found


def _speaks(message: ChatMessage) -> bool:
    return message.role in {"assistant", "user"}


def _wrong_results(messages: Sequence[ChatMessage]) -> list[str]:
    """Every call has exactly one result, in order, right after its message."""
    expected = [message.call_id if message.role == "tool" else None for message in messages]
    wanted: list[str | None] = []
    for message in messages:
        if message.role == "tool":
            continue
        wanted.append(None)
        wanted += [call.call_id for call in message.calls]
    return [] if expected == wanted else [f"results {expected} instead of {wanted}"]


def _wrong_calls(messages: Sequence[ChatMessage]) -> list[str]:
    found: list[str] = []
    ids: set[str] = set()
    for message in messages:
        if message.calls and message.role != "assistant":
            found.append(f"calls in a {message.role} message")
        for call in message.calls:
            if call.call_id in ids:
                found.append(f"the id {call.call_id} was used before")
            if not isinstance(json.loads(call.arguments), dict):
                found.append("arguments that are no object")
            ids.add(call.call_id)
    return found
