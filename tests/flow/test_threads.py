"""Threads: what runs see of them, forks and branches by reference, adoption, deletion."""

import logging
from typing import cast

import pytest
from pydantic import JsonValue

from perdure.engine.context import PlannerContext
from perdure.engine.retention import Retention
from perdure.protocol.decisions import Decision, Finish
from perdure.protocol.errors import Conflict, Gone, Invalid, ThreadBusy
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.messages import TextPart
from perdure.protocol.runs import RunRow
from perdure.protocol.states import ArtifactStatus, RunState
from perdure.service.artifacts import list_artifacts
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, fork
from perdure.service.messages import MessageRequest, append_message, list_messages
from perdure.service.principal import LOCAL
from perdure.service.runs import get_run
from perdure.service.thread_branches import (
    AdoptRequest,
    ThreadForkRequest,
    adopt_branch,
    delete_thread,
    fork_thread,
    list_branches,
)
from perdure.service.threads import get_thread
from perdure.store.reader import RunFilter
from perdure.testing.embedded import Embedded, call, scripted
from perdure.testing.tools import ToolZoo
from tests.flow.world import data_of, flow


def talks(context: PlannerContext) -> Decision:
    """Draw, and hang when the input says so; finish with what is seen of the thread."""
    if not context.turns:
        return call("draw", text="a plan")
    if str(context.input).startswith("hang") and len(context.turns) == 1:
        return call("hang")
    seen = [part.text for item in context.messages for part in item.parts if part.type == "text"]
    return Finish(answer=[*(text for text in seen if not text.startswith("[")), str(context.input)])


TALKING = scripted("talks", talks, tools=["draw", "hang"])


async def answer_of(engine: Embedded, run_id: str) -> list[str]:
    """Return the answer of a run that succeeds."""
    row = await engine.wait_terminal(run_id)
    assert row.hot.state is RunState.SUCCEEDED, row.hot.code
    return cast("list[str]", data_of(await engine.events(run_id), StateEvent)[-1].answer)


async def ask(engine: Embedded, text: str, thread_id: str | None = None) -> tuple[list[str], str]:
    """Run on a thread; return what the run saw of it, and the thread."""
    run_id = await engine.submit("talks", text, thread_id=thread_id)
    answer = await answer_of(engine, run_id)
    return answer, (await engine.run(run_id)).facts.thread_id


async def say(service: Service, thread_id: str, text: str) -> None:
    """Append a message of a person."""
    request = MessageRequest(parts=[TextPart(text=text)])
    await append_message(service, LOCAL, thread_id, request)


async def texts(service: Service, thread_id: str) -> list[str]:
    """Return what is said on a thread, answers left out, read in small pages."""
    found: list[str] = []
    places: list[int] = []
    after = 0
    while True:
        page = await list_messages(service, LOCAL, thread_id, after=after, limit=2)
        places += [item.position for item in page.items]
        found += [
            part.text
            for item in page.items
            for part in item.parts
            if part.type == "text" and item.role == "user"
        ]
        if page.next is None:
            assert places == sorted(set(places))
            return found
        after = int(page.next)


