"""API processes that are killed (F07, R-6.4), and several over one database (A6, R-3.2)."""

import signal
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from perdure.testing.faults import Boundary, Plan, When
from perdure.testing.sse_client import SseEvent, follow_to_the_end
from tests.flow.world import assert_sound, database_at
from tests.server.processes import ApiProcess, serving, serving_with_fault
from tests.server.world import free_port
from tests.streams.crowd import assert_exact, is_cut, stored_log

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(90),  # starts two or three server processes on a machine that is busy
]

KEY = {"Idempotency-Key": "order-1"}
BODY = {"input": {"times": 2}}


async def post(api: ApiProcess, path: str, body: object, key: dict[str, str]) -> httpx2.Response:
    """Send a request under a key."""
    return await api.http.post(path, json=body, headers=key)


async def until_served(api: ApiProcess) -> None:
    """Return once the process's worker has registered its agents."""
    with anyio.fail_after(30):
        while not (await api.http.get("/v1/agents")).json()["items"]:  # noqa: ASYNC110
            await anyio.sleep(0.05)


async def ended(api: ApiProcess, run_id: str) -> dict[str, Any]:
    """Return a run at its end."""
    answer = await api.http.get(f"/v1/runs/{run_id}", params={"wait": 20}, timeout=30)
    return answer.json()


@pytest.mark.parametrize("when", list(When))
async def test_f07_a_create_whose_server_dies_is_repeated_elsewhere_without_a_second_run(
    url: str, tmp_path: Path, when: When
) -> None:
    """F07, DUP-01: before and after it is durable, and with only the answer lost."""
    report = tmp_path / "report"
    plan = Plan(boundary=Boundary.CREATE, when=when, report=report)
    async with serving(url, tmp_path) as other:
        await until_served(other)
        async with serving_with_fault(url, tmp_path, plan) as dying:
            if when is When.ACK_LOST:
                lost = await post(dying, "/v1/agents/echo/run", BODY, KEY)
                assert (lost.status_code, lost.json()["code"]) == (503, "unavailable")
            else:
                with pytest.raises(httpx2.TransportError):
                    await post(dying, "/v1/agents/echo/run", BODY, KEY)
                assert await dying.ended() == -signal.SIGKILL
        assert report.exists()
        again = await post(other, "/v1/agents/echo/run", BODY, KEY)
        assert again.status_code in {200, 202}, again.text
        replayed = again.headers.get("Idempotency-Replayed") == "true"
        assert replayed is (when is not When.BEFORE)
        run = await ended(other, again.json()["run_id"])
        assert run["state"] == "succeeded"
        runs = (await other.http.get("/v1/runs")).json()["items"]
        assert [found["run_id"] for found in runs] == [run["run_id"]]
    async with database_at(url) as database:
        await assert_sound(database)


async def test_f07_a_stream_whose_server_is_killed_goes_on_at_another(
    url: str, tmp_path: Path
) -> None:
    async with serving(url, tmp_path) as working:
        await until_served(working)
        async with serving(url, tmp_path, words=["--no-worker"]) as dying:
            wish = {"times": 15, "seconds": 0.1}
            run = (await post(dying, "/v1/agents/walker/run", {"input": wish}, {})).json()
            client = dying.events_of(run["run_id"])
            seen: list[SseEvent] = []
            async with client.connect() as stream:
                for _ in range(9):
                    event = await stream.next()
                    assert event is not None
                    seen.append(event)
                dying.kill()
                assert await is_cut(stream, seen)
            assert await dying.ended() == -signal.SIGKILL
        client.port = working.port
        with anyio.fail_after(30):
            seen += await follow_to_the_end(client)
    await assert_whole(url, run["run_id"], seen)


async def test_f07_a_run_and_its_stream_outlive_the_only_server(url: str, tmp_path: Path) -> None:
    port = free_port()
    async with serving(url, tmp_path, port=port) as dying:
        await until_served(dying)
        wish = {"times": 12, "seconds": 0.1}
        run = (await post(dying, "/v1/agents/walker/run", {"input": wish}, {})).json()
        client = dying.events_of(run["run_id"])
        seen: list[SseEvent] = []
        async with client.connect() as stream:
            while len(seen) < 12:
                event = await stream.next()
                assert event is not None
                seen.append(event)
        dying.kill()
        assert await dying.ended() == -signal.SIGKILL
    async with serving(url, tmp_path, port=port):
        with anyio.fail_after(40):
            seen += await follow_to_the_end(client)
    await assert_whole(url, run["run_id"], seen)
    assert "lost" in {event.json()["data"].get("phase") for event in seen}


async def assert_whole(url: str, run_id: str, seen: list[SseEvent]) -> None:
    """Fail unless the run succeeded and what was seen is its whole log."""
    assert seen[-1].json()["data"]["state"] == "succeeded"
    async with database_at(url) as database:
        assert_exact(seen, await stored_log(database.reader, run_id))
        await assert_sound(database)


async def test_a6_fifty_requests_at_two_servers_under_one_key_are_one(
    url: str, tmp_path: Path
) -> None:
    """A6, DUP-02: one run, one thread, one message; the same id in every answer."""
    async with serving(url, tmp_path) as one, serving(url, tmp_path) as two:
        await until_served(one)
        runs = await storm(one, two, "/v1/agents/echo/run", BODY)
        (run_id,) = {answer.json()["run_id"] for answer in runs}
        assert len((await one.http.get("/v1/runs")).json()["items"]) == 1
        other = await post(two, "/v1/agents/echo/run", {"input": "another"}, KEY)
        assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
        assert other.json()["details"] == {"run_id": run_id}
        assert (await ended(two, run_id))["state"] == "succeeded"
        threads = await storm(one, two, "/v1/threads", {"title": "one"})
        (thread_id,) = {answer.json()["thread_id"] for answer in threads}
        path = f"/v1/threads/{thread_id}/messages"
        messages = await storm(one, two, path, {"parts": [{"type": "text", "text": "hi"}]})
        (message_id,) = {answer.json()["message_id"] for answer in messages}
        items = (await one.http.get(path)).json()["items"]
        assert [item["message_id"] for item in items] == [message_id]
    async with database_at(url) as database:
        await assert_sound(database)


async def storm(one: ApiProcess, two: ApiProcess, path: str, body: object) -> list[httpx2.Response]:
    """Send fifty equal requests at once to two servers; one of them must be the first."""
    found: list[httpx2.Response] = []

    async def send(api: ApiProcess) -> None:
        found.append(await post(api, path, body, KEY))

    async with anyio.create_task_group() as group:
        for number in range(50):
            group.start_soon(send, (one, two)[number % 2])
    assert all(answer.is_success for answer in found), [answer.text for answer in found]
    firsts = [answer for answer in found if "Idempotency-Replayed" not in answer.headers]
    assert (len(found), len(firsts)) == (50, 1)
    return found
