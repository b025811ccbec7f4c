"""What must hold after a play: progress, the rows, the journal, the answers and what was followed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.engine.answers import Reply
from perdure.engine.ports import ApprovalNotice
from perdure.ops.verify import verify
from perdure.ops.verify.checks import Finding as VerifyFinding
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.events import (
    ActionEvent,
    CompensationEvent,
    ResultEvent,
    ResumeEvent,
    StateEvent,
)
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, Answer, RunState
from perdure.protocol.tools import ToolResult
from perdure.store.ports import Database
from perdure.store.reader import RunFilter
from perdure.testing.sim.bookkeeping import Books
from perdure.testing.sim.outside import Effect, Undone
from perdure.testing.sim.tools import ONCE

PAGE = 500
SUSPICIOUS = frozenset(
    {
        FailureCode.INTERNAL,
        FailureCode.CHECKPOINT_INCOMPATIBLE,
        FailureCode.NON_DETERMINISTIC,
        FailureCode.TOOL_NOT_FOUND,
    }
)
"""Ends for which no script gives a reason."""


BY_TIME = frozenset({"I37"})
"""Invariants that compare times of several runs."""

AFTER_THE_END = frozenset({"late", "repair", "compensation"})
"""What may still be written to a run that has ended, when followers have left it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that must not be."""

    check: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.text}"


@dataclass(slots=True)
class Facts:
    """What the world around the engine knows of a play."""

    findings: list[Finding] = field(default_factory=list[Finding])
    coverage: Counter[str] = field(default_factory=Counter[str])
    journal: list[Effect] = field(default_factory=list[Effect])
    undone: list[Undone] = field(default_factory=list[Undone])
    notices: list[ApprovalNotice] = field(default_factory=list[ApprovalNotice])
    sent: dict[str, list[Reply]] = field(default_factory=dict[str, list[Reply]])
    """The answers that were sent to each interrupt."""

    accepted: dict[str, list[Reply]] = field(default_factory=dict[str, list[Reply]])
    """Those of which it was said that they count."""

    called: dict[str, list[ToolResult]] = field(default_factory=dict[str, list[ToolResult]])
    """The results that the provider told of each call."""

    taken: dict[str, list[ToolResult]] = field(default_factory=dict[str, list[ToolResult]])
    """Those of which it was said that they count."""

    set_back: bool = False
    """The database's clock was set back: what comes later may have an earlier time."""

    releases: bool = False
    """Versions of agents go away, and their runs end with them."""

    seen: dict[str, list[RecordedEvent]] = field(default_factory=dict[str, list[RecordedEvent]])
    cancelled: set[str] = field(default_factory=set[str])
    """The runs whose cancel was accepted before they ended."""

    followed: set[str] = field(default_factory=set[str])
    runs: int = 0
    events: int = 0

    def found(self, check: str, text: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(check, text))


async def unfinished(database: Database) -> list[str]:
    """Return what has not ended, in words."""
    return [
        f"{row.facts.run_id} is {row.hot.state}, parked on {row.hot.parked_on}, held by "
        f"{row.hot.lease_owner}, cancel epoch {row.hot.cancel_epoch}, faults {row.hot.faults}"
        for row in await _runs(database)
        if row.hot.state not in TERMINAL
    ]


async def check(facts: Facts, database: Database) -> None:
    """Check everything that a play left."""
    by_time = BY_TIME if facts.set_back else frozenset[str]()
    found: list[VerifyFinding] = []
    await verify(database.reader, on_finding=found.append)
    for one in found:
        if one.check not in by_time:
            facts.found("verify", str(one))
    retries: Counter[str] = Counter()
    undoing: dict[str, set[str]] = {}
    answered: set[str | None] = set()
    books = Books(lambda text: facts.found("fields", text), not facts.set_back, facts.coverage)
    for row in await _runs(database):
        log = await _log(database, row.facts.run_id)
        books.add(row, log)
        facts.runs += 1
        facts.events += len(log)
        _cover(facts, row, log)
        _check_end(facts, row)
        _check_answers(facts, log)
        _check_callbacks(facts, log)
        _check_followed(facts, row, log)
        retries += await _retries(facts, database, row, log)
        retries += _redriven(log)
        for event in log:
            if isinstance(event.data, ResumeEvent) and event.data.outcome == "answered":
                answered.add(event.data.interrupt_id)
            if isinstance(event.data, CompensationEvent):
                undoing.setdefault(event.data.key, set()).add(event.data.status)
    await books.check(database.reader)
    _check_lost_answers(facts, answered)
    _check_journal(facts, retries)
    _check_undone(facts, undoing)


