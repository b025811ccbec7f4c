"""Threads over HTTP: fork, branches, adopt, delete, search by metadata."""

from collections.abc import AsyncGenerator
from urllib.parse import quote

import pytest

from tests.server.world import World, open_world


@pytest.fixture
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def test_a_thread_is_forked_adopted_and_deleted(world: World) -> None:
    """R-11.1, R-11.3, R-3.2: the answers name what was done; once per key; 410 afterwards."""
    http = world.http
    first = await world.start("echo", wait=5)
    path = f"/v1/threads/{first['thread_id']}"
    body = {"title": "what if", "position": 1}
    made = await http.post(f"{path}/fork", json=body, headers={"Idempotency-Key": "k"})
    again = await http.post(f"{path}/fork", json=body, headers={"Idempotency-Key": "k"})
    other = await http.post(f"{path}/fork", headers={"Idempotency-Key": "k"})
    fork = made.json()
    assert (made.status_code, made.headers["Location"]) == (201, f"/v1/threads/{fork['thread_id']}")
    assert (fork["title"], fork["last_position"]) == ("what if", 1)
    (base,) = fork["bases"]
    assert (base["kind"], base["thread_id"], base["position"], base["author"]) == (
        "fork",
        first["thread_id"],
        1,
        "local",
    )
    assert again.json() == fork
    assert again.headers["Idempotency-Replayed"] == "true"
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
    said = (await http.get(f"/v1/threads/{fork['thread_id']}/messages")).json()["items"]
    assert [item["thread_id"] for item in said] == [first["thread_id"]]
    adopted = await http.post(f"{path}/adopt", json={"branch_id": fork["thread_id"]})
    assert adopted.status_code == 200
    assert adopted.json()["bases"][-1]["kind"] == "adopt"
    assert len((await http.get(f"{path}/messages")).json()["items"]) == 1
    (branch,) = (await http.get(f"{path}/branches")).json()["items"]
    assert (branch["thread_id"], branch["adopted_by"]) == (fork["thread_id"], "local")
    stranger = (await http.post("/v1/threads")).json()["thread_id"]
    for route, sent, status, code in (
        (f"{path}/fork", {"position": 99}, 422, "invalid"),
        (f"{path}/fork", {"position": -1}, 422, "invalid"),
        (f"{path}/fork", {"more": 1}, 422, "invalid"),
        (f"{path}/adopt", {"branch_id": stranger}, 409, "conflict"),
        (f"{path}/adopt", {"branch_id": "x"}, 404, "not_found"),
        (f"/v1/threads/thr_{'0' * 32}/fork", {}, 404, "not_found"),
    ):
        answer = await http.post(route, json=sent)
        assert (answer.status_code, answer.json()["code"]) == (status, code), (route, sent)
    for _ in range(2):
        assert (await http.delete(path)).status_code == 204
    for answer in (
        await http.get(path),
        await http.get(f"{path}/messages"),
        await http.get(f"{path}/runs"),
        await http.post(f"{path}/fork"),
        await http.post(f"{path}/runs", json={"agent_id": "echo", "input": 1}),
        await http.post(f"{path}/messages", json={"parts": [{"type": "text", "text": "x"}]}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (410, "gone"), answer.url
    assert (await http.delete(f"/v1/threads/thr_{'0' * 32}")).status_code == 404
    assert (await http.get(f"/v1/runs/{first['run_id']}")).status_code == 200
    said = (await http.get(f"/v1/threads/{fork['thread_id']}/messages")).json()["items"]
    assert len(said) == 1


async def test_the_key_of_a_thread_that_was_deleted_says_so_as_documented(world: World) -> None:
    key = {"Idempotency-Key": "k"}
    made = (await world.http.post("/v1/threads", json={}, headers=key)).json()
    await world.http.delete(f"/v1/threads/{made['thread_id']}")
    again = await world.http.post("/v1/threads", json={}, headers=key)
    document = (await world.http.get("/openapi.json")).json()
    told = document["paths"]["/v1/threads"]["post"]["responses"]
    assert (again.json()["code"], str(again.status_code) in told) == ("gone", True)


async def test_a_busy_thread_answers_with_the_branch_it_made(world: World) -> None:
    """R-11.1: chosen with the request and visible in the answer; a busy thread stays."""
    busy = await world.start("asker")
    path = f"/v1/threads/{busy['thread_id']}"
    body = {"agent_id": "echo", "input": 1, "options": {"multitask_strategy": "fork"}}
    run = (await world.http.post(f"{path}/runs?wait=5", json=body)).json()
    assert run["thread_id"] != busy["thread_id"]
    assert run["branch"] == {
        "thread_id": busy["thread_id"],
        "position": 0,
        "run_id": busy["run_id"],
    }
    for answer in (
        await world.http.delete(path),
        await world.http.post(f"{path}/adopt", json={"branch_id": run["thread_id"]}),
    ):
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (409, "thread_busy")
        assert problem["details"]["run_id"] == busy["run_id"]


async def test_an_optimistic_run_works_beside_and_ends_in_conflict_when_the_thread_moved(
    world: World,
) -> None:
    """R-11.1: chosen with the request; the answer and the end show what became of it."""
    busy = await world.start("asker")
    await world.until(busy["run_id"], "waiting_human")
    path = f"/v1/threads/{busy['thread_id']}"
    body = {"agent_id": "echo", "input": 1, "options": {"multitask_strategy": "optimistic"}}
    run = (await world.http.post(f"{path}/runs?wait=5", json=body)).json()
    assert (run["state"], run["thread_id"]) == ("succeeded", busy["thread_id"])
    assert (await world.get(f"/v1/runs/{busy['run_id']}"))["state"] == "waiting_human"
    assert (await world.get(path))["active_run_id"] == busy["run_id"]
    late = (await world.http.post(f"{path}/runs", json={**body, "agent_id": "asker"})).json()
    waits = await world.until(late["run_id"], "waiting_human")
    said = {"role": "user", "parts": [{"type": "text", "text": "aside"}]}
    assert (await world.http.post(f"{path}/messages", json=said)).status_code == 201
    (question,) = waits["open_interrupts"]
    answer = {"answer": "respond", "value": "north"}
    await world.http.post(f"/v1/interrupts/{question}/resolve", json=answer)
    ended = await world.until(late["run_id"], "failed")
    assert ended["error"]["code"] == "CONFLICT"
    assert (await world.get(f"/v1/runs/{busy['run_id']}"))["state"] == "waiting_human"


NO_NUMBERS = [(f'{{"a":{number}}}', 422) for number in ("NaN", "1e999", "-Infinity", "1" * 5000)]


async def test_threads_are_found_by_metadata(world: World) -> None:
    """R-11.3: each pair named, pages as ever; what is no object is refused."""
    for team in ("sales", "support", "sales"):
        await world.http.post("/v1/threads", json={"metadata": {"team": team, "n": 1}})
    query = "/v1/threads?metadata=" + quote('{"team": "sales", "n": 1}')
    page = (await world.http.get(f"{query}&limit=1")).json()
    rest = (await world.http.get(f"{query}&limit=1&after={page['next']}")).json()
    assert [item["metadata"]["team"] for item in page["items"] + rest["items"]] == ["sales"] * 2
    assert rest["next"] is None
    six = quote(str({str(n): n for n in range(6)}).replace("'", '"'))
    for text, status in (("[1]", 400), ("{", 400), ("", 400), (six, 422), *NO_NUMBERS):
        answer = await world.http.get(f"/v1/threads?metadata={text}")
        assert (answer.status_code, answer.json()["field"]) == (status, "metadata"), text
