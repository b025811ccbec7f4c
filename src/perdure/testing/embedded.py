"""The whole engine in one process over any database: for tests that follow a run from its order
to its end.

`embedded` starts a worker with local signals and the system's clock; what it gives submits,
answers, cancels and follows. Waiting is following the log (`engine.feed`), never sleeping, and
every wait is bounded by `WAIT_S`. `kill_worker` ends a worker as a crash would: nothing is
committed, released or recorded any more; its leases stay until they expire.
"""

import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime

import anyio
import anyio.abc
import uuid_utils.compat
from pydantic import JsonValue

from perdure.agents.catalog import AgentRegistry, Catalog
from perdure.agents.loop.scripted import ScriptedPlanner
from perdure.control.notify import FunctionNotifier
from perdure.control.policy import DefaultPolicy
from perdure.engine.answers import Answered, Reply, answer_interrupt
from perdure.engine.cancel import cancel_run
from perdure.engine.context import PlannerContext
from perdure.engine.core import Core, EngineSettings
from perdure.engine.directory import AgentDirectory
from perdure.engine.feed import follow
from perdure.engine.heartbeat import LoopHeartbeat
from perdure.engine.maintenance import Maintenance
from perdure.engine.ports import ApprovalNotice, HostedAgent, Policy, ToolGrant
from perdure.engine.submit import RunOrder, Submitted, submit_run
from perdure.engine.worker import Worker
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import TENANT_DEFAULT, from_micros
from perdure.protocol.codec import digest
from perdure.protocol.decisions import CallTools, Decision, ToolRequest
from perdure.protocol.errors import PerdureError
from perdure.protocol.ids import RUN, make_id
from perdure.protocol.log import RecordedEvent
from perdure.protocol.policies import RetryPolicy
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import Caller, RunContext, RunOptions, RunRow
from perdure.protocol.states import Answer, CancelAction, CancelOption, InterruptStatus, RunState
from perdure.signals.local import LocalSignals
from perdure.signals.ports import Signals
from perdure.store.ports import Database
from perdure.store.reader import InterruptFilter
from perdure.store.requests import CancelWish, LeaseKey
from perdure.tools import LocalToolRunner, ToolRegistry

WAIT_S = 30.0
LOOK_S = 0.2
"""How long it takes at most to see what comes without an event."""
PAGE = 500
ARRIVAL_S = 2.0
"""How long a write of a worker that was killed may still be on its way."""

SETTINGS = EngineSettings(
    poll_interval_s=0.05,
    maintenance_interval_s=0.05,
    heartbeat_s=0.05,
    cancel_grace_s=0.2,
    drain_grace_s=2.0,
)
"""Short intervals: a test does not wait for what a signal tells anyway."""


