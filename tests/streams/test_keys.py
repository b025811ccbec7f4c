"""One intention is one run, thread or message (R-3.2, A6; reported bugs DUP; F30), on both stores;
a message by its id (R-1.1).

Two servers over one database are in `test_server_killed`.
"""

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import httpx2
import pytest

from perdure.protocol.ids import MESSAGE, THREAD
from perdure.store.requests import AgentRegistration
from perdure.testing.tcp_proxy import tcp_proxy
from tests.server.documented import checked_client
from tests.server.world import World, free_port, open_world

RUN = "/v1/agents/echo/run"
KEY = {"Idempotency-Key": "order-1"}
REPLAYED = "Idempotency-Replayed"
PARTS: dict[str, Any] = {"parts": [{"type": "text", "text": "hello"}]}


@pytest.fixture
async def world(url: str) -> AsyncGenerator[World]:
    async with open_world(url=url) as opened:
        yield opened


async def new_thread(world: World) -> str:
    """Create a thread without a key and return its path."""
    answer = await world.http.post("/v1/threads", json={})
    return f"/v1/threads/{answer.json()['thread_id']}"


async def at_once(world: World, path: str, body: object) -> list[httpx2.Response]:
    """Send fifty equal requests at once."""
    found: list[httpx2.Response] = []

    async def send() -> None:
        found.append(await world.http.post(path, json=body, headers=KEY))

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(send)
    assert all(answer.is_success for answer in found), [answer.text for answer in found]
    assert sum(REPLAYED not in answer.headers for answer in found) == 1
    return found


async def test_a6_fifty_requests_at_once_under_one_key_make_one_run(world: World) -> None:
    """F30."""
    found = await at_once(world, RUN, {"input": 1})
    (run_id,) = {answer.json()["run_id"] for answer in found}
    runs = (await world.get("/v1/runs"))["items"]
    assert [run["run_id"] for run in runs] == [run_id]
    other = await world.http.post(RUN, json={"input": 2}, headers=KEY)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
    assert other.json()["details"] == {"run_id": run_id}


async def test_a6_a_key_outlives_the_server(url: str) -> None:
    async with open_world(url=url) as first:
        run = (await first.http.post(RUN, json={"input": 1}, headers=KEY)).json()
        thread = (await first.http.post("/v1/threads", json={"title": "t"}, headers=KEY)).json()
        path = f"/v1/threads/{thread['thread_id']}/messages"
        message = (await first.http.post(path, json=PARTS, headers=KEY)).json()
        await first.until(run["run_id"], "succeeded")
    async with open_world(url=url) as second:
        again = await second.http.post(RUN, json={"input": 1}, headers=KEY)
        assert (again.status_code, again.headers[REPLAYED]) == (200, "true")
        assert again.json()["run_id"] == run["run_id"]
        again = await second.http.post("/v1/threads", json={"title": "t"}, headers=KEY)
        assert again.headers[REPLAYED] == "true"
        assert (again.json()["thread_id"], again.json()["last_position"]) == (
            thread["thread_id"],
            1,
        )
        again = await second.http.post(path, json=PARTS, headers=KEY)
        assert (again.json(), again.headers[REPLAYED]) == (message, "true")
        other = await second.http.post(RUN, json={"input": 2}, headers=KEY)
        assert other.json()["details"] == {"run_id": run["run_id"]}


async def test_dup_01_a_lost_answer_and_a_retry_are_one_run(url: str) -> None:
    async with open_world(serve=True, works=False, url=url) as world:
        card = AgentRegistration(
            agent_id="echo", version="1", card={"agent_id": "echo", "version": "1"}, digest="d"
        )
        await world.core.store.register([card], [])
        async with tcp_proxy(world.port, port=free_port()) as proxy:
            proxy.loses_answers = 1
            async with checked_client(f"http://127.0.0.1:{proxy.port}") as http:
                with pytest.raises(httpx2.TransportError):
                    await http.post(RUN, json={"input": 1}, headers=KEY)
                again = await http.post(RUN, json={"input": 1}, headers=KEY)
            assert proxy.cut == 1
        assert (again.status_code, again.headers[REPLAYED]) == (202, "true")
        runs = (await world.get("/v1/runs"))["items"]
        assert [run["run_id"] for run in runs] == [again.json()["run_id"]]
        assert (await world.core.reader.backlog()).ready == 1


async def test_dup_02_ten_equal_requests_have_one_run_id(world: World) -> None:
    body = {"input": 1, "options": {"idempotency_key": "order-1"}}
    ids: set[str] = set()

    async def send() -> None:
        ids.add((await world.http.post(RUN, json=body)).json()["run_id"])

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(send)
    assert len(ids) == len((await world.get("/v1/runs"))["items"]) == 1


