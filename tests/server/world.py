"""A whole installation in one process for the tests of this folder: store, worker, HTTP server."""

import random
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import anyio
import httpx2
import uuid_utils
from fastapi import FastAPI
from prometheus_client import Counter, Gauge

from perdure.agents.catalog import AgentRegistry, Catalog, loop_agent
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.bindings import native
from perdure.control.policy import DefaultPolicy
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core, EngineSettings
from perdure.engine.directory import AgentDirectory
from perdure.engine.heartbeat import LoopHeartbeat
from perdure.engine.ports import ToolGrant
from perdure.engine.worker import Worker
from perdure.protocol.base import from_micros
from perdure.protocol.decisions import (
    Ask,
    CallTools,
    ChildRequest,
    Decision,
    Finish,
    Sleep,
    Spawn,
    ToolRequest,
    WriteField,
)
from perdure.protocol.events import CustomEvent
from perdure.protocol.fields import StateField
from perdure.protocol.ids import COMMIT, make_id
from perdure.protocol.log import NewEvent
from perdure.protocol.states import InterruptKind
from perdure.server.app import create_app
from perdure.server.serve import Server, make_server
from perdure.server.settings import ServerSettings
from perdure.server.stopping import Stopping
from perdure.service.base import Service
from perdure.signals.local import LocalSignals
from perdure.signals.ports import Signals, run_topic
from perdure.store.commits import Commit, Committed, Guard, HotUpdate
from perdure.store.memory import MemoryDatabase
from perdure.telemetry.metrics import Metrics
from perdure.testing.sse_client import SseClient
from perdure.tools.api import Performed, Returned, ToolContext, pending
from perdure.tools.decorator import tool
from perdure.tools.runner import LocalToolRunner
from tests.flow.world import assert_sound, database_at
from tests.server.documented import checked_client
from tests.waiting import eventually


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        return from_micros(time.time_ns() // 1000)

    def monotonic(self) -> float:
        return time.monotonic()


class SystemIds:
    """Fresh UUIDv7 ids."""

    def new(self, prefix: str) -> str:
        return make_id(prefix, UUID(bytes=uuid_utils.uuid7().bytes))


@tool(trusted=True)
def echo(text: str) -> str:
    """Return the text."""
    return text


@tool(trusted=True, side_effect="write", idempotent=True, timeout_s=5, compensation="none")
def publish(title: str, copies: int = 1) -> str:
    """Publish a report."""
    return f"{title} x{copies}"


@tool(side_effect="external", idempotent=False, timeout_s=10, compensation="none is needed")
def order(amount: int) -> Returned:
    """Order; the result comes by callback."""
    return pending(external_ref=f"order-{amount}")


def give_back(performed: Performed) -> dict[str, object]:
    """Give back what was borrowed."""
    return {"given back": performed.output}


@tool(trusted=True, side_effect="write", idempotent=True, timeout_s=5, compensate=give_back)
def borrow(title: str, context: ToolContext) -> str:
    """Borrow a book, and keep the slip."""
    context.artifact("slip.txt", f"slip of {title}", "text/plain")
    return title


@tool(trusted=True)
async def rest(seconds: float, text: str = "") -> str:
    """Return the text after so long."""
    await anyio.sleep(seconds)
    return text


def _calls(name: str, **args: Any) -> CallTools:
    return CallTools(calls=(ToolRequest(tool=name, args=args, call_id="c1"),))


def _echoes(context: PlannerContext) -> Decision:
    """Echo the input as often as it says, then finish with it."""
    wish = context.input if isinstance(context.input, dict) else {"times": 1}
    times = wish.get("times", 1)
    if context.step_index < (times if isinstance(times, int) else 1):
        return _calls("echo", text=f"{wish.get('text', 'hello')} {context.step_index}")
    return Finish(answer=wish.get("answer", "done"))


def _walks(context: PlannerContext) -> Decision:
    """Rest as often and as long as the input says."""
    wish = context.input if isinstance(context.input, dict) else {}
    times, seconds = wish.get("times", 3), wish.get("seconds", 0.02)
    if context.step_index < (times if isinstance(times, int) else 3):
        return _calls("rest", seconds=seconds, text=f"{wish.get('text', '')} {context.step_index}")
    return Finish(answer="arrived")


def _raises(context: PlannerContext) -> Decision:
    if context.step_index == 0:
        return _calls("echo", text="one")
    raise RuntimeError("a fault of the planner")


LEFT: list[dict[str, Any]] = [
    {"field": "turns", "value": 1},
    {"field": "seen", "value": "x"},
    {"field": "total", "value": 1},
]
AGENTS = (
    loop_agent("echo", "1", ScriptedPlanner(_echoes), tools=["echo"]),
    loop_agent("herald", "1", ScriptedPlanner([Finish(answer="news")]), publishes="news"),
    loop_agent("quick", "1", ScriptedPlanner([Finish(answer="heard")])),
    loop_agent(
        "publisher",
        "1",
        ScriptedPlanner([_calls("publish", title="Q1"), Finish(answer="published")]),
        tools=["publish"],
        input_schema={"type": "object"},
    ),
    loop_agent(
        "asker",
        "1",
        ScriptedPlanner(
            [
                Ask(title="Which region?", key="region", answer_schema={"type": "string"}),
                Finish(answer="thanks"),
            ]
        ),
    ),
    loop_agent(
        "login", "1", ScriptedPlanner([Ask(ask=InterruptKind.AUTH, title="Sign in"), Finish()])
    ),
    loop_agent("sleeper", "1", ScriptedPlanner([Sleep(duration="PT1H"), Finish()])),  # pyright: ignore[reportArgumentType]  # pydantic reads it
    loop_agent("walker", "1", ScriptedPlanner(_walks), tools=["rest"]),
    loop_agent(
        "manager",
        "1",
        ScriptedPlanner(
            [Spawn(children=(ChildRequest(agent_id="asker"),) * 3), Finish(answer="all told")]
        ),
    ),
    loop_agent(
        "buyer",
        "1",
        ScriptedPlanner([_calls("order", amount=1), Finish(answer="bought")]),
        tools=[ToolGrant(name="order", approve="never")],
    ),
    loop_agent(
        "reader",
        "1",
        ScriptedPlanner([_calls("borrow", title="Emma"), Ask(title="Go on?"), Finish()]),
        tools=[ToolGrant(name="borrow", approve="never")],
    ),
    loop_agent(
        "keeper",
        "1",
        ScriptedPlanner([Finish(records=tuple(WriteField(**one) for one in LEFT))]),
        state=[
            StateField(name="turns", scope="thread", rule="add"),
            StateField(name="seen", scope="thread", rule="append"),
            StateField(name="total", scope="agent", rule="add"),
        ],
    ),
    loop_agent("broken", "1", ScriptedPlanner(_raises), tools=["echo"]),
    loop_agent(
        "double",
        "1",
        ScriptedPlanner(
            [
                CallTools(
                    calls=(
                        ToolRequest(tool="publish", args={"title": "a"}),
                        ToolRequest(tool="publish", args={"title": "b"}),
                    )
                ),
                Finish(answer="both"),
            ]
        ),
        tools=[ToolGrant(name="publish")],
    ),
)


REGISTRY = AgentRegistry()
"""The agents and tools, also for server processes: `--agents tests.server.world:REGISTRY`."""

REGISTRY.add(*AGENTS)
REGISTRY.add_tool(borrow, echo, order, publish, rest)


@dataclass(slots=True)
class World:
    """What tests look at."""

    core: Core
    app: FastAPI
    service: Service
    settings: ServerSettings
    stopping: Stopping
    metrics: Metrics
    http: httpx2.AsyncClient
    server: Server | None = None

    @property
    def port(self) -> int:
        """The port of the server that really listens."""
        return self.settings.port

    async def start(
        self, agent: str, body: object = None, *, options: object = None, **query: Any
    ) -> dict[str, Any]:
        """Start a run and return it."""
        request = {"input": body} if options is None else {"input": body, "options": options}
        answer = await self.http.post(f"/v1/agents/{agent}/run", json=request, params=query)
        assert answer.status_code in {200, 202}, answer.text
        return answer.json()

    async def get(self, path: str, **query: Any) -> Any:
        """Return the body of a GET that succeeds."""
        answer = await self.http.get(path, params=query, headers={"Accept": "application/json"})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until(self, run_id: str, *states: str) -> dict[str, Any]:
        """Return the run once it is in one of the states."""
        return await self.until_run(run_id, lambda run: run["state"] in states)

    async def until_waiting(self, run_id: str, on: str) -> dict[str, Any]:
        """Return the run once it waits for that."""
        return await self.until_run(run_id, lambda run: run["waiting_on"] == on)

    async def until_run(
        self, run_id: str, holds: Callable[[dict[str, Any]], bool], seconds: float = 30
    ) -> dict[str, Any]:
        """Return the run once it is as asked; looked at when its bell rings, and now and then."""
        with anyio.fail_after(seconds):
            async with self.core.signals.subscribe(run_topic(run_id)) as bell:
                while not holds(run := await self.get(f"/v1/runs/{run_id}")):
                    with anyio.move_on_after(0.5):  # signals are hints
                        await bell.wait()
        return run

    async def add_event(self, run_id: str, text: str, times: int = 1) -> None:
        """Append events of some size, in one commit, beside who holds the run, if anybody does."""
        row = await self.core.reader.find_run(None, run_id)
        assert row is not None
        hot = row.hot
        data = CustomEvent(name="text", value=text)
        commit = Commit(
            run_id=run_id,
            commit_id=self.core.ids.new(COMMIT),
            guard=Guard(
                token=None,
                epoch=hot.cancel_epoch,
                from_state=hot.state,
                expected_seq=hot.last_seq,
                any_holder=hot.lease_owner is not None,
            ),
            hot=HotUpdate(
                state=hot.state,
                step_index=hot.step_index,
                faults=hot.faults,
                parked_on=hot.parked_on,
                waiting_kind=hot.waiting_kind,
                open_calls=hot.open_calls,
                open_interrupts=hot.open_interrupts,
                counters=hot.counters,
                checkpoint_seq=hot.checkpoint_seq,
            ),
            events=(NewEvent(data=data, step_index=hot.step_index),) * times,
        )
        (result,) = await self.core.store.commit([commit])
        assert isinstance(result, Committed), result
        self.core.signals.publish(run_topic(run_id))

    def events_of(self, run_id: str) -> SseClient:
        """Return a client of the run's stream on the real socket."""
        return SseClient("127.0.0.1", self.port, f"/v1/runs/{run_id}/events")


def value_of(metric: Counter | Gauge) -> float:
    """Return the value of a metric without labels."""
    return next(iter(next(iter(metric.collect())).samples)).value


def free_port() -> int:
    """Return a port below the ephemeral range that nobody listens on."""
    chance = random.SystemRandom()
    while True:
        port = chance.randrange(21_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@asynccontextmanager
async def open_world(
    *,
    serve: bool = False,
    works: bool = True,
    listens: bool = True,
    url: str | None = None,
    signals: Signals | None = None,
    poll_s: float = 0.05,
    agents: AgentRegistry = REGISTRY,
    **settings: Any,
) -> AsyncGenerator[World]:
    """Open an installation: with a worker unless `works` is False, on a socket with `serve`.

    In memory without a `url`; in the database of a URL `perdure verify` must find nothing at the
    end. Without `listens` the server is made and the caller runs it.
    """
    catalog = Catalog([agents])
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        database = await stack.enter_async_context(
            MemoryDatabase() if url is None else database_at(url)
        )
        if url is not None:
            stack.push_async_callback(assert_sound, database)
        signals = await stack.enter_async_context(signals or LocalSignals())
        runner = await stack.enter_async_context(LocalToolRunner(catalog.tools, inline=True))
        core = Core(
            store=database.store,
            reader=database.reader,
            signals=signals,
            clock=clock,
            ids=SystemIds(),
            chance=random.Random(1),  # noqa: S311  # jitter only
            directory=AgentDirectory(database.reader, clock),
            settings=EngineSettings(poll_interval_s=poll_s, maintenance_interval_s=0.05),
        )
        made = ServerSettings(port=free_port() if serve else 8420, **settings)
        stopping, metrics, service = Stopping(), Metrics(), Service(core=core)
        app = create_app(
            service, made, routers=native.routers(), stopping=stopping, metrics=metrics
        )
        transport = httpx2.ASGITransport(app=app)
        url = f"http://127.0.0.1:{made.port}"
        http = await stack.enter_async_context(
            checked_client(url, transport=None if serve else transport)
        )
        world = World(core, app, service, made, stopping, metrics, http)
        group = await stack.enter_async_context(anyio.create_task_group())
        worker = Worker(
            core=core,
            catalog=catalog,
            tools=runner,
            policy=DefaultPolicy(),
            heartbeat=LoopHeartbeat(core),
        )
        served = anyio.Event()
        if works:
            await group.start(worker.run)
        if serve:
            world.server = make_server(app, made, stopping)
        if world.server is not None and listens:
            group.start_soon(_serve, world.server, served)
            await eventually(lambda: world.server is not None and world.server.started)
        yield world
        if world.server is not None:
            world.server.stop_streams()
            world.server.should_exit = True
        worker.drain()
        if world.server is not None and listens:
            await served.wait()
        if not works:
            group.cancel_scope.cancel()


async def _serve(server: Server, served: anyio.Event) -> None:
    await server.serve()
    served.set()
