"""Bad and odd input for every door of the HTTP API, sent to the three stores alike.

The doors are read from the OpenAPI document: each path, query, header and field of a body. One
place of a valid request is filled with something odd; the answers of all stores must be the same,
but for ids and times.
"""

import json
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from urllib.parse import quote

import httpx2
from hypothesis import strategies as st

from perdure.bindings import native
from perdure.engine.core import Core
from perdure.protocol.base import TENANT_DEFAULT
from perdure.server.app import create_app
from perdure.server.settings import ServerSettings
from perdure.server.stopping import Stopping
from perdure.service.base import Service
from perdure.store.ports import Database
from perdure.store.reader import RunFilter
from perdure.testing.embedded import SETTINGS, embedded
from perdure.tools import ToolRegistry
from tests.server.documented import checked_client
from tests.server.world import AGENTS, borrow, echo, order, publish, rest

POOL = 3
"""So many waiting runs of each kind are there to be answered."""

HERE = "@here@"
_JSON = {"Content-Type": "application/json", "Accept": "application/json"}

# ---------------------------------------------------------------- what is odd

TEXTS = (
    "",
    " ",
    "\0",
    "a\0b",
    "a\nb\r\tc",
    "\u2028\u2029\x85\x0b\x0c",
    "\ufeffbom",
    "\u202eright to left\u200b\u200f",
    "\U0001f600 👩‍👩‍👧 e\u0301",
    "\x7f\x1b[31m",
    "../../etc/passwd",
    "%00%ff",
    "x" * 101,
    "x" * 201,
    "é" * 128,
    "x" * 5001,
    "\U0001f600" * 20_000,
    "a,b;c",
    "'; DROP TABLE runs; --",
    '"',
    "\\",
    "null",
    "-1",
)
_BROKEN = (
    r'"\ud83d"',
    r'"\udc00\ud83d"',
    r'{"\ud800":1}',
    r'"a\u0000b"',
    r'{"a\u0000":{"\u0000":1}}',
)
_NUMBERS = (
    *("0", "-0", "-0.0", "-1", "1", "2", "1.0", "1e2", "0.1", "1e308", "5e-324", "1e400", "-1e400"),
    *(str(2**31 - 1), str(2**31), str(2**53 - 1), str(2**53), str(2**63 - 1), str(2**63)),
    *(str(-(2**31) - 1), str(1 - 2**53), str(-(2**63) - 1), "9" * 400, "9" * 5000),
    *("NaN", "Infinity", "-Infinity"),
)
_DEEP = tuple(
    opening * depth + "1" + closing * depth
    for depth in (9, 60, 63, 64, 66, 1000)
    for opening, closing in (("[", "]"), ('{"a":', "}"))
)
_WIDE = (
    json.dumps({f"k{n}": n for n in range(51)}),
    json.dumps({"k" * 300: 1}),
    json.dumps(list(range(1100))),
    json.dumps(["x"] * 101),
    json.dumps({"text": "x" * 70_000}),
    json.dumps([{"a": [None] * 5}] * 20),
    '{"a":1,"a":2}',
)
_PLAIN = ("null", "true", "false", "[]", "{}", "[[]]", '{"":""}', '{"a/b":{"~":0}}')

RAW = st.one_of(
    st.sampled_from(TEXTS).map(json.dumps),
    st.sampled_from((*_BROKEN, *_NUMBERS, *_PLAIN)),
    st.sampled_from((*_DEEP, *_WIDE)),
    st.text(max_size=30).map(json.dumps),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
        max_leaves=6,
    ).map(json.dumps),
)
"""JSON, or what claims to be, as it stands in a body."""

WORDS = st.one_of(
    st.sampled_from([text for text in TEXTS if len(text) <= 5001]),
    st.text(max_size=20),
    st.sampled_from(_NUMBERS),
)
"""Texts for paths and queries."""

BYTES = st.binary(max_size=12) | WORDS.map(lambda text: text.encode("utf-8", "replace"))


