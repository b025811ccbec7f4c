"""History that is no longer kept: what goes, what stays, and that nothing breaks (R-6.8)."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import cast

import pytest

from perdure.engine.answers import Reply, answer_interrupt
from perdure.engine.approvals import delegate
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core
from perdure.engine.retention import Retention
from perdure.engine.state_updates import StateWish, update_state
from perdure.protocol.codec import decode
from perdure.protocol.decisions import Ask, Decision, Finish
from perdure.protocol.errors import Conflict, Gone, NotFound
from perdure.protocol.events import StateEvent
from perdure.protocol.ids import checkpoint_id
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import Answer, RunState
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, fork
from perdure.service.events import EncodedEvent, as_view, follow_run, read_page, starting_point
from perdure.service.principal import LOCAL
from perdure.service.thread_events import follow as follow_thread
from perdure.service.thread_events import thread_start
from perdure.store import keeping
from perdure.store.reader import Reader
from perdure.store.requests import RetentionRule
from perdure.testing.embedded import SETTINGS, Embedded, call, calls, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.meanwhile import disturbed
from tests.flow.rows import Rows
from tests.flow.world import flow

LARGE = 20_000
SUCCEEDED_AT_ONCE = RetentionRule(state=RunState.SUCCEEDED, older_than_s=0)
AT_ONCE = replace(
    SETTINGS,
    retention=(SUCCEEDED_AT_ONCE,),
    retention_interval_s=3600.0,
    blobs_kept_s=0,
)


class EndsMeanwhile:
    """A reader that ends a run and drops its history once its row was read, before its log is."""

    def __init__(self, engine: Embedded, run_id: str) -> None:
        self._engine, self._run_id = engine, run_id
        self._is_due = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine.core.reader, name)

    async def find_run(self, tenant_id: str | None, run_id: str) -> RunRow | None:
        """Find the row as it was."""
        row = await self._engine.core.reader.find_run(tenant_id, run_id)
        if self._is_due:
            self._is_due = False
            await self._engine.cancel(self._run_id)
            await self._engine.wait_terminal(self._run_id)
            rule = RetentionRule(state=RunState.FAILED, older_than_s=0)
            await self._engine.core.store.expire_history([rule], after=None, limit=10)
        return row


WRITES: dict[str, Callable[[Core, InterruptRow], Awaitable[object]]] = {
    "answer": lambda core, asked: answer_interrupt(
        core, "default", asked.interrupt_id, Reply(answer=Answer.RESPOND, by="ada", value=1)
    ),
    "delegate": lambda core, asked: delegate(
        core, "default", asked.interrupt_id, by="ada", to=["bob"], reason=None
    ),
    "state": lambda core, asked: update_state(core, asked.run_id, StateWish(state=1, by="ada")),
}


@pytest.mark.parametrize("how", WRITES)
async def test_who_writes_to_a_run_that_ended_and_lost_its_history_meanwhile_is_told_so(
    url: str, zoo: ToolZoo, how: str
) -> None:
    """R-6.8, R-8.3: it was told that the run is damaged and was put aside, which it was not."""
    decision = call("pay", amount=1) if how == "delegate" else Ask(title="?")
    agent = scripted("asks", [decision], tools=["pay"])
    async with flow(url, [agent], zoo) as engine:
        run_id = await engine.submit("asks")
        (asked,) = await engine.wait_waiting(run_id)
        reader = cast("Reader", EndsMeanwhile(engine, run_id))
        core = replace(engine.core, reader=reader)
        with pytest.raises(Conflict if how == "state" else Gone) as told:
            await WRITES[how](core, asked)
        assert "repair" not in str(told.value)
        row = await engine.run(run_id)
        assert (row.hot.state, row.hot.parked_on) == (RunState.FAILED, None)


async def test_an_ended_run_keeps_its_end_and_its_thread_when_its_history_goes(
    url: str, zoo: ToolZoo
) -> None:
    """R-6.8, R-7.5, F55, decision 39: events, checkpoints and unused content go; the summary stays."""
    seen: list[list[str]] = []

    def decide(context: PlannerContext) -> Decision:
        seen.append([str(message.parts) for message in context.messages])
        if not context.turns:
            return calls(("big", {"size": LARGE}), ("echo", {"text": "hi"}))
        return Finish(answer="z" * LARGE)

    agent = scripted("large", decide, tools=["big", "echo"])
    async with flow(url, [agent], zoo, settings=AT_ONCE) as engine:
        first = await engine.submit("large", "y" * LARGE)
        ended = await engine.wait_terminal(first)
        assert ended.hot.state is RunState.SUCCEEDED
        blobs = Rows(url).count("blobs")
        assert blobs == 3, "input, output and answer"
        assert await Retention(core=engine.core).run_once() == 1
        assert await Retention(core=engine.core).run_once() == 0
        assert Rows(url).count("blobs") == 2, "the tool's output is used by nobody"
        assert Rows(url).count("checkpoints") == 0
        events = await engine.events(first)
        assert [event.seq for event in events] == [ended.hot.terminal_seq]
        (end,) = [event.data for event in events if isinstance(event.data, StateEvent)]
        assert end.answer_ref is not None
        tenant = ended.facts.tenant_id
        answer = await engine.core.reader.read_blob(tenant, end.answer_ref.digest)
        assert answer is not None
        assert decode(answer) == "z" * LARGE
        second = await engine.submit("large", "again", thread_id=ended.facts.thread_id)
        row = await engine.wait_terminal(second)
        assert row.hot.state is RunState.SUCCEEDED
        assert len(seen[-1]) == 2, "the thread's messages are still there"


async def test_a_cancelled_run_still_tells_by_whom_and_why(url: str, zoo: ToolZoo) -> None:
    """R-9.4, F55: the end says so when the cancel is gone; so `verify` finds nothing."""
    rule = RetentionRule(state=RunState.FAILED, older_than_s=0)
    settings = replace(SETTINGS, retention=(rule,))
    agent = scripted("rests", [calls(("hang", {}))], tools=["hang"])
    async with flow(url, [agent], zoo, settings=settings) as engine:
        run_id = await engine.submit("rests")
        await zoo.wait_started("hang")
        await engine.cancel(run_id, by="ada")
        await engine.wait_terminal(run_id)
        assert await Retention(core=engine.core).run_once() == 1
        (end,) = [event.data for event in await engine.events(run_id)]
        assert isinstance(end, StateEvent)
        assert end.failure is not None
        assert end.failure.details == {"by": "ada", "reason": "enough"}


async def test_what_waits_or_is_kept_longer_stays_whole(url: str, zoo: ToolZoo) -> None:
    """R-6.8: only ended runs, only the states that a rule names."""
    failing = scripted("failing", [calls(("echo", {"text": "a"}))])
    async with flow(url, [failing], zoo, settings=AT_ONCE) as engine:
        row = await engine.wait_terminal(await engine.submit("failing"))
        assert row.hot.state is RunState.FAILED
        assert await Retention(core=engine.core).run_once() == 0
        assert (await engine.events(row.facts.run_id))[0].seq == 1


async def test_a_known_key_is_answered_also_when_the_place_it_began_at_is_gone(
    url: str, zoo: ToolZoo
) -> None:
    """R-3.2, R-7.4: the fork of a checkpoint that is no longer kept, asked for again."""

    def decide(context: PlannerContext) -> Decision:
        return Finish(answer=1) if context.turns else calls(("echo", {"value": 1}))

    agent = scripted("one", decide, tools=["echo"])
    async with flow(url, [agent], zoo, settings=AT_ONCE) as engine:
        run_id = (await engine.wait_terminal(await engine.submit("one"))).facts.run_id
        _, checkpoint, *_ = await engine.core.reader.list_checkpoints(run_id, before=None, limit=5)
        wish = ForkRequest(checkpoint_id=checkpoint_id(run_id, checkpoint.seq))
        service = Service(core=engine.core)
        first = await fork(service, LOCAL, run_id, wish, header_key="k")
        await engine.wait_terminal(first.run.run_id)
        await Retention(core=engine.core).run_once()
        await Retention(core=engine.core).run_once()
        with pytest.raises((NotFound, Gone)):
            await fork(service, LOCAL, run_id, wish, header_key="another")
        again = await fork(service, LOCAL, run_id, wish, header_key="k")
        assert (again.created, again.run.run_id) == (False, first.run.run_id)


async def test_a_sweep_deletes_a_bounded_number_of_events_in_one_transaction(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-6.8: each store call stays short, at least one history goes with it, and none is left."""
    monkeypatch.setattr(keeping, "EVENTS_AT_ONCE", 1)
    async with flow(url, [scripted("any", [Finish(answer=1)])], settings=AT_ONCE) as engine:
        runs = [await engine.submit("any") for _ in range(3)]
        for run_id in runs:
            await engine.wait_terminal(run_id)
        store, keep = engine.core.store, AT_ONCE.retention
        first = await store.expire_history(keep, after=None, limit=10)
        assert (first.runs, first.after) == (1, min(runs))
        assert await Retention(core=engine.core).run_once() == 2
        for run_id in runs:
            assert len(await engine.events(run_id)) == 1


