"""Who may decide an approval, who is told of it, and who is asked in time (R-8.3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from perdure.engine.approvals import delegate
from perdure.engine.ports import ApprovalNotice, HostedAgent, ToolGrant
from perdure.engine.snapshot import APPROVAL_EVENT_NAME
from perdure.protocol.decisions import Ask, Finish
from perdure.protocol.errors import Conflict, Forbidden, Gone, Invalid
from perdure.protocol.events import CustomEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import Answer, RunState
from perdure.testing.embedded import SETTINGS, Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow

QUICK = replace(SETTINGS, notice_retry_s=0.05)


def payer(**grant: object) -> HostedAgent:
    """An agent that pays once, when somebody approves it."""
    asked = ToolGrant(name="pay", **grant)  # pyright: ignore[reportArgumentType]  # of the tests
    return scripted("payer", [call("pay", amount=1), Finish(answer="paid")], tools=[asked])


async def phases(engine: Embedded, run_id: str) -> list[tuple[object, object]]:
    """Return what happened to the run's approval, and who could decide then."""
    lines = [
        event.value
        for event in data_of(await engine.events(run_id), CustomEvent)
        if event.name == APPROVAL_EVENT_NAME
    ]
    return [(line["phase"], line["approvers"]) for line in lines if isinstance(line, dict)]


@dataclass(slots=True)
class Inbox:
    """Where notices arrive; `broken` of them fail first."""

    broken: int = 0
    got: list[ApprovalNotice] = field(default_factory=list[ApprovalNotice])

    def tell(self, notice: ApprovalNotice) -> None:
        """Take a notice."""
        self.got.append(notice)
        if len(self.got) <= self.broken:
            raise OSError("no line")

    def names(self) -> list[Sequence[str]]:
        """Return whom the notices were for."""
        return [notice.approvers for notice in self.got]


async def wait_phases(engine: Embedded, run_id: str, wanted: Sequence[str]) -> None:
    """Wait until exactly this happened to the run's approval."""
    while [phase for phase, _ in await phases(engine, run_id)] != list(wanted):
        seqs = [event.seq for event in await engine.events(run_id) if event.type == "custom"]
        await engine.wait_event(run_id, "custom", after=max(seqs, default=0))


async def test_approvers_are_told_and_what_fails_is_recorded_and_tried_again(
    url: str, zoo: ToolZoo
) -> None:
    """R-8.3: the run waits for its answer meanwhile, and is not held up by it."""
    inbox = Inbox(broken=1)
    async with flow(url, [payer()], zoo, settings=QUICK, tells=inbox.tell) as engine:
        run_id = await engine.submit("payer")
        (asked,) = await engine.wait_waiting(run_id)
        await wait_phases(engine, run_id, ["not_notified", "notified"])
        assert [(told.interrupt_id, told.tool, told.number) for told in inbox.got] == [
            (asked.interrupt_id, "pay", 1),
            (asked.interrupt_id, "pay", 2),
        ]
        lines = data_of(await engine.events(run_id), CustomEvent)
        assert "no line" in str(lines[0].value)
        await engine.answer(asked.interrupt_id, Answer.APPROVE)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert len(inbox.got) == 2


async def test_others_are_asked_when_nobody_decides_in_time(url: str, zoo: ToolZoo) -> None:
    """R-8.3: then it is theirs to decide; they are told, and it is recorded."""
    inbox = Inbox()
    agent = payer(approvers=("ada",), escalate_after_s=1.5, escalate_to=("ops", "boss"))
    async with flow(url, [agent], zoo, settings=QUICK, tells=inbox.tell) as engine:
        run_id = await engine.submit("payer")
        (asked,) = await engine.wait_waiting(run_id)
        await wait_phases(engine, run_id, ["notified", "escalated", "notified"])
        assert inbox.names() == [("ada",), ("ops", "boss")]
        assert [told.escalated for told in inbox.got] == [False, True]
        assert await phases(engine, run_id) == [
            ("notified", ["ada"]),
            ("escalated", ["ops", "boss"]),
            ("notified", ["ops", "boss"]),
        ]
        with pytest.raises(Forbidden):
            await engine.answer(asked.interrupt_id, Answer.APPROVE, by="ada")
        await engine.answer(asked.interrupt_id, Answer.APPROVE, by="boss")
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_an_approval_is_handed_on_once_and_by_who_may_decide_it(
    url: str, zoo: ToolZoo
) -> None:
    """R-8.3: who, to whom and why are in the log, also after a restart."""
    settings = replace(QUICK, principals=frozenset({"ada", "bob", "eve"}))
    async with flow(url, [payer(approvers=("ada",))], zoo, settings=settings) as engine:
        core, tenant = engine.core, engine.tenant_id
        run_id = await engine.submit("payer")
        (asked,) = await engine.wait_waiting(run_id)
        key = asked.interrupt_id
        with pytest.raises(Forbidden):
            await delegate(core, tenant, key, by="eve", to=["eve"], reason=None)
        with pytest.raises(Invalid):
            await delegate(core, tenant, key, by="ada", to=["nobody"], reason=None)
        done = await delegate(core, tenant, key, by="ada", to=["bob"], reason="on leave")
        again = await delegate(core, tenant, key, by="ada", to=["bob"], reason="on leave")
        assert (done.replayed, again.replayed) == (False, True)
        await engine.kill_worker()
        await engine.start_worker()
        with pytest.raises(Forbidden):
            await engine.answer(key, Answer.REJECT, by="ada")
        await engine.answer(key, Answer.REJECT, by="bob", reason="no")
        row = await engine.wait_terminal(run_id)
        assert row.hot.code is FailureCode.APPROVAL_REJECTED
        assert await phases(engine, run_id) == [("delegated", ["bob"])]
        with pytest.raises(Gone):
            await delegate(core, tenant, key, by="bob", to=["eve"], reason=None)


async def test_an_approval_that_nobody_may_decide_is_flagged_at_once(
    url: str, zoo: ToolZoo
) -> None:
    """R-8.3: in the commit that asks; those it is passed on to may decide it."""
    settings = replace(QUICK, principals=frozenset({"ada"}))
    agent = payer(approvers=("ops",), escalate_after_s=0.2, escalate_to=("ada",))
    async with flow(url, [agent], zoo, settings=settings) as engine:
        run_id = await engine.submit("payer")
        (asked,) = await engine.wait_waiting(run_id)
        events = await engine.events(run_id)
        (opened,) = [event.seq for event in events if event.type == "approval_request"]
        assert (await phases(engine, run_id))[0] == ("undecidable", ["ops"])
        assert events[opened].type == "custom"  # right behind it
        await wait_phases(engine, run_id, ["undecidable", "escalated"])
        await engine.answer(asked.interrupt_id, Answer.APPROVE, by="ada")
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


async def test_what_is_no_approval_is_not_handed_on(url: str, zoo: ToolZoo) -> None:
    """R-8.3, R-8.4."""
    async with flow(url, [scripted("asker", [Ask(title="Which?"), Finish()])], zoo) as engine:
        run_id = await engine.submit("asker")
        (asked,) = await engine.wait_waiting(run_id)
        with pytest.raises(Conflict):
            await delegate(
                engine.core, engine.tenant_id, asked.interrupt_id, by="ada", to=["b"], reason=None
            )
