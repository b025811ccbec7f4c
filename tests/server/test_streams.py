"""Event streams on a real socket (R-6.3 to R-6.7; faults F31 to F33; reported bugs STR, MEM)."""

import json
from collections.abc import AsyncGenerator

import anyio
import pytest

from perdure.protocol.errors import Unavailable
from perdure.protocol.log import RecordedEvent
from perdure.protocol.states import RunState
from perdure.store.requests import RetentionRule
from perdure.testing.sse_client import SseClient, SseEvent, StreamInterrupted, follow_to_the_end
from tests.server.world import World, open_world, value_of
from tests.waiting import eventually


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world(serve=True, sse_heartbeat_s=0.1, sse_stall_s=0.3) as opened:
        yield opened


def _seqs(events: list[SseEvent]) -> list[int]:
    return [event.json()["seq"] for event in events]


async def test_a_stream_has_every_event_in_order_and_ends_with_the_run(world: World) -> None:
    """R-6.1, R-6.3."""
    run = await world.start("echo", {"times": 3})
    async with world.events_of(run["run_id"]).connect() as stream:
        with anyio.fail_after(30):
            events = await stream.rest()
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-store"
        assert stream.parser.retry_ms == 2000
        assert stream.is_clean or stream.parser.last_event_id == events[-1].id
    assert _seqs(events) == list(range(1, len(events) + 1))
    assert [event.id for event in events] == [str(seq) for seq in _seqs(events)]
    assert {event.type for event in events} == {"message"}
    assert events[-1].json()["data"]["state"] == "succeeded"
    page = await world.get(f"/v1/runs/{run['run_id']}/events", limit=200)
    assert [event.json() for event in events] == page["items"]


async def test_a_filtered_stream_tells_the_places_of_what_it_leaves_out(world: World) -> None:
    """R-6.10: `Last-Event-ID` moves on to the end, so that coming again finds nothing."""
    run = await world.start("echo", {"times": 3})
    path = f"/v1/runs/{run['run_id']}/events"
    client = SseClient("127.0.0.1", world.port, f"{path}?types=action")
    async with client.connect() as stream:
        with anyio.fail_after(30):
            events = await stream.rest()
        last = stream.parser.last_event_id
    whole = await world.get(path, limit=200)
    actions = [item for item in whole["items"] if item["type"] == "action"]
    assert [event.json() for event in events[:-1]] == actions
    assert events[-1].is_end, "the end is never left out"
    assert last == str(whole["last_seq"])
    again = await world.http.get(path, headers={"Last-Event-ID": last})
    assert again.status_code == 204
    page = await world.get(path, limit=200, granularity="state,message", types="result")
    groups = {"state", "attempt", "result", "message"}
    assert page["items"] == [item for item in whole["items"] if item["type"] in groups]
    wrong = await world.http.get(path, params={"types": "sate"})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "types")


async def test_starting_a_run_can_be_answered_by_its_stream(world: World) -> None:
    """R-3.1."""
    client = SseClient(
        "127.0.0.1", world.port, "/v1/agents/echo/run", method="POST", body=b'{"input": 1}'
    )
    async with client.connect() as stream:
        assert stream.headers["location"].startswith("/v1/runs/run_")
        with anyio.fail_after(30):
            events = await stream.rest()
    assert _seqs(events)[0] == 1
    assert events[-1].is_end


async def test_the_viewer_that_leaves_disturbs_neither_run_nor_other_viewers(
    world: World,
) -> None:
    """R-6.4, R-3.5."""
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    client = world.events_of(run["run_id"])
    async with world.events_of(run["run_id"]).connect() as other:
        async with client.connect() as stream:
            await stream.next()
        await world.http.post(
            f"/v1/runs/{run['run_id']}/resolve", json={"answer": "respond", "value": "x"}
        )
        with anyio.fail_after(30):
            seen = await other.rest()
            rest = await follow_to_the_end(client)
    assert seen[-1].is_end
    assert _seqs(rest) == _seqs(seen)[1:]
    assert not any(event.json()["type"] == "cancel" for event in seen)


async def test_a_pause_does_not_end_the_stream(world: World) -> None:
    run = await world.start("asker")
    async with world.events_of(run["run_id"]).connect() as stream:
        with anyio.fail_after(30):
            while (event := await stream.next()) is not None:
                if event.json()["type"] == "interrupt":
                    break
            await stream.wait_for_comment("hb")
            reply = {"answer": "respond", "value": "x"}
            await world.http.post(f"/v1/runs/{run['run_id']}/resolve", json=reply)
            assert (await stream.rest())[-1].is_end


