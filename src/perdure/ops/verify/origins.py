"""Runs that share the history of another, or took its place."""

from perdure.engine.continuing import goes_on_from
from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import StateEvent
from perdure.protocol.records import BaseKind
from perdure.protocol.states import CancelAction, RunState


@rule(
    "I70",
    "A run with an origin says so in its first event, and in no other, and whether it is a fork; "
    "the origin is of the same "
    "tenant, and its events are kept up to the place that is shared.",
)
def origin_is_told(record: RunRecord) -> Found:
    facts, sharing = record.facts, record.sharing
    named = None if facts.origin_run_id is None else (facts.origin_run_id, facts.origin_seq)
    for line, data in record.of(StateEvent):
        told = None if data.origin is None else (data.origin.run_id, data.origin.seq)
        if told != (named if line.seq == 1 else None):
            yield line.name, f"it tells the origin {told}, the row {named}"
        elif data.origin is not None and (data.origin.mode == "fork") == (
            facts.forked_from is None
        ):
            yield line.name, f"it tells a {data.origin.mode}, the row a fork of {facts.forked_from}"
    if named is None:
        return
    if sharing.problem is not None and record.hot.retained_from_seq == 1:
        yield "run", f"its shared history cannot be read: {sharing.problem}"
    if sharing.origin is None:
        return
    if sharing.origin.facts.tenant_id != facts.tenant_id:
        yield "run", f"its origin is of {sharing.origin.facts.tenant_id}"
    if not 1 <= (facts.origin_seq or 0) <= sharing.origin.hot.last_seq:
        yield "run", f"it shares {facts.origin_seq} events, there are {sharing.origin.hot.last_seq}"


@rule(
    "I71",
    "A retry is of a failed run of its thread, its agent and its tenant. Of a run that another is "
    "to go on from, I82 says how it ends.",
)
def retry_of_a_failure(record: RunRecord) -> Found:
    facts, retried = record.facts, record.sharing.retried
    if facts.retry_of is None:
        return
    if retried is None:
        yield "run", f"there is no run {facts.retry_of}"
        return
    if retried.hot.state is not RunState.FAILED and goes_on_from(facts) is None:
        yield "run", f"it retries {facts.retry_of}, which is {retried.hot.state}"
    mine = (facts.tenant_id, facts.thread_id, facts.agent_id)
    theirs = (retried.facts.tenant_id, retried.facts.thread_id, retried.facts.agent_id)
    if mine != theirs:
        yield "run", f"it is of {mine}, the run that it retries of {theirs}"


@rule(
    "I72",
    "A run for which another was cancelled names it in its first event, and in no other; that one "
    "is of its thread, and has a cancel as its options ask for, or a stronger one.",
)
def superseded_is_cancelled(record: RunRecord) -> Found:
    facts, other = record.facts, record.sharing.superseded
    for line, data in record.of(StateEvent):
        if data.supersedes is None:
            continue
        if line.seq != 1:
            yield line.name, f"it names {data.supersedes}, and is not the first"
        elif other is None:
            yield line.name, f"there is no run {data.supersedes}"
        elif (other.facts.tenant_id, other.facts.thread_id) != (facts.tenant_id, facts.thread_id):
            yield line.name, f"{data.supersedes} is of thread {other.facts.thread_id}"
        else:
            strategy, action = facts.options.multitask_strategy, other.hot.cancel_action
            if action not in _ENDED_BY.get(strategy, ()):
                yield line.name, f"{strategy} left {data.supersedes} with the cancel {action}"


_ENDED_BY = {
    "interrupt": (CancelAction.INTERRUPT, CancelAction.ROLLBACK),
    "rollback": (CancelAction.ROLLBACK,),
}


@rule(
    "I80",
    "A run for which a branch was made says so in its first event, and in no other: the thread, the "
    "place and the run that the base of its thread names, unless the thread was deleted.",
)
def branch_is_told(record: RunRecord) -> Found:
    deleted = record.thread is not None and record.thread.deleted_at is not None
    for line, data in record.of(StateEvent):
        if data.branch is None:
            continue
        if line.seq != 1:
            yield line.name, f"it names {data.branch.thread_id}, and is not the first"
        told = (data.branch.thread_id, data.branch.position, data.branch.run_id)
        forks = [base for base in record.sharing.bases if base.kind is BaseKind.FORK]
        found = [(base.base_thread_id, base.base_position, base.run_id) for base in forks]
        if found != [told] and not deleted:
            yield line.name, f"it tells the branch {told}, its thread {found}"


RULES = (origin_is_told, retry_of_a_failure, superseded_is_cancelled, branch_is_told)
