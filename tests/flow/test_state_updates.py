"""Updating the agent's own state of a waiting run by hand (R-11.3)."""

import anyio
import pytest
from pydantic import JsonValue

from perdure.engine.context import PlannerContext
from perdure.engine.state_updates import StateWish, Updated, update_state
from perdure.protocol.decisions import Ask, Decision, Finish
from perdure.protocol.errors import Conflict, IdempotencyMismatch, Invalid
from perdure.protocol.events import StateEvent
from perdure.protocol.runs import RunHot
from perdure.protocol.states import Answer, CancelAction, RunState
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, fork
from perdure.service.checkpoints import get_state, list_checkpoints
from perdure.service.principal import LOCAL
from perdure.testing.embedded import Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow


def tells(context: PlannerContext) -> Decision:
    """Ask with a state of its own, then answer with the state that is found."""
    if context.step_index == 0:
        return Ask(title="Which?", key="which", state={"region": "south"})
    return Finish(answer=context.state)


async def update(engine: Embedded, run_id: str, state: JsonValue, **more: str) -> Updated:
    """Update a run's state as ada."""
    wish = StateWish(state=state, by="ada", reason=more.get("reason"), key=more.get("key"))
    return await update_state(engine.core, run_id, wish)


async def test_the_planner_goes_on_with_the_state_of_a_person(url: str, zoo: ToolZoo) -> None:
    """R-11.3: a checkpoint with an author; the question stays open; a key makes one update."""
    async with flow(url, [scripted("teller", tells)], zoo) as engine:
        run_id = await engine.submit("teller")
        (question,) = await engine.wait_waiting(run_id)
        before = await engine.run(run_id)
        north: JsonValue = {"region": "north"}
        made = await update(engine, run_id, north, reason="moved", key="k")
        after = await engine.run(run_id)
        assert (made.replayed, made.seq) == (False, after.hot.checkpoint_seq)
        kept = {"last_seq", "checkpoint_seq", "updated_at"}
        changed = {
            name
            for name in RunHot.__dataclass_fields__
            if getattr(before.hot, name) != getattr(after.hot, name)
        }
        assert changed <= kept
        assert [row.interrupt_id for row in await engine.pending(run_id)] == [question.interrupt_id]
        again = await update(engine, run_id, north, reason="moved", key="k")
        assert again == Updated(seq=made.seq, replayed=True)
        with pytest.raises(IdempotencyMismatch):
            await update(engine, run_id, {"region": "east"}, reason="moved", key="k")
        service = Service(core=engine.core)
        listed = await list_checkpoints(service, LOCAL, run_id, before=None, limit=10)
        first, *others = listed.items
        assert (first.author, first.reason, first.agent_state) == ("ada", "moved", north)
        assert {item.author for item in others} == {None}
        values = (await get_state(service, LOCAL, first.checkpoint_id)).values
        assert (values["agent_state"], values["state"]) == (north, "waiting_human")
        await engine.drain()
        await engine.start_worker()
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="this")
        await engine.wait_terminal(run_id)
        assert data_of(await engine.events(run_id), StateEvent)[-1].answer == north
        assert (await update(engine, run_id, north, reason="moved", key="k")).replayed
        forked = await fork(
            service, LOCAL, run_id, ForkRequest(checkpoint_id=others[0].checkpoint_id)
        )
        (question,) = await engine.wait_waiting(forked.run.run_id)
        assert not (await update(engine, forked.run.run_id, 1, key="k")).replayed
        await engine.answer(question.interrupt_id, Answer.RESPOND, value="this")
        await engine.wait_terminal(forked.run.run_id)


async def test_only_a_run_that_waits_and_nobody_holds_is_updated(url: str, zoo: ToolZoo) -> None:
    """R-11.3: held, ended, cancelled or queued: refused, and nothing is changed."""
    slow = scripted("slow", [call("hang"), Finish()], tools=["hang"])
    agents = [scripted("teller", tells), slow, scripted("ends", [Finish(answer=1)])]
    async with flow(url, agents, zoo) as engine:
        held = await engine.submit("slow")
        await zoo.wait_started("hang")
        ended = await engine.submit("ends")
        await engine.wait_terminal(ended)
        waits = await engine.submit("teller")
        await engine.wait_waiting(waits)
        thread = (await engine.run(waits)).facts.thread_id
        queued = await engine.submit("teller", thread_id=thread)
        for run_id in (held, ended, queued):
            with pytest.raises(Conflict):
                await update(engine, run_id, {"n": 1})
        with pytest.raises(Invalid) as refused:
            await update(engine, waits, "x" * 300_000)
        assert refused.value.field == "/state"
        for run_id in (held, ended, queued, waits):
            assert "custom" not in [
                event.type
                for event in await engine.events(run_id)
                if "state_update" in event.raw.decode()
            ]
        await engine.cancel(waits, CancelAction.INTERRUPT)
        with pytest.raises(Conflict):
            await update(engine, waits, {"n": 1})
        zoo.open_gate()
        await engine.cancel(queued, CancelAction.INTERRUPT)
        await engine.cancel(held, CancelAction.INTERRUPT)
        for run_id in (waits, queued, held):
            await engine.wait_terminal(run_id)


async def test_an_update_and_an_answer_at_once_are_both_whole(url: str, zoo: ToolZoo) -> None:
    """R-11.3, R-8.2: whichever is first, the other sees it or is refused; updates of one key are one."""
    async with flow(url, [scripted("teller", tells)], zoo) as engine:
        for _ in range(5):
            run_id = await engine.submit("teller")
            (question,) = await engine.wait_waiting(run_id)
            made = list[Updated]()

            async def by_hand(run_id: str = run_id, made: list[Updated] = made) -> None:
                try:
                    made.append(await update(engine, run_id, {"region": "north"}, key="k"))
                except Conflict:
                    return

            async with anyio.create_task_group() as group:
                group.start_soon(by_hand)
                group.start_soon(by_hand)
                await engine.answer(question.interrupt_id, Answer.RESPOND, value="this")
            row = await engine.wait_terminal(run_id)
            assert row.hot.state is RunState.SUCCEEDED
            events = await engine.events(run_id)
            region = "north" if made else "south"
            assert data_of(events, StateEvent)[-1].answer == {"region": region}
            assert len({item.seq for item in made}) == len({bool(made)} - {False})
