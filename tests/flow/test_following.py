"""A snapshot with its last seq, and following from there: nothing missed, nothing twice (R-6.10)."""

from collections.abc import AsyncIterator
from dataclasses import replace

import anyio
import pytest

from perdure.engine.context import PlannerContext
from perdure.engine.core import Core
from perdure.engine.feed import follow
from perdure.protocol.decisions import Ask, Decision, Finish
from perdure.protocol.errors import Invalid
from perdure.protocol.event_views import EventView
from perdure.protocol.events import StateEvent
from perdure.protocol.granularity import Granularity, wanted_types
from perdure.protocol.log import EVENT_TYPES
from perdure.protocol.runs import RunRow
from perdure.protocol.states import Answer, RunState
from perdure.service.base import Service
from perdure.service.events import as_view, follow_run, starting_point
from perdure.service.principal import LOCAL
from perdure.service.runs import get_run
from perdure.testing.embedded import call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow

STEPS = 12


async def followed(service: Service, run_id: str, after: int) -> AsyncIterator[EventView]:
    """Yield the events behind a seq until the run ends, as a caller in this process does."""
    start = await starting_point(service, LOCAL, run_id, after)
    async with follow_run(service, start) as feed:
        while not feed.ended:
            for event in await feed.read(wait_s=5, limit=3):
                yield as_view(event)  # noqa: ASYNC119  # read to its end by the test below


async def test_following_from_a_snapshot_is_exact_at_every_moment(url: str, zoo: ToolZoo) -> None:
    """R-6.10, R-6.4: from each snapshot taken on the way the rest of the log follows, whole."""

    def decide(context: PlannerContext) -> Decision:
        step = context.step_index
        return Finish(answer="done") if step == STEPS else call("echo", value=step)

    async with flow(url, [scripted("walker", decide, tools=["echo"])], zoo) as engine:
        service = Service(core=engine.core)
        run_id = await engine.submit("walker")
        seen: list[tuple[int, RunState, list[EventView]]] = []

        async def look_and_follow() -> None:
            snapshot = await get_run(service, LOCAL, run_id)
            rest = [event async for event in followed(service, run_id, snapshot.last_seq)]
            seen.append((snapshot.last_seq, snapshot.state, rest))

        async with anyio.create_task_group() as group:
            for number in range(STEPS):
                group.start_soon(look_and_follow)
                await engine.wait_event(run_id, "result", after=number * 3)
        log = await engine.events(run_id)
        assert len({last_seq for last_seq, _, _ in seen}) > 1
        for last_seq, state, rest in seen:
            assert [event.seq for event in rest] == [event.seq for event in log[last_seq:]]
            assert [event.event_id for event in rest] == [
                event.event_id for event in log[last_seq:]
            ]
            states = data_of(log[:last_seq], StateEvent)
            assert state is states[-1].state


async def test_a_cursor_is_iterated_and_leaves_out_what_is_not_wanted(
    url: str, zoo: ToolZoo
) -> None:
    """R-6.10: the same feed as an async iterator; a filter leaves events out, not their place."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer="done") if context.turns else call("echo", value=1)

    async with flow(url, [scripted("walker", decide, tools=["echo"])], zoo) as engine:
        run_id = await engine.submit("walker")
        async with follow(engine.core, run_id, 0) as cursor:
            whole = [event async for event in cursor]
        assert whole == await engine.events(run_id)
        only = wanted_types(["result"], ["state"])
        async with follow(engine.core, run_id, 0, only=only) as cursor:
            some = [event async for event in cursor]
        assert {event.type for event in some} == {"state", "attempt", "result"}
        assert some == [event for event in whole if event.type in {"state", "attempt", "result"}]
        async with follow(engine.core, run_id, 0, only=wanted_types(["action"])) as cursor:
            assert len([event async for event in cursor]) == 1
            assert cursor.seq == whole[-1].seq


async def test_a_filtered_feed_tells_how_far_it_is_while_nothing_is_wanted(url: str) -> None:
    """R-6.10: one place without a body for all that was left out, so a reconnect goes on there."""
    async with flow(url, [scripted("asks", [Ask(title="?")])]) as engine:
        service = Service(core=engine.core)
        run_id = await engine.submit("asks")
        await engine.wait_waiting(run_id)
        last = (await engine.run(run_id)).hot.last_seq
        start = await starting_point(service, LOCAL, run_id, 0)
        async with follow_run(service, start, only=frozenset({"delta"})) as feed:
            (told,) = await feed.read(wait_s=5, limit=100)
        assert (told.seq, told.body) == (last, b"")


def test_every_type_of_event_is_in_one_group() -> None:
    """R-6.10."""
    assert wanted_types() is None
    assert wanted_types(granularity=list(Granularity)) == set(EVENT_TYPES)
    assert [wanted_types(granularity=[name]) for name in ("delta", "message", "custom")] == [
        {"delta"},
        {"message"},
        {"custom"},
    ]
    for wrong in ({"types": ["sate"]}, {"granularity": ["word"]}):
        with pytest.raises(Invalid):
            wanted_types(**wrong)


async def test_following_never_starts_changes_or_holds_a_run(url: str, zoo: ToolZoo) -> None:
    """R-6.4, R-3.5: a run that nobody carries out stays as it is, however many follow it."""
    agent = scripted("idle", [Finish(answer=1)])
    async with flow(url, [agent], zoo) as engine:
        await engine.kill_worker()
        run_id = await engine.submit("idle")
        before = await engine.run(run_id)
        service = Service(core=engine.core)
        start = await starting_point(service, LOCAL, run_id, 0)
        for _ in range(20):
            async with follow_run(service, start) as feed:
                assert [event.seq for event in await feed.read(wait_s=0, limit=10)] == [1]
                assert not feed.ended
        assert await engine.run(run_id) == before
        await engine.start_worker()
        assert (await engine.wait_terminal(run_id)).hot.state is RunState.SUCCEEDED


@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_who_follows_an_idle_run_asks_for_its_row_once(url: str, limit: int) -> None:
    """R-12.2: an idle follower costs one read a poll; the end is told whatever the pages' size."""

    class Counting:
        """A reader that counts who asks for a run's row."""

        def __init__(self, core: Core) -> None:
            self._reader = core.reader
            self.asked = 0

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        async def find_run(self, tenant_id: str | None, run_id: str) -> RunRow | None:
            """Count, and answer."""
            self.asked += 1
            return await self._reader.find_run(tenant_id, run_id)

    async with flow(url, [scripted("asker", [Ask(title="?"), Finish(answer=1)])]) as engine:
        run_id = await engine.submit("asker")
        (question,) = await engine.wait_waiting(run_id)
        reader = Counting(engine.core)
        core = replace(engine.core, reader=reader)
        async with follow(core, run_id, 0) as cursor:
            while await cursor.read(wait_s=0, limit=limit):
                pass
            asked = reader.asked
            assert await cursor.read(wait_s=0.2, limit=limit) == []
            assert reader.asked == asked
            await engine.answer(question.interrupt_id, Answer.RESPOND, value=1)
            with anyio.fail_after(30):
                while not cursor.ended:
                    await cursor.read(wait_s=5, limit=limit)
        assert cursor.seq == (await engine.run(run_id)).hot.last_seq
