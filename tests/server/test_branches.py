"""Going on from a run's history over HTTP: retry, fork, states at checkpoints."""

from collections.abc import AsyncGenerator

import pytest

from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def test_a_failed_run_is_retried_once_per_key_and_linked(world: World) -> None:
    """R-10.3, R-3.2: a new run on the same thread; the answer shows whose history it shares."""
    failed = await world.start("broken", options={"max_attempts": 1}, wait=5)
    assert "retry" in failed["next_actions"]
    path = f"/v1/runs/{failed['run_id']}/retry"
    body = {"reason": "mended", "options": {"max_attempts": 1}}
    made = await world.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    again = await world.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    other = await world.http.post(path, headers={"Idempotency-Key": "k"})
    run = made.json()
    assert (made.status_code, made.headers["Location"]) == (202, f"/v1/runs/{run['run_id']}")
    assert (run["retry_of"], run["origin_run_id"]) == (failed["run_id"], failed["run_id"])
    assert (run["thread_id"], run["step_index"]) == (failed["thread_id"], 1)
    assert again.json()["run_id"] == run["run_id"]
    assert again.headers["Idempotency-Replayed"] == "true"
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")


async def test_what_cannot_be_retried_is_refused_and_changes_nothing(world: World) -> None:
    """R-10.3."""
    done = await world.start("echo", wait=5)
    failed = await world.start("broken", options={"max_attempts": 1}, wait=5)
    path = f"/v1/runs/{failed['run_id']}/retry"
    for url, body, status, code in (
        (f"/v1/runs/{done['run_id']}/retry", {}, 409, "conflict"),
        (f"/v1/runs/run_{'0' * 32}/retry", {}, 404, "not_found"),
        (path, {"checkpoint_id": "ckp_" + "0" * 32}, 404, "not_found"),
        (path, {"options": {"agent_version": "9"}}, 404, "not_found"),
        (path, {"redrive": "maybe", "more": 1}, 422, "invalid"),
    ):
        answer = await world.http.post(url, json=body)
        assert (answer.status_code, answer.json()["code"]) == (status, code), url
    listed = (await world.http.get("/v1/runs")).json()["items"]
    assert len(listed) == 2


async def test_a_state_is_updated_by_hand_once_per_key(world: World) -> None:
    """R-11.3, R-3.2: a checkpoint with an author; an ended run is refused."""
    options = {"breakpoints": [{"at": "before_tool"}]}
    run = await world.start("echo", options=options)
    await world.until(run["run_id"], "waiting_human")
    path = f"/v1/runs/{run['run_id']}/state"
    body = {"state": {"n": 1}, "reason": "why not"}
    made = await world.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert made.status_code == 201, made.text
    found = made.json()
    assert (found["agent_state"], found["reason"]) == (body["state"], body["reason"])
    assert found["author"]
    assert made.headers["Location"] == f"/v1/checkpoints/{found['checkpoint_id']}"
    assert (await world.http.get(made.headers["Location"])).json() == found
    again = await world.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert (again.json(), again.headers["Idempotency-Replayed"]) == (found, "true")
    other = await world.http.post(path, json={"state": None}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
    done = await world.start("echo", wait=5)
    for url, wrong, status in (
        (path, {}, 422),
        (path, {"state": 1, "more": 1}, 422),
        (f"/v1/runs/{done['run_id']}/state", {"state": 1}, 409),
        (f"/v1/runs/run_{'0' * 32}/state", {"state": 1}, 404),
    ):
        assert (await world.http.post(url, json=wrong)).status_code == status, wrong
    empty = await world.http.post(path, json=body, headers={"Idempotency-Key": ""})
    assert (empty.status_code, empty.json()["code"]) == (422, "invalid")


async def test_a_run_is_forked_and_states_are_compared(world: World) -> None:
    """R-7.4, R-3.2: linked by `forked_from`, once per key; a patch tells what differs."""
    done = await world.start("echo", wait=5)
    path = f"/v1/runs/{done['run_id']}/fork"
    body = {"input": {"other": 1}, "state": {"n": 1}, "reason": "what if"}
    made = await world.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    again = await world.http.post(path, json=body, headers={"Idempotency-Key": "k"})
    run = made.json()
    assert (made.status_code, again.json()["run_id"]) == (202, run["run_id"])
    assert (run["forked_from"], run["input"]) == (done["run_id"], {"other": 1})
    assert run["thread_id"] != done["thread_id"]
    listed = await world.http.get(f"/v1/runs/{done['run_id']}/checkpoints")
    last, *_, first = [item["checkpoint_id"] for item in listed.json()["items"]]
    state = (await world.http.get(f"/v1/checkpoints/{last}/state")).json()
    assert state["values"]["state"] == "succeeded"
    found = (await world.http.get(f"/v1/checkpoints/{first}/diff/{last}")).json()
    assert {"op": "replace", "path": "/state", "value": "succeeded"} in found["patch"]
    for url in (f"/v1/checkpoints/ckp_{'0' * 32}/state", f"/v1/checkpoints/{first}/diff/nothing"):
        assert (await world.http.get(url)).status_code == 404
    wrong = await world.http.post(path, json={"state": "x" * 9000})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "/state")


async def test_a_run_that_is_put_aside_is_looked_at_and_returned_to_its_checkpoint(
    world: World,
) -> None:
    """R-7.7, R-3.2: the same again is the same run; what is not put aside is refused."""
    run = await world.start("echo", options={"breakpoints": [{"at": "before_tool"}]})
    await world.until(run["run_id"], "waiting_human")
    path = f"/v1/runs/{run['run_id']}/repair"
    body = {"action": "return", "reason": "the disk is mended"}
    for url, wrong, status in (
        (path, body, 409),
        (path, {"action": "return", "reason": ""}, 422),
        (path, {"action": "cut", "reason": "x"}, 422),
        (f"/v1/runs/run_{'0' * 32}/repair", body, 404),
    ):
        assert (await world.http.post(url, json=wrong)).status_code == status, wrong
    assert (await world.http.get(path)).status_code == 409
    await world.core.store.quarantine(run["run_id"], None, "nothing moves it", None)
    aside = await world.get(f"/v1/runs/{run['run_id']}")
    assert (aside["waiting_on"], aside["next_actions"]) == ("repair", ["repair", "cancel"])
    found = await world.get(path)
    assert (found["damage"], found["can_return"], found["obstacles"]) == (None, True, [])
    made = (await world.http.post(path, json=body)).json()
    again = (await world.http.post(path, json=body)).json()
    assert (made["retry_of"], made["origin_seq"]) == (run["run_id"], found["seq"])
    assert again["run_id"] == made["run_id"]
    ended = await world.get(f"/v1/runs/{run['run_id']}")
    assert ended["error"]["details"] == {"continued_by": made["run_id"]}
