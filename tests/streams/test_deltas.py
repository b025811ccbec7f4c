"""Text of replies in streams: live at once, durable soon, whole for whoever comes when (R-6.5,
R-6.7; decision 30; STR-03, MEM-01) on both databases, over real sockets."""

import random
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from perdure.engine.feed import follow
from perdure.protocol.codec import decode
from perdure.testing.sse_client import SseClient, SseEvent, StreamInterrupted
from perdure.testing.transcript import Transcript
from tests.server.world import World, open_world
from tests.streams.crowd import stored_log
from tests.streams.typist import OVERLOADED, Typist

STREAMED = {"stream": True}
TEXT = [f"word {number} ü🙂 " for number in range(60)]


@pytest.fixture
async def typist() -> AsyncGenerator[Typist]:
    typist = Typist()
    yield typist
    typist.close()


@pytest.fixture
async def world(url: str, typist: Typist) -> AsyncGenerator[World]:
    async with open_world(serve=True, url=url, agents=typist.registry()) as opened:
        yield opened


@dataclass(slots=True)
class Viewer:
    """A client that puts the text together over all of its connections."""

    client: SseClient
    cuts: list[int] = field(default_factory=list[int])
    transcript: Transcript = field(default_factory=Transcript)
    seen: list[SseEvent] = field(default_factory=list[SseEvent])

    async def follow(self) -> None:
        """Read to the end of the run, coming again after each cut."""
        while not (self.seen and self.seen[-1].is_end):
            cut_after = self.cuts.pop() if self.cuts else None
            async with self.client.connect(cut_after=cut_after) as stream:
                try:
                    while (event := await stream.next()) is not None:
                        self.take(event)
                except StreamInterrupted:
                    assert cut_after is not None

    def take(self, event: SseEvent) -> None:
        """Take one event."""
        self.seen.append(event)
        self.transcript.take(event.json())

    @property
    def live(self) -> list[dict[str, Any]]:
        """The live frames."""
        return [view for event in self.seen if (view := event.json()).get("live")]


async def test_text_is_live_without_an_id_and_its_durable_fragment_moves_the_id(
    world: World, typist: Typist
) -> None:
    run = await world.start("teller", options=STREAMED)
    client = world.events_of(run["run_id"])
    viewer = Viewer(client)
    async with client.connect() as stream:
        await typist.say("Hello")
        while not viewer.live:
            event = await stream.next()
            assert event is not None
            viewer.take(event)
        (live,) = viewer.live
        assert live["data"]["text"] == "Hello"
        assert (live["data"]["offset"], live["attempt"], live["cancel_epoch"]) == (0, 1, 0)
        assert "seq" not in live
        place = viewer.seen[-1].id
        await until_delta(world, run["run_id"])
        await typist.say(", world", None)
        for event in await stream.rest():
            viewer.take(event)
    log = await stored_log(world.core.reader, run["run_id"])
    deltas = [event for event in log if event.type == "delta"]
    assert len(deltas) == 2, "one of its own, and the rest in the step's commit"
    assert int(place) < deltas[0].seq, "a live frame moves no id"
    assert f"\nid: {deltas[0].seq}\n\n".encode() in bytes(stream.raw), "its id stands alone"
    numbered = [event for event in viewer.seen if not event.json().get("live")]
    ids = [int(event.id) for event in numbered]
    trimmed = {event.seq for event in deltas}
    assert [seq for seq in ids if seq not in trimmed] == [
        event.seq for event in log if event.type != "delta"
    ]
    assert viewer.transcript.replies == ["Hello, world"]
    assert stream.parser.last_event_id == str(log[-1].seq)
    answer = await world.get(f"/v1/runs/{run['run_id']}")
    assert answer["answer"] == "Hello, world"
    messages = (await world.get(f"/v1/threads/{run['thread_id']}/messages"))["items"]
    (model,) = [decode(event.raw) for event in log if event.type == "model"]
    assert isinstance(model, dict)
    assert messages[-1]["message_id"] == model["message_id"], "the answer is that message"


async def until_delta(world: World, run_id: str) -> None:
    """Return once a fragment is in the log."""
    with anyio.fail_after(30):
        async with follow(world.core, run_id, 0) as cursor:
            while not any(event.type == "delta" for event in await cursor.read(wait_s=5)):
                pass


async def test_whoever_leaves_joins_or_stays_ends_with_the_same_text(
    world: World, typist: Typist
) -> None:
    """R-6.5, STR-03: cuts at any byte, late joiners, and a request that is tried again."""
    chance = random.Random(5)  # noqa: S311
    run = await world.start("teller", options=STREAMED)
    viewers = [
        Viewer(world.events_of(run["run_id"]), [chance.randrange(4000) for _ in range(12)])
        for _ in range(6)
    ]
    viewers.append(Viewer(world.events_of(run["run_id"])))
    async with anyio.create_task_group() as group:
        for viewer in viewers[:4] + viewers[-1:]:
            group.start_soon(viewer.follow)
        await typist.say("this is ", "thrown away")
        await until_delta(world, run["run_id"])
        await typist.say(OVERLOADED)
        for place, piece in enumerate(TEXT):
            await typist.say(piece)
            if place == len(TEXT) // 2:
                for viewer in viewers[4:6]:
                    group.start_soon(viewer.follow)
            await anyio.sleep(chance.uniform(0, 0.02))
        await typist.say(None)
    whole = "".join(TEXT)
    for viewer in viewers:
        assert viewer.transcript.replies == [whole]
    stayed = viewers[-1]
    assert sum(len(view["data"]["text"]) for view in stayed.live) > len(whole) / 2
    assert len(stayed.transcript.texts) == 2, "the first request's text is another message"
    assert (await world.get(f"/v1/runs/{run['run_id']}"))["answer"] == whole


async def test_a_run_that_is_not_streamed_has_no_deltas(world: World, typist: Typist) -> None:
    run = await world.start("teller")
    viewer = Viewer(world.events_of(run["run_id"]))
    async with anyio.create_task_group() as group:
        group.start_soon(viewer.follow)
        await typist.say("Hello", None)
    assert {event.json()["type"] for event in viewer.seen} == {"state", "attempt", "model", "step"}
