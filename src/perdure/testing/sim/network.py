"""The database and the signals as processes see them: across a network that fails.

A request travels, is carried out by the database in one piece, and its answer travels back. What
happens to the process meanwhile changes nothing for a request that is on its way.
"""

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from hashlib import sha256
from types import TracebackType
from typing import Any, Self, cast

from perdure.protocol.errors import Unavailable
from perdure.protocol.runs import RunHot
from perdure.signals.bells import Bell
from perdure.signals.ports import CANCEL_TOPIC, Wakeup
from perdure.store.commits import Commit, Committed
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import CancelWish
from perdure.testing.clock import START
from perdure.testing.faults import Boundary, boundaries_of
from perdure.testing.sim.loop import START_S, Process, VirtualLoop, current_process
from perdure.testing.sim.script import FAULTS_END_S, Fault, Weather
from perdure.testing.sim.stores import Backend

TRAVEL_S = 0.02
"""The longest ordinary way of a request or an answer."""

_OF_STORE = {
    "insert_run": Boundary.CREATE,
    "renew_leases": Boundary.HEARTBEAT,
    "request_cancel": Boundary.CANCEL,
}
_WITH_RESULT = {"claim_runs": Boundary.CLAIM, "requeue_expired": Boundary.RECLAIM}
SILENT = frozenset({"claim_runs", "requeue_expired", "due_timers", "renew_leases"})
"""Methods that are traced only when they found something, or failed."""


class Trace:
    """What happened, line by line, and its digest."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._hash = sha256()
        self.lines: list[str] = []

    def add(self, text: str) -> None:
        """Add a line with the time and the process it happens in."""
        at_s = self._loop.time() - START_S
        line = f"{at_s:10.4f} {current_process() or 'world'}: {text}"
        self._hash.update(line.encode())
        self.lines.append(line)

    @property
    def digest(self) -> str:
        """Return the digest of all lines so far."""
        return self._hash.hexdigest()


class SimClock:
    """A process's clock: virtual time with an error of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.error_s = 0.0

    def now(self) -> datetime:
        """Return the time of day as this clock shows it."""
        seconds = self._loop.time() - START_S + self.error_s
        return START + timedelta(microseconds=round(seconds * 1e6))

    def monotonic(self) -> float:
        """Return virtual seconds."""
        return self._loop.time()


