"""The page of the context: what a planner reads, with every field of it."""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue

from perdure.engine.context import (
    AskRecord,
    CallRecord,
    ChildRecord,
    HandoffRecord,
    PlannerContext,
    Turn,
)
from perdure.protocol.failures import Failure
from perdure.protocol.runs import Counters, RunFacts

_HEAD = """\
# Context

What `next_step(context)` is given to decide upon: the run as its log tells it, of
`perdure.engine.context`. What it may return are [decisions](decisions.md). A recovered run is asked
again with the same context. Values over 8 KiB are shown as their beginning:
`{"ref": …, "size": …, "preview": …}`.

`facts.input` is as it is stored, `input` is the value itself. A call that a person answered in the place
of the tool is there as any other one:

| answer | `status` | `output` | `error` |
|---|---|---|---|
| `respond` to an approval | `denied` | the person's value | `POLICY_DENIED` |
| `happened` | `succeeded` | the answer's `value`; `None` without one | `None` |
| `skip` | `failed` | `None` | `TOOL_OUTCOME_UNKNOWN` |

In a [code agent](../code-agents.md) `ctx.tool` returns such an output, or raises `ToolFailed` with it.
"""

_PARTS: tuple[type, ...] = (
    PlannerContext,
    Turn,
    CallRecord,
    AskRecord,
    ChildRecord,
    HandoffRecord,
    Failure,
    Counters,
    RunFacts,
)

_LEFT_OUT = frozenset({"journal", "fields_read", "writes"})
"""What only the runtime's planner of code agents reads."""

_NOTES: dict[str, str] = {
    "AskRecord.answer": "which answer was given: `respond`, `reject`",
    "AskRecord.key": "the key of the decision's question",
    "AskRecord.title": "the question in a line",
    "AskRecord.value": "what was answered",
    "CallRecord.error": "why it has no good result: `error.code`, `error.reason`",
    "CallRecord.status": "where the call stands; every call is ended when the planner is asked",
    "ChildRecord.answer": "the child's answer",
    "ChildRecord.error": "why it failed, or was refused",
    "ChildRecord.key": "the key of the decision's child",
    "ChildRecord.state": "how it ended; `None`: it goes on",
    "Failure.reason": "for people",
    "HandoffRecord.reason": "why, in its words",
    "PlannerContext.agent_id": "the agent that decides: after a handoff not the run's first",
    "PlannerContext.input": "the run's input",
    "PlannerContext.tools": "the tools that the agent is granted, with their schemas",
    "RunFacts.agent_id": "the agent that the run was started with",
    "RunFacts.input": "the input as it is stored, inline or by reference",
    "active_agent": "agent and version that carry the run on after a handoff",
    "agent_id": "which agent",
    "agent_version": "the agent's version",
    "args": "its arguments; those that a person edited, if so",
    "asks": "what it asked people, with the answers",
    "by": "who answered",
    "caller": "who started the run",
    "calls": "the tool calls with their results, in the order of the decision",
    "child_run_id": "the child's run; `None`: it was refused",
    "children": "the child runs that it asked for, with their results",
    "code": "for programs, a [failure code](failures.md)",
    "context": "the caller's own data: what the request gave as `context`",
    "cost": "what models cost so far",
    "created_at": "when the run was created",
    "depth": "how many runs are above it",
    "detached": "nobody waits for its result",
    "details": "what else is to be known",
    "done": "of what did not end well: what was done, in the tool's words",
    "external_ref": "the id of its effect outside",
    "facts": "about the run, written once",
    "fields": "what the agent's declared fields hold, by name",
    "forked_from": "the run that it was forked from",
    "handoff": "how the deciding agent came to the run; `None`: it was started with it",
    "input_tokens": "tokens that models read",
    "interrupt_id": "id of the question",
    "messages": "the thread's messages before this run's input",
    "model_calls": "requests to models",
    "model_failures": "failed model requests of this step so far",
    "not_done": "of what did not end well: what was not done",
    "notes": "what the planner was told: an answer that does not fit, a failure it may mend",
    "open_message": "begins a message that followers see as it grows; `None`: nothing is streamed",
    "options": "the run's options, with what was not given at its default",
    "origin_run_id": "the run whose log it begins with",
    "origin_seq": "up to which seq of that log",
    "outcome": "`answered`, or `expired` with `on_expiry` deny; `None`: it is open",
    "output": "what the tool returned",
    "output_tokens": "tokens that models wrote",
    "parent_run_id": "the run that started it",
    "participants": "threads of those who have spoken in this run, by name",
    "plan": "the plan as it is now",
    "planner_call_id": "the planner's own name for the call, `call_id` of the decision",
    "required_runtime": "the least release that can carry it out, as a number",
    "retries": "tries that were repeated",
    "retry_of": "the run that it goes on from",
    "retryable": "the same again may succeed",
    "root_run_id": "the run at the top of its tree",
    "run_id": "the run",
    "schema_version": "of the run's log",
    "source": "the agent that handed over",
    "stage": "where it failed: a model, a tool, the runtime, …",
    "state": "the agent's own state, as the last decision left it",
    "step_index": "which step of the run",
    "tenant_id": "whose run it is",
    "text": "what the model said",
    "thread_id": "the thread that it runs on",
    "tool": "the tool's name",
    "tool_call_id": "id of the call",
    "tool_calls": "calls of tools",
    "trace_id": "of its trace",
    "turns": "the steps so far that called, asked, started children or said something",
    "usage": "what the run has used so far",
    "waiting_ms": "how long it has waited for people",
}


def context_page() -> str:
    """Return the page."""
    return _HEAD + "".join(
        f"\n## {part.__name__}\n\n{_meaning(part)}\n\n| field | type | meaning |\n|---|---|---|\n"
        + "".join(
            f"| `{name}` | {_type(kind)} | {_NOTES[_note_of(part, name)]} |\n"
            for name, kind in _fields(part)
        )
        for part in _PARTS
    )


def documented_context() -> tuple[set[str], set[str]]:
    """Return the notes that fields of the page need, and those that there are."""
    needed = {_note_of(part, name) for part in _PARTS for name, _ in _fields(part)}
    return needed, set(_NOTES)


def _note_of(part: type, name: str) -> str:
    own = f"{part.__name__}.{name}"
    return own if own in _NOTES else name


def _fields(part: type) -> Iterator[tuple[str, Any]]:
    if issubclass(part, BaseModel):
        yield from ((name, field.annotation) for name, field in part.model_fields.items())
        return
    for field in dataclasses.fields(cast("Any", part)):
        if part is not PlannerContext or field.name not in _LEFT_OUT:
            yield field.name, field.type


def _meaning(part: type) -> str:
    """Return the first paragraph of a docstring: what follows is for who reads the code."""
    text = (part.__doc__ or "").partition("\n\n")[0]
    return " ".join(text.split())


def _type(kind: Any) -> str:
    """Return an annotation as a few words for a table."""
    if kind is JsonValue:
        return "any JSON"
    origin = get_origin(kind)
    args = get_args(kind)
    if origin in {Union, types.UnionType}:
        return " or ".join(_type(one) for one in args)
    if origin is Literal:
        return " / ".join(f"`{one}`" for one in args)
    if origin in {list, Sequence}:
        return f"list of {_type(args[0])}"
    if origin in {dict, Mapping}:
        return f"{_type(args[1])} by {_type(args[0])}"
    if origin is tuple:
        return f"({', '.join(_type(one) for one in args)})"
    if origin is Callable:
        return "function"
    return "None" if kind is types.NoneType else str(kind.__name__)
