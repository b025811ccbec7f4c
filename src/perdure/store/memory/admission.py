"""How runs enter the memory store and how workers take them."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from perdure.protocol.errors import Conflict, Gone, NotFound, ThreadBusy
from perdure.protocol.messages import Role
from perdure.protocol.records import AttemptRow, MessageRow, ThreadBase, ThreadRow
from perdure.store import beginning, rules
from perdure.store.lineage import branch_base, branched
from perdure.store.memory.cancelling import cancel
from perdure.store.memory.state_values import copy
from perdure.store.memory.tables import Run, Tables
from perdure.store.requests import Claimed, ClaimWant, Inserted, NewRun


def insert(tables: Tables, new: NewRun, now: datetime) -> Inserted:
    """Create a run with all that belongs to it, or return the one that is there."""
    known = _known(tables, new)
    if known is not None:
        return Inserted(row=known.row, created=False, fingerprint=known.fingerprint)
    _check_origin(tables, new)
    thread = _thread_of(tables, new, now)
    if thread.active_run_id is not None and new.options.multitask_strategy == "fork":
        new = branched(new, thread.active_run_id)
        thread = _thread_of(tables, new, now)
    base = _base_of(tables, new, now)
    if base is not None:
        tables.bases.append(base)
        copy(tables, base)
        thread = replace(thread, last_position=base.base_position)
    queued = thread.active_run_id is not None and not beginning.takes_no_turn(new.options)
    if queued and new.options.multitask_strategy == "reject":
        raise ThreadBusy("the thread has an active run", details={"run_id": thread.active_run_id})
    superseded = _supersede(tables, thread, new, now)
    tables.threads[thread.thread_id] = replace(
        thread, active_run_id=thread.active_run_id or new.run_id
    )
    run = Run(
        facts=beginning.first_facts(new, now),
        kept=rules.Kept(hot=beginning.first_hot(new, now, queued=queued)),
        queue=new.queue,
        priority=new.priority,
        fingerprint=new.fingerprint,
        input_position=thread.last_position + 1,
    )
    _add(tables, run, replace(new, event=beginning.first_event(new, superseded, base)), now)
    if not queued:
        tables.ready[new.run_id] = run.hot.wake_at or now
    return Inserted(row=run.row, created=True, fingerprint=new.fingerprint, superseded=superseded)


def _supersede(tables: Tables, thread: ThreadRow, new: NewRun, now: datetime) -> str | None:
    """Cancel the thread's active run when the new one asks for it; return which was cancelled."""
    wish, active = beginning.superseding(new), thread.active_run_id
    if wish is None or active is None or not rules.accepts_cancel(tables.runs[active].hot, wish):
        return None
    cancel(tables, tables.runs[active], wish, now)
    return active


def _base_of(tables: Tables, new: NewRun, now: datetime) -> ThreadBase | None:
    """Return what the run's new thread says of the thread that it branches from."""
    if new.branches_from is None:
        return None
    source = tables.runs.get(new.branches_from)
    if source is None or tables.threads[source.facts.thread_id].deleted_at is not None:
        raise Gone("the thread was deleted")
    return branch_base(new, source.facts.thread_id, source.input_position, now)


def insert_children(tables: Tables, children: Sequence[NewRun], now: datetime) -> None:
    """Create the children of a commit; that their ids are free was looked at before."""
    for new in children:
        insert(tables, new, now)


def _known(tables: Tables, new: NewRun) -> Run | None:
    if new.run_id in tables.runs:
        return tables.runs[new.run_id]
    if new.idempotency_key is None:
        return None
    run_id = tables.keys.get((new.tenant_id, new.agent_id, new.idempotency_key))
    return None if run_id is None else tables.runs[run_id]


def _check_origin(tables: Tables, new: NewRun) -> None:
    if new.origin_run_id is None:
        return
    origin = tables.runs.get(new.origin_run_id)
    if origin is None or origin.hot.retained_from_seq > 1:
        raise Gone("the history that the run is to share is no longer kept")


def _thread_of(tables: Tables, new: NewRun, now: datetime) -> ThreadRow:
    thread = tables.threads.get(new.thread_id)
    if not new.creates_thread:
        if thread is None or thread.tenant_id != new.tenant_id:
            raise NotFound("no such thread")
        if thread.deleted_at is not None:
            raise Gone("the thread was deleted")
        return thread
    if thread is not None:
        raise Conflict("the thread exists")
    return ThreadRow(
        thread_id=new.thread_id,
        tenant_id=new.tenant_id,
        title="",
        metadata={},
        participants=[],
        capabilities=[],
        active_run_id=None,
        last_position=0,
        created_at=now,
        updated_at=now,
    )


def _add(tables: Tables, run: Run, new: NewRun, now: datetime) -> None:
    tables.runs[new.run_id] = run
    if new.idempotency_key is not None:
        tables.keys[new.tenant_id, new.agent_id, new.idempotency_key] = new.run_id
    tables.append(run, (new.event,))
    tables.keep_blobs(run, new.blobs, {blob.digest for blob in new.blobs}, now)
    tables.sync_deadline(run)
    tables.add_message(
        MessageRow(
            message_id=new.message_id,
            thread_id=new.thread_id,
            tenant_id=new.tenant_id,
            position=0,
            run_id=new.run_id,
            seq=None,
            role=Role.USER,
            author=new.caller.principal,
            body=None,
            created_at=now,
        )
    )


def claim(tables: Tables, want: ClaimWant, now: datetime) -> list[Claimed]:
    """Take runs: larger priority first, then by the time they became claimable, then by id."""
    fitting = [
        (-run.priority, at, run_id)
        for run_id, at in tables.ready.items()
        if at <= now and _fits(run := tables.runs[run_id], want)
    ]
    in_order = [tables.runs[run_id] for _, _, run_id in sorted(fitting)]
    suspected = [run for run in in_order if rules.is_suspected(run.hot)]
    left = {run.facts.run_id for run in suspected[want.suspects_max :]}
    chosen = [run for run in in_order if run.facts.run_id not in left]
    return [_take(tables, run, want, now) for run in chosen[: want.limit]]


def _fits(run: Run, want: ClaimWant) -> bool:
    facts = run.facts
    return (
        run.queue in want.queues
        and facts.agent_now in want.serves
        and facts.required_runtime <= want.runtime_version
    )


def _take(tables: Tables, run: Run, want: ClaimWant, now: datetime) -> Claimed:
    run_id = run.facts.run_id
    before = tables.attempts.get((run_id, run.hot.attempt))
    run.hot = rules.take(run.hot, want, now)
    del tables.ready[run_id]
    tables.attempts[run_id, run.hot.attempt] = AttemptRow(
        run_id=run_id,
        attempt=run.hot.attempt,
        token=run.hot.lease_token,
        worker_id=want.worker_id,
        started_at=run.hot.updated_at,
    )
    previous = None if before is None else before.end_reason
    tables.append_one(run, rules.claim_event(run.hot, want.worker_id, previous))
    return Claimed(
        row=run.row,
        token=run.hot.lease_token,
        input_position=run.input_position,
        deadline_in_s=rules.seconds_left(run.hot, now),
    )
