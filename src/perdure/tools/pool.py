"""Threads for sync user code, made to be abandoned.

There is a thread for every call under way: a call that never returns keeps its thread, and the
next call gets another. How many may be lost is the owner's bound. All counting is done on the
engine's loop; the threads only take calls and post results.
"""

import contextvars
import queue
import threading
from typing import Any

from perdure.tools.bridge import Call, Mailbox
from perdure.tools.caught import Caught


class ThreadPool:
    """Daemon threads over one queue, started when needed. They never keep the process alive."""

    def __init__(self, name: str, results: Mailbox[Call[Any]]) -> None:
        self.under_way = 0
        self._name = name
        self._results = results
        self._threads: list[threading.Thread] = []
        self._queue: queue.SimpleQueue[Call[Any] | None] = queue.SimpleQueue()

    def submit(self, call: Call[Any]) -> None:
        """Hand over a call; raise RuntimeError when no thread can be started for it."""
        call.home = self
        if self.under_way >= len(self._threads):
            thread = threading.Thread(
                target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        self.under_way += 1
        self._queue.put(call)

    def close(self) -> None:
        """Let idle threads end; never waits."""
        for _ in self._threads:
            self._queue.put(None)

    def threads_alive(self) -> int:
        """Return how many threads still run."""
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            if not call.claim():  # given up before it started
                continue
            with Caught() as caught:
                # an empty context: what one tool sets, the next one does not see
                call.value = contextvars.Context().run(call.body)
            call.error = caught.error
            self._results.post(call)
            del call, caught
