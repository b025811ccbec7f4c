"""All runs of a thread in one stream (R-6.3, R-6.4, R-11.2; decision 31; STR-09), on both stores.

What each client saw of each run is compared with that run's stored log.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from perdure.protocol.states import RunState
from perdure.signals.off import NoSignals
from perdure.store.requests import RetentionRule
from perdure.testing.sse_client import SseClient, SseEvent, SseStream, StreamInterrupted
from perdure.testing.transcript import Transcript
from tests.server.world import World, open_world
from tests.streams.crowd import assert_exact, stored_log
from tests.streams.typist import Typist

ANSWER = {"answer": "respond", "value": "north"}


def thread_client(world: World, thread_id: str) -> SseClient:
    """Return a client of a thread's stream."""
    return SseClient("127.0.0.1", world.port, f"/v1/threads/{thread_id}/events")


async def new_thread(world: World) -> str:
    """Return a new thread's id."""
    return (await world.http.post("/v1/threads", json={})).json()["thread_id"]


async def start_on(world: World, thread_id: str, agent: str, input: object = None) -> str:
    """Start a run on a thread and return its id."""
    body = {"agent_id": agent, "input": input}
    answer = await world.http.post(f"/v1/threads/{thread_id}/runs", json=body)
    assert answer.status_code == 202, answer.text
    return answer.json()["run_id"]


@dataclass(slots=True)
class Viewer:
    """A client of a thread that reads until so many runs have ended, over cut connections."""

    client: SseClient
    runs: int
    cuts: list[int] = field(default_factory=list[int])
    seen: list[SseEvent] = field(default_factory=list[SseEvent])

    @property
    def ended(self) -> int:
        """How many runs have ended before its eyes."""
        return sum(event.is_end for event in self.seen)

    async def follow(self) -> None:
        """Read, coming again after each cut."""
        while self.ended < self.runs:
            cut_after = self.cuts.pop() if self.cuts else None
            async with self.client.connect(cut_after=cut_after) as stream:
                assert stream.status == 200
                await self._read(stream)

    async def _read(self, stream: SseStream) -> None:
        try:
            while self.ended < self.runs:
                event = await stream.next()
                if event is None:  # after a run's end the stream of a thread goes on
                    stream._has_ended = False  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
                    continue
                self.seen.append(event)
        except StreamInterrupted:
            return


def renumbered(events: Sequence[SseEvent]) -> dict[str, list[SseEvent]]:
    """Return the events by run, each under its seq as in the run's own stream."""
    found: dict[str, list[SseEvent]] = {}
    for event in events:
        view = event.json()
        numbered = SseEvent(str(view["seq"]), event.type, event.data)
        found.setdefault(view["run_id"], []).append(numbered)
    return found


async def assert_whole(world: World, viewer: Viewer, run_ids: Sequence[str]) -> None:
    """Fail unless the viewer saw each run's whole log, once and in order."""
    by_run = renumbered(viewer.seen)
    assert set(by_run) == set(run_ids)
    for run_id, events in by_run.items():
        assert_exact(events, await stored_log(world.core.reader, run_id))


@pytest.mark.parametrize("signals", ["on", "off"])
async def test_every_client_of_a_thread_sees_each_runs_log(url: str, signals: str) -> None:
    """Cuts at any byte, late joiners, runs that queue, a run that is cancelled before others."""
    chance = random.Random(3)  # noqa: S311
    wire = NoSignals() if signals == "off" else None
    async with open_world(serve=True, url=url, signals=wire, poll_s=0.1) as world:
        thread_id = await new_thread(world)
        run_ids: list[str] = []
        viewers = [
            Viewer(thread_client(world, thread_id), 5, [chance.randrange(3000) for _ in range(6)])
            for _ in range(4)
        ]
        with anyio.fail_after(40):
            async with anyio.create_task_group() as group:
                for viewer in viewers[:2]:
                    group.start_soon(viewer.follow)
                for number in range(4):
                    wish = {"times": 2, "seconds": 0.03, "text": str(number)}
                    run_ids.append(await start_on(world, thread_id, "walker", wish))
                await world.http.post(f"/v1/runs/{run_ids[2]}/cancel")
                group.start_soon(viewers[2].follow)
                await world.get(f"/v1/runs/{run_ids[3]}", wait=20)
                run_ids.append(await start_on(world, thread_id, "echo"))
            await viewers[3].follow()
        for viewer in viewers:
            await assert_whole(world, viewer, run_ids)


