"""Playing one case of the acceptance scene, and what must be true of it afterwards."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from pydantic import JsonValue

from perdure.protocol.events import CancelEvent, ResultEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import AttemptRow, ExecutionRow, ToolCallRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import TERMINAL, AttemptEnd, RunState, ToolCallStatus
from perdure.testing.faults import Boundary, Plan, When
from perdure.testing.scene import Act, Order, cancel_act, submit_act
from tests.crash.cases import Case, Hook
from tests.crash.stage import Actor, Followed, Stage, staged

PAYMENTS = 4
"""How many payments an undisturbed run of the scene makes."""

_AGAIN = {ToolCallStatus.TIMED_OUT, ToolCallStatus.UNKNOWN, ToolCallStatus.FAILED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A scene that is over."""

    row: RunRow
    followed: list[RecordedEvent]
    stored: list[RecordedEvent]
    attempts: list[AttemptRow]
    calls: list[ToolCallRow]
    executions: list[ExecutionRow]
    payments: list[dict[str, Any]]
    began: list[dict[str, Any]]
    findings: list[str]

    @property
    def end(self) -> StateEvent:
        """The terminal event."""
        (end,) = [
            event.data
            for event in self.stored
            if isinstance(event.data, StateEvent) and event.data.state in TERMINAL
        ]
        return end

    @property
    def answer(self) -> JsonValue:
        """What the run answered."""
        return self.end.answer


async def undisturbed(url: str, folder: Path, act: Act = "pay") -> Seen:
    """Play the scene without a fault."""
    async with staged(url, folder) as stage:
        followed = await stage.submit(act)
        worker = await stage.worker()
        await followed.wait(worker)
        await worker.drained()
        return await _seen(stage, followed)


async def play(case: Case, url: str, folder: Path) -> Seen:
    """Play a case to its end. Fails when its fault did not happen."""
    async with staged(url, folder) as stage:
        followed = await _begin(stage, case)
        worker = await _worked(stage, case, followed)
        await followed.wait(worker)
        await worker.drained()
        assert _report(folder, "fault").exists(), "the boundary was not met"
        return await _seen(stage, followed)


def _report(folder: Path, name: str) -> Path:
    return folder / f"{name}.report"


def _plan(folder: Path, hook: Hook, when: When, name: str) -> Plan:
    return Plan(
        boundary=hook.boundary,
        when=when,
        nth=hook.nth,
        tool=hook.tool,
        report=_report(folder, name),
    )


async def _begin(stage: Stage, case: Case) -> Followed:
    """Order the run, through a faulty process where that is the case; follow it."""
    if case.hook.by == "submitter":
        await _request(stage, case, "submit", "")
        return stage.follow(await submit_act(stage.core, "pay", "scene"))
    if case.hook.by == "answerer":

        async def answer(interrupt_id: str) -> None:
            if not _report(stage.folder, "fault").exists():
                await _request(stage, case, "answer", interrupt_id)
            await stage.approve(interrupt_id)

        stage.approvals = answer
    return await stage.submit(case.hook.act)


async def _request(stage: Stage, case: Case, do: Any, subject: str) -> None:
    """Send one request through a process with the fault; the caller sends it again."""
    actor = await stage.start(
        Order(
            do=do,
            db_url=stage.url,
            folder=stage.folder,
            plan=_plan(stage.folder, case.hook, case.when, "fault"),
            subject=subject,
        )
    )
    if case.when is When.ACK_LOST:
        assert await actor.ended() == 0, actor.said()
    else:
        await actor.was_killed()


async def _worked(stage: Stage, case: Case, followed: Followed) -> Actor:
    """Let workers do what the case says; return the one that brings the run to its end."""
    hook = case.hook
    if hook.prelude is not None:
        way = When.AFTER if hook.prelude.boundary is Boundary.EFFECT else When.BEFORE
        first = await stage.worker(_plan(stage.folder, hook.prelude, way, "prelude"))
        await first.was_killed()
    if hook.boundary is Boundary.RECLAIM:
        await stage.lease_ran_out(followed.run_id)
    faulty = hook.by == "worker"
    worker = await stage.worker(_plan(stage.folder, hook, case.when, "fault") if faulty else None)
    if hook.act == "hold":
        await stage.began("hold")
        if hook.by == "canceller":
            await _request(stage, case, "cancel", followed.run_id)
        await cancel_act(stage.core, followed.run_id)
    if faulty and case.when is not When.ACK_LOST:
        await worker.was_killed()
        worker = await stage.worker()
    return worker


