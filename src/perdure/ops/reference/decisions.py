"""The page of decisions: what a planner may return, the fields of each, and what it sees of it later."""

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perdure.ops.reference.events import type_text
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    ChildRequest,
    DecisionBase,
    Finish,
    GiveUp,
    Handoff,
    ModelUse,
    Operate,
    Publish,
    Sleep,
    Spawn,
    ToolRequest,
    UpdatePlan,
    WriteField,
)
from perdure.protocol.events import PlanItem

_HEAD = """\
# Decisions

What `next_step(context)` may return: one of these, of `perdure.protocol.decisions`
([how to write a planner](../how-to/write-an-agent.md)). The schema is `schemas/decision.json`.

**Turns.** The next context shows some decisions in `turns`, others not at all. One that makes no turn
must carry a new `state` (or a `plan`), by which the planner knows that it was there: without one it sees
the same context as before, decides the same again, and the run goes round until `max_steps`. A decision
with `model_uses` always makes a turn, whose `text` is what the model said.

| decision | what it does | a turn |
|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A decision as the page tells of it."""

    model: type[DecisionBase]
    does: str
    turn: str
    code_only: bool = False


_KINDS = (
    _Kind(CallTools, "run these calls; the planner is asked again with their results", "`calls`"),
    _Kind(Ask, "ask a person, and wait without a worker", "`asks`"),
    _Kind(
        Spawn,
        "start child runs, and wait for them without a worker",
        "`children`; none without children",
    ),
    _Kind(Finish, "end the run with an answer", "only `notes` of an answer that does not fit"),
    _Kind(GiveUp, "end the run as failed", "none: it has ended"),
    _Kind(Sleep, "go on after a while, without a worker", "**none**"),
    _Kind(UpdatePlan, "only revise the plan", "**none**: `context.plan` shows it"),
    _Kind(
        Handoff,
        "let another agent carry the run on",
        "none: `context.agent_id` and `context.handoff` show it",
    ),
    _Kind(
        Operate,
        "what the runtime itself decides for a [code agent](../code-agents.md)",
        "none",
        code_only=True,
    ),
)

_PARTS: tuple[type[BaseModel], ...] = (
    ToolRequest,
    ChildRequest,
    ModelUse,
    PlanItem,
    Publish,
    WriteField,
)

_CODE_ONLY = frozenset({"position", "calls:ModelUse", "session"})
"""What only code agents, or the runtime's own planners, set; `name:Model` for one model's field."""

_NOTES: dict[str, str] = {
    "ask": "what kind of question it is",
    "agent_id": "which agent",
    "answer": "the answer of the run",
    "answer_schema": "JSON Schema that the person's value must fit",
    "args": "the arguments",
    "budget": "what the child may use",
    "call_id": "the planner's own name for the call, a model's call id",
    "calls": "the calls, run in parallel where the tools allow it",
    "children": "the runs to start; none: wait for those that are open",
    "code": "why, as a [failure code](failures.md)",
    "details": "what else is to be known of it",
    "detach": "the run neither waits for the child nor is told its result",
    "duration": "how long",
    "duration_ms": "how long the request took",
    "expires_in": "how long the question stands, 366 days at most; for ever if not given",
    "field": "which of the fields that the agent declares",
    "finish": "why the model stopped",
    "input": "the child's input",
    "key": "the planner's own name for it, unique in the step",
    "max_attempts": "how often the child is tried",
    "max_steps": "how many steps the child may take",
    "message_id": "the streamed message that this reply is, of `open_message`",
    "metadata": "the child's metadata",
    "model": "which model",
    "model_uses": "the model requests that led to the decision: tokens and cost are counted by them",
    "on_expiry": "what happens when nobody answers in time",
    "output_schema": "JSON Schema that the child's answer must fit",
    "participant": "children under one such name share a thread, one after the other",
    "payload": "what the person is to look at",
    "plan": "the whole plan as it is now",
    "problem": "set when the model's arguments were not JSON; `args` hold the text",
    "reason": "why, for people and for the next agent",
    "records": "what to publish to topics, and what to write to declared fields of the state",
    "request_digest": "SHA-256 of the request",
    "state": "the agent's own new state; None keeps the old one",
    "status": "how far it is",
    "tags": "the child's tags",
    "text": "the words for it: what was said, or is to be done",
    "timeouts": "the child's time limits",
    "title": "the question in a line",
    "tool": "the tool's name",
    "topic": "where to publish",
    "usage": "the tokens and the cost",
    "value": "what to publish, or to write by the field's rule",
    "version": "which version; the newest that is allowed if not given",
    "view": "what the next agent sees of the steps before",
    "wait": "wait for the children; else the planner goes on at once",
}


def decisions_page() -> str:
    """Return the page."""
    parts = [_HEAD]
    parts += [f"| `{kind.model.__name__}` | {kind.does} | {kind.turn} |\n" for kind in _KINDS]
    parts.append("\n## What every decision may carry\n\n")
    parts.append(_fields(DecisionBase))
    own = DecisionBase.model_fields
    parts += [
        f"\n## {kind.model.__name__}\n\n{_meaning(kind.model)}\n\n{_fields(kind.model, own)}"
        for kind in _KINDS
        if not kind.code_only
    ]
    parts.append("\n# What decisions are made of\n")
    parts += [f"\n## {part.__name__}\n\n{_meaning(part)}\n\n{_fields(part)}" for part in _PARTS]
    return "".join(parts)


def documented_fields() -> tuple[set[str], set[str]]:
    """Return the names of fields that the page shows, and those that have a line."""
    models = [kind.model for kind in _KINDS if not kind.code_only]
    shown = {
        name
        for model in (*models, *_PARTS)
        for name in model.model_fields
        if not _is_left_out(model, name)
    }
    return shown, set(_NOTES)


def documented_kinds() -> set[type[DecisionBase]]:
    """Return the decisions that the page lists."""
    return {kind.model for kind in _KINDS}


def _meaning(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").replace("\n    ", "\n").strip()


def _is_left_out(model: type[BaseModel], name: str) -> bool:
    return name == "kind" or bool({name, f"{name}:{model.__name__}"} & _CODE_ONLY)


def _fields(model: type[BaseModel], but: dict[str, FieldInfo] | None = None) -> str:
    schema = model.model_json_schema()["properties"]
    rows = [
        f"| `{name}` | {_type(field, schema[name])} | {_default(field)} | {_NOTES[name]} |\n"
        for name, field in model.model_fields.items()
        if not _is_left_out(model, name) and name not in (but or {})
    ]
    head = "| field | type | default | meaning |\n|---|---|---|---|\n"
    return head + "".join(rows) if rows else "It has no fields of its own.\n"


def _type(field: FieldInfo, schema: dict[str, object]) -> str:
    text = type_text(schema)
    if "Publish" in text:
        return "list of Publish or WriteField"
    return text.replace("duration", "`timedelta`")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = cast("object", field.get_default(call_default_factory=True, validated_data={}))
    if isinstance(value, BaseModel):
        return f"`{type(value).__name__}()`"
    if isinstance(value, timedelta):
        return f"`{value!r}`"
    return f"`{value!s}`" if isinstance(value, str) and value else f"`{value!r}`"
