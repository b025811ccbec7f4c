"""What an event says to a person, in one short line."""

from collections.abc import Callable

from pydantic import JsonValue

from perdure.protocol.codec import canonical
from perdure.protocol.event_views import EventView

TEXT_CHARACTERS_MAX = 200

_QUIET = frozenset({"step", "usage", "delta"})


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
    """Return a value as canonical JSON; long lists as their length."""
    if isinstance(value, list) and len(value) > 3:
        return f"[{len(value)} items]"
    if isinstance(value, dict):
        return ", ".join(f"{key}={value_text(item)}" for key, item in sorted(value.items()))
    return canonical(value).decode()


def _text(data: dict[str, JsonValue], name: str) -> str:
    value = data.get(name)
    return "" if value is None else str(value)


def _state(data: dict[str, JsonValue]) -> str:
    failure = data.get("failure")
    why = f": {_failure(failure)}" if isinstance(failure, dict) else ""
    return f"state {_text(data, 'state')}{why}"


def _failure(failure: dict[str, JsonValue]) -> str:
    return f"{_text(failure, 'code')} {_text(failure, 'reason')}"


def _action(data: dict[str, JsonValue]) -> str:
    args = "…" if data.get("args_ref") else value_text(data.get("args"))
    judged = "" if data.get("policy_effect") == "allow" else f" ({_text(data, 'policy_effect')})"
    return f"call {_text(data, 'tool')}({args}){judged}"


def _result(data: dict[str, JsonValue]) -> str:
    error = data.get("error")
    if isinstance(error, dict):
        return f"{_text(data, 'status')}: {_failure(error)}"
    output = "(large)" if data.get("output_ref") else value_text(data.get("output"))
    by = _text(data, "by")
    known = f", known from the {by}" if by in {"lookup", "person", "callback"} else ""
    return f"{_text(data, 'status')}: {output}{known}"


def _model(data: dict[str, JsonValue]) -> str:
    return f"{_text(data, 'model') or 'model'}: {_text(data, 'text') or _text(data, 'finish')}"


def _resume(data: dict[str, JsonValue]) -> str:
    reason = f": {_text(data, 'reason')}" if data.get("reason") else ""
    by = f" by {_text(data, 'by')}" if data.get("by") else ""
    return f"{_text(data, 'answer') or _text(data, 'outcome')}{by}{reason}"


def _attempt(data: dict[str, JsonValue]) -> str:
    reason = f": {_text(data, 'reason')}" if data.get("reason") else ""
    return f"attempt {_text(data, 'attempt')} {_text(data, 'phase')}{reason}"


def _retry(data: dict[str, JsonValue]) -> str:
    failure = data.get("failure")
    why = _failure(failure) if isinstance(failure, dict) else ""
    return f"{_text(data, 'subject')} is tried again: {why}"


def _artifact(data: dict[str, JsonValue]) -> str:
    return f"artifact {_text(data, 'name')} ({_text(data, 'size')} bytes)"


def _cancel(data: dict[str, JsonValue]) -> str:
    return f"cancel by {_text(data, 'by')} {_text(data, 'reason')}"


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
    "plan": lambda data: f"plan revision {_text(data, 'revision')}",
}
