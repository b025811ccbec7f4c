"""Signals only wake (R-12.2). A lost, doubled or late one changes latency, never a result.

Every waiter reads, finds nothing, waits for a signal or its poll interval, and reads again.
"""

from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self

QUEUE_TOPIC = "queue"
"""Something became claimable. One topic for all queues: a claim looks at its own."""

CANCEL_TOPIC = "cancel"
"""Some run was cancelled: workers look at their leases at once."""


RUN_PREFIX = "run:"


def run_topic(run_id: str) -> str:
    """Return the topic that is published after each commit of a run."""
    return RUN_PREFIX + run_id


def thread_topic(thread_id: str) -> str:
    """Return the topic that is published when a thread gets a run."""
    return f"thread:{thread_id}"


def end_topic(run_id: str) -> str:
    """Return the topic that is published once, when a run has ended."""
    return f"end:{run_id}"


class Wakeup(Protocol):
    """One subscriber's bell."""

    async def wait(self) -> None:
        """Return once a signal has arrived since the last return; may return without one."""
        ...


class Signals(Protocol):
    """Lossy wake-ups between those who write and those who wait."""

    def publish(self, topic: str) -> None:
        """Wake the topic's subscribers, soon. Never blocks, never raises; signals coalesce.

        Called from the loop that entered this object.
        """
        ...

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[Wakeup]:
        """Listen while the context is open."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
