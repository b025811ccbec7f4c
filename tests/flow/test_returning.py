"""A damaged run returns to its last consistent checkpoint, or is ended by a person (R-7.7)."""

from dataclasses import replace
from typing import cast

import pytest

from perdure.engine import returning
from perdure.engine.branch import BranchWish, open_at_checkpoint
from perdure.engine.context import PlannerContext
from perdure.engine.continuing import continuation, key_of_return
from perdure.engine.core import Core
from perdure.engine.ports import HostedAgent, ToolGrant
from perdure.engine.returning import RepairWish, assess
from perdure.engine.snapshot import RunSnapshot, snapshot_digest
from perdure.ops.verify import verify
from perdure.ops.verify.checks import Finding
from perdure.ops.verify.sweep import Sweep
from perdure.protocol.decisions import Ask, Decision, Finish
from perdure.protocol.errors import Conflict
from perdure.protocol.events import RepairEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import next_actions
from perdure.protocol.states import Answer, NextAction, ParkedOn, RunState
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.repairs import RepairRequest, get_repair, repair
from perdure.store.ports import Store
from perdure.store.requests import Inserted, NewRun
from perdure.testing.embedded import SETTINGS, Embedded, call, scripted, unasked
from perdure.testing.tools import ToolZoo
from tests.flow.rows import Rows
from tests.flow.world import data_of, flow

RETURN = RepairRequest(action="return", reason="a disk was replaced")


def payer() -> HostedAgent:
    """Pay, ask, look, and ask again; the answer says what was told."""

    def decide(context: PlannerContext) -> Decision:
        asked = [ask for turn in context.turns for ask in turn.asks]
        match len(context.turns):
            case 0:
                return call("pay", amount=7)
            case 2:
                return call("echo", value=1)
            case 1 | 3:
                return Ask(title=f"question {len(asked)}")
            case _:
                return Finish(answer=[ask.value for ask in asked])

    return scripted("payer", decide, tools=[*unasked("pay"), ToolGrant(name="echo")])


async def waits_twice(engine: Embedded, thread_id: str | None = None) -> tuple[str, str]:
    """Bring a payer to its second question; return the run and the question."""
    run_id = await engine.submit("payer", thread_id=thread_id)
    (first,) = await engine.wait_waiting(run_id)
    await engine.answer(first.interrupt_id, Answer.RESPOND, value="one")
    await engine.wait_event(run_id, "interrupt", after=first.opened_seq)
    (second,) = await engine.wait_waiting(run_id)
    return run_id, second.interrupt_id


async def damage(engine: Embedded, url: str, run_id: str, *, back: int) -> int:
    """Change the digest of the checkpoint so many before the last; return the one before it."""
    rows = await engine.core.reader.list_checkpoints(run_id, before=None, limit=100)
    statement = f"UPDATE checkpoints SET digest = ! WHERE run_id = ? AND seq = {rows[back].seq}"  # noqa: S608  # a number
    Rows(url).damage(statement, run_id, bytes(32))
    return rows[back + 1].seq


