"""Publish-subscribe: topics of a thread, and a run for each subscriber (R-4.8)."""

from dataclasses import replace
from typing import Any, cast

from pydantic import JsonValue

from perdure.agents.code import Context, agent
from perdure.engine.context import PlannerContext
from perdure.engine.ports import HostedAgent
from perdure.protocol.decisions import (
    ChildRequest,
    Decision,
    Finish,
    GiveUp,
    Publish,
    Spawn,
    UpdatePlan,
)
from perdure.protocol.events import ChildEvent, CustomEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import THREAD
from perdure.protocol.policies import Budget
from perdure.protocol.records import ThreadRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import RunState
from perdure.protocol.topics import PUBLISHED_EVENT_NAME, SubscriptionRow, SubscriptionTerms
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.topics import subscribe, unsubscribe
from perdure.store.reader import RunFilter
from perdure.testing.clock import ShiftingClock
from perdure.testing.embedded import SETTINGS, Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow


def saying(*values: JsonValue, topic: str = "news", then: str = "done") -> list[Decision]:
    """Publish values, one a step, and the last beside the answer."""
    *first, last = [(Publish(topic=topic, value=value),) for value in values]
    steps: list[Decision] = [UpdatePlan(plan=(), records=records) for records in first]
    return [*steps, Finish(answer=then, records=last)]


def hearing(agent_id: str) -> HostedAgent:
    """Finish with what came, and how much came before, by the inbox."""

    def decide(context: PlannerContext) -> Decision:
        before = sum(message.role == "assistant" for message in context.messages)
        return Finish(answer=[before, context.input])

    return scripted(agent_id, decide)


async def new_thread(engine: Embedded) -> str:
    now = engine.core.clock.now()
    row = ThreadRow(
        thread_id=engine.core.ids.new(THREAD),
        tenant_id=engine.tenant_id,
        title="",
        metadata={},
        participants=[],
        capabilities=[],
        active_run_id=None,
        last_position=0,
        created_at=now,
        updated_at=now,
    )
    await engine.core.store.create_thread(row)
    return row.thread_id


async def subscribed(
    engine: Embedded, thread_id: str, topic: str, *agents: str, **terms: Any
) -> list[str]:
    """Subscribe agents; return their inboxes."""
    service, wanted = Service(core=engine.core), SubscriptionTerms(**terms)
    made = [await subscribe(service, LOCAL, thread_id, topic, one, wanted) for one in agents]
    return [one.subscription.inbox_thread_id for one in made]


async def inbox(engine: Embedded, thread_id: str, count: int) -> list[RunRow]:
    """Return the runs of an inbox, in order, once so many have ended."""
    where = RunFilter(thread_id=thread_id)
    rows = await engine.core.reader.list_runs(None, where, after=None, limit=50)
    assert len(rows) == count
    return [await engine.wait_terminal(row.facts.run_id) for row in reversed(rows)]


async def answers(engine: Embedded, thread_id: str, count: int) -> list[JsonValue]:
    rows = await inbox(engine, thread_id, count)
    ends = [data_of(await engine.events(row.facts.run_id), StateEvent)[-1] for row in rows]
    return [end.answer for end in ends]


async def test_each_subscriber_gets_each_publication_once_and_in_order(url: str) -> None:
    """R-4.8: two subscribers, three publications; one at a time in an inbox that lasts; who asked
    for the subscription is the caller, and its terms hold."""
    agents = [scripted("says", saying(1, {"two": 2}, "x" * 20_000)), hearing("a"), hearing("b")]
    async with flow(url, agents) as engine:
        thread_id = await new_thread(engine)
        [first] = await subscribed(engine, thread_id, "news", "a")
        [second] = await subscribed(engine, thread_id, "news", "b", budget=Budget(model_calls=3))
        [nothing] = await subscribed(engine, thread_id, "other", "a")
        run_id = await engine.submit("says", thread_id=thread_id)
        row = await engine.wait_terminal(run_id)
        assert row.hot.state is RunState.SUCCEEDED
        heard = await answers(engine, first, 3)
        assert heard[:2] == [[0, 1], [1, {"two": 2}]]
        assert await answers(engine, nothing, 0) == []
        rows = await inbox(engine, second, 3)
        for one in rows:
            assert (one.facts.parent_run_id, one.facts.root_run_id) == (run_id, run_id)
            assert one.facts.options.budget.model_calls == 3
            assert one.facts.detached
        assert rows[2].facts.input.ref is not None
        events = await engine.events(run_id)
        said = [e for e in data_of(events, CustomEvent) if e.name == PUBLISHED_EVENT_NAME]
        assert [cast("dict[str, Any]", one.value)["topic"] for one in said] == ["news"] * 3
        told = data_of(events, ChildEvent)
        assert [event.agent_id for event in told] == ["a", "b"] * 3
        meta = rows[0].facts.options.metadata
        assert (meta["topic"], meta["published_by"]) == ("news", run_id)


