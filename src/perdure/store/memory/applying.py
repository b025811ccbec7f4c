"""Writes one commit into the tables: all of it, or nothing and the reason.

`why_not` looks for everything that a database's keys would refuse before `write` begins.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.records import (
    ArtifactRow,
    CheckpointRow,
    ExecutionRow,
    InterruptRow,
    MessageRow,
    StepRow,
)
from perdure.protocol.states import TERMINAL, ArtifactStatus, InterruptStatus, StepStatus
from perdure.store.commits import (
    Behind,
    Commit,
    CommitResult,
    Committed,
    InterruptClose,
    LeaseLost,
    NewExecution,
    NewInterrupt,
    Refused,
    StepChange,
)
from perdure.store.keeping import lasting_digests
from perdure.store.memory.admission import insert_children
from perdure.store.memory.state_values import have_moved, keep
from perdure.store.memory.tables import Run, Tables
from perdure.store.memory.threads import moved_at
from perdure.store.requests import TimerKind
from perdure.store.rules import advance, judge, ready_at

STEP_ENDS = frozenset({StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED})


def apply(tables: Tables, commit: Commit, now: datetime) -> CommitResult:
    """Judge a commit and write it; a run that does not exist is held by nobody."""
    run = tables.runs.get(commit.run_id)
    if run is None:
        return LeaseLost()
    verdict = judge(commit, run.hot)
    if verdict is not None:
        return verdict
    since = commit.unmoved_since
    if since is not None and moved_at(tables, run.facts.thread_id, since, commit.run_id):
        return Behind(seq=run.hot.last_seq)
    if commit.state_values and have_moved(tables, commit, run.facts.tenant_id):
        return Behind(seq=run.hot.last_seq)
    reason = why_not(tables, commit)
    if reason is not None:
        return Refused(reason=reason)
    _write(tables, run, commit, now)
    return Committed(seq=run.hot.last_seq, at=run.hot.updated_at)


# ---------------------------------------------------------------- what keys refuse


def why_not(tables: Tables, commit: Commit) -> str | None:
    """Return why a commit's rows cannot be stored, or None."""
    return (
        _twice(tables, commit)
        or _missing(tables, commit)
        or _threads(tables, commit)
        or _interrupts(tables, commit)
    )


def _twice(tables: Tables, commit: Commit) -> str | None:
    """Look for rows whose key is taken."""
    executions = [(new.tool_call_id, new.number) for new in commit.new_executions]
    checkpoints = [(commit.run_id, commit.checkpoint.seq)] if commit.checkpoint else []
    taken = (
        ("tool call", [row.tool_call_id for row in commit.new_calls], tables.calls),
        ("execution", executions, tables.executions),
        ("checkpoint", checkpoints, tables.checkpoints),
        ("interrupt", [new.interrupt_id for new in commit.new_interrupts], tables.interrupts),
        ("message", [new.message_id for new in commit.messages], tables.messages),
        ("artifact", [new.artifact_id for new in commit.artifacts], tables.artifacts),
        ("run", [new.run_id for new in commit.new_children], tables.runs),
        ("thread", _new_threads(commit), tables.threads),
    )
    for name, keys, table in taken:
        if len(set(keys)) != len(keys) or any(key in table for key in keys):
            return f"the {name} exists"
    return None


def _new_threads(commit: Commit) -> list[str]:
    return [new.thread_id for new in commit.new_children if new.creates_thread]


def _missing(tables: Tables, commit: Commit) -> str | None:
    """Look for changes of rows that are not there."""
    calls = {row.tool_call_id for row in commit.new_calls}
    named = [item.tool_call_id for item in (*commit.call_updates, *commit.new_executions)]
    if any(call_id not in calls and call_id not in tables.calls for call_id in named):
        return "no such tool call"
    begun = {(new.tool_call_id, new.number) for new in commit.new_executions}
    ended = [(end.tool_call_id, end.number) for end in commit.execution_ends]
    if any(key not in begun and key not in tables.executions for key in ended):
        return "no such execution"
    opened = {new.interrupt_id for new in commit.new_interrupts}
    spent = [new.approval_id for new in commit.new_executions if new.approval_id is not None]
    there = [tables.interrupts.get(key) for key in spent if key not in opened]
    if any(row is None or row.consumed_by for row in there) or len(set(spent)) != len(spent):
        return "no such approval, or it is spent"
    return None


def _threads(tables: Tables, commit: Commit) -> str | None:
    """Look for children that are to run on a thread that is not there."""
    made = set(_new_threads(commit))
    for new in commit.new_children:
        thread = tables.threads.get(new.thread_id)
        there = thread is not None and thread.tenant_id == new.tenant_id
        if new.thread_id not in made and not there:
            return "no such thread"
    return None


