"""Conversations: agents that last, and a speaker who is chosen once (R-4.8, R-13.4)."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest
from pydantic import JsonValue

from perdure.agents.code import agent
from perdure.agents.code.api import Context
from perdure.agents.models.scripted import ScriptedModel
from perdure.agents.patterns.conversation import (
    ByModel,
    Participant,
    Talk,
    conversation,
    routed,
)
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import Ask, Decision, Finish, GiveUp
from perdure.protocol.errors import ThreadBusy
from perdure.protocol.events import ChildEvent, ModelEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.messages import Message, TextPart
from perdure.protocol.states import Answer, RunState
from perdure.service.base import Service
from perdure.service.branches import RetryRequest, retry
from perdure.service.principal import LOCAL
from perdure.service.trees import interrupts_in_tree
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow

WRITER = Participant(name="writer", agent_id="writing", description="writes")
CRITIC = Participant(name="critic", agent_id="judging", description="judges")


def heard(context: PlannerContext) -> dict[str, Any]:
    """Return what a participant was told for this speech."""
    return cast("dict[str, Any]", context.input)


def speaking(agent_id: str, say: Callable[[PlannerContext], JsonValue]) -> HostedAgent:
    """A participant that answers at once."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer=say(context))

    return scripted(agent_id, decide)


def counting(word: str) -> Callable[[PlannerContext], JsonValue]:
    """Say how often one has spoken, by the messages of the thread alone, and what is new."""

    def say(context: PlannerContext) -> JsonValue:
        own = sum(message.role == "assistant" for message in context.messages)
        new = [line.get("said", line.get("failed")) for line in heard(context)["said"]]
        return f"{word} {own + 1} after {new}"

    return say


async def spoken(engine: Embedded, run_id: str) -> list[str | None]:
    """Return who spoke, in order, by the log of the conversation."""
    events = data_of(await engine.events(run_id), ChildEvent)
    return [event.participant for event in events if event.phase == "spawned"]


async def end_of(engine: Embedded, run_id: str) -> StateEvent:
    await engine.wait_terminal(run_id)
    return data_of(await engine.events(run_id), StateEvent)[-1]


async def test_participants_last_and_speak_in_turn_up_to_a_bound(url: str) -> None:
    """R-4.8, R-13.4: each has one thread for all it says, and is told only what it has not heard."""
    agents = [
        conversation("talk", "1", [WRITER, CRITIC], turns_max=5, answer="all"),
        speaking("writing", counting("draft")),
        speaking("judging", counting("note")),
    ]
    async with flow(url, agents) as engine:
        run_id = await engine.submit("talk", "a poem")
        answer = (await end_of(engine, run_id)).answer
        lines = cast("list[dict[str, str]]", answer)
        assert [line["by"] for line in lines] == ["writer", "critic"] * 2 + ["writer"]
        said = [line["said"] for line in lines]
        assert said[0] == "draft 1 after []"
        assert said[1] == f"note 1 after {[said[0]]}"
        assert said[2] == f"draft 2 after {[said[1]]}"
        assert said[4] == f"draft 3 after {[said[3]]}"
        where = RunFilter(parent_run_id=run_id)
        below = await engine.core.reader.list_runs(None, where, after=None, limit=10)
        assert len({row.facts.thread_id for row in below}) == 2
        assert len({row.facts.thread_id for row in below if row.facts.agent_id == "writing"}) == 1
        first = next(row for row in below[::-1] if row.facts.agent_id == "writing")
        opening = first.facts.input.inline
        assert opening == {"task": "a poem", "you": "writer", "said": []}


async def test_a_model_chooses_the_speaker_and_its_word_is_on_record(url: str) -> None:
    """R-4.8: the choice is one commit with the child that speaks; nonsense is asked again."""
    model = ScriptedModel(["critic", "nobody I know", "writer", "END"])
    agents = [
        conversation("talk", "1", [WRITER, CRITIC], select=ByModel(models=[model])),
        speaking("writing", counting("draft")),
        speaking("judging", counting("note")),
    ]
    async with flow(url, agents) as engine:
        run_id = await engine.submit("talk", "a poem")
        assert (await end_of(engine, run_id)).answer == "draft 1 after ['note 1 after []']"
        assert await spoken(engine, run_id) == ["critic", "writer"]
        uses = data_of(await engine.events(run_id), ModelEvent)
        assert [use.text for use in uses] == ["critic", "nobody I know", "writer", "END"]
        asked = model.requests[-1].messages
        assert "- critic: judges" in asked[0].text
        assert "critic: note 1 after []" in asked[1].text


async def test_speakers_route_the_word_and_a_word_ends_it(url: str) -> None:
    """R-4.8: an answer names who is next; one that nobody knows ends the run."""

    def route(context: PlannerContext) -> JsonValue:
        return {"text": "over to you", "next": "critic"}

    agents = [
        conversation("talk", "1", [WRITER, CRITIC], select=routed, stop_word="APPROVED"),
        conversation("lost", "1", [WRITER], select=routed),
        speaking("writing", route),
        speaking("judging", lambda _: "APPROVED, well done"),
    ]
    async with flow(url, agents) as engine:
        run_id = await engine.submit("talk", "a poem")
        lost = await engine.submit("lost", "a poem")
        assert (await end_of(engine, run_id)).answer == "APPROVED, well done"
        assert await spoken(engine, run_id) == ["writer", "critic"]
        failure = (await end_of(engine, lost)).failure
        assert failure is not None
        assert failure.code is FailureCode.OUTPUT_INVALID