async def test_one_agents_failure_is_nobody_elses(url: str, zoo: ToolZoo) -> None:
    """R-4.8: a subscriber that fails, one whose worker dies in the middle, one that is not
    registered any more; the publisher and the others know nothing of it."""
    clock = ShiftingClock()
    agents = [
        scripted("says", saying(1, 2)),
        scripted("fails", lambda _: GiveUp(code=FailureCode.MODEL_ERROR, reason="no")),
        scripted("hangs", [call("hang"), Finish(answer="came back")], tools=["hang"]),
        hearing("good"),
    ]
    async with flow(url, agents, zoo, clock=clock) as engine:
        thread_id = await new_thread(engine)
        fails, hangs, good = await subscribed(engine, thread_id, "news", "fails", "hangs", "good")
        gone = SubscriptionRow(
            tenant_id=engine.tenant_id,
            thread_id=thread_id,
            topic="news",
            agent_id="gone",
            inbox_thread_id=engine.core.ids.new(THREAD),
            terms=SubscriptionTerms(),
            caller=LOCAL.as_caller(),
            created_at=engine.core.clock.now(),
        )
        blank = await engine.core.reader.find_thread(engine.tenant_id, fails)
        assert blank is not None
        box = replace(blank, thread_id=gone.inbox_thread_id)
        await engine.core.store.put_subscription(gone, box)
        run_id = await engine.submit("says", thread_id=thread_id)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert await answers(engine, good, 2) == [[0, 1], [1, 2]]
        assert [row.hot.code for row in await inbox(engine, fails, 2)] == [
            FailureCode.MODEL_ERROR
        ] * 2
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        assert await answers(engine, hangs, 2) == ["came back"] * 2
        refused = [e for e in data_of(await engine.events(run_id), ChildEvent) if e.failure]
        assert [(e.agent_id, e.failure and e.failure.code) for e in refused] == [
            ("gone", FailureCode.AGENT_NOT_FOUND)
        ] * 2


async def test_subscribers_publish_to_the_same_thread_up_to_a_depth(url: str) -> None:
    """R-4.8: a chain of agents on one thread; two that answer each other for ever are ended by the
    limit on depth, which is recorded. An agent publishes its answers."""
    pong = replace(hearing("pong"), publishes="ping")
    ping = replace(hearing("ping"), publishes="pong")
    agents = [scripted("says", saying("go", topic="ping")), ping, pong]
    settings = replace(SETTINGS, depth_max=4)
    async with flow(url, agents, settings=settings) as engine:
        thread_id = await new_thread(engine)
        [to_ping] = await subscribed(engine, thread_id, "ping", "ping")
        [to_pong] = await subscribed(engine, thread_id, "pong", "pong")
        run_id = await engine.submit("says", thread_id=thread_id)
        await engine.wait_terminal(run_id)
        rows: list[RunRow] = []
        while len(rows) < 4:
            where = RunFilter(root_run_id=run_id)
            rows = await engine.core.reader.list_runs(None, where, after=None, limit=10)
            for row in rows:
                await engine.wait_terminal(row.facts.run_id)
        assert [row.facts.thread_id for row in rows[::-1]] == [to_ping, to_pong] * 2
        [last] = data_of(await engine.events(rows[0].facts.run_id), ChildEvent)
        assert last.failure is not None
        assert (last.phase, last.failure.code) == ("refused", FailureCode.BUDGET_EXCEEDED)
        assert last.failure.details["limit"] == "depth"


async def test_publications_start_no_more_runs_than_a_run_may_leave_behind(url: str) -> None:
    """R-13.1, R-14.3: what is over the limit on detached children is refused, and told."""
    few = replace(SETTINGS, detached_max=2)
    async with flow(url, [scripted("says", saying(1, 2, 3)), hearing("a")], settings=few) as engine:
        thread_id = await new_thread(engine)
        [inbox] = await subscribed(engine, thread_id, "news", "a")
        run_id = await engine.submit("says", thread_id=thread_id)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        told = data_of(await engine.events(run_id), ChildEvent)
        assert [one.phase for one in told] == ["spawned", "spawned", "refused"]
        assert told[-1].failure is not None
        assert told[-1].failure.details["limit"] == "detached_children"
        assert await answers(engine, inbox, 2) == [[0, 1], [1, 2]]


async def test_code_publishes_once_however_often_it_runs(url: str, zoo: ToolZoo) -> None:
    """R-4.6, R-4.8: the worker dies behind a publication; the function runs again, and publishes
    nothing anew. Who unsubscribed gets nothing more."""
    clock = ShiftingClock()

    @agent("coded", "1", tools=["hang"], publishes="ends")
    async def coded(ctx: Context, input: object) -> object:
        ctx.publish("news", {"n": 1})
        await ctx.tool("hang")
        ctx.publish("news", {"n": 2})
        return "over"

    async with flow(url, [coded, hearing("a")], zoo, clock=clock) as engine:
        thread_id = await new_thread(engine)
        [news] = await subscribed(engine, thread_id, "news", "a")
        [ends] = await subscribed(engine, thread_id, "ends", "a")
        run_id = await engine.submit("coded", thread_id=thread_id)
        await zoo.wait_started("hang")
        await engine.kill_worker()
        clock.advance(60)  # its leases run out
        zoo.open_gate()
        await engine.start_worker()
        await engine.wait_terminal(run_id)
        assert await answers(engine, news, 2) == [[0, {"n": 1}], [1, {"n": 2}]]
        assert await answers(engine, ends, 1) == [[0, "over"]]
        await unsubscribe(Service(core=engine.core), LOCAL, thread_id, "news", "a")
        await engine.wait_terminal(await engine.submit("coded", thread_id=thread_id))
        assert len(await answers(engine, news, 2)) == 2
        assert len(await answers(engine, ends, 2)) == 2


async def test_an_answer_that_does_not_stand_is_not_published(url: str) -> None:
    """R-4.8: beside open children, or when it does not fit, the planner decides again."""

    def decide(context: PlannerContext) -> Decision:
        if not context.turns:
            return Spawn(children=(ChildRequest(agent_id="a", input="below"),), wait=False)
        return Finish(answer="told", records=(Publish(topic="news", value="told"),))

    async with flow(url, [scripted("parent", decide), hearing("a")]) as engine:
        thread_id = await new_thread(engine)
        [news] = await subscribed(engine, thread_id, "news", "a")
        run_id = await engine.submit("parent", thread_id=thread_id)
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
        assert await answers(engine, news, 1) == [[0, "told"]]
