"""Carrying a run whose agent version is gone on as a new run of the version that replaces it.

The new run is made before the old one is ended: in the same thread, behind it, so that it begins
when the old one has ended, and under a key of the old one's id, so that a worker that dies in
between makes no second one. It shares the old run's history by reference, as a retry does.
"""

import logging
from contextlib import suppress

from perdure.engine.branch import BranchWish, continue_run
from perdure.engine.cancel import cancel_run
from perdure.engine.core import Core
from perdure.engine.history import load_value
from perdure.engine.submit import RunOrder
from perdure.protocol.agents import AgentCard
from perdure.protocol.codec import digest
from perdure.protocol.errors import PerdureError, StoreFull, Unavailable, Unreadable
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import DamagedEvent
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import CancelAction, RunState
from perdure.store.requests import CancelWish

log = logging.getLogger(__name__)

BY = "runtime"
PAUSE_S = 0.25
PAUSE_MAX_S = 3600.0


def pause_for_origin_s(row: RunRow) -> float:
    """Return how long a run that came too early waits: twice as long each time, up to an hour.

    Each time is an attempt in its log; mostly the other run ends within moments, but it may wait for
    a person when a worker that still has its version took it.
    """
    return min(PAUSE_MAX_S, PAUSE_S * 2 ** min(row.hot.attempt, 20))


def key_of_carrying_on(run_id: str) -> str:
    """Return the key under which the run is made that goes on in another version."""
    return f"perdure.continues:{run_id}"


def key_of_return(run_id: str) -> str:
    """Return the key under which the run is made that goes on from a checkpoint of a damaged one."""
    return f"perdure.returns:{run_id}"


def goes_on_from(facts: RunFacts) -> str | None:
    """Return the run that a continuation goes on from: it begins only when that one has ended and
    its end names it. No caller has such keys.
    """
    old, key = facts.retry_of, facts.options.idempotency_key
    if old is None or key not in {key_of_carrying_on(old), key_of_return(old)}:
        return None
    return old


async def carry_on(core: Core, row: RunRow, newer: AgentCard, reason: str) -> str | None:
    """Make the run that goes on, or find it; return its id, None when there can be none.

    A child that its parent is to be told of is not carried on: what to do is the parent's matter.
    Raises Unavailable and StoreFull: then the run is not to be ended yet.
    """
    facts = row.facts
    if facts.parent_run_id is not None and not facts.detached:
        return None
    key = key_of_carrying_on(facts.run_id)
    try:
        order = await continuation(
            core, row, key=key, agent_id=newer.agent_id, version=newer.version
        )
        wish = BranchWish(mode="retry", by=BY, reason=reason)
        made = await continue_run(core, row, order, wish)
    except (Unavailable, StoreFull):
        raise
    except (PerdureError, LookupError) as error:
        log.warning("%s cannot be carried on: %s", facts.run_id, error)
        return None
    return made.row.facts.run_id


async def continuation(
    core: Core, row: RunRow, *, key: str, agent_id: str, version: str
) -> RunOrder:
    """Return the order of a run that goes on from another in its thread, made once under the key.

    Raises LookupError when the input is no longer kept.
    """
    facts = row.facts
    options = {
        "idempotency_key": key,
        "agent_version": version,
        "multitask_strategy": "enqueue",
        "after": None,
    }
    return RunOrder(
        agent_id=agent_id,
        input=await load_value(core, facts.tenant_id, facts.input),
        context=facts.context,
        options=facts.options.model_copy(update=options),
        caller=facts.caller,
        fingerprint=digest(["continues", facts.run_id]),
        thread_id=facts.thread_id,
        trace_id=facts.trace_id,
    )


async def stop_continuing(core: Core, row: RunRow, run_id: str) -> None:
    """Cancel a run that was to go on from one that was cancelled in the meantime."""
    wish = CancelWish(action=CancelAction.INTERRUPT, by=BY, source="runtime")
    await cancel_run(core, row.facts.tenant_id, run_id, wish)


async def comes_too_early(core: Core, row: RunRow) -> bool:
    """Tell whether a claimed run has to wait for the end of the one that it goes on from.

    Mostly the thread's turn sees to that; but a run that is not the active one of its thread holds
    none. When the other has ended and its end does not name this run, it is cancelled.
    """
    old_id = goes_on_from(row.facts)
    if old_id is None or row.hot.state is not RunState.PENDING or row.hot.cancel_epoch > 0:
        return False
    try:
        old = await core.reader.find_run(None, old_id)
    except Unreadable:
        return True  # until it is repaired nobody knows whether it has ended
    if old is not None and old.hot.terminal_seq is None:
        return True
    if old is None or await _is_named(core, old, row.facts.run_id):
        return False
    log.warning("%s was to go on from %s, which ended otherwise", row.facts.run_id, old_id)
    wish = CancelWish(
        action=CancelAction.INTERRUPT,
        by=BY,
        source="runtime",
        reason=f"{old_id}, from which it was to go on, ended otherwise",
    )
    await core.store.request_cancel(row.facts.run_id, wish)
    return False


async def _is_named(core: Core, old: RunRow, run_id: str) -> bool:
    """Tell whether the end of a run names the one that goes on. When that event is damaged or no
    longer kept, the row's code says it: the other ends with this one are of runs that nobody was to
    go on from, or see to it themselves (`fail_run`).
    """
    if old.hot.code is not FailureCode.CHECKPOINT_INCOMPATIBLE or old.hot.terminal_seq is None:
        return False
    with suppress(Unreadable, DamagedEvent):
        for event in await core.reader.events_after(
            old.facts.run_id, old.hot.terminal_seq - 1, limit=1
        ):
            end = event.data
            if isinstance(end, StateEvent):
                return end.failure is not None and end.failure.details.get("continued_by") == run_id
    return True
