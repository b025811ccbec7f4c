"""Schema versions of what is stored, and how older ones are read (R-6.9, R-20.1).

An event keeps the version it was written with and is never rewritten; a reader lifts its data, one
version at a time, to the present form. `SCHEMA_VERSION` (in `base`) is raised only by a change that
a reader cannot take by ignoring or defaulting a field: each such change adds its upcasters here and
a stored sample of the version before. Version 0 is that of the prototypes before the first release.
"""

from collections.abc import Callable
from typing import Final, cast

from pydantic import JsonValue

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.codec import decode, encode

OLDEST_READABLE: Final = 0

Fields = dict[str, JsonValue]
Upcaster = Callable[[Fields], Fields]
"""Takes the data of one event type from its version to the next; must not fail on old data."""


class Incompatible(ValueError):
    """What is stored has a schema version that this release cannot carry on with."""


def upcast(event_type: str, version: int, raw: bytes) -> bytes:
    """Return the stored JSON of an event's data in the present form.

    A later version is returned as it is: what a reader does not know of it, it passes by. Raises
    Incompatible for a version that is no longer readable, or data that no upcaster takes.
    """
    if version >= SCHEMA_VERSION:
        return raw
    if version < OLDEST_READABLE:
        raise Incompatible(f"schema version {version} is no longer readable")
    fields = decode(raw)
    if not isinstance(fields, dict):
        raise Incompatible(f"a {event_type} event of version {version} is no object")
    for step in range(version, SCHEMA_VERSION):
        lift = UPCASTERS.get((step, event_type))
        try:
            fields = lift(fields) if lift is not None else fields
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"a {event_type} event cannot be lifted from version {step}: {error!r}"
            raise Incompatible(reason) from error
    return encode(fields)


def is_readable(version: int) -> bool:
    """Tell whether this release may carry on what that version wrote."""
    return OLDEST_READABLE <= version <= SCHEMA_VERSION


def check_version(version: int) -> None:
    """Raise Incompatible unless this release may carry on what that version wrote."""
    if not is_readable(version):
        raise Incompatible(
            f"schema version {version} is outside {OLDEST_READABLE} to {SCHEMA_VERSION}, "
            "which this release carries on"
        )


def _renamed(names: dict[str, str]) -> Upcaster:
    return lambda fields: {names.get(name, name): value for name, value in fields.items()}


def _result_0(fields: Fields) -> Fields:
    """Version 0 had the error of a result in two fields of its own."""
    lifted = {
        name: value for name, value in fields.items() if name not in {"error_code", "error_text"}
    }
    if "error_code" in fields:
        code = cast("str", fields["error_code"])
        lifted["error"] = {"code": code, "reason": fields.get("error_text", "")}
    return lifted


UPCASTERS: Final[dict[tuple[int, str], Upcaster]] = {
    (0, "state"): _renamed({"from": "from_state", "transition": "why"}),
    (0, "action"): _renamed({"idempotent": "repeatable", "call": "tool_call_id"}),
    (0, "result"): _result_0,
}
"""By (version, event type): what takes data of that version to the next one."""
