"""Answering people's questions over HTTP (R-8.2, fault F29)."""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import pytest

from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def _waiting(world: World, agent: str, body: object = None) -> tuple[str, dict[str, Any]]:
    run = await world.start(agent, body)
    waiting = await world.until(run["run_id"], "waiting_human")
    return run["run_id"], await world.get(f"/v1/interrupts/{waiting['open_interrupts'][0]}")


async def test_an_approval_shows_the_canonical_arguments_and_lets_the_run_go_on(
    world: World,
) -> None:
    """R-8.3."""
    run_id, asked = await _waiting(world, "publisher", {})
    assert (asked["kind"], asked["status"]) == ("approval", "pending")
    assert asked["action"]["tool"] == "publish"
    assert asked["action"]["args"] == {"title": "Q1"}
    assert asked["answers"] == ["approve", "edit", "respond", "reject"]
    answer = await world.http.post(
        f"/v1/interrupts/{asked['interrupt_id']}/resolve", json={"answer": "approve"}
    )
    assert (answer.status_code, answer.json()["answered_by"]) == (200, "local")
    assert (await world.until(run_id, "succeeded"))["answer"] == "published"


async def test_edited_arguments_stand_beside_the_first_ones(world: World) -> None:
    run_id, asked = await _waiting(world, "publisher", {})
    path = f"/v1/interrupts/{asked['interrupt_id']}/resolve"
    bad = await world.http.post(path, json={"answer": "edit", "args": {"copies": "many"}})
    assert (bad.status_code, bad.json()["code"]) == (422, "invalid")
    good = await world.http.post(
        path, json={"answer": "edit", "args": {"title": "Q1", "copies": 2}}
    )
    assert good.status_code == 200
    await world.until(run_id, "succeeded")
    call = (await world.get(f"/v1/runs/{run_id}/tool_calls"))["items"][0]
    assert call["args"] == {"title": "Q1"}
    assert call["effective_args"] == {"title": "Q1", "copies": 2}
    assert call["output"] == "Q1 x2"


async def test_the_same_answer_again_is_accepted_and_another_refused(world: World) -> None:
    _, asked = await _waiting(world, "asker")
    path = f"/v1/interrupts/{asked['interrupt_id']}/resolve"
    reply = {"answer": "respond", "value": "north"}
    first = await world.http.post(path, json=reply)
    again = await world.http.post(path, json=reply)
    other = await world.http.post(path, json={"answer": "respond", "value": "south"})
    assert (first.status_code, again.status_code, other.status_code) == (200, 200, 409)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert other.json()["code"] == "already_answered"
    assert other.json()["details"]["answered_by"] == "local"
    assert again.json()["value"] == "north"


async def test_opposite_answers_at_once_leave_one(world: World) -> None:
    _, asked = await _waiting(world, "asker")
    found: list[int] = []

    async def answer(value: str) -> None:
        reply = {"answer": "respond", "value": value}
        path = f"/v1/interrupts/{asked['interrupt_id']}/resolve"
        found.append((await world.http.post(path, json=reply)).status_code)

    async with anyio.create_task_group() as group:
        for value in "abcdefgh":
            group.start_soon(answer, value)
    assert sorted(found) == [200] + [409] * 7


async def test_an_answer_against_the_schema_or_kind_is_invalid(world: World) -> None:
    _, asked = await _waiting(world, "asker")
    path = f"/v1/interrupts/{asked['interrupt_id']}/resolve"
    for reply in (
        {"answer": "respond", "value": 7},
        {"answer": "approve"},
        {"answer": "shrug"},
        {"value": "north"},
    ):
        assert (await world.http.post(path, json=reply)).status_code == 422
    assert (await world.get(f"/v1/interrupts/{asked['interrupt_id']}"))["status"] == "pending"


