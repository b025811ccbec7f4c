"""What must hold after a play: progress, the rows, the journal, the answers and what was followed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from perdure.engine.answers import Reply
from perdure.ops.verify import verify
from perdure.protocol.events import ResumeEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, Answer, RunState
from perdure.store.memory import MemoryDatabase
from perdure.store.reader import RunFilter
from perdure.testing.sim.actors import Effect

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
    sent: dict[str, dict[str, Reply]] = field(default_factory=dict[str, dict[str, Reply]])
    """The answers that were sent to each interrupt, by who gave them."""

    accepted: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Who was told that the answer counts."""

    seen: dict[str, list[RecordedEvent]] = field(default_factory=dict[str, list[RecordedEvent]])
    cancelled: set[str] = field(default_factory=set[str])
    """The runs whose cancel was accepted before they ended."""

    followed: set[str] = field(default_factory=set[str])
    runs: int = 0
    events: int = 0

    def found(self, check: str, text: str) -> None:
        """Note a finding."""
        self.findings.append(Finding(check, text))


async def unfinished(database: MemoryDatabase) -> list[str]:
    """Return what has not ended, in words."""
    return [
        f"{row.facts.run_id} is {row.hot.state}, parked on {row.hot.parked_on}, held by "
        f"{row.hot.lease_owner}, cancel epoch {row.hot.cancel_epoch}, faults {row.hot.faults}"
        for row in await _runs(database)
        if row.hot.state not in TERMINAL
    ]


async def check(facts: Facts, database: MemoryDatabase) -> None:
    """Check everything that a play left."""
    await verify(database.reader, on_finding=lambda one: facts.found("verify", str(one)))
    retries: Counter[str] = Counter()
    for row in await _runs(database):
        log = await _log(database, row.facts.run_id)
        facts.runs += 1
        facts.events += len(log)
        _cover(facts, row, log)
        _check_end(facts, row)
        _check_answers(facts, log)
        _check_followed(facts, row.facts.run_id, log)
        retries += await _retries(database, log)
    _check_journal(facts, retries)


async def _runs(database: MemoryDatabase) -> list[RunRow]:
    rows: list[RunRow] = []
    after: str | None = None
    while page := await database.reader.list_runs(None, RunFilter(), after=after, limit=PAGE):
        rows += page
        after = page[-1].facts.run_id
    return rows


async def _log(database: MemoryDatabase, run_id: str) -> list[RecordedEvent]:
    log: list[RecordedEvent] = []
    while page := await database.reader.events_after(run_id, len(log), limit=PAGE):
        log += page
    return log


def _cover(facts: Facts, row: RunRow, log: Sequence[RecordedEvent]) -> None:
    for event in log:
        facts.coverage[f"event {event.type}"] += 1
        if isinstance(event.data, StateEvent) and event.data.why is not None:
            facts.coverage[f"transition {event.data.why}"] += 1
    facts.coverage[f"end {row.hot.state} {row.hot.code or ''}".strip()] += 1


def _check_end(facts: Facts, row: RunRow) -> None:
    if row.hot.code in SUSPICIOUS:
        facts.found("end", f"{row.facts.run_id} ended as {row.hot.code}")
    if row.facts.run_id in facts.cancelled and row.hot.state is RunState.SUCCEEDED:
        facts.found("cancel", f"the cancel of {row.facts.run_id} was accepted, and it succeeded")


def _check_answers(facts: Facts, log: Sequence[RecordedEvent]) -> None:
    """The answer in the log is one that was sent to this question, and the one that was accepted."""
    for event in log:
        resume = event.data
        if not isinstance(resume, ResumeEvent) or resume.outcome != "answered":
            continue
        sent = facts.sent.get(resume.interrupt_id, {})
        reply = sent.get(resume.by or "")
        named = f"{resume.interrupt_id} (event {event.seq} of {event.run_id})"
        if reply is None:
            facts.found("answers", f"{named} has an answer of {resume.by}, who gave it none")
        elif resume.answer != reply.answer:
            facts.found("answers", f"{named} was answered {reply.answer}, not {resume.answer}")
        accepted = facts.accepted.get(resume.interrupt_id, [])
        if any(by != resume.by and not _same(sent, by, resume.by) for by in accepted):
            facts.found("answers", f"{named} has the answer of {resume.by}, not of {accepted}")


def _same(sent: dict[str, Reply], one: str, other: str | None) -> bool:
    return one in sent and other in sent and sent[one].digest() == sent[other or ""].digest()


def _check_followed(facts: Facts, run_id: str, log: Sequence[RecordedEvent]) -> None:
    seen = facts.seen.get(run_id)
    if seen is None:
        return
    if run_id not in facts.followed:
        facts.found("followers", f"whoever follows {run_id} never came to its end")
        return
    told, written = ([(e.seq, e.type, e.raw) for e in events] for events in (seen, log))
    unseen = {e.type for e in log[len(seen) :]}
    if told != written[: len(told)] or not unseen <= AFTER_THE_END:
        facts.found("followers", f"what was seen of {run_id} is not its log")


async def _retries(database: MemoryDatabase, log: Sequence[RecordedEvent]) -> Counter[str]:
    """Return by effect key how often people decided that a call is to be run again."""
    retries: Counter[str] = Counter()
    for event in log:
        resume = event.data
        if not isinstance(resume, ResumeEvent) or resume.answer != Answer.RETRY:
            continue
        call = await database.reader.find_tool_call("default", resume.tool_call_id or "")
        if call is not None:
            retries[call.effect_key or ""] += 1
    return retries


def _check_journal(facts: Facts, retries: Counter[str]) -> None:
    """At most one effect per key, one more for each decision to run again (C3).

    An effect of a worker that was stopped, or whose lease a clock took away, between check and
    effect is what decision 17 admits; for idempotent tools nothing is admitted.
    """
    effects: Counter[str] = Counter()
    for effect in facts.journal:
        once = effect.tool in {"pay_idempotent", "publish"}
        effects[effect.key] += once or not effect.disturbed
        facts.coverage[f"effect {effect.tool}"] += 1
        if effect.disturbed and not once:
            facts.coverage["effect of a disturbed worker"] += 1
    for key, count in effects.items():
        if count > 1 + retries[key]:
            facts.found("journal", f"{count} effects under {key}, {retries[key]} retries decided")
