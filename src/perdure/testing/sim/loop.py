"""An event loop on a virtual clock, whose order a seed chooses, and that can stop a process.

`time()` is a number. Nothing is waited for: when nothing is ready the clock jumps to the next
timer, and it moves on only then. Every callback belongs to the process
in whose context it was made. Which process goes on is chosen by the seed; those of a process that is
stopped are put aside, so that it neither runs nor cleans up: as SIGSTOP does when
it is resumed later, and as kill -9 when it is not.
"""

import asyncio
import heapq
import random
import selectors
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, TypeVar, cast

from anyio._backends import _asyncio as anyio_asyncio

T = TypeVar("T")

START_S = 1000.0
ROUNDS_MAX = 50_000
"""How many callbacks may run at one moment; more is taken for a loop that never ends."""

CALLBACKS_MAX = 80_000
"""How many callbacks a play may take in all; an ordinary one takes a twentieth of it."""


class Livelock(RuntimeError):
    """The tasks keep each other busy and no time passes, or all wait for ever."""


class Process:
    """What fails as one: a worker, an API server, a client."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.dead = False
        self.stops = 0
        """How often it was stopped, so that others can tell whether it was meanwhile."""
        self.aside: list[asyncio.Handle] = []
        self.context: Context = copy_context()
        self.context.run(_process.set, self)

    def __repr__(self) -> str:
        return self.name


_process: ContextVar[Process | None] = ContextVar("perdure_sim_process", default=None)


def current_process() -> Process | None:
    """Return the process that the running code belongs to; None for the world around them."""
    return _process.get()


class _Ready:
    """The loop's queue of callbacks: which process goes on is the seed's choice.

    Within a process callbacks run in their order, as asyncio promises (anyio's checkpoints rely on
    it). It stands in for the loop's deque, of which the loop uses these methods only.
    """

    def __init__(self, chance: random.Random, nothing: asyncio.Handle) -> None:
        self._chance = chance
        self._nothing = nothing
        self._queues: dict[Process | None, deque[asyncio.Handle]] = {}
        self._count = 0
        self.taken = 0

    def __len__(self) -> int:
        return self._count

    def append(self, handle: asyncio.Handle) -> None:
        process = _owner(handle)
        if process is not None and process.stopped:
            process.aside.append(handle)
            return
        queue = self._queues.get(process)
        if queue is None:
            queue = self._queues[process] = deque()
        queue.append(handle)
        self._count += 1

    def popleft(self) -> asyncio.Handle:
        if self._count == 0:  # a process was stopped in this round
            return self._nothing
        self.taken += 1
        if self.taken > ROUNDS_MAX:
            raise Livelock(f"{ROUNDS_MAX} callbacks, and no time has passed")
        owners = list(self._queues)
        owner = owners[0]
        if len(owners) > 1:
            owner = owners[int(self._chance.random() * len(owners))]
        queue = self._queues[owner]
        handle = queue.popleft()
        self._count -= 1
        if not queue:
            del self._queues[owner]
        return handle

    def clear(self) -> None:
        self._queues.clear()
        self._count = 0

    def put_aside(self, process: Process) -> None:
        mine = self._queues.pop(process, deque())
        process.aside += mine
        self._count -= len(mine)


def _owner(handle: asyncio.Handle) -> Process | None:
    context: Context = cast("Any", handle)._context  # noqa: SLF001  # no other way to tell
    return context.get(_process)


class _Task(asyncio.Task[Any]):
    """A task whose place in a set is its number's, not its address's."""

    def __init__(self, number: int, coroutine: Any, **settings: Any) -> None:
        self._number = number
        super().__init__(coroutine, **settings)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop of a simulation."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(selectors.SelectSelector())
        self._now = START_S
        nothing = asyncio.Handle(lambda: None, (), self)
        nothing.cancel()
        self._ready = _Ready(chance, nothing)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self.callbacks = 0
        self._tasks_made = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call back at a time; those of one time in the order in which they were made."""
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is thrown away once it is due."""

    def _run_once(self) -> None:
        """Run what is ready, once; when nothing is, the time of the next timer has come."""
        ready = self._ready
        if not ready:
            self._pass_time()
        while self._timers and self._timers[0][0] <= self._now:
            timer = heapq.heappop(self._timers)[2]
            if not timer.cancelled():
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                cast("Any", handle)._run()  # noqa: SLF001  # as asyncio's own loop does
        handle = None

    def _pass_time(self) -> None:
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            raise Livelock("nothing is left to happen: everybody waits for ever")
        self._now = max(self._now, self._timers[0][0])
        self.callbacks += self._ready.taken
        self._ready.taken = 0
        if self.callbacks > CALLBACKS_MAX:
            raise Livelock(f"it has not ended after {CALLBACKS_MAX} callbacks")

    def _make_task(self, _: object, coroutine: Any, **settings: Any) -> "_Task":
        self._tasks_made += 1
        return _Task(self._tasks_made, coroutine, loop=self, **settings)

    def throw_away(self) -> None:
        """Close the loop over whatever never ended: processes that were killed do not clean up."""
        states: Any = anyio_asyncio._task_states  # type: ignore[attr-defined]  # noqa: SLF001
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
            states.pop(
                task, None
            )  # anyio keeps it until the task ends, and with it all that it holds
        self.close()

    def stop_process(self, process: Process) -> None:
        """Let a process run no more, until it is resumed."""
        process.stopped = True
        process.stops += 1
        self._ready.put_aside(process)

    def resume_process(self, process: Process) -> None:
        """Let a stopped process go on with all that came meanwhile."""
        process.stopped = False
        aside, process.aside = process.aside, []
        for handle in aside:
            self._ready.append(handle)


class _Ordered(Generic[T]):
    """A set that remembers the order of its items, where the order would be that of addresses."""

    def __init__(self) -> None:
        self._items: dict[T, None] = {}

    def add(self, item: T) -> None:
        self._items[item] = None

    def discard(self, item: T) -> None:
        self._items.pop(item, None)

    def remove(self, item: T) -> None:
        del self._items[item]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items


@contextmanager
def ordered_scopes() -> Generator[None]:
    """Make anyio cancel tasks in the order of their start, not of their place in memory."""
    scope: Any = anyio_asyncio.CancelScope
    made = scope.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self._child_scopes = _Ordered[Any]()
        self._tasks = _Ordered[Any]()

    scope.__init__ = make
    try:
        yield
    finally:
        scope.__init__ = made