async def test_runs_of_a_fork_see_what_was_said_before_it(url: str, zoo: ToolZoo) -> None:
    """R-7.4, R-11.3, R-7.5: also a fork of a fork, and what is said later on neither side."""
    async with flow(url, [TALKING], zoo) as engine:
        service = Service(core=engine.core)
        _, thread = await ask(engine, "one")
        run_id = await engine.submit("talks", "two", thread_id=thread)
        assert await answer_of(engine, run_id) == ["one", "two"]
        await ask(engine, "three", thread)
        made = (await fork(service, LOCAL, run_id, ForkRequest(input="other"))).run
        assert await answer_of(engine, made.run_id) == ["one", "other"]
        assert made.branch is not None
        assert (made.branch.thread_id, made.branch.run_id) == (thread, run_id)
        assert (await ask(engine, "later", made.thread_id))[0] == ["one", "other", "later"]
        assert await texts(service, made.thread_id) == ["one", "other", "later"]
        # by hand: from a place, of all of it, and of the fork
        place = made.branch.position
        part = await fork_thread(service, LOCAL, thread, ThreadForkRequest(position=place))
        whole = await fork_thread(service, LOCAL, thread, ThreadForkRequest(title="copy"), key="k")
        again = await fork_thread(service, LOCAL, thread, ThreadForkRequest(title="copy"), key="k")
        assert (again.created, again.thread.thread_id) == (False, whole.thread.thread_id)
        with pytest.raises(Conflict):
            await fork_thread(service, LOCAL, thread, ThreadForkRequest(), key="k")
        with pytest.raises(Invalid):
            await fork_thread(service, LOCAL, thread, ThreadForkRequest(position=99))
        await say(service, thread, "aside")
        assert (await ask(engine, "b", part.thread.thread_id))[0] == ["one", "b"]
        assert (await ask(engine, "c", whole.thread.thread_id))[0] == ["one", "two", "three", "c"]
        below = await fork_thread(
            service, LOCAL, made.thread_id, ThreadForkRequest(position=place - 1)
        )
        assert await texts(service, below.thread.thread_id) == ["one"]
        assert (await ask(engine, "d", thread))[0] == ["one", "two", "three", "aside", "d"]
        found = (await list_branches(service, LOCAL, thread, after=None, limit=9)).items
        assert [(item.thread_id, item.position) for item in found] == [
            (made.thread_id, place),
            (part.thread.thread_id, place),
            (whole.thread.thread_id, 6),
        ]
        rows = await engine.core.reader.list_messages(whole.thread.thread_id, after=0, limit=99)
        assert [row.position for row in rows] == [7, 8]


async def test_a_queued_run_sees_nothing_that_was_asked_behind_it(url: str, zoo: ToolZoo) -> None:
    """R-11.2: in order of the inputs; answers and what people say meanwhile are seen."""
    async with flow(url, [TALKING], zoo) as engine:
        service = Service(core=engine.core)
        first = await engine.submit("talks", "hang")
        thread = (await engine.run(first)).facts.thread_id
        await zoo.wait_started("hang")
        second = await engine.submit("talks", "second", thread_id=thread)
        third = await engine.submit("talks", "third", thread_id=thread)
        await say(service, thread, "aside")
        zoo.open_gate()
        assert await answer_of(engine, second) == ["hang", "aside", "second"]
        assert await answer_of(engine, third) == ["hang", "second", "aside", "third"]


async def test_a_branch_of_a_busy_thread_runs_beside_and_is_adopted(url: str, zoo: ToolZoo) -> None:
    """R-11.1, R-11.2: fork; the branch, its artifacts and its adoption are marked."""
    async with flow(url, [TALKING], zoo) as engine:
        service = Service(core=engine.core)
        _, thread = await ask(engine, "one")
        busy = await engine.submit("talks", "hang", thread_id=thread)
        await zoo.wait_started("hang")
        order = engine.order("talks", "beside", thread_id=thread, multitask_strategy="fork")
        row = (await engine.submit_order(order)).row
        branch = row.facts.thread_id
        assert branch != thread
        assert await answer_of(engine, row.facts.run_id) == ["one", "beside"]
        shown = await get_run(service, LOCAL, row.facts.run_id)
        assert shown.branch is not None
        assert (shown.branch.thread_id, shown.branch.position, shown.branch.run_id) == (
            thread,
            2,
            busy,
        )
        assert (await engine.run(busy)).hot.cancel_epoch == 0
        with pytest.raises(ThreadBusy):
            await adopt_branch(service, LOCAL, thread, AdoptRequest(branch_id=branch))
        zoo.open_gate()
        assert await answer_of(engine, busy) == ["one", "hang"]
        (drawn,) = (await list_artifacts(service, LOCAL, busy, after=None, limit=5)).items
        assert (drawn.status, drawn.thread_id) == (ArtifactStatus.FINAL, thread)
        for _ in range(2):
            view = await adopt_branch(service, LOCAL, thread, AdoptRequest(branch_id=branch))
            assert [(base.kind, base.thread_id) for base in view.bases] == [("adopt", branch)]
        (drawn,) = (
            await list_artifacts(service, LOCAL, row.facts.run_id, after=None, limit=5)
        ).items
        assert (drawn.status, drawn.thread_id) == (ArtifactStatus.ADOPTED, branch)
        (marked,) = (await list_branches(service, LOCAL, thread, after=None, limit=9)).items
        assert (marked.thread_id, marked.adopted_by) == (branch, "local")
        assert (await ask(engine, "on", thread))[0] == ["one", "beside", "on"]
        assert await texts(service, thread) == ["one", "beside", "on"]
        assert (await ask(engine, "own way", branch))[0] == ["one", "beside", "own way"]
        # a run from before the adoption is forked with what was said then
        made = (await fork(service, LOCAL, busy, ForkRequest(input="what if"))).run
        await answer_of(engine, made.run_id)
        assert (await ask(engine, "on", made.thread_id))[0] == ["one", "what if", "on"]


