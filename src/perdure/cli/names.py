"""What the fields of requests are called on the command line."""

from collections.abc import Sequence

_OPTIONS = {
    "/answer": "the answer",
    "/input": "--input",
    "/state": "--state",
    "/args": "--edit",
    "/value": "the value",
    "/external_ref": "--happened",
    "/reason": "--reason",
    "/checkpoint_id": "--checkpoint",
    "/thread_id": "--thread",
    "/agent_id": "--agent",
    "/tag": "--tag",
    "/all": "--all",
    "/position": "--position",
    "/title": "--title",
    "/to": "--to",
    "/branch_id": "BRANCH",
    "/output": "--output",
    "/error/reason": "--failed",
    "/options/after": "--after",
    "/options/queue": "--queue",
    "/options/priority": "--priority",
    "/options/agent_version": "--agent-version",
    "/options/idempotency_key": "--key",
    "/options": "--options",
    "agent_id": "AGENT",
    "topic": "TOPIC",
    "Idempotency-Key": "--key",
    "agents": "--agents",
    "data": "--data",
    "model": "--model",
    "region": "--region",
}

_OPTIONS_OF_COMMAND: dict[tuple[str, ...], dict[str, str]] = {
    ("runs", "callback"): {"/external_ref": "--ref"},
    ("topics", "subscribe"): {"/agent_version": "--version"},
    ("verify",): {"run_id": "--run"},
}
"""What other commands call otherwise."""


def option_of(field: str, words: Sequence[str] = ()) -> str:
    """Return the option that a field of a request was typed as, with the place in its value.

    `words` are those of the command line.
    """
    own = _OPTIONS_OF_COMMAND.get((*words[:2],)) or _OPTIONS_OF_COMMAND.get((*words[:1],)) or {}
    names = {**_OPTIONS, **own}
    for pointer, option in names.items():
        if field == pointer:
            return option
        if field.startswith(f"{pointer}/"):
            return f"{option} at {field.removeprefix(pointer)}"
    return field
