"""What an event says to a person, in one short line."""

from collections.abc import Callable, Mapping

from pydantic import JsonValue

from perdure.engine.journal import CODE, NOW, PATCHED, SLEEP, STEP_TOOLS
from perdure.engine.snapshot import (
    APPROVAL_EVENT_NAME,
    PENDING_EVENT_NAME,
    STATE_EVENT_NAME,
    STATE_UPDATE_EVENT_NAME,
)
from perdure.protocol.breakpoints import BREAKPOINTS_EVENT_NAME
from perdure.protocol.codec import canonical
from perdure.protocol.event_views import EventView
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    KEPT_EVENT_NAME,
    READ_EVENT_NAME,
    SETTLED_EVENT_NAME,
)
from perdure.protocol.topics import PUBLISHED_EVENT_NAME

TEXT_CHARACTERS_MAX = 200
WHY_CHARACTERS_MAX = 90
"""So much of a reason is shown before what a run has left in the world."""

_QUIET = frozenset({"step", "usage", "delta"})
_NEVER_HAPPENED = frozenset({"cancelled", "denied"})
"""How calls with a side effect end that were told to an ended run, and not begun."""


def line_of(event: EventView) -> str:
    """Return the line of an event; "" for one that says nothing to a person."""
    data = event.data if isinstance(event.data, dict) else {}
    if event.type in _QUIET:
        return ""
    write = _WRITERS.get(event.type)
    return short(write(data) if write is not None else event.type)