def _interrupts(tables: Tables, commit: Commit) -> str | None:
    """Look for keys used twice in the run, and for closes of what is not pending."""
    mine = [row for row in tables.interrupts.values() if row.run_id == commit.run_id]
    keys = [row.key for row in (*mine, *commit.new_interrupts) if row.key is not None]
    if len(set(keys)) != len(keys):
        return "the interrupt's key is used in this run"
    pending = {row.interrupt_id for row in mine if row.status is InterruptStatus.PENDING}
    pending |= {new.interrupt_id for new in commit.new_interrupts}
    closed = [close.interrupt_id for close in commit.interrupt_closes]
    if len(set(closed)) != len(closed) or not pending.issuperset(closed):
        return "the interrupt is not pending"
    return None


# ---------------------------------------------------------------- the writing


def _write(tables: Tables, run: Run, commit: Commit, now: datetime) -> None:
    run.kept = advance(run.kept, commit, now)
    at = run.hot.updated_at
    tables.append(run, commit.events)
    tables.keep_blobs(run, commit.blobs, lasting_digests(commit), now)
    for change in commit.steps:
        _move_step(tables, run, change, at)
    _write_calls(tables, run, commit, at)
    _write_products(tables, run, commit, at)
    for new in commit.new_interrupts:
        _open_interrupt(tables, run, new, now)
    for close in commit.interrupt_closes:
        _close_interrupt(tables, run, close, at)
    for execution in commit.new_executions:
        _begin_execution(tables, run, execution, at)
    for end in commit.execution_ends:
        row = tables.executions[end.tool_call_id, end.number]
        ended = replace(row, outcome=end.outcome, ended_at=at)
        tables.executions[end.tool_call_id, end.number] = ended
    if commit.attempt_end is not None:
        tables.end_attempt(run, commit.attempt_end)
    _write_relations(tables, run, commit, now)
    _schedule(tables, run, commit, now)


def _write_relations(tables: Tables, run: Run, commit: Commit, now: datetime) -> None:
    """Write what ties the run to its parent, its children and its agent."""
    insert_children(tables, commit.new_children, now)
    for child in commit.reported:
        tables.drop_timer(commit.run_id, TimerKind.CHILD, child)
    parent = tables.runs.get(commit.reports_to or "")
    if parent is not None and parent.hot.state not in TERMINAL:
        tables.set_timer(parent.facts.run_id, TimerKind.CHILD, now, commit.run_id)
    for new in commit.new_callbacks:
        due = now + timedelta(seconds=new.expires_in_s)
        tables.set_timer(commit.run_id, TimerKind.CALLBACK, due, new.tool_call_id)
    for call in commit.callbacks_over:
        tables.drop_timer(commit.run_id, TimerKind.CALLBACK, call)
    for notice in commit.notices:
        if notice.due_in_s is None:
            tables.drop_timer(commit.run_id, TimerKind.NOTICE, notice.interrupt_id)
        else:
            due = now + timedelta(seconds=notice.due_in_s)
            tables.set_timer(commit.run_id, TimerKind.NOTICE, due, notice.interrupt_id)
    if commit.state_values:
        keep(tables, run.facts, commit, run.hot.updated_at)
    if commit.handed_to is not None:
        run.facts = replace(run.facts, active_agent=commit.handed_to)


def _schedule(tables: Tables, run: Run, commit: Commit, now: datetime) -> None:
    """Set what wakes the run: its entry in `ready` and its timers."""
    if run.hot.state in TERMINAL:
        tables.end_run(run, now)
        return
    at = ready_at(run.hot, commit, now)
    if at is None:
        tables.ready.pop(commit.run_id, None)
    else:
        tables.ready[commit.run_id] = at
    tables.sync_deadline(run)
    if commit.close_in_s is not None:
        due = now + timedelta(seconds=commit.close_in_s)
        tables.set_timer(commit.run_id, TimerKind.CLOSE, due)


def _move_step(tables: Tables, run: Run, change: StepChange, at: datetime) -> None:
    key = (run.facts.run_id, change.index)
    row = tables.steps.get(key) or StepRow(
        run_id=run.facts.run_id,
        index=change.index,
        status=change.status,
        first_seq=change.first_seq,
        started_at=at,
    )
    ended = change.status in STEP_ENDS
    tables.steps[key] = replace(
        row,
        status=change.status,
        last_seq=row.last_seq if change.last_seq is None else change.last_seq,
        ended_at=(row.ended_at or at) if ended else None,
    )


