"""Trees over HTTP: children, questions of all that is below, and cancelling many runs at once."""

from collections.abc import AsyncGenerator

import pytest

from perdure.protocol.ids import RUN
from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def test_a_tree_is_answered_at_its_root(world: World) -> None:
    """R-13.1, R-13.5, SUB-05: three children ask; without an id the answer is refused with the
    ids; each gets its own, whatever the order; children are listed with parent and root."""
    run_id = (await world.start("manager"))["run_id"]
    root = await world.until_run(
        run_id, lambda run: len(run["open_interrupts"]) == 3 and run["waiting_on"] == "child"
    )
    assert root["open_children"] == 3
    assert root["next_actions"][0] == "answer_interrupt"
    reply = {"answer": "respond", "value": "north"}
    bare = await world.http.post(f"/v1/runs/{run_id}/resolve", json=reply)
    assert (bare.status_code, bare.json()["code"]) == (409, "conflict")
    ids = bare.json()["details"]["open_interrupts"]
    assert sorted(ids) == sorted(root["open_interrupts"])
    listed = await world.get(f"/v1/runs/{run_id}/interrupts", descendants="true", status="pending")
    assert [item["interrupt_id"] for item in listed["items"]] == sorted(ids)
    assert (await world.get(f"/v1/runs/{run_id}/interrupts"))["items"] == []
    children = (await world.get(f"/v1/runs/{run_id}/children"))["items"]
    assert {item["run_id"] for item in listed["items"]} == {item["run_id"] for item in children}
    for item in children:
        assert (item["parent_run_id"], item["root_run_id"], item["depth"]) == (run_id, run_id, 1)
    for interrupt_id in reversed(ids):
        answer = await world.http.post(f"/v1/interrupts/{interrupt_id}/resolve", json=reply)
        assert answer.status_code == 200
    ended = await world.until(run_id, "succeeded")
    assert (ended["answer"], ended["open_interrupts"]) == ("all told", [])
    unknown = await world.http.get(f"/v1/runs/{RUN}_{'0' * 32}/children")
    assert unknown.status_code == 404


async def test_many_runs_are_cancelled_by_filter(world: World) -> None:
    """CAN-12: in batches, idempotent; what was cancelled is claimed by nobody; bad input changes
    nothing."""
    tagged = {"input": None, "options": {"tags": ["trial"]}}
    runs = [
        (await world.http.post("/v1/agents/sleeper/run", json=tagged)).json()["run_id"]
        for _ in range(5)
    ]
    other = (await world.start("sleeper"))["run_id"]
    nothing = await world.http.post("/v1/runs/cancel", json={})
    assert (nothing.status_code, nothing.json()["code"]) == (422, "invalid")
    cancelled: list[str] = []
    more = True
    while more:
        wish = {"agent_id": "sleeper", "tag": "trial", "limit": 2, "reason": "enough"}
        answer = await world.http.post("/v1/runs/cancel", json=wish)
        assert answer.status_code == 200
        cancelled += answer.json()["run_ids"]
        more = answer.json()["more"]
    assert sorted(cancelled) == sorted(runs)
    for run_id in runs:
        ended = await world.until(run_id, "failed")
        assert ended["status"] == "INTERRUPTED"
    assert (await world.get(f"/v1/runs/{other}"))["cancel_epoch"] == 0
    again = await world.http.post("/v1/runs/cancel", json={"tag": "trial"})
    assert again.json() == {"run_ids": [], "more": False}