async def test_an_approval_is_handed_on_over_http(world: World) -> None:
    """R-8.3: idempotent by nature; a question is no approval."""
    _, asked = await _waiting(world, "publisher", {})
    path = f"/v1/interrupts/{asked['interrupt_id']}"
    assert (asked["approvers"], asked["handling"]) == ([], [])
    for body in ('{"to": []}', "{}", '{"to": [""]}', '{"to": 1}'):
        json = {"Content-Type": "application/json"}
        answer = await world.http.post(f"{path}/delegate", content=body, headers=json)
        assert answer.status_code == 422, body
    wish = {"to": ["local", "ada"], "reason": "her field"}
    done = await world.http.post(f"{path}/delegate", json=wish)
    again = await world.http.post(f"{path}/delegate", json=wish)
    assert (done.status_code, again.status_code) == (200, 200)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert done.json()["approvers"] == ["local", "ada"]
    (line,) = (await world.http.get(path)).json()["handling"]
    assert (line["phase"], line["by"], line["reason"]) == ("delegated", "local", "her field")
    await world.http.post(f"{path}/resolve", json={"answer": "approve"})
    late = await world.http.post(f"{path}/delegate", json={"to": ["eve"]})
    assert (late.status_code, late.json()["code"]) == (410, "gone")
    _, question = await _waiting(world, "asker")
    key = question["interrupt_id"]
    refused = await world.http.post(f"/v1/interrupts/{key}/delegate", json={"to": ["eve"]})
    assert (refused.status_code, refused.json()["code"]) == (409, "conflict")


async def test_an_answer_after_a_cancel_is_gone(world: World) -> None:
    """R-8.2."""
    run_id, asked = await _waiting(world, "asker")
    await world.http.post(f"/v1/runs/{run_id}/cancel")
    answer = await world.http.post(
        f"/v1/interrupts/{asked['interrupt_id']}/resolve",
        json={"answer": "respond", "value": "north"},
    )
    assert (answer.status_code, answer.json()["code"]) == (410, "gone")


async def test_a_run_is_answered_without_an_id_when_one_is_open(world: World) -> None:
    run_id, _ = await _waiting(world, "asker")
    answer = await world.http.post(
        f"/v1/runs/{run_id}/resolve", json={"answer": "respond", "value": "north"}
    )
    assert answer.status_code == 200
    await world.until(run_id, "succeeded")
    late = await world.http.post(f"/v1/runs/{run_id}/resolve", json={"answer": "approve"})
    assert (late.status_code, late.json()["details"]) == (409, {"open_interrupts": []})


async def test_with_several_open_an_answer_without_an_id_lists_them(world: World) -> None:
    """R-8.2."""
    run_id, _ = await _waiting(world, "double")
    answer = await world.http.post(f"/v1/runs/{run_id}/resolve", json={"answer": "approve"})
    listed = answer.json()["details"]["open_interrupts"]
    assert (answer.status_code, len(listed)) == (409, 2)
    for interrupt_id in reversed(listed):
        path = f"/v1/interrupts/{interrupt_id}/resolve"
        assert (await world.http.post(path, json={"answer": "approve"})).status_code == 200
    assert (await world.until(run_id, "succeeded"))["answer"] == "both"


async def test_the_inbox_shows_what_waits(world: World) -> None:
    run_id, asked = await _waiting(world, "asker")
    inbox = (await world.get("/v1/interrupts", status="pending"))["items"]
    assert [item["interrupt_id"] for item in inbox] == [asked["interrupt_id"]]
    assert inbox[0]["title"] == "Which region?"
    assert inbox[0]["answer_schema"] == {"type": "string"}
    of_run = (await world.get(f"/v1/runs/{run_id}/interrupts"))["items"]
    assert of_run == inbox
    assert (await world.get("/v1/interrupts", status="expired"))["items"] == []


async def test_a_request_to_sign_in_is_shown_in_status_and_events(world: World) -> None:
    """R-2.3, R-8.5."""
    run_id, _ = await _waiting(world, "login")
    run = await world.get(f"/v1/runs/{run_id}")
    assert (run["status"], run["next_actions"]) == ("AUTH_REQUIRED", ["authorise", "cancel"])
    await world.http.post(f"/v1/runs/{run_id}/resolve", json={"answer": "respond", "value": 1})
    await world.until(run_id, "succeeded")
    events = (await world.get(f"/v1/runs/{run_id}/events", limit=200))["items"]
    statuses = [event["data"]["status"] for event in events if event["type"] == "state"]
    assert "AUTH_REQUIRED" in statuses
    assert statuses[-1] == "COMPLETED"