@pytest.mark.slow
async def test_cut_at_every_byte_and_resumed_it_is_whole(world: World) -> None:
    """F32, R-6.3, F35."""
    run = await world.start("echo", {"text": "é\u2028👩‍👩‍👧", "answer": "ü"}, wait=5)
    async with world.events_of(run["run_id"]).connect() as stream:
        whole = await stream.rest()
        size = stream.body_bytes
    page = await world.get(f"/v1/runs/{run['run_id']}/events", limit=200)
    assert [event.json() for event in whole] == page["items"]
    places = {*range(40), *range(40, size, 61), *range(size - 8, size)}
    limiter = anyio.CapacityLimiter(20)

    async def follow(place: int) -> None:
        async with limiter:
            found = await follow_to_the_end(world.events_of(run["run_id"]), cuts=[place + 1])
            assert found == whole

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for place in places:
                group.start_soon(follow, place)


async def test_a_cut_stream_is_not_a_finished_run(world: World) -> None:
    run = await world.start("echo", wait=5)
    async with world.events_of(run["run_id"]).connect(cut_after=700) as stream:
        with pytest.raises(StreamInterrupted):
            await stream.rest()


async def test_after_the_end_there_is_nothing_more(world: World) -> None:
    """R-6.3, decision 33."""
    run = await world.start("echo", wait=5)
    path = f"/v1/runs/{run['run_id']}/events"
    for query, headers in (
        ({"after": str(run["last_seq"])}, {}),
        ({}, {"Last-Event-ID": str(run["last_seq"])}),
        ({"after": "1"}, {"Last-Event-ID": str(run["last_seq"])}),
    ):
        answer = await world.http.get(path, params=query, headers=headers)
        assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.parametrize("cursor", ["abc", "-1", "1.5", "1 2", "٣", "9" * 40, "run:4"])
async def test_a_cursor_that_is_no_seq_is_malformed(world: World, cursor: str) -> None:
    run = await world.start("echo", wait=5)
    path = f"/v1/runs/{run['run_id']}/events"
    answer = await world.http.get(path, headers=[(b"Last-Event-ID", cursor.encode())])
    assert (answer.status_code, answer.json()["field"]) == (400, "Last-Event-ID")
    for headers in ({}, {"Last-Event-ID": "1"}):
        answer = await world.http.get(path, params={"after": cursor}, headers=headers)
        assert answer.status_code in {400, 422}


async def test_a_place_that_is_none_is_malformed_beside_one_that_is(world: World) -> None:
    run = await world.start("echo", wait=5)
    answer = await world.http.get(
        f"/v1/threads/{run['thread_id']}/events",
        params={"after": "abc"},
        headers={"Last-Event-ID": "t1.0", "Accept": "application/json"},
    )
    assert (answer.status_code, answer.json()["field"]) == (400, "after")


async def test_a_cursor_of_the_future_says_that_history_was_reset(world: World) -> None:
    """Decision 33, R-6.3, F17."""
    run = await world.start("echo", wait=5)
    for accept in ("text/event-stream", "application/json"):
        answer = await world.http.get(
            f"/v1/runs/{run['run_id']}/events",
            headers={"Last-Event-ID": str(run["last_seq"] + 1), "Accept": accept},
        )
        assert (answer.status_code, answer.json()["code"]) == (409, "history_reset")
        assert answer.json()["details"]["last_seq"] == run["last_seq"]


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "text/event-stream"),
        ("text/event-stream", "text/event-stream"),
        ("application/json", "application/json"),
        ("application/json, */*;q=0.1", "application/json"),
        ("text/event-stream;q=0.5, application/json", "application/json"),
        ("text/html", "application/problem+json"),
    ],
)
async def test_the_form_of_the_answer_is_by_accept(world: World, accept: str, kind: str) -> None:
    run = await world.start("echo", wait=5)
    answer = await world.http.get(f"/v1/runs/{run['run_id']}/events", headers={"Accept": accept})
    assert answer.headers["content-type"] == kind
    assert answer.status_code == (406 if "problem" in kind else 200)