async def drop_by_rule(engine: Embedded, _: str) -> None:
    """Let the histories of runs that have succeeded go."""
    await engine.core.store.expire_history([SUCCEEDED_AT_ONCE], after=None, limit=10)


async def drop_with_thread(engine: Embedded, run_id: str) -> None:
    """Delete the thread of a run, and with it the run's history."""
    facts = (await engine.run(run_id)).facts
    await engine.core.store.delete_thread(facts.tenant_id, facts.thread_id)
    await engine.core.store.expire_deleted(facts.thread_id, after=None, limit=10)


@pytest.mark.parametrize("drop", [drop_by_rule, drop_with_thread])
async def test_who_follows_while_a_history_goes_is_told_what_is_missing(
    url: str, zoo: ToolZoo, drop: Callable[[Embedded, str], Awaitable[None]]
) -> None:
    """R-6.8, R-6.4, F32: streams of a run and of its thread say `gap` there, and so does a page."""
    script = [call("echo", value=1), call("echo", value=2), Finish(answer=1)]
    async with flow(url, [scripted("echoes", script, tools=["echo"])], zoo) as engine:
        service = Service(core=engine.core)
        run_id, paged = await engine.submit("echoes"), await engine.submit("echoes")
        ended = await engine.wait_terminal(run_id)
        await engine.wait_terminal(paged)
        end = ended.hot.last_seq
        left = [(end - 1, "gap"), (end, "state")]
        thread_id = ended.facts.thread_id
        start = await starting_point(service, LOCAL, run_id, 0)
        place = await thread_start(service, LOCAL, thread_id, "")
        async with follow_run(service, start) as feed, follow_thread(service, place) as threads:
            for source in (feed, threads):
                first = await source.read(wait_s=5, limit=2)
                assert [event.seq for event in first] == [1, 2]
            await drop(engine, run_id)
            rest: list[EncodedEvent] = []
            while not feed.ended:
                rest += await feed.read(wait_s=5, limit=2)
            assert [(event.seq, event.type) for event in rest] == left
            gap = as_view(rest[0])
            assert gap.model_dump()["data"]["kept_from"] == end
            assert gap.model_dump()["data"]["run"]["retained_from_seq"] == end
            rest = await threads.read(wait_s=5, limit=2) + await threads.read(wait_s=5, limit=2)
            assert [(event.seq, event.type) for event in rest] == left

        reads = disturbed(engine, "events_after", lambda: drop(engine, paged))
        page = await read_page(reads, LOCAL, paged, after=2, limit=2)
        assert [event.seq for event in page.events] == [end]
        assert page.gap is not None
        assert (page.gap.kept_from, page.gap.run.retained_from_seq, page.next) == (end, end, None)
