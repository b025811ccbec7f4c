"""What readers of events may rely on: a level for every field, and since when it is there (R-6.9).

`stable`: name, type and meaning stay; one that is to go is marked deprecated for two minor
releases before. `text`: always there, worded for people, and may be worded otherwise at any time.
`provisional`: the runtime does not write it yet, or its form may change in a minor release.
"""

from enum import StrEnum

SINCE = "0.1.0"
"""The release that wrote the first events; a later type or field stands in `ADDED`."""

ADDED: dict[str, str] = {}
"""The release that added a type (`delta`) or a field (`model.session`) after the first one."""

DEPRECATED: dict[str, str] = {}
"""The release that marked a type or a field as going."""


class Stability(StrEnum):
    """How far a field may change."""

    STABLE = "stable"
    TEXT = "text"
    PROVISIONAL = "provisional"


PROVISIONAL_TYPES = frozenset(
    {
        "gap",
        "guardrail",
        "message",
        "takeover",
        "usage",
    }
)
"""Types that readers must accept and the runtime does not write yet."""

_TEXT_FIELDS = frozenset({"done", "not_done", "reason", "title"})
_PROVISIONAL_FIELDS = frozenset({"model.request_digest", "model.session", "retry.delay_ms"})


def level_of(event_type: str, field: str) -> Stability:
    """Return the level of a field of an event type."""
    if event_type in PROVISIONAL_TYPES or f"{event_type}.{field}" in _PROVISIONAL_FIELDS:
        return Stability.PROVISIONAL
    return Stability.TEXT if field in _TEXT_FIELDS else Stability.STABLE


def since(event_type: str, field: str | None = None) -> str:
    """Return the release that added a type, or a field of it."""
    added = ADDED.get(event_type, SINCE)
    return added if field is None else ADDED.get(f"{event_type}.{field}", added)
