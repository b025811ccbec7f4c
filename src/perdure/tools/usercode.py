"""Where user code runs: beside the engine's loop, never on it (decision 15).

`UserCode` owns the current user loop and the thread pool, and keeps count of what was given up
and still runs: the lost slots. A loop that misses its pulse is blocked by one of its calls; it is
replaced by a fresh one, and calls that it had not started move over. Calls that it had started
end when it comes back, else by their timeout. All methods run on the engine's loop.

Planners and code agents of users may run here too: a body may return or raise anything.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio

from perdure.tools.bridge import Call, Mailbox
from perdure.tools.pool import ThreadPool
from perdure.tools.userloop import UserLoop

R = TypeVar("R")

log = logging.getLogger(__name__)

_numbers = itertools.count(1)


class UserCode:
    """The user loop and the pool of one engine.

    `pulse_s` apart the loop is pinged; after `pulses_missed_max` missed in a row it is replaced.
    A call given up counts as lost at once when it holds a thread or a blocked loop; a task on a
    healthy loop after `lost_after_s`, for it may need a moment to take its cancellation.
    """

    def __init__(
        self,
        *,
        lost_slots_max: int = 16,
        pulse_s: float = 0.25,
        pulses_missed_max: int = 4,
        lost_after_s: float = 1.0,
        stop_s: float = 2.0,
    ) -> None:
        self.lost_slots_max = lost_slots_max
        self.generation = 0
        self._pulse_s = pulse_s
        self._missed_max = pulses_missed_max
        self._lost_after_s = lost_after_s
        self._stop_s = stop_s
        self.name = f"perdure-user-{next(_numbers)}"
        self._abandoned: set[Call[Any]] = set()
        self._retired: list[UserLoop] = []
        self._engine: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: UserLoop
        self._pool: ThreadPool

    async def __aenter__(self) -> Self:
        self._engine = asyncio.get_running_loop()
        self._pool = ThreadPool(f"{self.name}-thread", Mailbox(self._engine, self._settle))
        self._loop = self._new_loop()
        self._timer = self._engine.call_later(self._pulse_s, self._watch)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        with anyio.move_on_after(self._stop_s, shield=True):
            await self._stop()

    @property
    def lost_slots(self) -> int:
        """Return how many calls were given up and still run."""
        if not self._abandoned:
            return 0
        before = time.monotonic() - self._lost_after_s
        return sum(
            isinstance(call.home, ThreadPool)
            or call.home.retired
            or (call.abandoned_at or 0.0) <= before
            for call in self._abandoned
        )

    @property
    def exhausted(self) -> bool:
        """Tell whether so much is lost that no further call is taken."""
        if not self._abandoned and not self._retired:
            return False
        return max(self.lost_slots, len(self._retired)) >= self.lost_slots_max

    def run_async(self, body: Callable[[], Awaitable[R]], label: str = "") -> Call[R]:
        """Start async user code on the user loop; `label` names it in logs."""
        call: Call[R] = Call(body, label)
        self._loop.submit(call)
        return call

    def run_sync(self, body: Callable[[], R]) -> Call[R]:
        """Start sync user code in a thread; raise RuntimeError when there is none to be had."""
        call: Call[R] = Call(body)
        self._pool.submit(call)
        return call

    def request_stop(self, call: Call[Any]) -> None:
        """Ask a started call to stop; sync code cannot be asked this way."""
        if isinstance(call.home, UserLoop):
            call.home.stop(call)

    def withdraw(self, call: Call[Any]) -> bool:
        """Take back a call that has not started; return False when it has."""
        if not call.claim():
            return False
        call.home.under_way -= 1
        if call.home.under_way == 0 and call.home in self._retired:
            call.home.close()
        return True

    def abandon(self, call: Call[R], on_late: Callable[[Call[R]], None]) -> None:
        """Give a started call up; `on_late` is called once if it ends all the same."""
        self._abandoned.add(call)
        call.abandon(time.monotonic(), on_late)

    def _settle(self, call: Call[Any]) -> None:
        call.home.under_way -= 1
        self._abandoned.discard(call)
        if call.home.under_way == 0 and call.home in self._retired:
            call.home.close()
        try:
            call.settle()
        except Exception:
            log.exception("a late outcome could not be handed over")

    # ---------------------------------------------------------------- the user loop's pulse

    def _new_loop(self) -> UserLoop:
        assert self._engine is not None
        self.generation += 1
        return UserLoop(f"{self.name}-loop-{self.generation}", self._engine, self._settle)

    def _watch(self) -> None:
        # Counted in rounds of this timer, not in time: when the whole process was stopped, one
        # round passes, and the user loop has until the next to answer.
        assert self._engine is not None
        self._timer = self._engine.call_later(self._pulse_s, self._watch)
        self._close_finished()
        loop = self._loop
        if loop.under_way == 0 and loop.missed == 0:
            return
        if not loop.pulse() and loop.missed >= self._missed_max:
            self._replace(loop)

    def _replace(self, blocked: UserLoop) -> None:
        if len(self._retired) >= self.lost_slots_max:
            return
        try:
            self._loop = self._new_loop()
        except RuntimeError:
            log.exception("the user loop is blocked, and no thread can be started for another")
            return
        log.warning(
            "the user loop was blocked by %s: replaced by generation %d",
            blocked.held_by() or "code that is not known",
            self.generation,
        )
        self._retired.append(blocked)
        for call in blocked.retire():
            self._loop.submit(call)
        self._close_finished()

    def _close_finished(self) -> None:
        for loop in self._retired:
            if loop.under_way <= 0:
                loop.close()
        self._retired = [loop for loop in self._retired if loop.is_alive()]

    async def _stop(self) -> None:
        """End the threads that can end; those stuck in user code are daemons and stay behind."""
        self._pool.close()
        loops = [self._loop, *self._retired]
        for loop in loops:
            loop.close()
        while self._pool.threads_alive() or any(loop.is_alive() for loop in loops):  # noqa: ASYNC110 (a thread's end sets no event)
            await anyio.sleep(0.005)
