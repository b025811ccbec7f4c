"""Which events a reader wants: types by name, or groups of them by granularity (R-6.10).

Every type belongs to one group. A filter leaves events out, never their place: a cursor moves
over what is left out as over all else.
"""

from collections.abc import Iterable
from enum import StrEnum

from perdure.protocol.errors import Invalid
from perdure.protocol.log import EVENT_TYPES


class Granularity(StrEnum):
    """A group of event types, from where the run stands to each word of a reply."""

    STATE = "state"
    STEP = "step"
    MESSAGE = "message"
    DELTA = "delta"
    CUSTOM = "custom"


_STATE = "state attempt cancel interrupt approval_request resume child handoff takeover repair gap"
_APART = {
    "message": Granularity.MESSAGE,
    "delta": Granularity.DELTA,
    "custom": Granularity.CUSTOM,
    **dict.fromkeys(_STATE.split(), Granularity.STATE),
}

GROUP_OF: dict[str, Granularity] = {
    name: _APART.get(name, Granularity.STEP) for name in EVENT_TYPES
}
"""The group of each type; what no other group takes is part of a step."""


def wanted_types(
    types: Iterable[str] = (), granularity: Iterable[str] = ()
) -> frozenset[str] | None:
    """Return the types that are named or in a named group; None for all, when nothing is named.

    Raises Invalid (`invalid`) for a name that is none.
    """
    named, groups = frozenset(types), frozenset(granularity)
    unknown = named - set(EVENT_TYPES)
    if unknown:
        raise Invalid(f"no type of event: {', '.join(sorted(unknown))[:200]}", field="types")
    unknown = groups - set(Granularity)
    if unknown:
        raise Invalid(f"no granularity: {', '.join(sorted(unknown))[:200]}", field="granularity")
    if not named and not groups:
        return None
    return named | {name for name, group in GROUP_OF.items() if group in groups}
