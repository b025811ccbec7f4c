"""Plays one script: workers, callers, people and followers, until all has ended or time is up."""

import asyncio
import gc
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pydantic import JsonValue

from perdure.control.policy import DefaultPolicy
from perdure.engine.answers import Reply
from perdure.engine.cancel import cancel_run
from perdure.engine.core import Core, EngineSettings
from perdure.engine.directory import AgentDirectory
from perdure.engine.feed import follow
from perdure.engine.submit import RunOrder, submit_run
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.codec import digest
from perdure.protocol.errors import NotFound, PerdureError, Unavailable
from perdure.protocol.log import RecordedEvent
from perdure.protocol.policies import Timeouts
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import Caller, RunContext, RunOptions
from perdure.protocol.states import TERMINAL, Answer, InterruptKind, InterruptStatus
from perdure.store.memory import MemoryDatabase
from perdure.store.reader import InterruptFilter
from perdure.store.requests import CancelWish
from perdure.testing.embedded import new_worker
from perdure.testing.faults import Boundary
from perdure.testing.sim.actors import Outside, Workplace, catalog, inline_tools, workplace
from perdure.testing.sim.checks import Facts, Finding, check, unfinished
from perdure.testing.sim.loop import (
    START_S,
    Livelock,
    Process,
    VirtualLoop,
    ordered_scopes,
)
from perdure.testing.sim.network import Network, SimClock, SimSignals, Trace
from perdure.testing.sim.planted import NOTHING, Planted
from perdure.testing.sim.script import (
    FAULTS_END_S,
    WORKERS,
    Cancel,
    Crash,
    Fault,
    Item,
    Jump,
    Pause,
    People,
    Script,
    Submit,
    Weather,
)

SETTLE_S = 600.0
"""How much virtual time everything has to end in, once the faults are over."""

FOLLOWERS_S = 60.0
"""How much more followers have to see the end."""

LOOK_S = 5.0
TRIES_MAX = 30
TRY_AGAIN_S = 0.7