def head_value(data: bytes) -> bytes:
    """Return bytes that HTTP lets a header have."""
    return bytes(byte for byte in data if byte == 9 or 32 <= byte != 127)[:9000].strip()


# ---------------------------------------------------------------- the doors


@dataclass(frozen=True, slots=True, repr=False)
class Operation:
    """One route, with where something can be put."""

    method: str
    path: str
    queries: tuple[str, ...]
    headers: tuple[str, ...]
    bodies: tuple[Any, ...]
    """Valid ones."""
    fields: tuple[tuple[str, ...], ...]
    """The places in a body, by the names that lead there; the empty one is the whole body."""

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters of the path."""
        return tuple(re.findall(r"{(\w+)}", self.path))

    def __repr__(self) -> str:
        return f"{self.method} {self.path}"


def operations(document: Mapping[str, Any]) -> list[Operation]:
    """Return every route of an OpenAPI document under /v1."""
    found: list[Operation] = []
    for path, methods in document["paths"].items():
        if not path.startswith("/v1"):
            continue
        for method, told in methods.items():
            given = told.get("parameters", [])
            content = told.get("requestBody", {}).get("content", {}).get("application/json", {})
            examples = content.get("examples", {}).values()
            found.append(
                Operation(
                    method=method.upper(),
                    path=path,
                    queries=tuple(one["name"] for one in given if one["in"] == "query"),
                    headers=tuple(one["name"] for one in given if one["in"] == "header"),
                    bodies=tuple(one["value"] for one in examples),
                    fields=tuple(_places(document, content.get("schema", {}))) if content else (),
                )
            )
    return found


def _places(document: Mapping[str, Any], schema: Mapping[str, Any], depth: int = 3) -> list[Any]:
    """Return the places of a schema, at most three names deep."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        schema = document["components"]["schemas"][name]
    found: list[tuple[str, ...]] = [()]
    for one in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        found += [place for place in _places(document, one, depth) if place]
    if depth:
        for name, inner in schema.get("properties", {}).items():
            found += [(name, *rest) for rest in _places(document, inner, depth - 1)]
    return list(dict.fromkeys(found))


def body_with(body: Any, place: Sequence[str], raw: str) -> bytes:
    """Return a valid body as text with something odd at one place."""
    filled = _filled(body, place)
    return json.dumps(filled).replace(json.dumps(HERE), raw, 1).encode("utf-8", "surrogatepass")


def _filled(body: Any, place: Sequence[str]) -> Any:
    if not place:
        return HERE
    inner: dict[str, Any] = {**cast("dict[str, Any]", body)} if isinstance(body, dict) else {}
    inner[place[0]] = _filled(inner.get(place[0]), place[1:])
    return inner


# ---------------------------------------------------------------- the stores


@dataclass(slots=True, repr=False)
class Site:
    """One store with the API over it, without a worker."""

    core: Core
    http: httpx2.AsyncClient
    ids: dict[str, list[str]]

    def __repr__(self) -> str:
        return "a site"

    async def fingerprint(self) -> tuple[object, ...]:
        """Return what every change of a database shows on."""
        reader = self.core.reader
        runs = await reader.list_runs(None, RunFilter(), after=None, limit=5000)
        threads = await reader.list_threads(TENANT_DEFAULT, after=None, limit=5000)
        return (
            [(row.facts.run_id, row.hot.last_seq, row.hot.updated_at) for row in runs],
            [(row.thread_id, row.last_position) for row in threads],
        )


