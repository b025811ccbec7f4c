"""What must hold after a campaign: the rows, what clients were told, and the payment journal."""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from typing import Any

from perdure.engine.core import Core
from perdure.ops.verify import verify
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.events import ResumeEvent
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, Answer, AttemptEnd, InterruptStatus, RunState
from perdure.service.base import Service
from perdure.service.events import Projector
from perdure.store.reader import InterruptFilter, RunFilter
from perdure.testing.chaos.clients import Told, answer_text, text_digest
from perdure.testing.chaos.fleet import Disturbances
from perdure.testing.chaos.report import Record
from perdure.testing.sim.checks import AFTER_THE_END, SUSPICIOUS

PAGE = 500
ONCE = frozenset({"pay_idempotent", "publish"})
"""Tools of which the provider makes one payment per key, whatever comes."""


async def check(
    core: Core,
    record: Record,
    told: Told,
    payments: list[dict[str, Any]],
    disturbances: Disturbances,
) -> None:
    """Check everything that a campaign left."""
    report = await verify(core.reader, on_finding=lambda one: record.found("verify", str(one)))
    record.count("verified", "runs", report.runs)
    record.count("verified", "events", report.events)
    if report.moving:
        record.found("verify", f"{report.moving} runs went on although all processes had ended")
    allowed = _Allowed()
    known: set[str] = set()
    answered: set[str] = set()
    async for row in all_runs(core):
        known.add(row.facts.run_id)
        answered |= await _check_run(core, record, told, row, allowed)
    for run_id in told.seen.keys() - known:
        record.found("lost", f"the start of {run_id} was acknowledged, and there is no such run")
    for interrupt_id in told.accepted.keys() - answered:
        record.found("answers", f"an answer to {interrupt_id} was accepted, and no log has one")
    _check_journal(record, payments, disturbances, allowed)


async def all_runs(core: Core, *, unfinished: bool = False) -> AsyncIterator[RunRow]:
    """Yield all runs, or those that have not ended."""
    after: str | None = None
    while True:
        where = RunFilter(unfinished=unfinished)
        page = await core.reader.list_runs(None, where, after=after, limit=PAGE)
        for row in page:
            yield row
        if len(page) < PAGE:
            return
        after = page[-1].facts.run_id


class _Allowed:
    """What excuses a further payment under a key."""

    def __init__(self) -> None:
        self.retries: Counter[str] = Counter()
        """By effect key: how often a person decided that a call is to be run again."""

        self.late: dict[str, set[int]] = defaultdict(set)
        """By effect key: executions whose result came after their worker had lost the run."""


async def _check_run(
    core: Core, record: Record, told: Told, row: RunRow, allowed: _Allowed
) -> set[str]:
    """Check one run; return the questions to which its log has an answer."""
    run_id, hot = row.facts.run_id, row.hot
    record.count("runs", "all")
    record.count("runs", "children" if row.facts.depth else "of clients")
    record.count("runs ended", f"{hot.state} {hot.code or ''}".strip())
    if hot.state not in TERMINAL:
        record.found("unfinished", f"{run_id} is {hot.state}, parked on {hot.parked_on}")
    if hot.code in SUSPICIOUS:
        record.found("end", f"{run_id} ended as {hot.code}")
    if run_id in told.cancelled and hot.state is RunState.SUCCEEDED:
        record.found("cancel", f"the cancel of {run_id} was accepted, and it succeeded")
    log = await _log(core, run_id)
    record.count("runs", "events", len(log))
    for attempt in await core.reader.list_attempts(run_id):
        record.count("attempts", str(attempt.end_reason or AttemptEnd.FINISHED))
    await _check_seen(core, record, told, row, log)
    answered = await _check_answers(core, record, told, run_id, log)
    await _gather_allowed(core, record, run_id, log, allowed)
    return answered


async def _log(core: Core, run_id: str) -> list[RecordedEvent]:
    log: list[RecordedEvent] = []
    while page := await core.reader.events_after(run_id, len(log), limit=PAGE):
        log += page
    return log


