"""Text of replies as it is said (R-6.5, R-6.7): what happens to it when things go wrong.

Followers here are the service's own feed, as the stream uses it.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest

from perdure.agents.catalog import loop_agent
from perdure.agents.loop.isolated import IsolatedPlanner
from perdure.agents.loop.react import ReActPlanner
from perdure.agents.models.openai import OpenAIModel
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core
from perdure.engine.live import HEARD_CHARACTERS_MAX
from perdure.engine.ports import HostedAgent
from perdure.protocol.agents import AgentCard
from perdure.protocol.codec import decode
from perdure.protocol.decisions import Finish, ModelUse
from perdure.protocol.events import DeltaEvent, ModelEvent, RetryEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.states import RunState
from perdure.service.base import Service
from perdure.service.events import Feed, follow_run, starting_point
from perdure.service.principal import LOCAL
from perdure.signals.local import LocalSignals
from perdure.testing.embedded import SETTINGS, Embedded, core_of
from perdure.testing.openai_stub import openai_stub, reply, trickle
from perdure.testing.transcript import Transcript
from tests.flow.world import data_of, database_at, flow, types
from tests.streams.typist import Typist


@pytest.fixture
async def typist() -> AsyncGenerator[Typist]:
    typist = Typist()
    yield typist
    typist.close()


@dataclass(slots=True)
class Follower:
    """A client in this process."""

    feed: Feed
    transcript: Transcript = field(default_factory=Transcript)
    views: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def read(self) -> None:
        """Take what comes next."""
        for event in await self.feed.read(wait_s=5, limit=50):
            if event.body:
                view = decode(event.body)
                assert isinstance(view, dict)
                self.views.append(view)
                self.transcript.take(view)

    async def until(self, text: str) -> None:
        """Read until some message is this text."""
        with anyio.fail_after(30):
            while text not in self.transcript.texts.values():
                await self.read()

    async def to_the_end(self) -> None:
        """Read to the end of the run."""
        with anyio.fail_after(30):
            while not self.feed.ended:
                await self.read()


@asynccontextmanager
async def following(core: Core, run_id: str, after: int = 0) -> AsyncGenerator[Follower]:
    """Follow a run with live text."""
    service = Service(core=core)
    start = await starting_point(service, LOCAL, run_id, after)
    async with follow_run(service, start, live=True) as feed:
        yield Follower(feed)


def dropped(engine: Embedded, reason: str) -> float:
    """Return how many fragments the engine dropped for a reason."""
    name, labels = "perdure_live_fragments_dropped_total", {"reason": reason}
    return engine.core.metrics.registry.get_sample_value(name, labels) or 0


@pytest.mark.slow
async def test_a_worker_that_dies_in_mid_message_leaves_text_that_never_counts(
    url: str, typist: Typist
) -> None:
    """R-6.5, F43, CKP-07: the next attempt says it anew, under another id; viewers end with that."""
    settings = replace(SETTINGS, lease_ttl_s=1.5, lease_margin_s=0.2)
    async with flow(url, [typist.agent()], settings=settings) as engine:
        run_id = await engine.submit("teller", stream=True)
        async with following(engine.core, run_id) as follower:
            await typist.say("half an ans")
            await follower.until("half an ans")
            await engine.wait_event(run_id, "delta")
            await engine.kill_worker()
            await engine.start_worker()
            await engine.wait_until(run_id, lambda row: row.hot.attempt == 2)
            await typist.say("the whole ", "answer", None)
            await follower.to_the_end()
        assert follower.transcript.replies == ["the whole answer"]
        assert sorted(follower.transcript.texts.values()) == ["half an ans", "the whole answer"]
        log = await engine.events(run_id)
        attempts = {event.attempt for event in log if event.type == "delta"}
        assert attempts == {1, 2}
        (model,) = data_of(log, ModelEvent)
        first = data_of(log, DeltaEvent)[0]
        assert (first.text, first.message_id == model.message_id) == ("half an ans", False)


async def test_a_cancel_in_mid_message_silences_it(url: str, typist: Typist) -> None:
    """R-6.5, R-9.1: nothing of a message is shown after its run was cancelled."""
    settings = replace(SETTINGS, delta_interval_s=5)
    async with flow(url, [typist.agent()], settings=settings) as engine:
        run_id = await engine.submit("teller", stream=True)
        async with following(engine.core, run_id) as follower:
            await typist.say("so far")
            await follower.until("so far")
            await typist.say(" and no further")
            await engine.cancel(run_id)
            await engine.wait_terminal(run_id)
            await follower.to_the_end()
        assert "delta" not in types(await engine.events(run_id))
        kinds = [view["type"] for view in follower.views]
        assert "delta" not in kinds[kinds.index("cancel") :]
        assert dropped(engine, "ended") + dropped(engine, "epoch") == 1
        assert follower.transcript.replies == []


async def test_another_process_sees_the_durable_fragments_a_moment_later(
    url: str, typist: Typist
) -> None:
    """R-6.5: without live text the same message comes in coalesced pieces."""
    async with flow(url, [typist.agent()]) as engine, database_at(url) as database:
        async with LocalSignals() as signals:  # hears nothing: this follower polls
            other = core_of(database, signals)
            run_id = await engine.submit("teller", stream=True)
            async with following(other, run_id) as follower:
                await typist.say("one ", "two ")
                with anyio.fail_after(30):
                    await follower.until("one two ")
                await typist.say("three", None)
                await follower.to_the_end()
        assert follower.transcript.replies == ["one two three"]
        assert not any(view.get("live") for view in follower.views)
        deltas = data_of(await engine.events(run_id), DeltaEvent)
        assert [delta.offset for delta in deltas] == [0, len("one two ")]


async def test_a_follower_that_does_not_read_costs_a_bounded_buffer_and_misses_nothing(
    url: str, typist: Typist
) -> None:
    """R-6.7, MEM-01: what finds no room is dropped, counted, and read from the log."""
    piece = "x" * 10_000
    async with flow(url, [typist.agent()]) as engine:
        run_id = await engine.submit("teller", stream=True)
        async with following(engine.core, run_id) as follower:
            await typist.say(*[piece] * 40, None)
            await engine.wait_terminal(run_id)
            room = HEARD_CHARACTERS_MAX // len(piece)
            assert dropped(engine, "slow") == 40 - room
            await follower.to_the_end()
            named = follower.transcript.named
            assert follower.transcript.texts == {next(iter(named)): piece * 40}


async def test_a_planner_of_a_user_speaks_from_its_own_thread(url: str) -> None:
    """R-6.5, decision 15: sync and async planners alike; text that was not replied is superseded."""

    def decide(context: PlannerContext) -> Finish:
        assert context.open_message is not None
        lost, message = context.open_message(), context.open_message()
        lost.say("not this")
        for piece in ("to", "get", "her"):
            message.say(piece)
        use = ModelUse(model="own", text="together", message_id=message.message_id)
        return Finish(answer="together", model_uses=(use,))

    async def decide_async(context: PlannerContext) -> Finish:
        return decide(context)

    agents = [
        HostedAgent(card=AgentCard(agent_id=name, version="1"), planner=IsolatedPlanner(planner))
        for name, planner in (("sync", decide), ("async", decide_async))
    ]
    async with flow(url, agents) as engine:
        for name in ("sync", "async"):
            run_id = await engine.submit(name, stream=True)
            assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED
            log = await engine.events(run_id)
            (model,) = data_of(log, ModelEvent)
            said = [data.text for data in data_of(log, DeltaEvent)]
            assert said == ["together"], "in the step's own commit"
            assert model.message_id is not None
            assert types(log).index("delta") == types(log).index("model") - 1


async def test_a_model_that_goes_silent_is_asked_again_and_its_words_do_not_count(url: str) -> None:
    """TIM-04, CKP-07, R-6.5: three deltas, then only keep-alive bytes; the next reply is another message."""
    async with openai_stub(trickle(3), reply("all is well")) as stub:
        model = OpenAIModel("stub", base_url=stub.base_url)
        planner = ReActPlanner([model], idle_s=0.4, model_retry=RetryPolicy(backoff_s=0.01))
        async with flow(url, [loop_agent("teller", "1", planner)]) as engine:
            run_id = await engine.submit("teller", stream=True)
            async with following(engine.core, run_id) as follower:
                await follower.until("w0 w1 w2 ")
                await follower.to_the_end()
            assert follower.transcript.replies == ["all is well"]
            assert len(follower.transcript.texts) == 2
            retry, *_ = data_of(await engine.events(run_id), RetryEvent)
            assert retry.failure.code is FailureCode.MODEL_TIMEOUT
        await model.aclose()