def short(text: str, characters_max: int = TEXT_CHARACTERS_MAX) -> str:
    """Return a text on one line, cut with an ellipsis; control characters become spaces."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return flat if len(flat) <= characters_max else flat[: characters_max - 1] + "…"


def value_text(value: JsonValue) -> str:
    """Return a value as canonical JSON; long lists as their length, objects as `name=value`."""
    if isinstance(value, list) and len(value) > 3:
        return f"[{len(value)} items]"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_inner_text(item)}" for key, item in sorted(value.items()))
    return canonical(value).decode()


def _inner_text(value: JsonValue) -> str:
    text = value_text(value)
    return f"{{{text}}}" if isinstance(value, dict) else text


def _text(data: dict[str, JsonValue], name: str) -> str:
    value = data.get(name)
    return "" if value is None else str(value)


def _state(data: dict[str, JsonValue]) -> str:
    failure = data.get("failure")
    why = f": {_failure(failure)}" if isinstance(failure, dict) else ""
    told = data.get("effects")
    effects = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    left = "; ".join(effect_text(effect) for effect in effects if may_be_there(effect))
    if not left:
        return f"state {_text(data, 'state')}{why}"
    return f"state {_text(data, 'state')}{short(why, WHY_CHARACTERS_MAX)}; in the world: {left}"


def may_be_there(effect: Mapping[str, JsonValue]) -> bool:
    """Tell whether an effect of an ended run is, was or may be in the world: its call was begun."""
    return effect.get("status") not in _NEVER_HAPPENED


def effect_text(effect: dict[str, JsonValue]) -> str:
    """Return what a call of an ended run has left, and what became of undoing it if that was asked."""
    undoing = effect.get("compensation")
    told = "" if undoing is None else f", undoing {str(undoing).replace('_', ' ')}"
    if undoing == "none":
        told = ", not undone"
    return f"{_text(effect, 'tool')} {_text(effect, 'status')}{_external(effect)}{told}"


def _failure(failure: dict[str, JsonValue]) -> str:
    return f"{_text(failure, 'code')} {_text(failure, 'reason')}"


def _action(data: dict[str, JsonValue]) -> str:
    judged = "" if data.get("policy_effect") == "allow" else f" ({_text(data, 'policy_effect')})"
    if data.get("tool") in STEP_TOOLS:
        return f"step {_text(data, 'planner_call_id')}({_args_of_step(data)}){judged}"
    ref = data.get("args_ref")
    args = f"{_text(ref, 'preview')}…" if isinstance(ref, dict) else value_text(data.get("args"))
    return f"call {_text(data, 'tool')}({args}){judged}"


def _args_of_step(data: dict[str, JsonValue]) -> str:
    args = data.get("args")
    given = args.get("args") if isinstance(args, dict) else None
    if data.get("args_ref") or not isinstance(given, list):
        return "…"
    return ", ".join(value_text(item) for item in given)


def _result(data: dict[str, JsonValue]) -> str:
    error = data.get("error")
    if isinstance(error, dict):
        return f"{_text(data, 'status')}: {_failure(error)}"
    output = "(large)" if data.get("output_ref") else value_text(data.get("output"))
    by = _text(data, "by")
    known = f", known from the {by}" if by in {"lookup", "person", "callback"} else ""
    return f"{_text(data, 'status')}: {output}{_external(data)}{known}"


def _model(data: dict[str, JsonValue]) -> str:
    return f"{_text(data, 'model') or 'model'}: {_text(data, 'text') or _text(data, 'finish')}"


def _because(data: dict[str, JsonValue]) -> str:
    return f": {_text(data, 'reason')}" if data.get("reason") else ""


def _by(data: dict[str, JsonValue]) -> str:
    return f" by {_text(data, 'by')}" if data.get("by") else ""


def _resume(data: dict[str, JsonValue]) -> str:
    return f"{_text(data, 'answer') or _text(data, 'outcome')}{_by(data)}{_because(data)}"


def _attempt(data: dict[str, JsonValue]) -> str:
    if data.get("phase") == "claimed" and data.get("attempt") != 1:
        return f"attempt {_text(data, 'attempt')} claimed: the run goes on"
    return f"attempt {_text(data, 'attempt')} {_text(data, 'phase')}{_because(data)}"


def _retry(data: dict[str, JsonValue]) -> str:
    failure = data.get("failure")
    why = _failure(failure) if isinstance(failure, dict) else ""
    return f"{_text(data, 'subject')} is tried again: {why}"


def _artifact(data: dict[str, JsonValue]) -> str:
    return f"artifact {_text(data, 'name')} ({_text(data, 'size')} bytes)"


def _cancel(data: dict[str, JsonValue]) -> str:
    undone = ", undoing its effects" if data.get("compensate") else ""
    return f"cancel{_by(data)}{undone}{_because(data)}"


def _plan(data: dict[str, JsonValue]) -> str:
    items = data.get("items")
    found = [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    told = "; ".join(f"{_text(item, 'text')} ({_text(item, 'status')})" for item in found)
    return f"plan revision {_text(data, 'revision')}: {told}"


def _child(data: dict[str, JsonValue]) -> str:
    failure = data.get("failure")
    agent = f"{_text(data, 'agent_id')} {_text(data, 'agent_version')}".strip()
    run_id = _text(data, "child_run_id")
    match data.get("phase"):
        case "spawned":
            how = " on its own" if data.get("detached") else ""
            topic = f", who is told of {_text(data, 'topic')}" if data.get("topic") else ""
            name = f" as {_text(data, 'participant')}" if data.get("participant") else ""
            return f"child {run_id} of {agent}{name} started{how}{topic}"
        case "refused":
            why = _failure(failure) if isinstance(failure, dict) else ""
            return f"child of {agent} refused: {why}"
        case "result":
            if isinstance(failure, dict):
                return f"child {run_id} {_text(data, 'state')}: {_failure(failure)}"
            if data.get("tool_call_id"):  # what it answered is the call's `result`, told next
                return f"child {run_id} {_text(data, 'state')}"
            result = "(large)" if data.get("result_ref") else value_text(data.get("result"))
            return f"child {run_id} {_text(data, 'state')}: {result}"
        case _:
            return f"waits for child {run_id}" if run_id else "waits for its children"


def _compensation(data: dict[str, JsonValue]) -> str:
    call = f"undoing {_text(data, 'tool_call_id')}"
    error, status = data.get("error"), _text(data, "status")
    if isinstance(error, dict):
        again = ", is tried again" if data.get("again") else ""
        return f"{call} {status}{again}: {_failure(error)}"
    if status == "started" or data.get("detail") is None:
        return f"{call} {status}"
    return f"{call} {status}: {value_text(data.get('detail'))}"


def _handoff(data: dict[str, JsonValue]) -> str:
    target = f"{_text(data, 'target')} {_text(data, 'target_version')}".strip()
    return f"{_text(data, 'source')} hands over to {target}{_because(data)}"


def _error(data: dict[str, JsonValue]) -> str:
    failure = data.get("failure")
    told = "" if data.get("final") else ", the planner is told"
    return f"error {_failure(failure) if isinstance(failure, dict) else ''}{told}"


def _message(data: dict[str, JsonValue]) -> str:
    parts = data.get("parts")
    found = [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return f"{_text(data, 'role')}: {' '.join(_text(part, 'text') for part in found)}"


def _custom(data: dict[str, JsonValue]) -> str:
    name, value = _text(data, "name"), data.get("value")
    write = _CUSTOM_WRITERS.get(name)
    if write is not None:
        return write(value if isinstance(value, dict) else {"value": value})
    if name == CODE:
        return ""
    if name == STATE_EVENT_NAME:
        return f"agent state: {value_text(value)}"
    return f"reports {name}" + ("" if value is None else f": {value_text(value)}")


def _sleep(value: dict[str, JsonValue]) -> str:
    if value.get("until"):
        return f"sleeps until {_text(value, 'until').replace('+00:00', 'Z')}"
    return f"sleeps {_text(value, 'seconds')} s"


def _approval(value: dict[str, JsonValue]) -> str:
    names = value.get("approvers")
    to = f" to {', '.join(str(name) for name in names)}" if isinstance(names, list) else ""
    phase = _text(value, "phase").replace("_", " ")
    return f"approval {_text(value, 'approval_id')} {phase}{to}{_by(value)}{_because(value)}"


def _pending(value: dict[str, JsonValue]) -> str:
    return f"the result of {_text(value, 'tool_call_id')} comes by callback{_external(value)}"


def _external(data: dict[str, JsonValue]) -> str:
    ref = _text(data, "external_ref")
    return f" (external reference {ref})" if ref else ""


def _of_field(value: dict[str, JsonValue]) -> str:
    held = value_text(value.get("value")) if "value" in value else "nothing"
    version = _text(value, "version")
    return f"the {_text(value, 'scope')}'s {_text(value, 'field')}, version {version}: {held}"


_CUSTOM_WRITERS: dict[str, Callable[[dict[str, JsonValue]], str]] = {
    APPROVAL_EVENT_NAME: _approval,
    BREAKPOINTS_EVENT_NAME: lambda _: "breakpoints set",
    FIELD_EVENT_NAME: lambda value: (
        f"writes {_text(value, 'field')} ({_text(value, 'rule')}): {value_text(value.get('value'))}"
    ),
    KEPT_EVENT_NAME: lambda value: f"leaves {_of_field(value)}",
    READ_EVENT_NAME: lambda value: f"finds {_of_field(value)}",
    SETTLED_EVENT_NAME: lambda _: "",
    NOW: lambda value: f"takes the time {value_text(value.get('value'))}",
    PATCHED: lambda value: f"has the change {value_text(value.get('value'))}",
    PENDING_EVENT_NAME: _pending,
    PUBLISHED_EVENT_NAME: lambda value: (
        f"publishes to {_text(value, 'topic')}: {value_text(value.get('value'))}"
    ),
    SLEEP: _sleep,
    STATE_UPDATE_EVENT_NAME: lambda value: f"agent state replaced{_by(value)}{_because(value)}",
}


_WRITERS: dict[str, Callable[[dict[str, JsonValue]], str]] = {
    "state": _state,
    "action": _action,
    "result": _result,
    "model": _model,
    "resume": _resume,
    "attempt": _attempt,
    "retry": _retry,
    "artifact": _artifact,
    "cancel": _cancel,
    "approval_request": lambda data: f"asks: {_text(data, 'title')} {_text(data, 'reason')}",
    "interrupt": lambda data: f"asks ({_text(data, 'kind')}): {_text(data, 'title')}",
    "timeout": lambda data: f"{_text(data, 'subject')} timed out",
    "late": lambda data: f"late result of {_text(data, 'tool_call_id')}",
    "repair": lambda data: f"{_text(data, 'action')}: {_text(data, 'reason')}",
    "plan": _plan,
    "child": _child,
    "compensation": _compensation,
    "handoff": _handoff,
    "error": _error,
    "message": _message,
    "custom": _custom,
    "guardrail": lambda data: (
        f"guardrail {_text(data, 'rule')}: {_text(data, 'outcome')}, {_text(data, 'action')}"
    ),
    "takeover": lambda data: f"{_text(data, 'phase')}{_by(data)}",
    "gap": lambda data: f"events before {_text(data, 'kept_from')} are no longer kept",
}
