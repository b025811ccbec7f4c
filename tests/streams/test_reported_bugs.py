"""Reported cases of streams and of answers that get lost, on both databases (R-6.3, R-6.4)."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx2
import pytest

from perdure.server.settings import ServerSettings
from perdure.testing.sse_client import SseClient, SseEvent, StreamInterrupted, follow_to_the_end
from perdure.testing.tcp_proxy import TcpProxy, tcp_proxy
from tests.flow.rows import Rows
from tests.server.documented import checked_client
from tests.server.world import World, free_port, open_world
from tests.streams.crowd import assert_exact, stored_log
from tests.waiting import eventually

HEARTBEAT_S = 0.1
ANSWER = {"answer": "respond", "value": "north"}


@pytest.fixture
async def world(url: str) -> AsyncGenerator[World]:
    async with open_world(serve=True, url=url, sse_heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


@pytest.fixture
async def proxy(world: World) -> AsyncGenerator[TcpProxy]:
    async with tcp_proxy(world.port, port=free_port()) as opened:
        yield opened


def through(proxy: TcpProxy, run: dict[str, Any]) -> SseClient:
    """Return a client of a run's stream that comes through the proxy."""
    return SseClient("127.0.0.1", proxy.port, f"/v1/runs/{run['run_id']}/events")


async def answer(world: World, run: dict[str, Any]) -> None:
    """Answer a run's only open question."""
    reply = await world.http.post(f"/v1/runs/{run['run_id']}/resolve", json=ANSWER)
    assert reply.status_code == 200, reply.text


async def assert_whole(world: World, run: dict[str, Any], seen: list[SseEvent]) -> None:
    """Fail unless what was seen is the run's whole log, and that ends."""
    assert_exact(seen, await stored_log(world.core.reader, run["run_id"]))
    assert seen[-1].is_end


def types(events: list[SseEvent]) -> list[str]:
    """Return the types of events, in order."""
    return [event.json()["type"] for event in events]


async def test_str_01_what_was_sent_while_away_comes_after_a_restart(url: str) -> None:
    """STR-01: another server goes on from the last id that was seen, exactly."""
    async with open_world(serve=True, url=url) as first:
        run = await first.start("asker")
        await first.until(run["run_id"], "waiting_human")
        client = first.events_of(run["run_id"])
        async with client.connect() as stream:
            seen = [event for _ in range(4) if (event := await stream.next()) is not None]
    assert client.last_event_id == "4"
    async with open_world(serve=True, url=url) as second:
        await answer(second, run)
        await second.until(run["run_id"], "succeeded")
        client.port = second.port
        with anyio.fail_after(30):
            seen += await follow_to_the_end(client)
        await assert_whole(second, run, seen)


async def test_str_02_a_viewer_that_leaves_takes_nothing_from_others_or_itself(
    world: World,
) -> None:
    """STR-02: whoever stays misses nothing, and neither does who comes back."""
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    leaver, stayer = world.events_of(run["run_id"]), world.events_of(run["run_id"])
    async with stayer.connect() as other:
        async with leaver.connect() as stream:
            first = await stream.next()
        await answer(world, run)
        with anyio.fail_after(30):
            stayed = await other.rest()
            came_back = await follow_to_the_end(leaver)
    assert first is not None
    await assert_whole(world, run, stayed)
    await assert_whole(world, run, [first, *came_back])


async def test_str_03_a_stream_closed_politely_half_way_is_not_a_finished_run(
    world: World, proxy: TcpProxy
) -> None:
    """STR-03: only the terminal event is the end; a clean close is an interruption."""
    run = await world.start("echo", {"times": 2}, wait=5)
    client = through(proxy, run)
    proxy.events_max = 3
    seen: list[SseEvent] = []
    async with client.connect() as stream:
        for _ in range(3):
            event = await stream.next()
            assert event is not None
            seen.append(event)
        with pytest.raises(StreamInterrupted) as end:
            await stream.next()
    assert end.value.last_event_id == "3"
    with anyio.fail_after(30):
        seen += await follow_to_the_end(client)
    await assert_whole(world, run, seen)
    assert proxy.cut >= run["last_seq"] // 3


async def test_str_06_heartbeats_keep_an_idle_stream_open_through_a_balancer(
    world: World, proxy: TcpProxy
) -> None:
    """STR-06: comments come before a balancer loses its patience."""
    assert ServerSettings().sse_heartbeat_s <= 15
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    proxy.idle_s = 5 * HEARTBEAT_S
    async with through(proxy, run).connect() as stream:
        with anyio.fail_after(30):
            for _ in range(10):  # twice the balancer's patience
                stream.parser.comments.clear()
                await stream.wait_for_comment("hb")
    assert proxy.cut == 0


@pytest.mark.parametrize("is_polite", [True, False])
async def test_str_06_a_client_that_was_cut_while_idle_comes_again(
    world: World, proxy: TcpProxy, is_polite: bool
) -> None:
    """STR-06: cut all the same, politely or not, the client resumes."""
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    proxy.idle_s, proxy.is_polite = HEARTBEAT_S / 2, is_polite
    client = through(proxy, run)
    seen: list[SseEvent] = []

    async def follow() -> None:
        seen.extend(await follow_to_the_end(client))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(follow)
            await eventually(lambda: proxy.cut >= 3)
            await answer(world, run)
    await assert_whole(world, run, seen)