async def test_a_crash_in_the_middle_lets_nobody_speak_twice(url: str, zoo: ToolZoo) -> None:
    """R-4.8: the worker dies while a participant is at work, and while the selector decides."""
    clock = ShiftingClock()
    chosen: list[int] = []
    begun = threading.Event()

    async def select(talk: Talk) -> str | None:
        chosen.append(len(talk.speeches))
        if chosen.count(2) == 1 and len(talk.speeches) == 2:
            begun.set()
            await anyio.sleep_forever()
        return ["writer", "critic", "writer", None][len(talk.speeches)]

    def work(context: PlannerContext) -> Decision:
        if not context.turns:
            return call("pay_idempotent", amount=len(context.messages))
        return Finish(answer="paid")

    agents = [
        conversation("talk", "1", [WRITER, CRITIC], select=select, answer="all"),
        scripted("writing", work, tools=["pay_idempotent"]),
        scripted("judging", [call("hang"), Finish(answer="fine")], tools=["hang"]),
    ]
    agents[1] = replace(
        agents[1], grants=tuple(replace(grant, approve="never") for grant in agents[1].grants)
    )
    async with flow(url, agents, zoo, clock=clock) as engine:
        run_id = await engine.submit("talk", "a poem")
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        assert await anyio.to_thread.run_sync(begun.wait, 5)
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        await engine.start_worker()
        answer = (await end_of(engine, run_id)).answer
        assert [line["by"] for line in cast("list[dict[str, str]]", answer)] == [
            "writer",
            "critic",
            "writer",
        ]
        assert await spoken(engine, run_id) == ["writer", "critic", "writer"]
        assert zoo.executions["pay_idempotent"] == 2
        assert chosen == [0, 1, 2, 2, 3]


async def test_a_participants_question_is_listed_above_and_its_failure_told(url: str) -> None:
    """R-13.5: the question of a participant surfaces at the conversation; R-4.8: one that fails
    ends it, or is told to the others."""
    asking = scripted("judging", [Ask(title="good?"), GiveUp(reason="cannot judge")])
    writing = speaking("writing", counting("draft"))
    talk = conversation("talk", "1", [CRITIC, WRITER], turns_max=2, on_failure="go_on")
    strict = conversation("strict", "1", [CRITIC, WRITER], turns_max=2)
    async with flow(url, [talk, strict, asking, writing]) as engine:
        for agent_id, state in (("talk", RunState.SUCCEEDED), ("strict", RunState.FAILED)):
            run_id = await engine.submit(agent_id, "a poem")
            await engine.wait_until(run_id, lambda row: row.hot.open_children == 1)
            where = RunFilter(parent_run_id=run_id)
            [child] = await engine.core.reader.list_runs(None, where, after=None, limit=10)
            [question] = await engine.wait_waiting(child.facts.run_id)
            row = await engine.run(run_id)
            service = Service(core=engine.core)
            listed = await interrupts_in_tree(service, row, status=None, after=None, limit=5)
            assert [row.interrupt_id for row in listed] == [question.interrupt_id]
            await engine.answer(question.interrupt_id, Answer.RESPOND, value="no")
            end = await end_of(engine, run_id)
            assert end.state is state
            if end.failure is None:
                assert end.answer == "draft 1 after ['INTERNAL']"
            else:
                assert end.failure.details["participant"] == "critic"


async def test_code_speaks_with_a_participant(url: str) -> None:
    """R-13.4: `ctx.spawn(participant=…)` goes on in the thread of the call before it."""

    @agent("interviewer", "1")
    async def interviewer(ctx: Context, input: object) -> object:
        told = [
            await ctx.spawn("guest", question, participant="guest") for question in ("who", "why")
        ]
        return [*told, await ctx.spawn("guest", "again")]

    def say(context: PlannerContext) -> JsonValue:
        return [[text(message) for message in context.messages], context.input]

    def text(message: Message) -> str:
        [part] = message.parts
        return part.text if isinstance(part, TextPart) else str(getattr(part, "data", ""))

    async with flow(url, [interviewer, speaking("guest", say)]) as engine:
        run_id = await engine.submit("interviewer")
        first, second, alone = cast("list[list[Any]]", (await end_of(engine, run_id)).answer)
        assert first == [[], "who"]
        assert second[0][0] == "who"
        assert len(second[0]) == 2
        assert alone == [[], "again"]


async def test_a_participants_thread_stays_while_the_conversation_goes_on(url: str) -> None:
    """R-11.3, R-13.4: deleting it is refused until the conversation has ended."""
    said = anyio.Event()

    async def select(talk: Talk) -> str | None:
        if len(talk.speeches) == 1 and not said.is_set():
            said.set()
            await anyio.sleep_forever()
        return None if len(talk.speeches) == 2 else "writer"

    agents = [
        conversation("talk", "1", [WRITER], select=select),
        speaking("writing", counting("draft")),
    ]
    async with flow(url, agents) as engine:
        run_id = await engine.submit("talk", "a poem")
        await said.wait()
        where = RunFilter(parent_run_id=run_id)
        (child,) = await engine.core.reader.list_runs(None, where, after=None, limit=10)
        store, thread_id = engine.core.store, child.facts.thread_id
        with pytest.raises(ThreadBusy) as busy:
            await store.delete_thread(engine.tenant_id, thread_id)
        assert busy.value.details == {"run_id": run_id}
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)
        assert await store.delete_thread(engine.tenant_id, thread_id)
        made = await retry(Service(core=engine.core), LOCAL, run_id, RetryRequest())
        end = await end_of(engine, made.run.run_id)
        assert end.answer == "draft 1 after ['draft 1 after []']"  # in a thread of its own
