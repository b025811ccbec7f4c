"""The table of all checks, by id, and of those that wait for their feature."""

from perdure.ops.verify import (
    actions,
    approvals,
    artifacts,
    by_hand,
    cancel,
    compensation,
    deltas,
    hot,
    humans,
    journal,
    life,
    live,
    origins,
    outside,
    ownership,
    replay,
    steps,
    tenancy,
    threads,
    tree,
)
from perdure.ops.verify.checks import Check, Rule
from perdure.ops.verify.keys import I27
from perdure.ops.verify.live import Moment
from perdure.ops.verify.outside import Effects
from perdure.ops.verify.record import RunRecord
from perdure.ops.verify.threads import ThreadRecord

RUN_RULES: tuple[Rule[RunRecord], ...] = (
    *life.RULES,
    *actions.RULES,
    *ownership.RULES,
    *cancel.RULES,
    *compensation.RULES,
    *steps.RULES,
    *humans.RULES,
    *approvals.RULES,
    *by_hand.RULES,
    *artifacts.RULES,
    *tenancy.RULES,
    *tree.RULES,
    *hot.RULES,
    *deltas.RULES,
    *journal.RULES,
    *replay.RULES,
    *origins.RULES,
)
THREAD_RULES: tuple[Rule[ThreadRecord], ...] = threads.RULES
LIVE_RULES: tuple[Rule[Moment], ...] = live.RULES
JOURNAL_RULES: tuple[Rule[Effects], ...] = outside.RULES


def _all() -> dict[str, Check]:
    checks = [rule.check for rule in RUN_RULES]
    checks += [rule.check for rule in THREAD_RULES]
    checks += [rule.check for rule in LIVE_RULES]
    checks += [rule.check for rule in JOURNAL_RULES]
    found = {check.id: check for check in [*checks, I27]}
    assert len(found) == len(checks) + 1, "an id is used twice"
    order = "ICHML"
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0])))


CHECKS: dict[str, Check] = _all()

WAITING: dict[str, str] = {
    "I38": "no usage ledger yet: counters are compared with the log instead (C1)",
    "I40": "no usage ledger yet: no physical request keys are stored",
    "I51": "no outbox yet",
    "C2": "checked by the stream tests, which record the bytes of clients",
    "C5": "checked by the tests that plant canary values",
    "C7": "checked by the tests with tenants as canaries",
    "C8": "checked by the backup drill",
    "L2": "needs the quota and slots of workers, which rows do not tell",
    "L3": "no deadline for cancelling is stored yet",
    "L5": "no timeout of a call is stored with it yet",
    "L7": "no outbox yet",
    "L8": "a property of the end of a chaos test, not of a database",
}
"""Checks of the catalogue that are not made here, each with the reason."""
