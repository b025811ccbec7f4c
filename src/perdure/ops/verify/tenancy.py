"""Whose a run is: tenant, thread, root, and that nothing of another run is mixed in."""

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord


@rule(
    "I20",
    "A run without a parent is its own root, at depth 0; a child has its parent's root and tenant, "
    "and is one deeper.",
)
def has_root(record: RunRecord) -> Found:
    facts = record.facts
    own = facts.root_run_id == facts.run_id
    if own != (facts.parent_run_id is None):
        yield "run", f"its parent is {facts.parent_run_id}, its root {facts.root_run_id}"
    if facts.parent_run_id is None:
        if facts.depth:
            yield "run", f"it has no parent and the depth {facts.depth}"
        return
    if record.parent is None:
        yield "run", f"its parent {facts.parent_run_id} does not exist"
        return
    over = record.parent.facts
    wanted = (over.root_run_id, over.tenant_id, over.depth + 1)
    if (facts.root_run_id, facts.tenant_id, facts.depth) != wanted:
        yield "run", f"root, tenant and depth do not follow from its parent {over.run_id}"


@rule(
    "I36",
    "Tenant and run agree across a run, its thread, events, calls, interrupts and artifacts.",
)
def nothing_foreign(record: RunRecord) -> Found:
    facts = record.facts
    if facts.caller.tenant_id != facts.tenant_id:
        yield "run", f"it is of {facts.tenant_id}, its caller of {facts.caller.tenant_id}"
    if record.thread is None:
        yield "run", f"its tenant has no thread {facts.thread_id}"
    for question in record.interrupts:
        if (question.tenant_id, question.run_id) != (facts.tenant_id, facts.run_id):
            yield question.interrupt_id, f"it is of {question.tenant_id}, {question.run_id}"
    for row in record.artifacts:
        owner = (row.tenant_id, row.run_id, row.thread_id)
        if owner != (facts.tenant_id, facts.run_id, facts.thread_id):
            yield row.artifact_id, f"it is of {owner}"
    for item in record.foreign:
        if record.is_told_damaged and item.seq < record.given_up_at:
            continue
        owner = item.owner or "no run of the tenant"
        yield f"event {item.seq}", f"it names the {item.kind} {item.id}, which is of {owner}"


RULES = (has_root, nothing_foreign)
