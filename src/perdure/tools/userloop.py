"""A thread with its own event loop for async user code, made to be abandoned.

Whatever the code does (blocks, exits, swallows its cancellation) stays on this loop: a blocked
loop is replaced by its owner, `SystemExit` does not end the thread, and a task that swallows its
cancellation is asked again a few times, no more. Raw asyncio, for the reasons in `bridge`.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from perdure.tools.bridge import Call, Mailbox
from perdure.tools.caught import Caught

STOPS_MAX = 3
STOP_AGAIN_S = 0.5
CLOSE_S = 1.0

log = logging.getLogger(__name__)

_UNNAMED = "other user code"


class UserLoop:
    """One generation: one thread, one loop. `under_way` counts its calls that have not ended."""

    def __init__(
        self, name: str, engine: asyncio.AbstractEventLoop, settle: Callable[[Call[Any]], None]
    ) -> None:
        self.under_way = 0
        self.missed = 0
        self.retired = False
        self._ping = self._pong = 0
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._inbox: Mailbox[Call[Any]] = Mailbox(self._loop, self._receive, engine)
        self._results: Mailbox[Call[Any]] = Mailbox(engine, settle, self._loop)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ---------------------------------------------------------------- on the engine's loop

    def submit(self, call: Call[Any]) -> None:
        """Hand over a call to be started."""
        call.home = self
        self.under_way += 1
        self._inbox.post(call)

    def stop(self, call: Call[Any]) -> None:
        """Ask a started call to stop: cancel its task, again if it swallows that."""
        self._inbox.post(call)

    def pulse(self) -> bool:
        """Send a ping and tell whether the one before came back."""
        if self._ping != self._pong:
            self.missed += 1
            return False
        self.missed = 0
        self._ping += 1
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._loop.call_soon_threadsafe(self._answer_ping, self._ping)
        return True

    def retire(self) -> list[Call[Any]]:
        """Give the loop up as blocked; return the calls it had not started.

        What it has finished is delivered, though its own delivery is stuck behind the block.
        """
        self.retired = True
        unstarted: list[Call[Any]] = []
        for call in self._inbox.take_all():
            if call.started:  # a request to stop: it counts when the loop comes back
                self._inbox.post(call)
            else:
                unstarted.append(call)
        self.under_way -= len(unstarted)
        self._results.drain()
        return unstarted

    def held_by(self) -> str:
        """Return what runs on the loop at the moment, as its caller named it; "" if not known."""
        task = asyncio.current_task(self._loop)
        return "" if task is None else task.get_name()

    def close(self) -> None:
        """Stop the thread when the loop gets to it; never waits."""
        if not self._closing:
            self._closing = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)

    def is_alive(self) -> bool:
        """Tell whether the thread still runs."""
        return self._thread.is_alive()

    # ---------------------------------------------------------------- on the loop's own thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            with Caught() as caught:
                self._loop.run_forever()
            if caught.error is not None:  # a task of the user's own exits: not our exit
                log.warning("user code raised %s in its loop", type(caught.error).__name__)
        self._finish()

    def _finish(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        with Caught() as caught:
            self._loop.run_until_complete(_ended(self._loop))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        if caught.error is not None:
            log.warning("user code raised %s while its loop closed", type(caught.error).__name__)
        self._loop.close()

    def _receive(self, call: Call[Any]) -> None:
        if call.task is not None:
            self._stop(call, 1)
        else:
            # RUF006 does not apply: the call holds its task, and its owner the call
            call.task = self._loop.create_task(self._execute(call), name=call.label or _UNNAMED)

    async def _execute(self, call: Call[Any]) -> None:
        if not call.claim():  # taken back while something else held the loop
            return
        call.entered = True
        with Caught() as caught:
            call.value = await call.body()
        call.error = caught.error
        self._results.post(call)

    def _stop(self, call: Call[Any], times: int) -> None:
        if call.task is None or call.task.done():
            return
        if not call.entered:  # cancelled before its first step, a task would end without a word
            self._loop.call_soon(self._stop, call, times)
            return
        call.task.cancel()
        if times < STOPS_MAX:
            self._loop.call_later(STOP_AGAIN_S, self._stop, call, times + 1)

    def _answer_ping(self, number: int) -> None:
        self._pong = number


async def _ended(loop: asyncio.AbstractEventLoop) -> None:
    """Wait a moment for the cancelled tasks to end."""
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_S)