@dataclass(slots=True, kw_only=True)
class Network:
    """What lies between the processes. `stop` stops a process for a while, or for ever (None)."""

    loop: VirtualLoop
    backend: Backend
    chance: random.Random
    trace: Trace
    stop: Callable[[Process, float | None, float], None]
    faults: Sequence[Fault] = ()
    weather: Weather | None = None
    acknowledge_early: bool = False
    """A planted fault: a commit is acknowledged although it never reaches the database."""
    cancel_by_signal: bool = False
    """A planted fault: the cancel of a held run is only a signal, and durable once it is heard."""

    coverage: Counter[str] = field(default_factory=Counter[str])
    heals_at: float = START_S + FAULTS_END_S
    _server: Process = field(default_factory=lambda: Process("database"))
    _working: set["asyncio.Task[None]"] = field(default_factory=set["asyncio.Task[None]"])
    _wishes: list[tuple[str, CancelWish]] = field(default_factory=list[tuple[str, CancelWish]])
    _met: Counter[str] = field(default_factory=Counter[str])
    _topics: list[tuple[str, Bell, Process | None]] = field(
        default_factory=list[tuple[str, Bell, Process | None]]
    )
    _known_topics: dict[str, None] = field(default_factory=dict[str, None])

    def store_of(self, process: Process) -> Store:
        """Return the store as a process sees it."""
        return cast("Store", _Port(self, self.backend.database.store, process))

    def reader_of(self, process: Process) -> Reader:
        """Return the reader as a process sees it."""
        return cast("Reader", _Port(self, self.backend.database.reader, process))

    @property
    def is_healed(self) -> bool:
        """Tell whether faults are over."""
        return self.loop.time() >= self.heals_at

    # ---------------------------------------------------------------- requests

    async def ask(
        self, process: Process, target: object, name: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Carry a request to the database and its answer back."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        request = _Request(process, target, name, args, kwargs, answer)
        request.fault = self._fault_at(request, _before(name, args))
        kind = request.fault.kind if request.fault is not None else None
        delay_s = self.chance.random() * TRAVEL_S
        if request.fault is not None:
            self._note_fault(request, request.fault)
        match kind:
            case "refused":
                self._later(delay_s, self._answer, request, None, Unavailable(_LOST))
                if name == "commit" and self.acknowledge_early:
                    early = [_early(commit) for commit in args[0]]
                    self._later(delay_s / 2, self._answer, request, early, None)
            case "late":
                assert request.fault is not None
                self._later(delay_s, self._answer, request, None, Unavailable(_LOST))
                self._later(delay_s + request.fault.amount_s, self._carry_out, request)
            case "slow":
                assert request.fault is not None
                self._later(delay_s + request.fault.amount_s, self._carry_out, request)
            case "crash":
                assert request.fault is not None
                self.stop(process, None, request.fault.amount_s)
            case "pause":
                assert request.fault is not None
                self._later(delay_s, self._carry_out, request)
                self.stop(process, request.fault.amount_s, 0.0)
            case _:
                self._later(delay_s, self._carry_out, request)
        return await answer

    def _later(self, delay_s: float, act: Callable[..., object], *args: object) -> None:
        self.loop.call_later(delay_s, act, *args, context=self._server.context)

    def _carry_out(self, request: "_Request") -> None:
        self._work(self._perform(request))

    def _work(self, work: Coroutine[Any, Any, None]) -> None:
        """Let the database work: in one piece, unless it takes turns for its writes."""
        if self.backend.waits:
            task = self.loop.create_task(work, context=self._server.context)
            self._working.add(task)
            task.add_done_callback(self._working.discard)
        else:
            _at_once(work)

    async def _perform(self, request: "_Request") -> None:
        result, error = None, None
        try:
            if self.cancel_by_signal and request.name == "request_cancel":
                result = await self._remember_cancel(*request.args)
            else:
                method = getattr(request.target, request.name)
                result = await method(*request.args, **request.kwargs)
        except Exception as failure:  # noqa: BLE001  # it is for whoever asked
            error = failure
        self._note(request, result, error)
        fault = request.fault
        if fault is None and request.name in _WITH_RESULT and result:
            fault = self._fault_at(request, (_WITH_RESULT[request.name],))
            if fault is not None:
                self._note_fault(request, fault)
        if fault is not None and fault.kind in {"ack_lost", "refused", "late"}:
            result, error = None, Unavailable(_LOST)
        elif fault is not None and fault.kind in {"crash", "crash_after"}:
            self.stop(request.process, None, fault.amount_s)
        elif fault is not None and fault.kind == "pause" and request.fault is None:
            self.stop(request.process, fault.amount_s, 0.0)
        self._later(self.chance.random() * TRAVEL_S, self._answer, request, result, error)

    def meet(self, process: Process, boundary: Boundary, kind: str) -> None:
        """Pass one side of a boundary that lies in the process itself."""
        for fault in self.faults:
            met = self._met[f"{boundary} {fault.kind}"] + 1
            if fault.where == boundary and fault.kind == kind and fault.nth == met:
                self._met[f"{boundary} {kind}"] += 1
                if not self.is_healed:
                    self.coverage[f"fault {kind} at {boundary}"] += 1
                    self.stop(process, None, fault.amount_s)
                return
        self._met[f"{boundary} {kind}"] += 1

    async def _remember_cancel(self, run_id: str, wish: CancelWish) -> RunHot | None:
        """Write the cancel of a held run only once a worker hears of it."""
        row = await self.backend.database.reader.find_run(None, run_id)
        if row is None or row.hot.lease_owner is None:
            return await self.backend.database.store.request_cancel(run_id, wish)
        self._wishes.append((run_id, wish))
        return row.hot

    def _answer(self, request: "_Request", result: object, error: Exception | None) -> None:
        if request.answer.done():
            return
        if error is not None:
            request.answer.set_exception(error)
        else:
            request.answer.set_result(result)

    def _fault_at(self, request: "_Request", places: Sequence[str]) -> Fault | None:
        """Return the fault that is planned for the moment, if any."""
        found: Fault | None = None
        for place in places:
            self._met[place] += 1
            for fault in self.faults:
                if fault.where == place and fault.nth == self._met[place]:
                    found = found or fault
        if self.is_healed or (found is not None and not _may_stop(found, request.process)):
            return None
        return found

    def _note_fault(self, request: "_Request", fault: Fault) -> None:
        self.coverage[f"fault {fault.kind} at {fault.where}"] += 1
        self.trace.add(f"FAULT {fault.kind} at {fault.where}: {request.name} of {request.process}")

    def _note(self, request: "_Request", result: object, error: Exception | None) -> None:
        if error is None and (
            request.target is self.backend.database.reader
            or (request.name in SILENT and not result)
        ):
            return
        self.trace.add(f"{request.process} {request.name} {_told(request, result, error)}")

    # ---------------------------------------------------------------- signals

    def publish(self, topic: str) -> None:
        """Send a signal to all who listen, as the weather lets it."""
        self._known_topics[topic] = None
        weather = None if self.is_healed else self.weather
        times = 1
        if weather is not None:
            if self.chance.random() < weather.misdirected:
                topic = self.chance.choice(list(self._known_topics))
                self.coverage["signal misdirected"] += 1
            if self.chance.random() < weather.lost:
                self.coverage["signal lost"] += 1
                return
            if self.chance.random() < weather.doubled:
                self.coverage["signal doubled"] += 1
                times = 2
        for _ in range(times):
            self._send(topic, weather)

    def _send(self, topic: str, weather: Weather | None) -> None:
        for known, bell, process in list(self._topics):
            if known != topic:
                continue
            delay_s = self.chance.random() * TRAVEL_S
            if weather is not None and self.chance.random() < weather.late:
                self.coverage["signal late"] += 1
                delay_s += 5.0
            context = process.context if process is not None else None
            self.loop.call_later(delay_s, self._ring, topic, bell, process, context=context)

    def _ring(self, topic: str, bell: Bell, process: Process | None) -> None:
        if topic == CANCEL_TOPIC and process is not None and process.name.startswith("worker"):
            wishes, self._wishes = self._wishes, []
            for run_id, wish in wishes:
                self._work(self._cancel(run_id, wish))
        bell.ring()

    async def _cancel(self, run_id: str, wish: CancelWish) -> None:
        await self.backend.database.store.request_cancel(run_id, wish)

    @asynccontextmanager
    async def listen(self, topic: str) -> AsyncGenerator[Wakeup]:
        """Listen to a topic as the running process."""
        entry = (topic, Bell(), current_process())
        self._topics.append(entry)
        try:
            yield entry[1]
        finally:
            self._topics.remove(entry)


class SimSignals:
    """The signals port over the network."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def publish(self, topic: str) -> None:
        """Wake the topic's subscribers, perhaps."""
        self._network.publish(topic)

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[Wakeup]:
        """Listen while the context is open."""
        return self._network.listen(topic)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


_LOST = "the connection was lost (a fault of the simulation)"


@dataclass(slots=True, eq=False)
class _Request:
    process: Process
    target: object
    name: str
    args: tuple[Any, ...]
    kwargs: Any
    answer: "asyncio.Future[Any]"
    fault: Fault | None = None


class _Port:
    """A store or a reader behind the network: every method of the port becomes a request."""

    def __init__(self, network: Network, target: object, process: Process) -> None:
        self._network = network
        self._target = target
        self._process = process

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]] | bool:
        network, target, process = self._network, self._target, self._process
        found = getattr(target, name)
        if isinstance(found, bool):  # what a store says of itself, without a journey
            return found
        if not inspect.iscoroutinefunction(found):
            raise AttributeError(name)

        def ask(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return network.ask(process, target, name, args, kwargs)

        setattr(self, name, ask)
        return ask


def _at_once(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that awaits nothing, as those of the memory store."""
    try:
        work.send(None)
    except StopIteration:
        return
    work.close()
    raise RuntimeError("the memory store waits for something")


def _before(name: str, args: tuple[Any, ...]) -> list[str]:
    """Return the places that a request meets: its method and its boundaries."""
    if name == "commit":
        commits = cast("Sequence[Commit]", args[0])
        return [name, *dict.fromkeys(b for commit in commits for b in boundaries_of(commit))]
    boundary = _OF_STORE.get(name)
    return [name] if boundary is None else [name, boundary]


def _may_stop(fault: Fault, process: Process) -> bool:
    """Only workers are stopped: what callers and people do goes on."""
    stops = fault.kind in {"crash", "crash_after", "pause"}
    return not stops or process.name.startswith("worker")


def _early(commit: Commit) -> Committed:
    return Committed(seq=commit.guard.expected_seq + len(commit.events), at=START)


def _told(request: _Request, result: object, error: Exception | None) -> str:
    """Return a request and its answer in a few words."""
    if error is not None:
        return f"→ {type(error).__name__}: {error}"
    if request.name != "commit":
        about = request.args[0] if request.args and isinstance(request.args[0], str) else ""
        return f"{about} → {_short(result)}"
    commits = cast("Sequence[Commit]", request.args[0])
    answers = cast("Sequence[object]", result)
    return "; ".join(
        f"{commit.run_id[-6:]} {'+'.join(event.data.type for event in commit.events)}"
        f" as {commit.guard.token} after {commit.guard.expected_seq} → {_short(answer)}"
        for commit, answer in zip(commits, answers, strict=True)
    )


def _short(result: object) -> str:
    if isinstance(result, Committed):
        return f"seq {result.seq}"
    if isinstance(result, list):
        return f"{len(cast('list[object]', result))} of them"
    return type(result).__name__
