"""What the fields of requests are called on the command line."""

_OPTIONS = {
    "/answer": "the answer",
    "/input": "--input",
    "/state": "--state",
    "/args": "--edit",
    "/value": "--respond",
    "/external_ref": "--happened",
    "/reason": "--reason",
    "/checkpoint_id": "--checkpoint",
    "/thread_id": "--thread",
    "/agent_id": "--agent",
    "/tag": "--tag",
    "/all": "--all",
    "/options/after": "--after",
    "/options/queue": "--queue",
    "/options/priority": "--priority",
    "/options/agent_version": "--agent-version",
    "/options/idempotency_key": "--key",
    "/options": "--options",
    "agent_id": "AGENT",
    "Idempotency-Key": "--key",
    "agents": "--agents",
    "data": "--data",
    "model": "--model",
    "region": "--region",
}


def option_of(field: str) -> str:
    """Return the option that a field of a request was typed as, with the place in its value."""
    for pointer, option in _OPTIONS.items():
        if field == pointer:
            return option
        if field.startswith(f"{pointer}/"):
            return f"{option} at {field.removeprefix(pointer)}"
    return field
