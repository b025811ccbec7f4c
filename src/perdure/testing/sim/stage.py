"""What all parts of a play share: its loop, database, network and clocks, and what they know."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar, cast

from perdure.engine.core import Core, EngineSettings
from perdure.engine.directory import AgentDirectory
from perdure.protocol.errors import PerdureError, Unavailable
from perdure.protocol.states import RunState
from perdure.store.requests import RetentionRule
from perdure.telemetry.metrics import Metrics
from perdure.testing.sim.checks import Facts
from perdure.testing.sim.loop import START_S, Process, VirtualLoop
from perdure.testing.sim.network import Network, SimClock, SimSignals, Trace
from perdure.testing.sim.outside import Order, Outside
from perdure.testing.sim.planted import Planted
from perdure.testing.sim.script import WORKERS, Fault, Forget, Keep, Script, Weather
from perdure.testing.sim.stores import Backend

T = TypeVar("T")

TRIES_MAX = 30
TRY_AGAIN_S = 0.7

SETTINGS = EngineSettings(
    lease_ttl_s=10.0,
    heartbeat_s=3.0,
    lease_margin_s=1.0,
    poll_interval_s=5.0,
    maintenance_interval_s=5.0,
    cancel_grace_s=1.0,
    drain_grace_s=6.0,
    cancel_deadline_s=20.0,
    compensation_deadline_s=120.0,
    callback_timeout_s=30.0,
    notice_retry_s=2.0,
    runs_max=8,
)


class Stage:
    """The world of a play, without those who act in it."""

    def __init__(self, script: Script, loop: VirtualLoop, planted: Planted) -> None:
        self.script = script
        self.loop = loop
        self.planted = planted
        self.trace = Trace(loop)
        self.facts = Facts()
        self.clocks = [SimClock(loop) for _ in range(WORKERS + 1)]
        """Those of the workers, and the callers'."""
        self.db_clock = SimClock(loop)
        self.jumps = 0
        """How often the database's clock was set."""
        self.api = Process("api")
        self.over = False
        self.known: dict[int, str] = {}
        self.threads: dict[int, str] = {}
        self.forks: dict[int, str] = {}
        """The thread of the newest fork of a run."""
        self._settings = _settings(script)
        self._ids = SeededIds(chance_of(script, "ids"))
        self._engine_chance = chance_of(script, "engine")
        self._server_chance = chance_of(script, "server")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._world = Process("world").context
        self._database = Process("database").context

    def open(
        self,
        backend: Backend,
        stop: Callable[[Process, float | None, float], None],
        on_order: Callable[[Order], None],
    ) -> None:
        """Set up what is over the database."""
        script, planted = self.script, self.planted
        self.backend = backend
        self.network = Network(
            loop=self.loop,
            backend=backend,
            chance=chance_of(script, "network"),
            trace=self.trace,
            stop=stop,
            faults=[item for item in script.items if isinstance(item, Fault)],
            weather=next((i for i in script.items if isinstance(i, Weather)), None),
            acknowledge_early=planted.acknowledge_early,
            cancel_by_signal=planted.cancel_by_signal,
        )
        self.outside = Outside(chance_of(script, "outside"), on_order)
        self.facts.journal, self.facts.undone = self.outside.journal, self.outside.undone
        self.facts.notices = self.outside.notices

    def soon(self, act: Callable[[], None]) -> None:
        """Give the database its next turn: what comes before it is one transaction."""
        delay_s = self._server_chance.random() * 0.004
        self.loop.call_later(delay_s, act, context=self._database)

    @property
    def now_s(self) -> float:
        """Seconds since the play began."""
        return self.loop.time() - START_S

    def at(self, delay_s: float, act: Callable[..., object], *args: object) -> None:
        """Have the world do something after a while."""
        self.loop.call_later(delay_s, act, *args, context=self._world)

    def begin(
        self, work: Coroutine[Any, Any, None], process: Process, context: Context | None = None
    ) -> None:
        """Run something as a process; an error in it is a finding."""
        context = process.context.copy() if context is None else context
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(process, done))

    def _ended(self, process: Process, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.facts.found("error", f"{process} ended by {inner(error)!r}")

    def core(self, process: Process, clock: SimClock | None = None) -> Core:
        """Return an engine's surroundings as a process has them."""
        reader = self.network.reader_of(process)
        clock = clock or self.clocks[-1]
        return Core(
            store=self.network.store_of(process),
            reader=reader,
            signals=SimSignals(self.network),
            clock=clock,
            ids=self._ids,
            chance=self._engine_chance,
            directory=AgentDirectory(reader, clock),
            settings=self._settings,
            metrics=_metrics(),
        )

    def cover(self, what: str) -> None:
        """Count something that was exercised."""
        self.facts.coverage[what] += 1


@cache
def _metrics() -> Metrics:
    """Return where everything is counted: nobody reads it, and to make it anew takes long."""
    return Metrics()


def _settings(script: Script) -> EngineSettings:
    keep = next((item for item in script.items if isinstance(item, Keep)), None)
    sweeps = keep is not None or any(isinstance(item, Forget) for item in script.items)
    rules: tuple[RetentionRule, ...] = ()
    if keep is not None and keep.ended_s is not None:
        states = (RunState.SUCCEEDED, RunState.FAILED)
        rules = tuple(RetentionRule(state=one, older_than_s=keep.ended_s) for one in states)
    return replace(
        SETTINGS,
        retention=rules,
        retention_interval_s=6.0 if sweeps else 3600.0,
        blobs_kept_s=3600.0 if keep is None else keep.content_s,
    )


def chance_of(script: Script, what: str) -> random.Random:
    """Return a seed's chance for one of its parts."""
    return random.Random(f"{script.seed} {what}")  # noqa: S311  # to be repeated


class SeededIds:
    """Ids that a seed gives: ordered as they are made, as those of a UUIDv7 are."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._made = 0

    def new(self, prefix: str) -> str:
        """Return a fresh id under a prefix."""
        self._made += 1
        return f"{prefix}_{self._made:012x}7000{self._chance.getrandbits(64):016x}"


async def repeated(
    request: Callable[[], Awaitable[T]], again: tuple[type[PerdureError], ...] = (Unavailable,)
) -> T:
    """Send a request again while its answer is lost, as clients do."""
    for _ in range(TRIES_MAX):
        try:
            return await request()
        except again:
            await asyncio.sleep(TRY_AGAIN_S)
    return await request()


def inner(error: BaseException) -> BaseException:
    """Return the first error in groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