def _write_calls(tables: Tables, run: Run, commit: Commit, at: datetime) -> None:
    for row in commit.new_calls:
        tables.calls[row.tool_call_id] = row
    for update in commit.call_updates:
        old = tables.calls[update.tool_call_id]
        tables.calls[update.tool_call_id] = replace(
            old,
            status=update.status,
            effective_digest=update.effective_digest or old.effective_digest,
            external_ref=update.external_ref or old.external_ref,
            result_seq=old.result_seq if update.result_seq is None else update.result_seq,
        )


def _begin_execution(tables: Tables, run: Run, new: NewExecution, at: datetime) -> None:
    tables.executions[new.tool_call_id, new.number] = ExecutionRow(
        tool_call_id=new.tool_call_id,
        number=new.number,
        run_id=run.facts.run_id,
        attempt=run.hot.attempt,
        args_digest=new.args_digest,
        started_at=at,
    )
    if new.approval_id is not None:
        approval = tables.interrupts[new.approval_id]
        tables.interrupts[new.approval_id] = replace(approval, consumed_by=new.number)


def _write_products(tables: Tables, run: Run, commit: Commit, at: datetime) -> None:
    """Write the checkpoint, messages and artifacts."""
    facts, new = run.facts, commit.checkpoint
    if new is not None:
        tables.checkpoints[facts.run_id, new.seq] = CheckpointRow(
            run_id=facts.run_id,
            seq=new.seq,
            parent_seq=new.parent_seq,
            step_index=new.step_index,
            attempt=run.hot.attempt,
            epoch=run.hot.cancel_epoch,
            schema_version=SCHEMA_VERSION,
            agent_state=new.agent_state,
            digest=new.digest,
            created_at=at,
        )
    for message in commit.messages:
        tables.add_message(
            MessageRow(
                message_id=message.message_id,
                thread_id=facts.thread_id,
                tenant_id=facts.tenant_id,
                position=0,
                run_id=facts.run_id,
                seq=message.seq,
                role=message.role,
                author=message.author,
                body=None,
                created_at=at,
            )
        )
    _write_artifacts(tables, run, commit, at)
    if commit.discards is not None:
        _discard(tables, run, commit.discards)


def _discard(tables: Tables, run: Run, digests: frozenset[str]) -> None:
    facts = run.facts
    for row in list(tables.artifacts.values()):
        if row.run_id == facts.run_id and row.status is not ArtifactStatus.ADOPTED:
            tables.artifacts[row.artifact_id] = replace(row, status=ArtifactStatus.DISCARDED)
    for digest in digests:
        tables.blob_uses.pop((facts.tenant_id, digest, facts.run_id), None)


def _write_artifacts(tables: Tables, run: Run, commit: Commit, at: datetime) -> None:
    for new in commit.artifacts:
        tables.artifacts[new.artifact_id] = ArtifactRow(
            artifact_id=new.artifact_id,
            run_id=run.facts.run_id,
            tenant_id=run.facts.tenant_id,
            thread_id=run.facts.thread_id,
            name=new.name,
            version=new.version,
            media_type=new.media_type,
            digest=new.digest,
            size=new.size,
            status=new.status,
            step_index=new.step_index,
            tool_call_id=new.tool_call_id,
            seq=new.seq,
            created_at=at,
        )


def _open_interrupt(tables: Tables, run: Run, new: NewInterrupt, now: datetime) -> None:
    expires_at = None
    if new.expires_in_s is not None:
        expires_at = now + timedelta(seconds=new.expires_in_s)
        tables.set_timer(run.facts.run_id, TimerKind.EXPIRY, expires_at, new.interrupt_id)
    tables.interrupts[new.interrupt_id] = InterruptRow(
        interrupt_id=new.interrupt_id,
        run_id=run.facts.run_id,
        tenant_id=run.facts.tenant_id,
        kind=new.kind,
        status=InterruptStatus.PENDING,
        key=new.key,
        tool_call_id=new.tool_call_id,
        args_digest=new.args_digest,
        definition_digest=new.definition_digest,
        opened_seq=new.opened_seq,
        expires_at=expires_at,
        on_expiry=new.on_expiry,
        created_at=run.hot.updated_at,
    )


def _close_interrupt(tables: Tables, run: Run, close: InterruptClose, at: datetime) -> None:
    row = tables.interrupts[close.interrupt_id]
    tables.interrupts[close.interrupt_id] = replace(
        row,
        status=close.status,
        closed_seq=close.closed_seq,
        args_digest=close.effective_digest or row.args_digest,
        answer=close.answer,
        answer_digest=close.answer_digest,
        answered_by=close.answered_by,
        answered_at=at if close.status is InterruptStatus.ANSWERED else None,
    )
    tables.drop_timer(run.facts.run_id, TimerKind.EXPIRY, close.interrupt_id)
    tables.drop_timer(run.facts.run_id, TimerKind.NOTICE, close.interrupt_id)