async def _runs(database: Database) -> list[RunRow]:
    rows: list[RunRow] = []
    after: str | None = None
    while page := await database.reader.list_runs(None, RunFilter(), after=after, limit=PAGE):
        rows += page
        after = page[-1].facts.run_id
    return rows


async def _log(database: Database, run_id: str) -> list[RecordedEvent]:
    log: list[RecordedEvent] = []
    seq = 0
    while page := await database.reader.events_after(run_id, seq, limit=PAGE):
        log += page
        seq = page[-1].seq
    return log


def _cover(facts: Facts, row: RunRow, log: Sequence[RecordedEvent]) -> None:
    for event in log:
        facts.coverage[f"event {event.type}"] += 1
        if isinstance(event.data, StateEvent) and event.data.why is not None:
            facts.coverage[f"transition {event.data.why}"] += 1
        if isinstance(event.data, CompensationEvent):
            facts.coverage[f"compensation {event.data.status}"] += 1
    if row.hot.retained_from_seq > 1:
        facts.coverage["history dropped"] += 1
    facts.coverage[f"end {row.hot.state} {row.hot.code or ''}".strip()] += 1


def _check_end(facts: Facts, row: RunRow) -> None:
    gone = row.hot.code is FailureCode.CHECKPOINT_INCOMPATIBLE and facts.releases
    if row.hot.code in SUSPICIOUS and not gone:
        facts.found("end", f"{row.facts.run_id} ended as {row.hot.code}")
    if row.facts.run_id in facts.cancelled and row.hot.state is RunState.SUCCEEDED:
        facts.found("cancel", f"the cancel of {row.facts.run_id} was accepted, and it succeeded")


def _check_answers(facts: Facts, log: Sequence[RecordedEvent]) -> None:
    """The answer in the log is one that was sent to this question, and the one that was accepted."""
    for event in log:
        resume = event.data
        if not isinstance(resume, ResumeEvent) or resume.outcome != "answered":
            continue
        if resume.answer in {Answer.CONTINUE, Answer.STEP}:
            continue
        told = Reply(
            answer=Answer(resume.answer or ""),
            by=resume.by or "",
            value=resume.value,
            args=resume.effective_args,
        )
        named = f"{resume.interrupt_id} (event {event.seq} of {event.run_id})"
        sent = [(one.by, one.digest()) for one in facts.sent.get(resume.interrupt_id, [])]
        if (told.by, told.digest()) not in sent:
            facts.found("answers", f"{named} has an answer that nobody gave it: {told}")
        accepted = facts.accepted.get(resume.interrupt_id, [])
        if any(one.digest() != told.digest() for one in accepted):
            facts.found("answers", f"{named} has the answer {told}, not {accepted}")


def _check_lost_answers(facts: Facts, answered: set[str | None]) -> None:
    """Every answer that was accepted is in a log, unless logs are no longer kept."""
    if "history dropped" in facts.coverage:
        return
    for interrupt_id in facts.accepted.keys() - answered:
        facts.found("answers", f"an answer to {interrupt_id} was accepted, and no log has one")


def _check_callbacks(facts: Facts, log: Sequence[RecordedEvent]) -> None:
    """The result of a callback is one that was told of this call, and the one that was taken."""
    for event in log:
        result = event.data
        if not isinstance(result, ResultEvent) or result.by != "callback":
            continue
        told = _in_short(result)
        named = f"{result.tool_call_id} (event {event.seq} of {event.run_id})"
        called = [_in_short(one) for one in facts.called.get(result.tool_call_id, [])]
        if told not in called:
            facts.found("callbacks", f"{named} has a result that nobody told: {told}")
        taken = [_in_short(one) for one in facts.taken.get(result.tool_call_id, [])]
        if any(one != told for one in taken):
            facts.found("callbacks", f"{named} has the result {told}, not {taken}")


def _in_short(result: ResultEvent | ToolResult) -> tuple[str, str]:
    reason = "" if result.error is None else result.error.reason
    return result.status, f"{result.output} {reason}"