async def test_an_optimistic_run_ends_in_conflict_when_its_thread_has_moved(
    url: str, zoo: ToolZoo
) -> None:
    """R-11.1: it runs beside the active run; who comes second finds that the thread says more."""
    async with flow(url, [TALKING], zoo) as engine:
        service = Service(core=engine.core)
        _, thread = await ask(engine, "one")
        busy = await engine.submit("talks", "hang", thread_id=thread)
        await zoo.wait_started("hang")

        async def beside(text: str) -> str:
            order = engine.order("talks", text, thread_id=thread, multitask_strategy="optimistic")
            return (await engine.submit_order(order)).row.facts.run_id

        quick = await beside("quick")
        assert await answer_of(engine, quick) == ["one", "hang", "quick"]
        slow = await beside("hang too")
        await zoo.wait_started("hang", 2)
        queued = await engine.submit("talks", "queued", thread_id=thread)
        await say(service, thread, "aside")
        zoo.open_gate()
        row = await engine.wait_terminal(slow)
        assert (row.hot.state, row.hot.code) == (RunState.FAILED, FailureCode.CONFLICT)
        failure = data_of(await engine.events(slow), StateEvent)[-1].failure
        assert failure is not None
        assert failure.details["began_at"] == 6
        assert (await engine.wait_terminal(busy)).hot.state is RunState.SUCCEEDED
        assert (await engine.wait_terminal(queued)).hot.state is RunState.SUCCEEDED
        assert await answer_of(engine, await beside("alone"))


async def test_a_deleted_thread_is_gone_but_for_what_its_branches_share(
    url: str, zoo: ToolZoo, caplog: pytest.LogCaptureFixture
) -> None:
    """R-11.3, R-6.8, R-7.5: history and messages go, the runs' rows stay, shared content stays."""
    async with flow(url, [TALKING], zoo) as engine:
        service = Service(core=engine.core)
        _, thread = await ask(engine, "one")
        busy = await engine.submit("talks", "hang", thread_id=thread)
        await zoo.wait_started("hang")
        with pytest.raises(ThreadBusy):
            await delete_thread(service, LOCAL, thread)
        zoo.open_gate()
        await answer_of(engine, busy)
        made = (await fork(service, LOCAL, busy, ForkRequest(input="other"))).run
        await answer_of(engine, made.run_id)
        for _ in range(2):
            await delete_thread(service, LOCAL, thread)
        with pytest.raises(Gone):
            await get_thread(service, LOCAL, thread)
        with pytest.raises(Gone):
            await engine.submit("talks", "more", thread_id=thread)
        assert (await ask(engine, "on", made.thread_id))[0] == ["one", "other", "on"]
        runs = {
            row.facts.run_id: row.hot.retained_from_seq for row in await _runs_of(engine, thread)
        }
        assert runs[busy] == 1  # shared by the fork
        assert [kept > 1 for run_id, kept in runs.items() if run_id != busy] == [True]
        run = await get_run(service, LOCAL, busy)
        assert run.answer == cast("JsonValue", ["one", "hang"])
        await delete_thread(service, LOCAL, made.thread_id)
        assert await engine.core.reader.list_messages(thread, after=0, limit=9) == []
        caplog.clear()
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                await Retention(core=engine.core).run_once()
        told = [one.getMessage() for one in caplog.records if "history of" in one.getMessage()]
        assert told
        assert all("runs of deleted threads was dropped" in text for text in told)
        assert all(row.hot.retained_from_seq > 1 for row in await _runs_of(engine, thread))


async def _runs_of(engine: Embedded, thread_id: str) -> list[RunRow]:
    where = RunFilter(thread_id=thread_id)
    return await engine.core.reader.list_runs(None, where, after=None, limit=9)
