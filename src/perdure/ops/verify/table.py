"""The table of all checks, by id, and of those that wait for their feature."""

from collections.abc import Iterable, Iterator

from perdure.ops.verify import (
    actions,
    approvals,
    artifacts,
    by_hand,
    cancel,
    compensation,
    deltas,
    fields,
    holding,
    hot,
    humans,
    journal,
    life,
    live,
    origins,
    outside,
    ownership,
    repairs,
    replay,
    steps,
    tenancy,
    threads,
    tree,
)
from perdure.ops.verify.checks import Check, Rule
from perdure.ops.verify.holding import AgentRecord
from perdure.ops.verify.keys import I27
from perdure.ops.verify.left import I68
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
    *repairs.RULES,
    *artifacts.RULES,
    *tenancy.RULES,
    *tree.RULES,
    *hot.RULES,
    *deltas.RULES,
    *journal.RULES,
    *fields.RULES,
    *replay.RULES,
    *origins.RULES,
)
THREAD_RULES: tuple[Rule[ThreadRecord], ...] = threads.RULES
AGENT_RULES: tuple[Rule[AgentRecord], ...] = holding.RULES
LIVE_RULES: tuple[Rule[Moment], ...] = live.RULES
JOURNAL_RULES: tuple[Rule[Effects], ...] = outside.RULES

_OF_A_SOUND_LOG = frozenset(
    [
        "I03",
        "I06",
        "I07",
        "I08",
        "I09",
        "I10",
        "I11",
        "I16",
        "I17",
        "I22",
        "I23",
        "I24",
        "I32",
        "I33",
        "I34",
        "I42",
        "I46",
        "I48",
        "I50",
        "I60",
        "I61",
        "I62",
        "I63",
        "I64",
        "I65",
        "I66",
        "I67",
        "I70",
        "I72",
        "I73",
        "I74",
        "I76",
        "I80",
        "I81",
        "C4",
    ]
)
"""Checks that compare events with each other or with rows. The log of a run that a repair has ended
for its damage says nothing about them any more.
"""


def asked_of(record: RunRecord, rules: Iterable[Rule[RunRecord]]) -> Iterator[Rule[RunRecord]]:
    """Yield those of the rules that can be asked of a run."""
    for rule in rules:
        if rule.check.id not in _OF_A_SOUND_LOG or not record.is_told_damaged:
            yield rule


def _all() -> dict[str, Check]:
    checks = [rule.check for rule in RUN_RULES]
    checks += [rule.check for rule in THREAD_RULES]
    checks += [rule.check for rule in AGENT_RULES]
    checks += [rule.check for rule in LIVE_RULES]
    checks += [rule.check for rule in JOURNAL_RULES]
    found = {check.id: check for check in [*checks, I27, I68]}
    assert len(found) == len(checks) + 2, "an id is used twice"
    order = "ICHML"
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0])))


CHECKS: dict[str, Check] = _all()

WAITING: dict[str, str] = {
    "I38": "waits for budgets with a usage ledger: counters are compared with the log instead (C1)",
    "I40": "waits for budgets with a usage ledger: no keys of physical requests are stored yet",
    "I51": "waits for webhooks: there is no outbox yet",
    "C2": "needs the bytes that clients received: the stream tests compare them with the log",
    "C5": "waits for the protected store of secrets; needs values that a test has planted",
    "C7": "waits for authentication of several tenants; needs values that a test has planted",
    "C8": "needs a copy: `tests/flow/test_backup.py` takes one in the middle of work, verifies it "
    "and lets it go on",
    "L2": "waits for quotas: rows do not tell which worker has a free slot for whom",
    "L5": "the timeout of a call is its tool's and not stored with it",
    "L7": "waits for webhooks: there is no outbox yet",
    "L8": "a property of the end of a chaos test, not of a database",
}
"""Checks of the catalogue that are not made here, each with the reason."""
