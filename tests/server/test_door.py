"""What the door refuses before a route sees it (F35 to F38, AUT-16, AUT-17, R-21.2, R-21.3)."""

import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import anyio
import pytest
import uvicorn
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perdure.protocol.codec import parse_strict
from perdure.protocol.errors import Invalid, Malformed
from perdure.server.asgi import BodyDoor, Boundary, host_name, is_our_host
from perdure.server.serve import AbortableProtocol, Server
from perdure.server.settings import ServerSettings
from perdure.server.stopping import Stopping
from tests.server.world import World, open_world
from tests.waiting import eventually

JSON = {"Content-Type": "application/json"}
RUN = "/v1/agents/echo/run"


@pytest.fixture(scope="module")
async def world() -> AsyncGenerator[World]:
    async with open_world() as opened:
        yield opened


async def _nothing_changed(world: World) -> None:
    assert (await world.get("/v1/runs"))["items"] == []


def _nested(depth: int) -> bytes:
    return b'{"input":' + b"[" * depth + b"]" * depth + b"}"


@pytest.mark.parametrize(
    ("query", "field", "detail"),
    [
        ("limit=5&limit=6", "limit", "it is given 2 times; give it once"),
        ("unfinished=true&unfinished=true", "unfinished", "it is given 2 times; give it once"),
        ("limits=5", "limits", "there is no such parameter here; there are: "),
    ],
)
async def test_a_parameter_that_is_not_there_or_given_twice_is_refused(
    world: World, query: str, field: str, detail: str
) -> None:
    """R-21.3: no value is silently chosen among several."""
    answer = await world.http.get(f"/v1/runs?{query}")
    assert answer.status_code == 422
    told = answer.json()
    assert (told["code"], told["field"]) == ("invalid", field)
    assert told["detail"].startswith(detail) or detail in told["errors"][0]["detail"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'\xef\xbb\xbf{"input":1}', 400),
        (b'{"input":NaN}', 422),
        (b'{"input":Infinity}', 422),
        (b'{"input":-Infinity}', 422),
        (b'{"input":1e400}', 422),
        (b'{"input":9007199254740992}', 422),
        (b'{"input":' + b"9" * 10_000 + b"}", 422),
        (b'{"input":1,"input":2}', 422),
        (b'{"input":{"a":1,"a":2}}', 422),
        (b'{"input":"\\ud83d"}', 422),
        (b'{"input":{"\\udc00":1}}', 422),
        (b"[1]", 422),
        (b"null", 422),
        (b'"text"', 422),
        (b'{"input":1,"inputs":2}', 422),
        (b'{"input":1,"options":{"max_steps":0}}', 422),
        (b'{"input":1,"options":{"max_steps":"5"}}', 422),
        (b'{"input":1,"options":{"max_steps":true}}', 422),
        (b'{"input":1,"options":{"max_steps":5.0}}', 422),
        (b'{"input":1,"options":{"timeouts":{"run_s":"60"}}}', 422),
        (b'{"input":1,"context":{"user_id":7}}', 422),
        (b'{"input":1,"context":{"user_id":"a\\u0000b"}}', 422),
        (b'{"input":1,"options":{"idempotency_key":"a\\u0000b"}}', 422),
        (b'{"input":[' + b"1," * 1_000_000 + b"1]}", 422),
        (b'{"input":{' + b",".join(b'"%d":1' % n for n in range(200_000)) + b"}}", 422),
        (_nested(70), 422),
        (_nested(1_000), 422),
        (_nested(100_000), 422),
    ],
)
async def test_bad_bodies_get_a_problem_and_change_nothing(
    world: World, body: bytes, status: int
) -> None:
    """R-21.3."""
    answer = await world.http.post(RUN, content=body, headers=JSON)
    problem = answer.json()
    assert answer.status_code == status, problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["code"] == ("malformed" if status == 400 else "invalid")
    assert problem["instance"].endswith(answer.headers["x-request-id"])
    await _nothing_changed(world)


async def test_a_problem_points_at_every_field(world: World) -> None:
    """R-21.3."""
    body = {"input": 1, "options": {"max_steps": "many", "a/b": 1}}
    problem = (await world.http.post(RUN, json=body)).json()
    assert problem["field"] == "/options/max_steps"
    assert [error["field"] for error in problem["errors"]] == [
        "/options/max_steps",
        "/options/a~1b",
    ]


async def test_text_with_many_commas_and_any_character_is_an_input(world: World) -> None:
    """F37: what is counted are values; a NUL is refused in texts, not in a caller's JSON."""
    text = "1,2;\0" * 100_000
    answer = await world.http.post("/v1/agents/nobody/run", json={"input": text})
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metadata": {"a": "x" * 70_000}}, "/metadata"),
        ({"participants": [{"a": "x" * 70_000}]}, "/participants"),
        ({"title": "a\0b"}, "/title"),
        ({"capabilities": ["fine", "a\0b"]}, "/capabilities/1"),
    ],
)
async def test_a_thread_is_bounded_like_a_run(
    world: World, body: dict[str, object], field: str
) -> None:
    problem = (await world.http.post("/v1/threads", json=body)).json()
    assert (problem["code"], problem["field"]) == ("invalid", field)