async def test_a_key_makes_one_thread(world: World) -> None:
    found = await at_once(world, "/v1/threads", {"title": "weekly"})
    assert len({answer.text for answer in found}) == 1
    assert {answer.status_code for answer in found} == {201}
    thread_id = found[0].json()["thread_id"]
    assert found[0].headers["Location"] == f"/v1/threads/{thread_id}"
    threads = (await world.get("/v1/threads"))["items"]
    assert [thread["thread_id"] for thread in threads] == [thread_id]
    other = await world.http.post("/v1/threads", json={"title": "daily"}, headers=KEY)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
    assert other.json()["details"] == {"thread_id": thread_id}
    assert len((await world.get("/v1/threads"))["items"]) == 1


async def test_a_key_appends_one_message(world: World) -> None:
    thread = await new_thread(world)
    found = await at_once(world, f"{thread}/messages", PARTS)
    assert len({answer.text for answer in found}) == 1
    message = found[0].json()
    assert found[0].headers["Location"] == f"/v1/messages/{message['message_id']}"
    assert (await world.get(f"{thread}/messages"))["items"] == [message]
    changed = {**PARTS, "role": "system"}
    other = await world.http.post(f"{thread}/messages", json=changed, headers=KEY)
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_mismatch")
    assert other.json()["details"] == {"message_id": message["message_id"]}


async def test_a_default_that_is_spelled_out_is_the_same_request(world: World) -> None:
    thread = await new_thread(world)
    first = await world.http.post("/v1/threads", json={}, headers=KEY)
    bodies: list[dict[str, Any] | None] = [
        {"title": ""},
        {"metadata": {}, "participants": []},
        None,
    ]
    for body in bodies:
        again = await world.http.post("/v1/threads", json=body, headers=KEY)
        assert again.json() == first.json()
    first = await world.http.post(f"{thread}/messages", json=PARTS, headers=KEY)
    again = await world.http.post(f"{thread}/messages", json={**PARTS, "role": "user"}, headers=KEY)
    assert again.json() == first.json()


async def test_a_key_belongs_to_what_it_was_sent_to(world: World) -> None:
    one, two = await new_thread(world), await new_thread(world)
    answers = [
        await world.http.post(path, json=body, headers=KEY)
        for path, body in (
            (RUN, {"input": 1}),
            ("/v1/agents/asker/run", {"input": 1}),
            ("/v1/threads", {}),
            (f"{one}/messages", PARTS),
            (f"{two}/messages", PARTS),
        )
    ]
    assert all(answer.is_success and REPLAYED not in answer.headers for answer in answers)


@pytest.mark.parametrize("key", ["", "x" * 256, "perdure.continues:run_1"])
async def test_a_key_out_of_bounds_is_invalid_everywhere(world: World, key: str) -> None:
    thread = await new_thread(world)
    for path, body in ((RUN, {"input": 1}), ("/v1/threads", {}), (f"{thread}/messages", PARTS)):
        answer = await world.http.post(path, json=body, headers={"Idempotency-Key": key})
        assert (answer.status_code, answer.json()["field"]) == (422, "Idempotency-Key"), path
    twice = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = await world.http.post("/v1/threads", json={}, headers=twice)
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed")
    assert (await world.get(f"{thread}/messages"))["items"] == []


async def test_a_message_to_an_unknown_thread_leaves_its_key_free(world: World) -> None:
    path = f"/v1/threads/{THREAD}_{'0' * 32}/messages"
    answer = await world.http.post(path, json=PARTS, headers=KEY)
    assert answer.status_code == 404
    thread = await new_thread(world)
    answer = await world.http.post(f"{thread}/messages", json=PARTS, headers=KEY)
    assert answer.status_code == 201


async def test_a_message_is_shown_by_its_id(world: World) -> None:
    thread = await new_thread(world)
    appended = (await world.http.post(f"{thread}/messages", json=PARTS)).json()
    run = await world.start("echo", {"answer": "done"}, wait=5)
    of_run = (await world.get(f"/v1/threads/{run['thread_id']}/messages"))["items"]
    for message in (appended, *of_run):
        assert await world.get(f"/v1/messages/{message['message_id']}") == message
    for unknown in (f"{MESSAGE}_{'0' * 32}", "nope", f"{THREAD}_{'0' * 32}"):
        answer = await world.http.get(f"/v1/messages/{unknown}")
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