async def _seen(stage: Stage, followed: Followed) -> Seen:
    reader, run_id = stage.core.reader, followed.run_id
    return Seen(
        row=await stage.row(run_id),
        followed=followed.events,
        stored=await stage.log(run_id),
        attempts=await reader.list_attempts(run_id),
        calls=await reader.list_tool_calls(run_id, after=None, limit=100),
        executions=await reader.list_executions(run_id),
        payments=stage.outside.payments(),
        began=stage.outside.executions(),
        findings=list(await stage.findings()),
    )


# ---------------------------------------------------------------- what must be true


def assert_recovered(case: Case, seen: Seen, expected: Seen) -> None:
    """Fail unless the case ended as R-7.3 (or R-9.4) says."""
    assert seen.findings == []
    assert_followed_whole(seen)
    assert_no_needless_execution(seen)
    lost = [row for row in seen.attempts if row.end_reason is AttemptEnd.LEASE_LOST]
    assert len(lost) >= case.losses
    keys = [line["key"] for line in seen.payments]
    assert len(keys) == len(set(keys)), f"paid twice: {seen.payments}"
    if case.hook.act == "hold":
        assert_cancelled_once(seen)
        return
    assert seen.row.hot.state is RunState.SUCCEEDED
    assert seen.answer == expected.answer
    assert len(keys) == PAYMENTS


def assert_followed_whole(seen: Seen) -> None:
    """The follower saw every event up to the end, once, in order, as it is stored."""
    assert seen.followed == seen.stored[: len(seen.followed)]
    assert [event.seq for event in seen.stored] == list(range(1, seen.row.hot.last_seq + 1))
    assert len(seen.followed) >= (seen.row.hot.terminal_seq or 0) > 0
    assert {event.type for event in seen.stored[seen.row.hot.terminal_seq :]} <= {"late"}


def assert_no_needless_execution(seen: Seen) -> None:
    """A call ran again only after its worker was lost, or after a lost answer; never with a result.

    What began outside is what the rows say, each execution once.
    """
    lost = {row.attempt for row in seen.attempts if row.end_reason is AttemptEnd.LEASE_LOST}
    for call in seen.calls:
        rows = [row for row in seen.executions if row.tool_call_id == call.tool_call_id]
        for row in rows[:-1]:
            assert row.attempt in lost or row.outcome in _AGAIN, f"{call.tool}: {rows}"
        assert len({row.attempt for row in rows}) == len(rows) or not lost
        began = [line["execution"] for line in seen.began if line["key"] == call.effect_key]
        assert len(began) == len(set(began)), f"{call.tool} began twice: {began}"
        assert set(began) <= {row.number for row in rows}
    results = [event.data for event in seen.stored if isinstance(event.data, ResultEvent)]
    assert len({result.tool_call_id for result in results}) == len(results)


def assert_cancelled_once(seen: Seen) -> None:
    """One cancel, one end, by it; what was paid before stands in the end."""
    assert seen.row.hot.state is RunState.FAILED
    assert seen.row.hot.code is FailureCode.RUN_CANCELLED
    epochs = [event.data.epoch for event in seen.stored if isinstance(event.data, CancelEvent)]
    assert epochs == [1]
    assert seen.end.effects is not None
    assert [effect["tool"] for effect in seen.end.effects] == ["pay_idempotent"]


def run_play(case: Case, url: str, folder: Path) -> Seen:
    """Play a case on a loop of its own, in any thread."""
    folder.mkdir()
    return anyio.run(play, case, url, folder)


def run_undisturbed(url: str, folder: Path, act: Act) -> Seen:
    """Play the undisturbed scene on a loop of its own, in any thread."""
    folder.mkdir()
    return anyio.run(undisturbed, url, folder, act)
