"""Fields of scope thread and agent over HTTP (R-1.5)."""

from collections.abc import AsyncGenerator

import pytest

from perdure.protocol.ids import THREAD
from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def test_what_runs_left_is_read_by_thread_and_by_agent(world: World) -> None:
    """R-1.5: by name, with version, rule and the event that says so; in pages; of one's own."""
    thread_id = (await world.http.post("/v1/threads", json={})).json()["thread_id"]
    of_thread, of_agent = f"/v1/threads/{thread_id}/state", "/v1/agents/keeper/state"
    for place in (of_thread, of_agent):
        assert await world.get(place) == {"items": [], "next": None}
    run_id = ""
    for _ in range(2):
        body = {"agent_id": "keeper", "input": None}
        run = (await world.http.post(f"/v1/threads/{thread_id}/runs", json=body)).json()
        run_id = run["run_id"]
        await world.until(run_id, "succeeded")
    first = await world.get(of_thread, limit=1)
    rest = await world.get(of_thread, limit=1, after=first["next"])
    (seen,), (turns,) = first["items"], rest["items"]
    assert rest["next"] is None
    assert (seen["name"], seen["value"], seen["rule"]) == ("seen", ["x", "x"], "append")
    assert (turns["name"], turns["value"], turns["version"]) == ("turns", 2, 2)
    assert (turns["scope"], turns["scope_id"], turns["empty"]) == ("thread", thread_id, False)
    events = (await world.get(f"/v1/runs/{run_id}/events"))["items"]
    (said,) = [event for event in events if event["seq"] == turns["seq"]]
    assert (turns["run_id"], said["data"]["name"]) == (run_id, "perdure.field_kept")
    assert said["data"]["value"]["value"] == 2
    (total,) = (await world.get(of_agent))["items"]
    assert (total["name"], total["value"], total["scope_id"]) == ("total", 2, "keeper")
    wrong = await world.http.get(of_agent, params={"after": first["next"]})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "malformed")
    for place in (f"/v1/threads/{THREAD}_{'0' * 32}/state", "/v1/agents/nobody/state"):
        assert (await world.http.get(place)).status_code == 404
    assert (await world.http.delete(f"/v1/threads/{thread_id}")).status_code == 204
    assert (await world.http.get(of_thread)).status_code == 410
    assert (await world.get(of_agent))["items"] == [total]
