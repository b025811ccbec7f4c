"""Replacing the agent's own state of a run that waits, by hand (R-11.3).

An update is an event with its author and a checkpoint of its own, written beside no holder: the
commit names the last seq it was drafted upon, so that a worker that takes the run first has it
refused. What was decided stays decided: open questions and calls are as they were, and the planner
sees the new state when it is asked next. An ended run is not changed; it is forked.
"""

from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.approvals import leave_as_it_is
from perdure.engine.core import Core
from perdure.engine.draft import Draft
from perdure.engine.fold_custom import state_update_fingerprint
from perdure.engine.snapshot import STATE_UPDATE_EVENT_NAME, RunSnapshot
from perdure.engine.unheld import intervene
from perdure.protocol.codec import clean
from perdure.protocol.errors import Conflict, IdempotencyMismatch, Invalid, NotFound
from perdure.protocol.events import CustomEvent
from perdure.protocol.ids import checkpoint_id
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class StateWish:
    """The whole new state, who gives it and why. `key` makes the same wish again the same update."""

    state: JsonValue
    by: str
    reason: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """The seq of the update's checkpoint; `replayed` when it was there before."""

    seq: int
    replayed: bool


async def update_state(core: Core, run_id: str, wish: StateWish) -> Updated:
    """Write the state to a run that waits for a person, at a checkpoint of its own.

    Raises Conflict for a run that does not wait, is held by a worker, is being ended or has ended;
    Invalid for a state that is larger than an inline value; IdempotencyMismatch when the key stands
    for another state or reason.
    """
    state = clean(wish.state)
    before: Updated | None = None
    seq = 0

    def change(row: RunRow, draft: Draft) -> bool:
        nonlocal before, seq
        snapshot = draft.view.snapshot
        before = _replay(snapshot, run_id, state, wish)
        if before is not None:
            return False
        _check_waits(row, snapshot)
        if draft.keep(state).ref is not None:
            raise Invalid("an agent's state is at most an inline value", field="/state")
        value: dict[str, JsonValue] = {"state": state, "by": wish.by}
        value |= {} if wish.reason is None else {"reason": wish.reason}
        value |= {} if wish.key is None else {"key": wish.key}
        seq = draft.add(CustomEvent(name=STATE_UPDATE_EVENT_NAME, value=value))
        leave_as_it_is(row, draft)
        draft.with_checkpoint = True
        return True

    if await intervene(core, run_id, change) is not None:
        return Updated(seq=seq, replayed=False)
    if before is not None:
        return before
    if await core.reader.find_run(None, run_id) is None:
        raise NotFound("there is no such run")
    raise Conflict("the run is over: fork it with another state")


def _replay(
    snapshot: RunSnapshot, run_id: str, state: JsonValue, wish: StateWish
) -> Updated | None:
    known = snapshot.state_updates.get(wish.key) if wish.key is not None else None
    if known is None:
        return None
    if known.fingerprint != state_update_fingerprint(state, wish.reason):
        raise IdempotencyMismatch(
            "the idempotency key was used with another body",
            details={"checkpoint_id": checkpoint_id(run_id, known.seq)},
        )
    return Updated(seq=known.seq, replayed=True)


def _check_waits(row: RunRow, snapshot: RunSnapshot) -> None:
    if snapshot.state in TERMINAL:
        raise Conflict(f"the run is {snapshot.state}: fork it with another state")
    if row.hot.cancel_epoch > 0 or snapshot.ending is not None:
        raise Conflict("the run is being ended")
    if row.hot.lease_owner is not None:
        raise Conflict("a worker holds the run: update its state while it waits for a person")
    if snapshot.state is not RunState.WAITING_HUMAN:
        raise Conflict(
            f"the run is {snapshot.state}: its state is updated while it waits for a person, as at a "
            "breakpoint"
        )