def _check_followed(facts: Facts, row: RunRow, log: Sequence[RecordedEvent]) -> None:
    """What was followed is the log, as far as it is kept, up to the end."""
    run_id = row.facts.run_id
    seen = facts.seen.get(run_id)
    if seen is None:
        return
    if run_id not in facts.followed:
        facts.found("followers", f"whoever follows {run_id} never came to its end")
        return
    kept_from = row.hot.retained_from_seq
    last = seen[-1].seq if seen else 0
    told = [(e.seq, e.type, e.raw) for e in seen if e.seq >= kept_from]
    written = [(e.seq, e.type, e.raw) for e in log if e.seq <= last]
    before = [e.seq for e in seen if e.seq < kept_from]
    in_order = before == list(range(1, len(before) + 1))
    unseen = {e.type for e in log if e.seq > last}
    if told != written or not in_order or not unseen <= AFTER_THE_END:
        facts.found("followers", f"what was seen of {run_id} is not its log")


async def _retries(
    facts: Facts, database: Database, row: RunRow, log: Sequence[RecordedEvent]
) -> Counter[str]:
    """Return by effect key how often people decided that a call is to be run again.

    Where the log is no longer kept, how often they said so.
    """
    retries: Counter[str] = Counter()
    calls: list[str | None] = [
        event.data.tool_call_id
        for event in log
        if isinstance(event.data, ResumeEvent) and event.data.answer == Answer.RETRY
    ]
    if row.hot.retained_from_seq > 1:
        for interrupt_id, replies in facts.sent.items():
            asked = await database.reader.find_interrupt(TENANT_DEFAULT, interrupt_id)
            if asked is not None and asked.run_id == row.facts.run_id:
                calls += [asked.tool_call_id for one in replies if one.answer is Answer.RETRY]
    for tool_call_id in calls:
        call = await database.reader.find_tool_call(TENANT_DEFAULT, tool_call_id or "")
        if call is not None:
            retries[call.effect_key or ""] += 1
    return retries


def _redriven(log: Sequence[RecordedEvent]) -> Counter[str]:
    """Return the keys of calls that a redrive makes again in its first step: that was decided too."""
    began = log[0].data if log else None
    if not isinstance(began, StateEvent) or began.origin is None:
        return Counter()
    if began.origin.mode != "redrive":
        return Counter()
    over = next((event.seq for event in log if event.type == "step"), log[-1].seq)
    return Counter(
        event.data.effect_key
        for event in log
        if isinstance(event.data, ActionEvent) and event.seq < over
    )


def _check_journal(facts: Facts, retries: Counter[str]) -> None:
    """At most one effect per key, one more for each decision to run again (C3).

    An effect of a worker that was stopped, or whose lease a clock took away, between check and
    effect is what decision 17 admits; for idempotent tools nothing is admitted.
    """
    effects: Counter[str] = Counter()
    for effect in facts.journal:
        once = effect.tool in ONCE
        effects[effect.key] += once or not effect.disturbed
        facts.coverage[f"effect {effect.tool}"] += 1
        if effect.disturbed and not once:
            facts.coverage["effect of a disturbed worker"] += 1
    for key, count in effects.items():
        if count > 1 + retries[key]:
            facts.found("journal", f"{count} effects under {key}, {retries[key]} retries decided")


def _check_undone(facts: Facts, undoing: dict[str, set[str]]) -> None:
    """What was undone had been done, was to be undone, and is so once; what is told is so."""
    done = {effect.key for effect in facts.journal}
    kept = "history dropped" not in facts.coverage
    for key, count in Counter(one.key for one in facts.undone).items():
        if count > 1:
            facts.found("undone", f"{count} times under {key}")
        if kept and "started" not in undoing.get(key, set()):
            facts.found("undone", f"{key} was undone, and nothing tells of it")
    for one in facts.undone:
        facts.coverage["effect undone"] += 1
        if one.of not in done:
            facts.found("undone", f"{one.of} was undone and never done")
    undone = {one.key for one in facts.undone}
    for key, told in undoing.items():
        if "succeeded" in told and key not in undone:
            facts.found("undone", f"{key} is told of as undone, and is not")
    facts.coverage["approvers told"] += len(facts.notices)