async def test_a_damaged_run_goes_on_from_its_last_consistent_checkpoint_as_a_linked_run(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7: what was paid before it stays paid; both logs tell; the thread's next run follows."""
    async with flow(url, [payer(), scripted("idle", [Finish()])], zoo) as engine:
        service = Service(core=engine.core)
        run_id, question = await waits_twice(engine)
        thread = (await engine.run(run_id)).facts.thread_id
        behind = await engine.submit("idle", thread_id=thread)
        ended = await engine.submit("idle")
        await engine.wait_terminal(ended)
        with pytest.raises(Conflict, match="has ended"):
            await repair(service, LOCAL, ended, RepairRequest(action="fail", reason="no"))
        with pytest.raises(Conflict, match="not put aside"):
            await repair(service, LOCAL, run_id, RETURN)
        place = await damage(engine, url, run_id, back=0)
        with pytest.raises(Conflict, match="put aside for repair"):
            await engine.answer(question, Answer.RESPOND, value="two")
        hot = (await engine.run(run_id)).hot
        assert next_actions(hot) == [NextAction.REPAIR, NextAction.CANCEL]
        found = await get_repair(service, LOCAL, run_id)
        assert (found.can_return, found.seq, found.obstacles) == (True, place, [])
        assert found.damage is not None
        made = await repair(service, LOCAL, run_id, RETURN)
        assert (made.retry_of, made.origin_run_id, made.origin_seq) == (run_id, run_id, place)
        again = RepairRequest(action="return", reason="said twice")
        assert (await repair(service, LOCAL, run_id, again)).run_id == made.run_id
        old = await engine.run(run_id)
        assert (old.hot.state, old.hot.code) == (
            RunState.FAILED,
            FailureCode.CHECKPOINT_INCOMPATIBLE,
        )
        aside, returned = data_of(await engine.events(run_id), RepairEvent)
        assert (aside.action, returned.action) == ("quarantine", "return")
        assert (returned.by, returned.reason) == ("local", "a disk was replaced")
        assert isinstance(returned.after, dict)
        assert (returned.after["run_id"], returned.after["seq"]) == (made.run_id, place)
        (begin, *_) = data_of(await engine.events(made.run_id), StateEvent)
        assert begin.origin is not None
        assert (begin.origin.mode, begin.origin.reason) == ("return", "a disk was replaced")
        await engine.wait_terminal(behind)
        (asked,) = await engine.wait_waiting(made.run_id)
        await engine.answer(asked.interrupt_id, Answer.RESPOND, value="two")
        await engine.wait_terminal(made.run_id)
        end = data_of(await engine.events(made.run_id), StateEvent)[-1]
        assert end.answer == ["one", "two"]
        assert len(zoo.payments()) == 1


async def test_a_run_with_an_effect_behind_its_last_consistent_checkpoint_is_for_a_person(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7, F21: nothing is done twice; the policy leaves it too; ending it frees its thread."""
    settings = replace(SETTINGS, on_damage="return")
    async with flow(url, [payer(), scripted("idle", [Finish()])], zoo, settings=settings) as engine:
        service = Service(core=engine.core)
        run_id, question = await waits_twice(engine)
        thread = (await engine.run(run_id)).facts.thread_id
        behind = await engine.submit("idle", thread_id=thread)
        (paid, *_) = await engine.core.reader.list_tool_calls(run_id, after=None, limit=1)
        rows = await engine.core.reader.list_checkpoints(run_id, before=None, limit=100)
        back = next(n for n, row in enumerate(rows) if row.seq == paid.action_seq)
        place = await damage(engine, url, run_id, back=back)
        await damage(engine, url, run_id, back=0)
        with pytest.raises(Conflict, match="put aside for repair"):
            await engine.answer(question, Answer.RESPOND, value="two")
        found = await get_repair(service, LOCAL, run_id)
        assert (found.can_return, found.seq) == (False, place)
        assert paid.tool_call_id in found.obstacles[0]
        with pytest.raises(Conflict, match="cannot be returned") as refused:
            await repair(service, LOCAL, run_id, RETURN)
        assert refused.value.details["obstacles"] == found.obstacles
        row = await engine.run(run_id)
        assert (row.hot.parked_on, row.hot.state) == (ParkedOn.REPAIR, RunState.WAITING_HUMAN)
        fail = RepairRequest(action="fail", reason="it is paid by hand")
        ended = await repair(service, LOCAL, run_id, fail)
        assert (ended.state, ended.open_interrupts) == (RunState.FAILED, [])
        assert (await repair(service, LOCAL, run_id, fail)).last_seq == ended.last_seq
        last = data_of(await engine.events(run_id), StateEvent)[-1]
        assert last.effects is not None
        assert [effect["tool"] for effect in last.effects] == ["pay"]
        assert (await engine.wait_terminal(behind)).hot.state is RunState.SUCCEEDED
        assert len(zoo.payments()) == 1


@pytest.mark.parametrize("cancelled", [False, True], ids=["", "cancelled"])
async def test_ending_a_run_by_hand_ends_what_a_return_had_begun_that_was_cut_off(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    """R-7.7, I82: whoever returned it died once the new run was there; it must not go on by itself,
    though the old one was also cancelled before it was ended."""
    async with flow(url, [payer()], zoo) as engine:
        service, core = Service(core=engine.core), engine.core
        run_id, question = await waits_twice(engine)
        await damage(engine, url, run_id, back=0)
        with pytest.raises(Conflict, match="put aside for repair"):
            await engine.answer(question, Answer.RESPOND, value="two")
        row = await engine.run(run_id)
        compared: list[RunSnapshot] = []

        def compare(snapshot: RunSnapshot) -> str:
            compared.append(snapshot)
            return snapshot_digest(snapshot)

        monkeypatch.setattr(returning, "snapshot_digest", compare)
        found = await assess(core, row)
        kept = await core.reader.list_checkpoints(run_id, before=None, limit=100)
        assert len(compared) == len(kept), "a long log is digested where something is to compare"
        order = await continuation(
            core, row, key=key_of_return(run_id), agent_id="payer", version=row.facts.agent_version
        )
        wish = BranchWish(mode="return", by="local", checkpoint=found.checkpoint)
        begun = (await open_at_checkpoint(core, row, order, wish)).row
        assert begun.hot.parked_on is ParkedOn.THREAD
        if cancelled:
            with pytest.raises(Conflict, match="put aside for repair"):
                await engine.cancel(run_id)
        fail = RepairRequest(action="fail", reason="enough")
        assert (await repair(service, LOCAL, run_id, fail)).state is RunState.FAILED
        end = data_of(await engine.events(run_id), StateEvent)[-1].failure
        assert end is not None
        if cancelled:  # found by the simulation (seed 4606): the end outlives the cancel event
            assert (end.code, end.details) == (
                FailureCode.RUN_CANCELLED,
                {"by": "ada", "reason": "enough"},
            )
        dropped = await engine.run(begun.facts.run_id)
        assert (dropped.hot.state, dropped.hot.code) == (
            RunState.FAILED,
            FailureCode.RUN_CANCELLED,
        )


class EndsFirst:
    """A store in which the origin is ended by hand right before the run that goes on is inserted."""

    def __init__(self, core: Core, run_id: str) -> None:
        self._core, self._run_id = core, run_id

    def __getattr__(self, name: str) -> object:
        return getattr(self._core.store, name)

    async def insert_run(self, new: NewRun) -> Inserted:
        """End the origin, then insert."""
        fail = RepairRequest(action="fail", reason="enough")
        await repair(Service(core=self._core), LOCAL, self._run_id, fail)
        return await self._core.store.insert_run(new)


async def test_a_run_that_is_ended_while_it_is_returned_goes_on_nowhere(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7: the end by hand was answered as done; the run that was to go on is cancelled."""
    async with flow(url, [payer()], zoo) as engine:
        run_id, question = await waits_twice(engine)
        await damage(engine, url, run_id, back=0)
        with pytest.raises(Conflict, match="put aside for repair"):
            await engine.answer(question, Answer.RESPOND, value="two")
        row = await engine.run(run_id)
        core = replace(engine.core, store=cast("Store", EndsFirst(engine.core, run_id)))
        with pytest.raises(Conflict, match="ended otherwise"):
            await returning.return_run(core, row, RepairWish(by="ada", reason="a disk"))
        begun = await core.reader.find_run_by_key(
            row.facts.tenant_id, row.facts.agent_id, key_of_return(run_id)
        )
        assert begun is not None
        stopped = await engine.wait_terminal(begun.row.facts.run_id)
        assert stopped.hot.code is FailureCode.RUN_CANCELLED


async def test_by_the_policy_a_worker_returns_a_damaged_run_by_itself_and_only_once(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7: off unless it is set; a run that began so and is damaged again waits for a person."""

    def decide(context: PlannerContext) -> Decision:
        return call("hang") if len(context.turns) == 1 else call("echo", value=1)

    agent = scripted("hanging", decide, tools=["echo", "hang"])
    settings = replace(SETTINGS, on_damage="return", drain_grace_s=0.3)
    async with flow(url, [agent], zoo, settings=settings) as engine:
        run_id = await engine.submit("hanging")
        ids = [run_id]
        for _ in range(2):
            await zoo.wait_started("hang", len(ids))
            await engine.wait_until(ids[-1], lambda row: row.hot.open_calls == 1)
            await engine.drain()
            place = await damage(engine, url, ids[-1], back=0)
            await engine.start_worker()
            if len(ids) == 2:
                break
            old = await engine.wait_terminal(run_id)
            assert old.hot.code is FailureCode.CHECKPOINT_INCOMPATIBLE
            (_, told) = data_of(await engine.events(run_id), RepairEvent)
            assert (told.action, told.by) == ("return", "runtime")
            assert isinstance(told.after, dict)
            assert told.after["seq"] == place
            ids.append(str(told.after["run_id"]))
        await engine.wait_until(ids[1], lambda row: row.hot.parked_on is ParkedOn.REPAIR)
        await engine.drain()
        assert (await engine.run(ids[1])).hot.state is RunState.EXECUTING
        service = Service(core=engine.core)
        with pytest.raises(Conflict):
            await engine.cancel(ids[1])
        fail = RepairRequest(action="fail", reason="enough")
        ended = await repair(service, LOCAL, ids[1], fail)
        assert ended.error is not None
        assert ended.error.code is FailureCode.RUN_CANCELLED, "it was cancelled before"


async def test_a_run_that_a_caller_met_damaged_is_returned_by_the_sweep_of_a_worker(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7: by the policy; whoever puts a run aside may die before anything else."""
    settings = replace(SETTINGS, on_damage="return", drain_grace_s=0.3)
    async with flow(url, [payer()], zoo, settings=settings) as engine:
        run_id, question = await waits_twice(engine)
        place = await damage(engine, url, run_id, back=0)
        with pytest.raises(Conflict, match="put aside for repair"):
            await engine.answer(question, Answer.RESPOND, value="two")
        assert (await engine.run(run_id)).hot.parked_on is ParkedOn.REPAIR
        await Sweep(core=engine.core).run_once()
        (_, told) = data_of(await engine.events(run_id), RepairEvent)
        assert isinstance(told.after, dict)
        assert (told.action, told.after["seq"]) == ("return", place)
        goes_on = str(told.after["run_id"])
        await engine.wait_waiting(goes_on)
        await engine.cancel(goes_on)
        assert len(zoo.payments()) == 1


async def test_whatever_event_a_run_has_lost_ending_it_tells_the_damage(
    url: str, zoo: ToolZoo
) -> None:
    """R-7.7: `verify` is green afterwards (the flow's own), whichever event is missing."""
    async with flow(url, [payer()], zoo) as engine:
        service = Service(core=engine.core)
        first, _ = await waits_twice(engine)
        runs = [first]
        while len(runs) < (await engine.run(first)).hot.last_seq:
            runs.append((await waits_twice(engine))[0])
        await engine.kill_worker()
        for seq, run_id in enumerate(runs, 1):
            statement = f"DELETE FROM events WHERE run_id = ? AND seq = {seq}"  # noqa: S608  # a number
            Rows(url).damage(statement, run_id)
            await engine.core.store.quarantine(run_id, None, f"event {seq} is missing", None)
            await repair(service, LOCAL, run_id, RepairRequest(action="fail", reason="a disk"))
            found: list[Finding] = []
            await verify(engine.core.reader, run_id=run_id, on_finding=found.append)
            assert found == [], seq