async def test_a_client_that_does_not_read_is_cut_off_and_can_resume(world: World) -> None:
    """R-6.7."""
    run = await world.start("sleeper")
    blob = "x" * 60_000
    for _ in range(200):
        await world.add_event(run["run_id"], blob)
    client = world.events_of(run["run_id"])
    dropped = world.metrics.server.sse_dropped
    async with client.connect(receive_buffer=65_536) as stream:
        await stream.next()
        await eventually(lambda: value_of(dropped) == 1)
        with pytest.raises(StreamInterrupted) as cut:
            await stream.rest()
        assert not cut.value.clean
    assert 0 < int(client.last_event_id) < 200
    with anyio.fail_after(30):
        async with client.connect() as stream:
            event = await stream.next()
    assert event is not None
    assert int(event.id) > int(client.last_event_id) - 2


async def test_viewers_that_vanish_leave_nothing_behind(world: World) -> None:
    """R-6.4, R-6.7."""
    run = await world.start("sleeper")
    client = world.events_of(run["run_id"])

    async def visit() -> None:
        async with client.connect() as stream:
            await stream.next()

    with anyio.fail_after(30):
        for _ in range(5):
            async with anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(visit)
    await eventually(lambda: value_of(world.metrics.server.sse_subscribers) == 0)


async def test_many_late_joiners_see_one_log(world: World) -> None:
    """R-6.4."""
    run = await world.start("echo", {"times": 5})
    found: list[list[int]] = []

    async def follow() -> None:
        found.append(_seqs(await follow_to_the_end(world.events_of(run["run_id"]))))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(follow)
    assert all(seqs == found[0] for seqs in found)


async def test_the_wire_has_lf_only_and_no_character_that_splits_lines(world: World) -> None:
    run = await world.start("echo", {"answer": "a\u2028b\u2029c\x85d\r\ne"}, wait=5)
    async with world.events_of(run["run_id"]).connect() as stream:
        events = await stream.rest()
        raw = stream.raw.decode()
    assert raw.splitlines() == raw.split("\n")[:-1]
    assert "\r" not in raw
    assert events[-1].json()["data"]["answer"] == "a\u2028b\u2029c\x85d\r\ne"
    assert all(json.loads(event.data) for event in events)


async def test_a_cursor_before_the_kept_range_gets_a_gap_with_a_snapshot(world: World) -> None:
    """R-6.8: what is no longer kept is told; everything else of the run can still be read."""
    run = await world.start("echo", {"times": 2}, wait=5)
    path, end = f"/v1/runs/{run['run_id']}", run["last_seq"]
    keep = (RetentionRule(state=RunState.SUCCEEDED, older_than_s=0),)
    assert (await world.core.store.expire_history(keep, after=None, limit=10)).runs == 1
    async with world.events_of(run["run_id"]).connect() as stream:
        first, *rest = await stream.rest()
    gap = first.json()
    assert (first.id, gap["type"], gap["data"]["kept_from"]) == (str(end - 1), "gap", end)
    assert gap["data"]["run"]["state"] == "succeeded"
    assert _seqs(rest) == [end]
    page = await world.get(f"{path}/events", after="2")
    assert page["gap"]["kept_from"] == end
    assert (await world.get(f"{path}/events", after=str(end - 1)))["gap"] is None
    for part in ("", "/attempts", "/steps", "/tool_calls", "/checkpoints", "/interrupts"):
        await world.get(path + part)
    (call, _) = (await world.get(f"{path}/tool_calls"))["items"]
    assert (call["status"], call["args"], call["output"]) == ("succeeded", None, None)


async def test_a_store_that_goes_away_ends_the_stream_and_not_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R-6.4."""
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")

    async def away(run_id: str, seq: int, *, limit: int) -> list[RecordedEvent]:
        raise Unavailable("the store does not answer")

    client = world.events_of(run["run_id"])
    async with client.connect() as stream:
        await stream.wait_for_comment("hb")
        with monkeypatch.context() as patch:
            patch.setattr(world.core.reader, "events_after", away)
            with pytest.raises(StreamInterrupted) as end:
                await stream.rest()
        assert end.value.clean
        assert stream.parser.comments[-1] == "unavailable, come again"
    reply = {"answer": "respond", "value": "x"}
    await world.http.post(f"/v1/runs/{run['run_id']}/resolve", json=reply)
    with anyio.fail_after(30):
        assert (await follow_to_the_end(client))[-1].is_end


async def test_signals_may_be_lost_without_losing_an_event(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F25, R-6.6, R-12.2."""
    monkeypatch.setattr(world.core.signals, "publish", lambda topic: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]  # the patch has no types
    run = await world.start("echo", {"times": 3})
    with anyio.fail_after(30):
        events = await follow_to_the_end(world.events_of(run["run_id"]))
    assert _seqs(events) == list(range(1, len(events) + 1))