SETTINGS = EngineSettings(
    lease_ttl_s=10.0,
    heartbeat_s=3.0,
    lease_margin_s=1.0,
    poll_interval_s=2.0,
    maintenance_interval_s=2.0,
    cancel_grace_s=1.0,
    cancel_deadline_s=20.0,
    runs_max=8,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a play showed."""

    script: Script
    digest: str
    findings: tuple[Finding, ...]
    coverage: Counter[str]
    runs: int
    events: int
    virtual_s: float
    trace: tuple[str, ...]

    @property
    def is_green(self) -> bool:
        """Tell whether nothing was found."""
        return not self.findings


def simulate(script: Script, planted: Planted = NOTHING) -> Outcome:
    """Play a script to its end and check all that it left."""
    loop = VirtualLoop(_chance(script, "order"))
    with _undisturbed(), ordered_scopes(), planted.patched():
        play = _Play(script, loop, planted)
        try:
            loop.run_until_complete(play.run())
        except Livelock as error:
            play.facts.found("progress", str(error))
        finally:
            outcome = play.outcome()
            _forget(loop)
    return outcome


def _chance(script: Script, what: str) -> random.Random:
    return random.Random(f"{script.seed} {what}")  # noqa: S311  # to be repeated


@contextmanager
def _undisturbed() -> Generator[None]:
    """Let neither the collector nor logs nor what is thrown away have a part in it."""
    was_on, hook, level = gc.isenabled(), sys.unraisablehook, logging.root.manager.disable
    gc.disable()
    gc.freeze()  # the collection at the end looks at what the play has made only
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # tasks of dead processes end when they are thrown away
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            gc.collect()
        gc.unfreeze()
        sys.unraisablehook = hook
        logging.disable(level)
        if was_on:
            gc.enable()


def _forget(loop: VirtualLoop) -> None:
    """Close the loop over whatever never ended: processes that were killed do not clean up."""
    for task in asyncio.all_tasks(loop):
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
    loop.close()


class _Play:
    def __init__(self, script: Script, loop: VirtualLoop, planted: Planted) -> None:
        self.script = script
        self.loop = loop
        self.planted = planted
        self.trace = Trace(loop)
        self.facts = Facts()
        self.people = next((i for i in script.items if isinstance(i, People)), _PATIENT)
        self._db_clock = SimClock(loop)
        self._ids = SeededIds(_chance(script, "ids"))
        self._engine_chance = _chance(script, "engine")
        self._people_chance = _chance(script, "people")
        self.database = MemoryDatabase(self._db_clock.now)
        self.network = Network(
            loop=loop,
            database=self.database,
            chance=_chance(script, "network"),
            trace=self.trace,
            stop=self._stop,
            faults=[item for item in script.items if isinstance(item, Fault)],
            weather=next((i for i in script.items if isinstance(i, Weather)), None),
            acknowledge_early=planted.acknowledge_early,
            cancel_by_signal=planted.cancel_by_signal,
        )
        self._outside = Outside(_chance(script, "outside"))
        self.facts.journal = self._outside.journal
        self._workers: list[Process] = []
        self._clocks: list[SimClock] = [SimClock(loop) for _ in range(WORKERS)]
        self._started = 0
        self._jumps = 0
        self._known: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._answers = 0
        self._api = Process("api")
        self._clients = Process("clients")
        self._over = False
        self._ended_at = 0.0

    # ---------------------------------------------------------------- the course of a play

    async def run(self) -> None:
        """Do what the script says, let it heal, wait for the end, and check."""
        async with self.database:
            for number in range(WORKERS):
                self._workers.append(self._start_worker(number))
            self._begin(self._answer_all(self._core(self._api)), self._api)
            for item in self.script.items:
                await self._until(item.at)
                self._do(item)
            await self._until(FAULTS_END_S)
            self._heal()
            await self._settle()
            self._over = True
            self._ended_at = self.loop.time()
            await self._followers_end()
            await check(self.facts, self.database)

    def outcome(self) -> Outcome:
        """Return what the play showed."""
        coverage = self.network.coverage
        coverage.update(self.facts.coverage)
        return Outcome(
            script=self.script,
            digest=self.trace.digest,
            findings=tuple(self.facts.findings),
            coverage=coverage,
            runs=self.facts.runs,
            events=self.facts.events,
            virtual_s=(self._ended_at or self.loop.time()) - START_S,
            trace=tuple(self.trace.lines),
        )

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, START_S + at_s - self.loop.time()))

    async def _settle(self) -> None:
        give_up = self.loop.time() + SETTLE_S
        while left := await unfinished(self.database):
            if self.loop.time() > give_up:
                for text in left:
                    self.facts.found("progress", text)
                return
            await asyncio.sleep(LOOK_S)

    async def _followers_end(self) -> None:
        """Let followers come to the end, as far as a slow answer does not keep them."""
        give_up = self.loop.time() + FOLLOWERS_S
        while (  # noqa: ASYNC110  # virtual time costs nothing
            len(self.facts.followed) < len(self.facts.seen) and self.loop.time() < give_up
        ):
            await asyncio.sleep(SETTINGS.poll_interval_s)

    def _do(self, item: Item) -> None:
        match item:
            case Submit():
                self._begin(self._submit(item), self._api)
                if item.twice:
                    self._begin(self._submit(item), self._api)
            case Cancel():
                self._begin(self._cancel(item), self._api)
            case Crash():
                self._stop(self._workers[item.worker], None, item.back_s)
            case Pause():
                self._stop(self._workers[item.worker], item.for_s, 0.0)
            case Jump():
                clock = self._db_clock if item.worker is None else self._clocks[item.worker]
                clock.error_s += item.by_s
                self._jumps += item.worker is None
                self.network.coverage["clock set"] += 1
                self.trace.add(f"{item}")
            case Fault() | Weather() | People():
                pass

    def _begin(self, work: Coroutine[Any, Any, None], process: Process) -> None:
        """Run something as a process; an error in it is a finding."""
        task = self.loop.create_task(work, context=process.context.copy())
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(process, done))

    def _ended(self, process: Process, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.facts.found("error", f"{process} ended by {_inner(error)!r}")
        elif process.name.startswith("worker"):
            self.facts.found("error", f"{process} ended by itself")

    # ---------------------------------------------------------------- workers

    def _start_worker(self, number: int) -> Process:
        self._started += 1
        process = Process(f"worker-{number}.{self._started}")
        self._begin(self._work(process, number), process)
        return process

    async def _work(self, process: Process, number: int) -> None:
        workplace.set(
            Workplace(
                worker=process.name,
                outside=self._outside,
                meet=lambda kind: self.network.meet(process, Boundary.EFFECT, kind),
                disturbances=lambda: process.stops + self._jumps,
            )
        )
        core = self._core(process, self._clocks[number])
        while True:
            async with inline_tools() as tools:
                worker = new_worker(core, catalog(), tools, DefaultPolicy())
                worker.worker_id = process.name
                try:
                    await worker.run()
                except Exception as error:  # a supervisor starts it again
                    if not isinstance(_inner(error), Unavailable):
                        raise
                    await asyncio.sleep(1.0)

    def _stop(self, process: Process, for_s: float | None, back_s: float) -> None:
        """Stop a worker for a while; for ever (None) means that another comes after `back_s`."""
        if process.stopped or process.dead or process not in self._workers:
            return
        number = self._workers.index(process)
        self.loop.stop_process(process)
        if for_s is None:
            process.dead = True
            self.network.coverage["worker crashed"] += 1
            self.trace.add(f"{process} CRASHES, another comes after {back_s:g} s")
            self._at(back_s, self._replace, number, process)
        else:
            self.network.coverage["worker paused"] += 1
            self.trace.add(f"{process} STOPS for {for_s:g} s")
            self._at(for_s, self._resume, process)

    def _at(self, delay_s: float, act: Callable[..., None], *args: object) -> None:
        self.loop.call_later(delay_s, act, *args, context=self._world)

    @property
    def _world(self) -> Any:
        return Process("world").context

    def _replace(self, number: int, dead: Process) -> None:
        if self._workers[number] is dead:
            self._workers[number] = self._start_worker(number)

    def _resume(self, process: Process) -> None:
        if process.stopped and not process.dead:
            self.trace.add(f"{process} goes on")
            self.loop.resume_process(process)

    def _heal(self) -> None:
        self.trace.add("the faults are over")
        for number, process in enumerate(self._workers):
            if process.dead:
                self._replace(number, process)
            else:
                self._resume(process)

    # ---------------------------------------------------------------- callers

    def _core(self, process: Process, clock: SimClock | None = None) -> Core:
        reader = self.network.reader_of(process)
        clock = clock or SimClock(self.loop)
        return Core(
            store=self.network.store_of(process),
            reader=reader,
            signals=SimSignals(self.network),
            clock=clock,
            ids=self._ids,
            chance=self._engine_chance,
            directory=AgentDirectory(reader, clock),
            settings=SETTINGS,
        )

    async def _submit(self, item: Submit) -> None:
        core = self._core(self._api)
        body: Any = {"steps": list(item.steps)}
        order = RunOrder(
            agent_id=item.agent,
            input=body,
            context=RunContext(user_id="ada"),
            options=RunOptions(
                idempotency_key=f"run-{item.run}",
                max_attempts=item.max_attempts,
                multitask_strategy=item.strategy,
                timeouts=Timeouts(run_s=item.run_s),
            ),
            caller=Caller(tenant_id=TENANT_DEFAULT, principal="ada"),
            fingerprint=digest([item.agent, body]),
            thread_id=None if item.group is None else self._threads.get(item.group),
        )
        try:
            submitted = await _repeated(lambda: submit_run(core, order), (Unavailable, NotFound))
        except PerdureError as error:
            self.facts.coverage[f"submit refused {error.code}"] += 1
            return
        facts = submitted.row.facts
        self.trace.add(f"run {item.run} is {facts.run_id}")
        if item.run in self._known and self._known[item.run] != facts.run_id:
            self.facts.found("keys", f"two runs under the key of run {item.run}")
        if item.run not in self._known:
            self._known[item.run] = facts.run_id
            if item.group is not None:
                self._threads.setdefault(item.group, facts.thread_id)
            self._begin(self._follow(facts.run_id), self._clients)

    async def _cancel(self, item: Cancel) -> None:
        run_id = self._known.get(item.run)
        if run_id is None:
            return
        core = self._core(self._api)
        wish = CancelWish(action=item.action, by="ada", source="api", reason="enough")
        self.trace.add(f"cancel of {run_id}")
        row = await _repeated(lambda: cancel_run(core, TENANT_DEFAULT, run_id, wish))
        if row.hot.cancel_epoch > 0 or row.hot.state not in TERMINAL:
            self.facts.cancelled.add(run_id)
            self.facts.coverage[f"cancel accepted {item.action}"] += 1

    async def _follow(self, run_id: str) -> None:
        """Follow a run to its end, beginning again where the connection was lost or cut."""
        core = self._core(self._clients)
        seen: list[RecordedEvent] = []
        self.facts.seen[run_id] = seen
        while True:
            seq = seen[-1].seq if seen else 0
            try:
                async with follow(core, run_id, seq) as cursor:
                    while not cursor.ended:
                        seen += await cursor.read(wait_s=20.0)
                        if self._people_chance.random() < 0.05:
                            break
                    else:
                        self.facts.followed.add(run_id)
                        return
            except Unavailable:
                await asyncio.sleep(TRY_AGAIN_S)

    # ---------------------------------------------------------------- people

    async def _answer_all(self, core: Core) -> None:
        """Answer what is asked, now and then; two people at once where the script wants it."""
        where = InterruptFilter(status=InterruptStatus.PENDING)
        chance = self._people_chance
        while not self._over:
            await asyncio.sleep(self.people.pause_s * (0.5 + chance.random()))
            try:
                pending = await core.reader.list_interrupts(
                    TENANT_DEFAULT, where, after=None, limit=100
                )
            except Unavailable:
                continue
            chance.shuffle(pending)
            for row in pending:
                if not self.network.is_healed and chance.random() < self.people.idle:
                    continue
                await self._answer(core, row)

    async def _answer(self, core: Core, row: InterruptRow) -> None:
        call = await self.database.reader.find_tool_call(TENANT_DEFAULT, row.tool_call_id or "")
        paid = call is not None and self._outside.find(call.effect_key) is not None
        first = self._reply(row, paid)
        self._begin(self._give(core, row, first), self._api)
        if self._people_chance.random() < self.people.doubled:
            second = first
            if self._people_chance.random() < self.people.opposite:
                second = self._reply(row, paid)
                self.facts.coverage["answers opposite"] += 1
            else:
                self.facts.coverage["answers doubled"] += 1
            self._begin(self._give(core, row, second), self._api)

    def _reply(self, row: InterruptRow, paid: bool) -> Reply:
        self._answers += 1
        chance, by = self._people_chance.random(), f"person-{self._answers}"
        match row.kind:
            case InterruptKind.APPROVAL:
                return Reply(answer=Answer.APPROVE if chance < 0.85 else Answer.REJECT, by=by)
            case InterruptKind.OUTCOME:
                answer = Answer.HAPPENED if paid else Answer.RETRY
                return Reply(answer=Answer.SKIP if chance < 0.1 else answer, by=by)
            case _:
                value: JsonValue = {"answered": self._answers}
                return Reply(answer=Answer.RESPOND, by=by, value=value)

    async def _give(self, core: Core, row: InterruptRow, reply: Reply) -> None:
        sent = self.facts.sent.setdefault(row.interrupt_id, {})
        sent[reply.by] = reply
        self.trace.add(f"{reply.by} answers {row.interrupt_id}: {reply.answer}")
        give = self.planted.answer
        try:
            answered = await _repeated(lambda: give(core, TENANT_DEFAULT, row.interrupt_id, reply))
        except PerdureError as error:
            self.facts.coverage[f"answer refused {error.code}"] += 1
        else:
            if not answered.replayed:
                self.facts.accepted.setdefault(row.interrupt_id, []).append(reply.by)
            self.facts.coverage[f"answer {row.kind} {reply.answer}"] += 1


_PATIENT = People(at=0.0, pause_s=3.0, doubled=0.0, opposite=0.0, idle=0.0)


class SeededIds:
    """Ids that a seed gives: ordered as they are made, as those of a UUIDv7 are."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._made = 0

    def new(self, prefix: str) -> str:
        """Return a fresh id under a prefix."""
        self._made += 1
        return f"{prefix}_{self._made:012x}7000{self._chance.getrandbits(64):016x}"


async def _repeated(
    request: Callable[[], Awaitable[Any]], again: tuple[type[PerdureError], ...] = (Unavailable,)
) -> Any:
    """Send a request again while its answer is lost, as clients do."""
    for _ in range(TRIES_MAX):
        try:
            return await request()
        except again:
            await asyncio.sleep(TRY_AGAIN_S)
    return await request()


def _inner(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
