"""Rules of how a run begins: its rows, its first event, and what it does to a busy thread."""

from datetime import datetime, timedelta

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.events import Branch, StateEvent
from perdure.protocol.log import NewEvent
from perdure.protocol.records import ThreadBase
from perdure.protocol.runs import RunFacts, RunHot, RunOptions
from perdure.protocol.states import (
    CancelAction,
    ParkedOn,
    RunState,
)
from perdure.store.requests import CancelWish, NewRun


def first_facts(new: NewRun, now: datetime) -> RunFacts:
    """Return the cold row of a new run."""
    return RunFacts(
        run_id=new.run_id,
        tenant_id=new.tenant_id,
        agent_id=new.agent_id,
        agent_version=new.agent_version,
        thread_id=new.thread_id,
        root_run_id=new.root_run_id or new.run_id,
        parent_run_id=new.parent_run_id,
        retry_of=new.retry_of,
        forked_from=new.forked_from,
        origin_run_id=new.origin_run_id,
        origin_seq=new.origin_seq,
        depth=new.depth,
        detached=new.detached,
        input=new.input,
        context=new.context,
        options=new.options,
        caller=new.caller,
        trace_id=new.trace_id,
        created_at=now,
        required_runtime=new.required_runtime,
        schema_version=SCHEMA_VERSION,
    )


def first_hot(new: NewRun, now: datetime, *, queued: bool) -> RunHot:
    """Return the hot row of a new run; `queued` behind another run of its thread.

    The `wake_at` of a run that is queued and delayed is kept until its turn comes.
    """
    limit_s = new.options.timeouts.run_s
    delayed = new.start_at is not None and new.start_at > now
    start_at = new.start_at if delayed else None
    return RunHot(
        state=RunState.PENDING,
        step_index=new.event.step_index,
        last_seq=1,
        parked_on=_first_wait(start_at, queued=queued),
        wake_at=start_at,
        deadline_at=None if limit_s is None else now + timedelta(seconds=limit_s),
        updated_at=now,
    )


def takes_no_turn(options: RunOptions) -> bool:
    """Tell whether a run never waits for its thread: it works beside the active run."""
    return options.multitask_strategy == "optimistic"


def superseding(new: NewRun) -> CancelWish | None:
    """Return the cancel that a new run has in store for its thread's active run, if any."""
    action = _SUPERSEDING.get(new.options.multitask_strategy)
    if action is None:
        return None
    reason = f"superseded by {new.run_id}"
    return CancelWish(action=action, by=new.caller.principal, source="thread", reason=reason)


_SUPERSEDING = {"interrupt": CancelAction.INTERRUPT, "rollback": CancelAction.ROLLBACK}


def first_event(new: NewRun, superseded: str | None, base: ThreadBase | None = None) -> NewEvent:
    """Return the event that creates a run, with the run that was cancelled for it and the thread
    that its own one was branched from.
    """
    if (superseded is None and base is None) or not isinstance(new.event.data, StateEvent):
        return new.event
    update: dict[str, object] = {"supersedes": superseded}
    if base is not None:
        update["branch"] = Branch(
            thread_id=base.base_thread_id, position=base.base_position, run_id=base.run_id or ""
        )
    data = new.event.data.model_copy(update=update)
    return NewEvent(data=data, step_index=new.event.step_index)


def _first_wait(start_at: datetime | None, *, queued: bool) -> ParkedOn | None:
    if queued:
        return ParkedOn.THREAD
    return None if start_at is None else ParkedOn.TIMER
