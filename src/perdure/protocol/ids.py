"""Identifiers: a type prefix and the 32 hex digits of a UUIDv7, convertible without loss.

Ids are unguessable and time-ordered (R-1.4). Events, checkpoints and steps have no identity of
their own beside their run; their ids derive from the run and the seq or index (decision 32).
Possession of an id is never a permission.
"""

import re
from uuid import UUID

from perdure.protocol.errors import Malformed

RUN = "run"
THREAD = "thr"
TOOL_CALL = "tc"
INTERRUPT = "int"
CHECKPOINT = "ckp"
ARTIFACT = "art"
MESSAGE = "msg"
COMMIT = "cmt"
EVENT = "evt"
STEP = "stp"
WORKER = "wrk"

_ID = re.compile(r"([a-z]{2,3})_([0-9a-f]{32})")
_DERIVED = re.compile(r"([a-z]{2,3})_([0-9a-f]{32})_(0|[1-9][0-9]{0,8})")


def make_id(prefix: str, value: UUID) -> str:
    """Return the id text of a UUID under a prefix."""
    return f"{prefix}_{value.hex}"


def uuid_of(identifier: str) -> UUID:
    """Return the bare UUID of an id made by `make_id`."""
    return UUID(identifier[identifier.index("_") + 1 :])


def hex_of(identifier: str) -> str:
    """Return the 32 hex digits of an id made by `make_id`."""
    return identifier[identifier.index("_") + 1 :]


def check_id(prefix: str, text: str, field: str) -> str:
    """Return `text` when it is an id of that kind; raise Malformed (`malformed`) otherwise."""
    found = _ID.fullmatch(text)
    if found is None or found.group(1) != prefix:
        raise Malformed(f"not an id of the form {prefix}_<32 hex digits>", field=field)
    return text


def is_id(prefix: str, text: str) -> bool:
    """Tell whether `text` is an id of that kind."""
    found = _ID.fullmatch(text)
    return found is not None and found.group(1) == prefix


def event_id(run_id: str, seq: int) -> str:
    """Return the id of the event at `seq` of a run."""
    return f"{EVENT}_{hex_of(run_id)}_{seq}"


def step_id(run_id: str, index: int) -> str:
    """Return the id of the step at `index` of a run."""
    return f"{STEP}_{hex_of(run_id)}_{index}"


def parse_step_id(text: str) -> tuple[str, int]:
    """Return (run_id, index) of a step id; raise Malformed otherwise."""
    return _parse_derived(STEP, text, "step_id")


def checkpoint_id(run_id: str, seq: int) -> str:
    """Return the id of the checkpoint at `seq` of a run."""
    return f"{CHECKPOINT}_{hex_of(run_id)}_{seq}"


def parse_checkpoint_id(text: str) -> tuple[str, int]:
    """Return (run_id, seq) of a checkpoint id; raise Malformed otherwise."""
    return _parse_derived(CHECKPOINT, text, "checkpoint_id")


def _parse_derived(prefix: str, text: str, field: str) -> tuple[str, int]:
    found = _DERIVED.fullmatch(text)
    if found is None or found[1] != prefix:
        raise Malformed(f"not an id of the form {prefix}_<32 hex digits>_<number>", field=field)
    return f"{RUN}_{found[2]}", int(found[3])


def span_id(run_id: str, step_index: int) -> str:
    """Return the 16 hex digits that name the span of a step, the same at every reading."""
    return (
        f"{(int(hex_of(run_id)[16:], 16) ^ ((step_index + 1) * 0x9E3779B97F4A7C15)) % 2**64:016x}"
    )