class SystemClock:
    """The machine's clock, in whole microseconds as stores keep them."""

    def now(self) -> datetime:
        """Return the time of day."""
        return from_micros(time.time_ns() // 1000)

    def monotonic(self) -> float:
        """Return seconds that never go back."""
        return time.monotonic()


class RandomIds:
    """UUIDv7 ids."""

    def new(self, prefix: str) -> str:
        """Return a fresh id under a prefix."""
        return make_id(prefix, uuid_utils.compat.uuid7())


def scripted(
    agent_id: str,
    script: Sequence[Decision] | Callable[[PlannerContext], Decision],
    *,
    tools: Sequence[str | ToolGrant] = (),
    version: str = "1",
    model_retry: RetryPolicy | None = None,
    deny_tells_planner: bool = False,
) -> HostedAgent:
    """Return an agent that follows a script; tools by name run by policy."""
    grants = tuple(ToolGrant(name=tool) if isinstance(tool, str) else tool for tool in tools)
    return HostedAgent(
        card=AgentCard(
            agent_id=agent_id, version=version, tools=tuple(grant.name for grant in grants)
        ),
        planner=ScriptedPlanner(script),
        grants=grants,
        model_retry=model_retry or RetryPolicy(backoff_s=0.01),
        deny_tells_planner=deny_tells_planner,
    )


def unasked(*names: str) -> tuple[ToolGrant, ...]:
    """Return grants that let write and external tools run without an approval."""
    return tuple(ToolGrant(name=name, approve="never") for name in names)


def call(tool: str, /, **args: JsonValue) -> CallTools:
    """Return the decision to call one tool."""
    return calls((tool, args))


def calls(*wishes: tuple[str, dict[str, JsonValue]]) -> CallTools:
    """Return the decision to call several tools in one step."""
    return CallTools(calls=tuple(ToolRequest(tool=tool, args=args) for tool, args in wishes))


@dataclass(slots=True, kw_only=True)
class Embedded:
    """A running engine. `worker` is the worker started last."""

    core: Core
    catalog: Catalog
    tools: LocalToolRunner
    policy: Policy
    worker: Worker
    tenant_id: str = TENANT_DEFAULT
    _group: anyio.abc.TaskGroup
    _running: dict[str, tuple[Worker, anyio.CancelScope, anyio.Event]] = field(
        default_factory=dict[str, tuple[Worker, anyio.CancelScope, anyio.Event]]
    )

    # -- workers

    async def start_worker(self) -> Worker:
        """Start one more worker of the same catalog."""
        worker = new_worker(self.core, self.catalog, self.tools, self.policy)
        await self.run_worker(worker)
        return worker

    async def run_worker(self, worker: Worker) -> None:
        """Start a worker that was made; return once it has registered what it serves."""
        self.worker = worker
        registered = anyio.Event()
        self._group.start_soon(self._run, worker, registered)
        await registered.wait()

    async def _run(self, worker: Worker, registered: anyio.Event) -> None:
        ended = anyio.Event()
        async with anyio.create_task_group() as own:
            self._running[worker.worker_id] = (worker, own.cancel_scope, ended)
            await own.start(worker.run)
            registered.set()
        self._running.pop(worker.worker_id, None)
        ended.set()

    async def kill_worker(self, worker: Worker | None = None) -> None:
        """End a worker as a crash would: its leases stay until they expire.

        A renewal that was on its way has arrived by then: it would prolong them by a clock that the
        test moves next.
        """
        gone, scope, ended = self._running[(worker or self.worker).worker_id]
        scope.cancel()
        await ended.wait()
        nothing = LeaseKey(run_id=self.core.ids.new(RUN), token=1)
        with (
            suppress(PerdureError),
            anyio.move_on_after(ARRIVAL_S),
        ):  # a test's store may not answer
            await self.core.store.renew_leases(gone.worker_id, [nothing], 1)

    async def drain(self, worker: Worker | None = None) -> None:
        """Stop a worker in order; return once it has handed back what it held."""
        gone, _, ended = self._running[(worker or self.worker).worker_id]
        gone.drain()
        await ended.wait()

    async def stop(self) -> None:
        """Drain every worker."""
        for worker, _, _ in list(self._running.values()):
            await self.drain(worker)

    async def sweep(self) -> bool:
        """Do one round of maintenance now, as any process may."""
        return await Maintenance(core=self.core, tools=self.tools).run_once()

    # -- what a caller does

    async def submit(
        self,
        agent_id: str,
        input: JsonValue = "go",
        *,
        thread_id: str | None = None,
        tenant_id: str | None = None,
        context: Mapping[str, JsonValue] | None = None,
        **options: object,
    ) -> str:
        """Create a run and return its id; `options` are those of `RunOptions`."""
        order = self.order(agent_id, input, thread_id=thread_id, tenant_id=tenant_id, **options)
        order = replace(order, context=RunContext.model_validate(dict(context or {})))
        return (await self.submit_order(order)).row.facts.run_id

    async def submit_order(self, order: RunOrder) -> Submitted:
        """Create a run from a whole order."""
        return await submit_run(self.core, order)

    def order(
        self,
        agent_id: str,
        input: JsonValue = "go",
        *,
        thread_id: str | None = None,
        tenant_id: str | None = None,
        **options: object,
    ) -> RunOrder:
        """Return the order of a run."""
        return RunOrder(
            agent_id=agent_id,
            input=input,
            context=RunContext(),
            options=RunOptions.model_validate(options),
            caller=Caller(tenant_id=tenant_id or self.tenant_id, principal="local"),
            fingerprint=digest([agent_id, input]),
            thread_id=thread_id,
        )

    async def answer(
        self,
        interrupt_id: str,
        answer: Answer,
        *,
        by: str = "ada",
        value: JsonValue = None,
        args: JsonValue = None,
        reason: str | None = None,
        external_ref: str | None = None,
    ) -> Answered:
        """Answer an interrupt."""
        reply = Reply(
            answer=answer, by=by, value=value, args=args, reason=reason, external_ref=external_ref
        )
        return await answer_interrupt(self.core, self.tenant_id, interrupt_id, reply)

    async def cancel(
        self,
        run_id: str,
        action: CancelAction = CancelAction.INTERRUPT,
        *,
        by: str = "ada",
        options: CancelOption = CancelOption.NONE,
    ) -> RunRow:
        """Cancel a run."""
        wish = CancelWish(action=action, by=by, source="api", reason="enough", options=options)
        return await cancel_run(self.core, self.tenant_id, run_id, wish, tools=self.tools)

    # -- what a caller sees

    async def run(self, run_id: str) -> RunRow:
        """Return a run that must be there."""
        row = await self.core.reader.find_run(None, run_id)
        assert row is not None, f"no run {run_id}"
        return row

    async def events(self, run_id: str) -> list[RecordedEvent]:
        """Return the log of a run, as far as it is kept."""
        log: list[RecordedEvent] = []
        seq = 0
        while page := await self.core.reader.events_after(run_id, seq, limit=PAGE):
            log += page
            seq = page[-1].seq
        return log

    async def pending(self, run_id: str) -> list[InterruptRow]:
        """Return the open questions of a run."""
        row = await self.run(run_id)
        where = InterruptFilter(status=InterruptStatus.PENDING, run_id=run_id)
        return await self.core.reader.list_interrupts(
            row.facts.tenant_id, where, after=None, limit=PAGE
        )

    async def wait_terminal(self, run_id: str, *, wait_s: float = WAIT_S) -> RunRow:
        """Return a run once it has ended."""
        with anyio.fail_after(wait_s):
            async with follow(self.core, run_id, 0) as cursor:
                while not cursor.ended:
                    await cursor.read(wait_s=wait_s)
        return await self.run(run_id)

    async def wait_until(
        self, run_id: str, holds: Callable[[RunRow], bool], *, wait_s: float = WAIT_S
    ) -> RunRow:
        """Return a run once its row is as asked.

        Looked at after each of its commits, and between them: a lease goes without an event.
        """
        with anyio.fail_after(wait_s):
            async with follow(self.core, run_id, 0) as cursor:
                while True:
                    row = await self.run(run_id)
                    if holds(row):
                        return row
                    with anyio.move_on_after(LOOK_S):
                        await cursor.read(wait_s=wait_s)
                    assert not cursor.ended or holds(await self.run(run_id)), "the run has ended"

    async def wait_state(self, run_id: str, state: RunState) -> RunRow:
        """Return a run once it is in a state."""
        return await self.wait_until(run_id, lambda row: row.hot.state is state)

    async def wait_waiting(self, run_id: str) -> list[InterruptRow]:
        """Return the open questions of a run once it waits for people and nobody holds it."""
        await self.wait_state(run_id, RunState.WAITING_HUMAN)
        return await self.pending(run_id)

    async def wait_event(
        self, run_id: str, type: str, *, after: int = 0, wait_s: float = WAIT_S
    ) -> RecordedEvent:
        """Return the first event of a type behind a seq."""
        with anyio.fail_after(wait_s):
            async with follow(self.core, run_id, after) as cursor:
                while not cursor.ended:
                    for event in await cursor.read(wait_s=wait_s):
                        if event.type == type:
                            return event
        raise AssertionError(f"the run ended without an event {type}")


def new_worker(core: Core, catalog: Catalog, tools: LocalToolRunner, policy: Policy) -> Worker:
    """Return a worker that beats on the engine's own loop."""
    tell = catalog.tells_approvers
    return Worker(
        core=core,
        catalog=catalog,
        tools=tools,
        policy=policy,
        heartbeat=LoopHeartbeat(core),
        notifier=None if tell is None else FunctionNotifier(tell, tools.user_code),
    )


def core_of(database: Database, signals: Signals, settings: EngineSettings = SETTINGS) -> Core:
    """Return an engine's surroundings over an entered database, with the system's clock."""
    clock = SystemClock()
    return Core(
        store=database.store,
        reader=database.reader,
        signals=signals,
        clock=clock,
        ids=RandomIds(),
        chance=random.Random(),  # noqa: S311  # jitter, not secrets
        directory=AgentDirectory(database.reader, clock),
        settings=settings,
    )


@asynccontextmanager
async def embedded(
    database: Database,
    agents: Sequence[HostedAgent],
    *,
    tools: ToolRegistry | None = None,
    policy: Policy | None = None,
    settings: EngineSettings = SETTINGS,
    start: bool = True,
    tells: Callable[[ApprovalNotice], object] | None = None,
    runner: type[LocalToolRunner] = LocalToolRunner,
) -> AsyncGenerator[Embedded]:
    """Start the engine over an entered database; on leaving, the workers are drained.

    `tells` is the function that tells approvers, `runner` what runs the tools. `start=False` starts
    no worker: register and run one with `start_worker` when it suits.
    """
    registry = AgentRegistry()
    registry.add(*agents)
    if tells is not None:
        registry.on_approval(tells)
    catalog = Catalog([registry]) if tools is None else _catalog(registry, tools)
    async with LocalSignals() as signals:
        core = core_of(database, signals, settings)
        running = runner(catalog.tools, grace_s=settings.cancel_grace_s)
        judge = policy or DefaultPolicy()
        async with running, anyio.create_task_group() as group:
            catalog.attach(running.user_code)
            engine = Embedded(
                core=core,
                catalog=catalog,
                tools=running,
                policy=judge,
                worker=new_worker(core, catalog, running, judge),
                _group=group,
            )
            if start:
                await engine.run_worker(engine.worker)
            yield engine
            await engine.stop()
            group.cancel_scope.cancel()


def _catalog(registry: AgentRegistry, tools: ToolRegistry) -> Catalog:
    for spec in tools.specs():
        tool = tools.get(spec.name, spec.version)
        assert tool is not None
        registry.add_tool(tool)
    return Catalog([registry])