async def _check_seen(
    core: Core, record: Record, told: Told, row: RunRow, log: list[RecordedEvent]
) -> None:
    """What a client saw of a run is its log, up to the end, each event once and in order."""
    seen = told.seen.get(row.facts.run_id)
    if seen is None:
        return
    if seen.end is None:
        record.found("streams", f"whoever follows {row.facts.run_id} never came to its end")
    projector = Projector(Service(core=core), row)
    bodies = [(await projector.encode(event)).body for event in log]
    stored = [
        (event.seq, text_digest(body)) for event, body in zip(log, bodies, strict=True) if body
    ]
    last = seen.events[-1][0] if seen.events else 0
    unseen = {event.type for event in log if event.seq > last}
    if seen.events != stored[: len(seen.events)] or (seen.end and not unseen <= AFTER_THE_END):
        places = [one[0] for one in seen.events]
        record.found("streams", f"what was seen of {row.facts.run_id} is not its log: {places}")
    record.count("streams", "events compared", len(seen.events))


async def _check_answers(
    core: Core, record: Record, told: Told, run_id: str, log: list[RecordedEvent]
) -> set[str]:
    """The answer in the log is one that was sent, and the one of which a client was told so."""
    answered: set[str] = set()
    for event in log:
        resume = event.data
        if not isinstance(resume, ResumeEvent) or resume.outcome != "answered":
            continue
        answered.add(resume.interrupt_id)
        text = answer_text(resume.answer or "", resume.value)
        name = f"{resume.interrupt_id} of {run_id}"
        if text not in told.sent.get(resume.interrupt_id, []):
            record.found("answers", f"{name} has an answer that nobody gave: {text}")
        accepted = told.accepted.get(resume.interrupt_id, set())
        if accepted - {text}:
            record.found("answers", f"{name} has the answer {text}, but {accepted} was accepted")
    where = InterruptFilter(run_id=run_id, status=InterruptStatus.PENDING)
    left: list[InterruptRow] = await core.reader.list_interrupts(
        TENANT_DEFAULT, where, after=None, limit=1
    )
    for row in left:
        record.found("answers", f"{row.interrupt_id} of {run_id} is open after all has ended")
    return answered


async def _gather_allowed(
    core: Core, record: Record, run_id: str, log: list[RecordedEvent], allowed: _Allowed
) -> None:
    for event in log:
        resume = event.data
        if isinstance(resume, ResumeEvent) and resume.answer == Answer.RETRY:
            call = await core.reader.find_tool_call(TENANT_DEFAULT, resume.tool_call_id or "")
            allowed.retries["" if call is None else call.effect_key] += 1
    if not any(event.type == "late" for event in log):
        return
    for late in await core.reader.list_late(run_id):
        call = await core.reader.find_tool_call(TENANT_DEFAULT, late.tool_call_id)
        allowed.late["" if call is None else call.effect_key].add(late.execution)
        record.count("attempts", "late results")


def _check_journal(
    record: Record,
    payments: list[dict[str, Any]],
    disturbances: Disturbances,
    allowed: _Allowed,
) -> None:
    """At most one payment per key, one more for each decision to run a call again (C3).

    A payment of a worker that had lost the run is what decision 17 admits: it has a `late` row, or
    its process was stopped or cut off then, and was killed before it could tell. Of a tool that is
    idempotent nothing is admitted.
    """
    by_key: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for payment in payments:
        by_key[payment["key"]].append(payment)
        record.count("payments", payment["tool"])
    for key, made in by_key.items():
        is_once = made[0]["tool"] in ONCE
        counted = [one for one in made if is_once or one["execution"] not in allowed.late[key]]
        excess = len(counted) - 1 - (0 if is_once else allowed.retries[key])
        if len(made) > len(counted):
            record.count("payments", "of executions that had lost their run")
        if excess <= 0:
            continue
        excused = sum(disturbances.excuses(one["pid"], one["at"]) for one in counted)
        if not is_once and excess <= excused:
            record.count("payments", "of processes that were stopped or cut off", excess)
            continue
        record.found("journal", f"{key}: {made}, {allowed.retries[key]} retries decided")