async def test_a_place_outlives_the_server_and_a_pause_ends_nothing(url: str) -> None:
    """STR-01, STR-09: an open question, a restart, an answer, and one more run."""
    async with open_world(serve=True, url=url) as world:
        thread_id = await new_thread(world)
        run_id = await start_on(world, thread_id, "asker")
        queued = await start_on(world, thread_id, "echo")
        await world.until(run_id, "waiting_human")
        first = Viewer(thread_client(world, thread_id), 0)
        async with first.client.connect() as stream:
            while len(renumbered(first.seen)) < 2:
                event = await stream.next()
                assert event is not None
                first.seen.append(event)
        page = await world.get(f"/v1/threads/{thread_id}/events")
    async with open_world(serve=True, url=url) as world:
        client = thread_client(world, thread_id)
        client.last_event_id = first.client.last_event_id
        viewer = Viewer(client, 3, seen=first.seen)
        run_ids: list[str] = []
        async with anyio.create_task_group() as group:
            group.start_soon(viewer.follow)
            await world.http.post(f"/v1/runs/{run_id}/resolve", json=ANSWER)
            await world.get(f"/v1/runs/{queued}", wait=20)
            run_ids = [run_id, queued, await start_on(world, thread_id, "echo")]
        await assert_whole(world, viewer, run_ids)
        rest = await world.get(f"/v1/threads/{thread_id}/events", after=page["place"])
        both = [*page["items"], *rest["items"]]
        whole = (await world.get(f"/v1/threads/{thread_id}/events", limit=200))["items"]
        by_seq = sorted(both, key=lambda view: (view["run_id"], view["seq"]))
        assert by_seq == sorted(whole, key=lambda view: (view["run_id"], view["seq"]))


async def test_pages_walk_through_a_thread_and_cursors_are_checked(url: str) -> None:
    async with open_world(url=url) as world:
        thread_id = await new_thread(world)
        for _ in range(3):
            await world.get(f"/v1/runs/{await start_on(world, thread_id, 'echo')}", wait=20)
        path = f"/v1/threads/{thread_id}/events"
        walked: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = await world.get(path, after=after, limit=5)
            walked += page["items"]
            after = page["next"]
        whole = await world.get(path, limit=200)
        assert walked == whole["items"]
        assert (await world.get(path, after=whole["place"]))["items"] == []
        json = {"Accept": "application/json"}
        for text, code in (("7", 400), ("t1.1.2-1", 400), ("t1.99", 409), ("t1.3.3-99", 409)):
            answer = await world.http.get(path, params={"after": text}, headers=json)
            assert answer.status_code == code, (text, answer.text)
            answer = await world.http.get(path, headers={"Last-Event-ID": text})
            assert answer.status_code == code
        answer = await world.http.get(f"/v1/threads/thr_{'0' * 32}/events")
        assert answer.json()["code"] == "not_found"


async def test_a_run_whose_history_is_gone_says_so_in_its_thread(url: str) -> None:
    """R-6.8: a gap for that run, then what is kept, then the other runs."""
    async with open_world(url=url) as world:
        thread_id = await new_thread(world)
        old = await start_on(world, thread_id, "echo")
        end = (await world.get(f"/v1/runs/{old}", wait=20))["last_seq"]
        keep = (RetentionRule(state=RunState.SUCCEEDED, older_than_s=0),)
        await world.core.store.expire_history(keep, after=None, limit=10)
        new = await start_on(world, thread_id, "echo")
        await world.get(f"/v1/runs/{new}", wait=20)
        page = await world.get(f"/v1/threads/{thread_id}/events", limit=3)
        found = [(view["run_id"], view["type"], view["seq"]) for view in page["items"]]
        assert found == [(old, "gap", end - 1), (old, "state", end), (new, "state", 1)]


async def test_text_of_replies_is_live_in_a_threads_stream(url: str) -> None:
    """R-6.5 in a thread: live without an id, whole for who joins later."""
    typist = Typist()
    async with open_world(serve=True, url=url, agents=typist.registry()) as world:
        thread_id = await new_thread(world)
        body = {"agent_id": "teller", "input": 1, "options": {"stream": True}}
        await world.http.post(f"/v1/threads/{thread_id}/runs", json=body)
        early, late = (Viewer(thread_client(world, thread_id), 1) for _ in range(2))
        async with anyio.create_task_group() as group:
            group.start_soon(early.follow)
            await typist.say("one ")
            await anyio.sleep(0.05)
            await typist.say("two", None)
        await late.follow()
        for viewer in (early, late):
            transcript = Transcript()
            for event in viewer.seen:
                transcript.take(event.json())
            assert transcript.replies == ["one two"]
        assert any(event.json().get("live") for event in early.seen)
        assert not any(event.json().get("live") for event in late.seen)
    typist.close()