@dataclass(frozen=True, slots=True, repr=False)
class Sent:
    """A request. `path` has the names of its parameters still, for each store its own ids."""

    method: str
    path: str
    odd: Mapping[str, str] = field(default_factory=dict[str, str])
    """Instead of an id of this store."""
    query: str = ""
    headers: Sequence[tuple[bytes, bytes]] = ()
    body: bytes | None = None
    turn: int = 0
    """Which of several objects is meant."""

    def __repr__(self) -> str:
        body = (self.body or b"")[:500]
        return f"{self.method} {self.path} {self.odd} {self.query} {self.headers} {body!r}"[:2000]

    def url(self, site: Site) -> str:
        """Return the path and query for one store."""
        path = self.path
        for name in re.findall(r"{(\w+)}", path):
            odd = self.odd.get(name)
            known = site.ids[name]
            value = odd if odd is not None else known[self.turn % len(known)]
            path = path.replace("{" + name + "}", quote(value, safe="", errors="replace"))
        return path + (f"?{self.query}" if self.query else "")


async def send(site: Site, sent: Sent) -> httpx2.Response:
    """Send a request to one store."""
    headers = [*((name.encode(), value.encode()) for name, value in _JSON.items()), *sent.headers]
    return await site.http.request(
        sent.method, sent.url(site), content=sent.body, headers=cast("Any", headers)
    )


_MASKS = (
    (re.compile(r"\b([a-z]{2,4})_[0-9a-f]{32}"), r"\1"),
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:]+\.\d+Z"), "time"),
    (re.compile(r'"next":"[^"]*"'), '"next":"cursor"'),
    (
        re.compile(r'"(trace_id|span_id|digest|key|effect_key|args_digest)":"[0-9a-f]{16,64}"'),
        r'"\1":"hex"',
    ),
    (re.compile(r'"(duration_ms|waiting_ms|age_s|\w+_ms)":[\d.]+'), r'"\1":0'),
)


def masked(answer: httpx2.Response) -> tuple[int, str]:
    """Return an answer without what differs from store to store: ids and times."""
    text = answer.text
    for pattern, instead in _MASKS:
        text = pattern.sub(instead, text)
    return answer.status_code, text


@asynccontextmanager
async def open_site(database: Database) -> AsyncGenerator[Site]:
    """Make runs of several kinds over an entered database, stop their worker, open the API."""
    tools = ToolRegistry([borrow, echo, order, publish, rest])
    settings = replace(SETTINGS, poll_interval_s=0.02)
    async with embedded(database, AGENTS, tools=tools, settings=settings) as engine:
        done = await engine.submit("echo", {"times": 1}, idempotency_key="known")
        await engine.wait_terminal(done)
        asked: list[str] = []
        called: list[str] = []
        for _ in range(POOL):
            asked.append(await engine.submit("asker"))
            called.append(await engine.submit("buyer"))
        questions = [(await engine.wait_waiting(run_id))[0].interrupt_id for run_id in asked]
        for run_id in called:
            await engine.wait_until(run_id, lambda row: row.hot.parked_on is not None)
        await engine.drain()
        reader = engine.core.reader
        calls = [await reader.list_tool_calls(run, after=None, limit=1) for run in called]
        points = await reader.list_checkpoints(done, before=None, limit=10)
        rows = [await engine.run(run_id) for run_id in (done, *asked)]
        (message, *_) = await reader.list_messages(rows[0].facts.thread_id, after=-1, limit=1)
        app = create_app(
            Service(core=engine.core),
            ServerSettings(port=8420),
            routers=native.routers(),
            stopping=Stopping(),
        )
        transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
        async with checked_client("http://127.0.0.1:8420", transport=transport) as http:
            yield Site(
                core=engine.core,
                http=http,
                ids={
                    "agent_id": ["echo"],
                    "run_id": [done, *asked],
                    "thread_id": [row.facts.thread_id for row in rows],
                    "interrupt_id": questions,
                    "tool_call_id": [call[0].tool_call_id for call in calls],
                    "checkpoint_id": [point.checkpoint_id for point in points],
                    "other_id": [points[0].checkpoint_id],
                    "message_id": [message.message_id],
                    "event_id": [f"evt_{done[4:]}_1"],
                    "step_id": [f"step_{done[4:]}_0"],
                    "artifact_id": ["art_" + "0" * 32],
                    "topic": ["news"],
                },
            )