async def test_str_07_a_reset_of_the_only_viewer_cancels_nothing(
    world: World, proxy: TcpProxy
) -> None:
    """STR-07: the run goes on and its log knows of no cancel."""
    proxy.is_polite, proxy.events_max = False, 4
    run = await world.start("walker", {"times": 4, "seconds": 0.05})
    async with through(proxy, run).connect() as stream:
        with pytest.raises(StreamInterrupted):
            await stream.rest()
    assert proxy.cut == 1
    done = await world.until(run["run_id"], "succeeded", "failed")
    assert (done["state"], done["cancel_epoch"], done["answer"]) == ("succeeded", 0, "arrived")
    log = await stored_log(world.core.reader, run["run_id"])
    assert not [event for event in log if "cancel" in event.type or b"cancel" in event.raw.lower()]


async def test_str_09_one_subscription_lasts_through_a_pause(world: World) -> None:
    """STR-09: what comes after the answer comes on the same connection."""
    run = await world.start("asker")
    seen: list[SseEvent] = []
    async with world.events_of(run["run_id"]).connect() as stream:
        with anyio.fail_after(30):
            while (event := await stream.next()) is not None:
                seen.append(event)
                if event.json()["type"] == "interrupt":
                    break
            for _ in range(3):  # several empty reads, of which none may be the end
                stream.parser.comments.clear()
                await stream.wait_for_comment("hb")
            await answer(world, run)
            seen += await stream.rest()
    await assert_whole(world, run, seen)
    assert "resume" in types(seen)


async def test_str_10_an_error_ends_as_failed_with_a_code_and_nothing_after(
    world: World,
) -> None:
    """STR-10: no success is made up at the end of a stream."""
    run = await world.start("broken")
    with anyio.fail_after(30):
        seen = await follow_to_the_end(world.events_of(run["run_id"]))
    await assert_whole(world, run, seen)
    last = seen[-1].json()
    assert (last["type"], last["data"]["state"]) == ("state", "failed")
    assert last["data"]["code"] in {"RETRIES_EXHAUSTED", "INTERNAL"}
    states = [event.json()["data"].get("state") for event in seen]
    assert "succeeded" not in states


async def test_str_11_a_question_asked_before_anyone_listened_is_seen_by_both_ways(
    url: str,
) -> None:
    """STR-11: the log has it from the start, the snapshot for who looks from now on."""
    async with open_world(serve=True, url=url) as first:
        run = await first.start("asker")
        await first.until(run["run_id"], "waiting_human")
    async with open_world(serve=True, url=url) as world:
        snapshot = await world.get(f"/v1/runs/{run['run_id']}")
        (interrupt_id,) = snapshot["open_interrupts"]
        from_start = world.events_of(run["run_id"])
        from_now = world.events_of(run["run_id"])
        from_now.last_event_id = str(snapshot["last_seq"])
        async with from_start.connect() as old, from_now.connect() as new:
            early: list[SseEvent] = []
            with anyio.fail_after(30):
                while "interrupt" not in types(early):
                    event = await old.next()
                    assert event is not None
                    early.append(event)
                assert early[-1].json()["data"]["interrupt_id"] == interrupt_id
                await answer(world, run)
                early += await old.rest()
                late = await new.rest()
        await assert_whole(world, run, early)
        assert late == early[snapshot["last_seq"] :]
        assert json.loads(late[0].data)["type"] == "resume"


async def test_dup_01_a_create_whose_answer_was_lost_is_one_run(
    world: World, proxy: TcpProxy, url: str
) -> None:
    """DUP-01: the same key again gets the same run, says so, and queues nothing more."""
    body, key = {"input": None}, {"Idempotency-Key": "order-1"}
    proxy.loses_answers = 1
    base = f"http://127.0.0.1:{proxy.port}"
    async with checked_client(base, headers=key) as client:
        with pytest.raises(httpx2.TransportError):
            await client.post("/v1/agents/asker/run", json=body)
        again = await client.post("/v1/agents/asker/run", json=body)
    assert again.status_code == 202, again.text
    assert again.headers["Idempotency-Replayed"] == "true"
    run_id = again.json()["run_id"]
    assert [run["run_id"] for run in (await world.get("/v1/runs"))["items"]] == [run_id]
    await world.until(run_id, "waiting_human")
    attempts = await world.core.reader.list_attempts(run_id)
    assert (len(attempts), Rows(url).count("runs"), Rows(url).count("ready")) == (1, 1, 0)


async def test_hitl_05_a_viewer_that_leaves_at_the_question_cancels_nothing(
    world: World,
) -> None:
    """HITL-05: the call that asked goes on with its approval, whoever watched."""
    run = await world.start("publisher", {})
    async with world.events_of(run["run_id"]).connect() as stream:
        event = await stream.next()
        while event is not None and event.json()["type"] != "approval_request":
            event = await stream.next()
    waiting = await world.until(run["run_id"], "waiting_human")
    assert waiting["cancel_epoch"] == 0
    reply = await world.http.post(f"/v1/runs/{run['run_id']}/resolve", json={"answer": "approve"})
    assert reply.status_code == 200, reply.text
    done = await world.until(run["run_id"], "succeeded", "failed")
    assert (done["state"], done["answer"]) == ("succeeded", "published")
    seen = await follow_to_the_end(world.events_of(run["run_id"]))
    await assert_whole(world, run, seen)
    assert "cancel" not in types(seen)


async def test_tim_07_a_wait_for_the_next_event_can_have_a_limit(world: World) -> None:
    """TIM-07: it ends in time, and the same stream goes on afterwards."""
    run = await world.start("asker")
    await world.until(run["run_id"], "waiting_human")
    seen: list[SseEvent] = []
    async with world.events_of(run["run_id"]).connect() as stream:
        for _ in range(2):
            with anyio.move_on_after(0.15) as limit:
                while (event := await stream.next()) is not None:
                    seen.append(event)
            assert limit.cancelled_caught
        await answer(world, run)
        with anyio.fail_after(30):
            seen += await stream.rest()
    await assert_whole(world, run, seen)
