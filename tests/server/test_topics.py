"""Subscriptions over HTTP and on the command line (R-4.8)."""

from collections.abc import AsyncGenerator

import pytest

from perdure.protocol.ids import THREAD
from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def test_a_subscriber_gets_what_is_published_until_it_is_ended(world: World) -> None:
    """R-4.8: made once however often it is asked for; a run in its inbox for each publication."""
    thread_id = (await world.http.post("/v1/threads", json={})).json()["thread_id"]
    place = f"/v1/threads/{thread_id}/topics/news/subscriptions/quick"
    made = await world.http.put(place)
    assert made.status_code == 201
    again = await world.http.put(place, json={"max_steps": 3}, headers={"Idempotency-Key": "k"})
    assert again.status_code == 200
    assert again.json() == made.json() | {"terms": made.json()["terms"] | {"max_steps": 3}}
    listed = await world.get(f"/v1/threads/{thread_id}/subscriptions")
    assert listed == {"items": [again.json()], "next": None}
    assert await world.get(f"/v1/threads/{thread_id}/subscriptions", topic="x") == {
        "items": [],
        "next": None,
    }
    body = {"agent_id": "herald", "input": None}
    run = (await world.http.post(f"/v1/threads/{thread_id}/runs", json=body)).json()
    await world.until(run["run_id"], "succeeded")
    inbox = f"/v1/threads/{made.json()['inbox_thread_id']}/runs"
    [delivered] = (await world.get(inbox))["items"]
    assert (delivered["input"], delivered["parent_run_id"]) == ("news", run["run_id"])
    assert delivered["options"]["max_steps"] == 3
    for _ in range(2):
        assert (await world.http.delete(place)).status_code == 204
    run = (await world.http.post(f"/v1/threads/{thread_id}/runs", json=body)).json()
    await world.until(run["run_id"], "succeeded")
    assert len((await world.get(inbox))["items"]) == 1


async def test_what_cannot_be_subscribed_is_refused(world: World) -> None:
    """R-21.3: unknown thread and agent, a bad name, bad terms; nothing is made."""
    thread_id = (await world.http.post("/v1/threads", json={})).json()["thread_id"]
    topics = f"/v1/threads/{thread_id}/topics"
    nowhere = f"/v1/threads/{THREAD}_{'0' * 32}"
    cases = [
        (f"{nowhere}/topics/news/subscriptions/quick", None, 404, "not_found"),
        (f"{topics}/news/subscriptions/nobody", None, 404, "not_found"),
        (f"{topics}/news/subscriptions/quick", {"agent_version": "99"}, 404, "not_found"),
        (f"{topics}/-bad/subscriptions/quick", None, 422, "invalid"),
        (f"{topics}/news/subscriptions/quick", {"max_steps": 0}, 422, "invalid"),
        (f"{topics}/news/subscriptions/quick", {"unknown": 1}, 422, "invalid"),
    ]
    for place, body, status, code in cases:
        answer = await world.http.put(place, json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code), place
    assert (await world.http.delete(cases[0][0])).status_code == 404
    assert (await world.http.get(f"{nowhere}/subscriptions")).status_code == 404
    assert (await world.get(f"/v1/threads/{thread_id}/subscriptions"))["items"] == []
