"""What callers, followers and operators are told: all of it, and nothing that is not theirs."""

from dataclasses import replace

import pytest

from perdure.engine import rowview, tree
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core
from perdure.engine.rowview import view_from_rows
from perdure.protocol.codec import decode
from perdure.protocol.decisions import Ask, ChildRequest, Decision, Finish, Spawn, UpdatePlan
from perdure.protocol.events import ChildEvent, PlanItem, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import (
    Answer,
    CancelAction,
    InterruptKind,
    RunState,
    RunStatus,
)
from perdure.protocol.values import EVENT_DATA_BYTES_MAX
from perdure.service import base
from perdure.service.base import Service
from perdure.service.events import Projector
from perdure.service.principal import LOCAL
from perdure.service.steps import list_steps
from perdure.service.tool_calls import list_tool_calls
from perdure.testing.embedded import SETTINGS, call, calls, new_worker, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow

SECRET = "postgresql://me:secret@db.internal:5432/perdure"


async def test_an_error_of_ours_is_told_by_its_type_and_one_of_the_author_in_full(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R-21.2: what a driver says of its database stands in the log, under the id that is told."""

    class Leaky:
        """A reader that fails with words that are nobody's business."""

        def __init__(self, core: Core) -> None:
            self._reader = core.reader

        def __getattr__(self, name: str) -> object:
            return getattr(self._reader, name)

        async def find_thread(self, *_: object) -> object:
            """Fail."""
            raise RuntimeError(SECRET)

    def broken(_: PlannerContext) -> Decision:
        raise KeyError("my own words")

    agents = [scripted("broken", broken), scripted("one", [Finish(answer=1)])]
    async with flow(url, agents) as engine:
        first = await engine.wait_terminal(await engine.submit("broken", max_attempts=1))
        failure = data_of(await engine.events(first.facts.run_id), StateEvent)[-1].failure
        assert failure is not None
        assert "KeyError: 'my own words'" in failure.reason
        await engine.stop()
        core = replace(engine.core, reader=Leaky(engine.core))
        await engine.run_worker(new_worker(core, engine.catalog, engine.tools, engine.policy))
        again = await engine.submit("one", thread_id=first.facts.thread_id, max_attempts=1)
        row = await engine.wait_terminal(again)
        assert row.hot.code is FailureCode.INTERNAL
        told = [event.raw for event in await engine.events(again)]
        assert not [raw for raw in told if b"secret" in raw]
        failure = data_of(await engine.events(again), StateEvent)[-1].failure
        assert failure is not None
        assert failure.reason.startswith("RuntimeError in the runtime")
        log_id = failure.reason.rpartition(" ")[2]
        assert [one for one in caplog.records if log_id in one.getMessage() and one.exc_info]


async def test_tools_that_a_model_made_up_make_no_series_of_their_own(
    url: str, zoo: ToolZoo
) -> None:
    """R-17.3: labels are bounded by what is registered."""
    script = [call("made_up_17"), call("echo", value=1), Finish(answer=1)]
    async with flow(url, [scripted("one", script, tools=["echo"])], zoo) as engine:
        await engine.wait_terminal(await engine.submit("one"))
        text = engine.core.metrics.text().decode()
        assert 'perdure_tool_calls_total{status="succeeded",tool="echo"}' in text
        assert 'tool="unknown"' in text
        assert "made_up_17" not in text
        (count,) = [line for line in text.splitlines() if "commit_seconds_count" in line]
        assert float(count.split()[-1]) > 0


async def test_a_call_that_runs_is_told_as_running_among_the_items_of_its_step(
    url: str, zoo: ToolZoo
) -> None:
    """R-1.3: no event tells that it began, its row does."""
    script = [calls(("hang", {}), ("pay", {"amount": 1})), Finish(answer=1)]
    async with flow(url, [scripted("one", script, tools=["hang", "pay"])], zoo) as engine:
        run_id = await engine.submit("one")
        await zoo.wait_started("hang")
        steps = await list_steps(Service(core=engine.core), LOCAL, run_id, after=-1, limit=9)
        told = {item.name: item.status for item in steps.items[0].items if item.kind == "tool"}
        assert told == {"hang": "running", "pay": "awaiting_approval"}
        zoo.open_gate()
        await engine.cancel(run_id)
        await engine.wait_terminal(run_id)


async def test_two_followers_see_one_status_whenever_they_began(url: str) -> None:
    """R-6.2: a follower that knew of the first, weaker cancel tells the end by the last one."""
    async with flow(url, [scripted("asker", [Ask(title="?")])]) as engine:
        run_id = await engine.submit("asker")
        await engine.wait_waiting(run_id)
        await engine.cancel(run_id, CancelAction.ROLLBACK)
        row = await engine.wait_terminal(run_id)
        (end,) = [one for one in await engine.events(run_id) if one.seq == row.hot.terminal_seq]
        earlier = replace(
            row.hot, state=RunState.WAITING_HUMAN, cancel_action=CancelAction.INTERRUPT
        )
        service = Service(core=engine.core)
        for known in (row, replace(row, hot=earlier)):
            body = decode((await Projector(service, known).encode(end)).body)
            assert isinstance(body, dict)
            assert isinstance(body["data"], dict)
            assert body["data"]["status"] == RunStatus.CANCELED


async def test_what_lies_behind_the_first_page_of_questions_counts_too(
    url: str, zoo: ToolZoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-6.2, R-8.6: an authorisation, and edited arguments, behind a page of other questions."""
    monkeypatch.setattr(base, "_INTERRUPTS_PAGE", 2)
    script = [
        *[Ask(title=str(number)) for number in range(3)],
        call("pay", amount=5),
        Ask(title="sign in", ask=InterruptKind.AUTH),
        Finish(answer=1),
    ]
    async with flow(url, [scripted("asker", script, tools=["pay"])], zoo) as engine:
        run_id = await engine.submit("asker")
        for number in range(5):
            await engine.wait_until(run_id, lambda row: row.hot.open_interrupts == 1)
            (question,) = await engine.pending(run_id)
            if number == 3:
                await engine.answer(question.interrupt_id, Answer.EDIT, args={"amount": 6})
            else:
                await engine.answer(question.interrupt_id, Answer.RESPOND, value="yes")
            await engine.wait_event(run_id, "resume", after=question.opened_seq)
        await engine.wait_terminal(run_id)
        service, row = Service(core=engine.core), await engine.run(run_id)
        projector = Projector(service, row)
        seen: list[object] = []
        for event in await engine.events(run_id):
            if isinstance(event.data, StateEvent) and event.data.state is RunState.WAITING_HUMAN:
                body = decode((await projector.encode(event)).body)
                assert isinstance(body, dict)
                assert isinstance(body["data"], dict)
                seen.append(body["data"]["status"])
        assert seen == ["INPUT_REQUIRED"] * 4 + ["AUTH_REQUIRED"]
        found = await list_tool_calls(service, LOCAL, run_id, after=None, limit=10)
        assert [one.effective_args for one in found.items] == [{"amount": 6}]


async def test_an_event_is_not_larger_than_its_limit(url: str) -> None:
    """Decision 37: a plan that is too large ends its run at once, and says why."""
    item = PlanItem(text="x" * 900)
    large = UpdatePlan(plan=(item,) * (EVENT_DATA_BYTES_MAX // 900 + 1))
    async with flow(url, [scripted("planner", [large, Finish(answer=1)])]) as engine:
        row = await engine.wait_terminal(await engine.submit("planner"))
        assert (row.hot.code, row.hot.attempt) == (FailureCode.INTERNAL, 1)
        events = await engine.events(row.facts.run_id)
        assert max(len(event.raw) for event in events) <= EVENT_DATA_BYTES_MAX
        failure = data_of(events, StateEvent)[-1].failure
        assert failure is not None
        assert "plan event" in failure.reason


async def test_detached_children_are_bounded_and_hide_no_child_that_is_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-13.1, R-13.6: their number has a limit; behind pages of them the others are found."""
    monkeypatch.setattr(rowview, "PAGE", 1)
    monkeypatch.setattr(tree, "CHILDREN_PAGE", 1)
    requests = [ChildRequest(agent_id="asker")]
    requests += [ChildRequest(agent_id="asker", detach=True) for _ in range(3)]
    spawner = scripted("spawner", [Spawn(children=tuple(requests))])
    few = replace(SETTINGS, detached_max=2, cancel_deadline_s=0.2)
    async with flow(url, [spawner, scripted("asker", [Ask(title="?")])], settings=few) as engine:
        run_id = await engine.submit("spawner")
        await engine.wait_until(
            run_id, lambda row: row.hot.lease_owner is None and row.hot.open_children > 0
        )
        events = data_of(await engine.events(run_id), ChildEvent)
        assert [one.phase for one in events] == ["spawned"] * 3 + ["refused"]
        assert events[-1].failure is not None
        assert events[-1].failure.details["limit"] == "detached_children"
        for one in events[:3]:
            assert one.child_run_id is not None
            await engine.wait_waiting(one.child_run_id)
        awaited = events[0].child_run_id
        row = await engine.run(run_id)
        view = await view_from_rows(engine.core, row)
        assert list(view.snapshot.open_children) == [awaited]
        await tree._orphan_below(engine.core, run_id, engine.tools)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - else a deadline has to pass
        assert awaited is not None
        assert (await engine.run(awaited)).hot.code is FailureCode.ORPHANED
        await engine.wait_terminal(run_id)
        for one in events[1:3]:
            assert one.child_run_id is not None
            await engine.cancel(one.child_run_id)