async def test_a_body_that_does_not_come_is_given_up() -> None:
    """R-21.3: a slow sender holds its place for a bounded time."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive, send).body()

    async def receive() -> Message:
        await anyio.sleep_forever()
        raise AssertionError

    door = Boundary(BodyDoor(app, bytes_max=1000, timeout_s=0.05))
    assert await _status_of(door, receive) == 408


async def test_a_client_that_leaves_before_its_body_is_whole_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive, send).body()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    door = Boundary(BodyDoor(app, bytes_max=1000, timeout_s=5))
    assert await _status_of(door, receive) is None
    assert caplog.records == []


async def _status_of(app: ASGIApp, receive: Receive) -> int | None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"9")]
    scope: Scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    with anyio.fail_after(30):
        await app(scope, receive, send)
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize(
    "request_",
    [b"NONSENSE\r\n\r\n", b"GET /v1/runs?x=" + b"a" * 5_000_000 + b" HTTP/1.1\r\n\r\n"],
    ids=["nonsense", "long"],
)
async def test_what_is_no_http_gets_a_problem_too(request_: bytes) -> None:
    """R-21.3: what the HTTP library refuses has the form of all other refusals, and arrives."""
    server = Server(uvicorn.Config(FastAPI(), http=AbortableProtocol, log_config=None), Stopping())
    answer = b""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            await eventually(lambda: server.started)
            async with await anyio.connect_tcp(*listener.getsockname()) as stream:
                await stream.send(request_)
                with suppress(anyio.EndOfStream):
                    while True:
                        answer += await stream.receive()
            server.should_exit = True
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"content-type: application/problem+json" in head
    assert json.loads(body)["code"] == "malformed"


async def test_a_body_over_the_limit_is_refused_with_its_limit(world: World) -> None:
    body = b'{"input":"' + b"x" * (5 * 1024 * 1024) + b'"}'
    answer = await world.http.post(RUN, content=body, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert answer.json()["details"] == {"bytes_max": 4 * 1024 * 1024}
    await _nothing_changed(world)


async def test_a_body_in_chunks_is_counted_too(world: World) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"input":"'
        for _ in range(80):
            yield b"x" * 65_536
        yield b'"}'

    answer = await world.http.post(RUN, content=chunks(), headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json; charset=utf-16"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
        {"Content-Type": ""},
    ],
)
async def test_only_json_in_utf_8_is_read(world: World, headers: dict[str, str]) -> None:
    answer = await world.http.post(RUN, content=b'{"input":1}', headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media")
    await _nothing_changed(world)


async def test_a_body_without_a_media_type_is_refused(world: World) -> None:
    request = world.http.build_request("POST", RUN, content=b'{"input":1}')
    request.headers.pop("content-type", None)
    assert (await world.http.send(request)).status_code == 415


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Origin": "http://localhost.evil.example:8420"},
        {"Origin": "http://127.0.0.1:8420", "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_another_sites_page_cannot_start_a_run(world: World, headers: dict[str, str]) -> None:
    answer = await world.http.post(RUN, json={"input": 1}, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    await _nothing_changed(world)


async def test_the_servers_own_page_may_mutate(world: World) -> None:
    own = {"Origin": "http://127.0.0.1:8420", "Sec-Fetch-Site": "same-origin"}
    answer = await world.http.post("/v1/threads", json={}, headers=own)
    assert answer.status_code == 201


@pytest.mark.parametrize(
    "host",
    ["attacker.example", "attacker.example:8420", "127.evil.example", "localhost.evil", "[::2]"],
)
async def test_a_rebound_name_reads_nothing(world: World, host: str) -> None:
    for path in ("/v1/runs", "/openapi.json", "/docs", "/metrics", "/nope"):
        answer = await world.http.get(path, headers={"Host": host})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert (await world.http.get("/livez", headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST:8420", True),
        ("127.0.0.1:1", True),
        ("127.8.9.10", True),
        ("[::1]:8420", True),
        ("api.example", True),
        ("api.example:443", True),
        ("other.example", False),
        ("127.0.0.1.nip.io", False),
        ("localhost@evil.example", False),
        ("localhost:8420/evil", False),
        ("localhost:99999", False),
        ("8.8.8.8", False),
        ("", False),
    ],
)
def test_which_hosts_are_ours(host: str, expected: bool) -> None:
    assert is_our_host(host, ServerSettings(allowed_hosts=("api.example",))) is expected


@given(st.text(max_size=40))
def test_any_host_header_is_judged_without_an_error(text: str) -> None:
    host_name(text)
    is_our_host(text, ServerSettings())


async def test_answers_carry_security_headers_and_the_request_id(world: World) -> None:
    answer = await world.http.get("/v1/runs", headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    odd = await world.http.get("/v1/runs", headers={"X-Request-Id": "a b"})
    assert odd.headers["x-request-id"].startswith("req_")


async def test_an_unknown_path_or_method_is_a_problem(world: World) -> None:
    unknown = await world.http.get("/v2/runs")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")
    assert unknown.json()["detail"] == "there is no such route: /docs lists them all"
    for path, allowed in (
        ("/v1/runs", "GET"),
        ("/v1/threads", "GET, POST"),
        ("/v1/runs/cancel", "POST"),  # though a run's path matches it too
    ):
        method = await world.http.delete(path)
        assert (method.status_code, method.json()["code"]) == (405, "method_not_allowed")
        assert method.headers["allow"] == allowed


_JSON_BYTES = st.one_of(
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=12,
    ).map(lambda value: json.dumps(value, ensure_ascii=True).encode()),
)


@given(_JSON_BYTES)
def test_the_parser_answers_or_refuses_and_never_breaks(body: bytes) -> None:
    try:
        value = parse_strict(body)
    except (Malformed, Invalid):
        return
    json.dumps(value, allow_nan=False).encode()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(body=_JSON_BYTES)
async def test_no_body_makes_the_server_fail(world: World, body: bytes) -> None:
    for path in (RUN, "/v1/threads", f"/v1/runs/run_{'0' * 32}/cancel"):
        for content in (body, b'{"input":1,"title":' + body + b"}"):
            answer = await world.http.post(path, content=content, headers=JSON)
            assert answer.status_code < 500, (path, content, answer.text)
