"""Hand-overs between the engine's loop and the threads of user code, in batches.

Concurrency model. The engine's loop is one thread; each user loop and each pool thread is another.
A `Call` is the only object both sides touch. The user's side writes `value` or `error` and then
posts the call; the engine's side alone reads them after that, and alone uses `wait`, `settle` and
`abandon`. Whether a call starts is decided by who pops its one ticket: the thread that starts it,
or the engine that gives it up; list.pop and deque operations are atomic.

This module and `userloop` use asyncio itself: anyio has no future that another thread may wake
in batches, and its scopes cost more than the whole hand-over (decision 15).
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")
T = TypeVar("T")


class Call(Generic[R]):
    """One execution of user code, as the engine's loop sees it. It can be given up.

    `label` names it in logs.
    """

    __slots__ = (
        "__weakref__",
        "_on_end",
        "_ticket",
        "_waiter",
        "abandoned_at",
        "body",
        "ended",
        "entered",
        "error",
        "home",
        "label",
        "task",
        "value",
    )

    def __init__(self, body: Callable[[], Any], label: str = "") -> None:
        self.body = body
        self.label = label
        self.value: R | None = None
        self.error: BaseException | None = None
        self.ended = False
        self.entered = False
        self.abandoned_at: float | None = None
        self.home: Any = None
        self.task: asyncio.Task[None] | None = None
        self._ticket = [None]
        self._waiter: asyncio.Future[None] | None = None
        self._on_end: Callable[[Call[R]], None] | None = None

    def claim(self) -> bool:
        """Decide whether the call starts; only the first to ask gets True. From any thread."""
        try:
            self._ticket.pop()
        except IndexError:
            return False
        return True

    @property
    def started(self) -> bool:
        """Tell whether somebody claimed the call."""
        return not self._ticket

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end at most so long; return whether it has ended."""
        if self.ended:
            return True
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None
        return self.ended

    def settle(self) -> None:
        """Take note of the end. Runs on the engine's loop, once."""
        self.ended = True
        if self._waiter is not None:
            _wake(self._waiter)
        if self._on_end is not None:
            self._on_end(self)

    def abandon(self, now: float, on_end: Callable[["Call[R]"], None]) -> None:
        """Stop waiting; `on_end` is called on the engine's loop if it ends all the same."""
        self.abandoned_at = now
        self._on_end = on_end


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class Mailbox(Generic[T]):
    """Items on their way into a loop: one wake-up brings all that came meanwhile.

    With a source loop, the wake-up is sent at the end of that loop's current round, so that
    everything posted in the round travels together. `deliver` must not raise.
    """

    def __init__(
        self,
        target: asyncio.AbstractEventLoop,
        deliver: Callable[[T], None],
        source: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._target = target
        self._deliver = deliver
        self._source = source
        self._items: deque[T] = deque()
        self._announced = False

    def post(self, item: T) -> None:
        """Add an item. From the source loop, or from any thread when there is none."""
        self._items.append(item)
        if not self._announced:  # append first: a drain under way then takes the item
            self._announced = True
            if self._source is None:
                self._announce()
            else:
                self._source.call_soon(self._announce)

    def drain(self) -> None:
        """Deliver what is there. On the target loop, or in its stead while it is blocked."""
        self._announced = False  # clear first: what comes from here on announces itself
        items = self._items
        while True:
            try:
                item = items.popleft()
            except IndexError:
                return
            self._deliver(item)

    def take_all(self) -> list[T]:
        """Take out what was not delivered yet."""
        taken: list[T] = []
        while True:
            try:
                taken.append(self._items.popleft())
            except IndexError:
                return taken

    def _announce(self) -> None:
        try:
            self._target.call_soon_threadsafe(self.drain)
        except RuntimeError:  # the target loop is closed: nobody is left to care
            self._items.clear()
