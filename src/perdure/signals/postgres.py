"""Signals between processes through PostgreSQL's LISTEN and NOTIFY.

Publishing never touches a commit: a pending NOTIFY makes all commits of a server wait for each
other. Topics are gathered for some milliseconds and sent in one statement on a connection of its
own. Another connection listens; when it was lost, everybody is woken after it is back, because
hints were missed. Subscribers of this process are woken at once, without the way through the server.

A run publishes after each of its commits. Those hints only make a follower in another process
look a little sooner, so they travel ten times less often than what a worker waits for.
"""

import hashlib
import logging
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, Self, cast

import anyio
import asyncpg
from anyio.abc import TaskStatus

from perdure.signals.bells import Bells
from perdure.signals.ports import RUN_PREFIX, Wakeup

log = logging.getLogger(__name__)

CHANNEL = "perdure_signals"
COALESCE_S = 0.01
FOLLOWERS_COALESCE_S = 0.1
PAYLOAD_BYTES_MAX = 1000
TOPICS_MAX = 10_000
PING_S = 15.0
CONNECT_S = 10.0
_BACKOFF_S = 0.05
_BACKOFF_MAX_S = 5.0
_NOTIFY = "SELECT pg_notify($1, topic) FROM unnest($2::text[]) AS sent(topic)"
_TROUBLE = (
    OSError,
    TimeoutError,
    EOFError,
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
)


class _Connection(Protocol):
    """What is used of the driver's connection."""

    async def execute(self, query: str, *args: object) -> str: ...
    async def add_listener(self, _channel: str, _callback: Callable[..., None], /) -> None: ...
    def add_termination_listener(self, _callback: Callable[..., None], /) -> None: ...
    def is_closed(self) -> bool: ...
    def terminate(self) -> None: ...
    def get_server_pid(self) -> int: ...


async def _connect(dsn: str) -> _Connection:
    settings = {"application_name": "perdure signals"}
    opened: object = await asyncpg.connect(dsn, timeout=CONNECT_S, server_settings=settings)
    return cast("_Connection", opened)


def payload_of(topic: str) -> str:
    """Return what is sent for a topic: itself, or its digest when it is long or not plain."""
    if len(topic.encode()) <= PAYLOAD_BYTES_MAX and "\0" not in topic:
        return topic
    return "#" + hashlib.sha256(topic.encode()).hexdigest()


class PostgresSignals:
    """The `Signals` port over one PostgreSQL; `dsn` must lead to the server, not to a pooler."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._local = Bells()
        self._pending: set[str] = set()
        self._for_followers: set[str] = set()
        self._wanted = anyio.Event()
        self._urgent = anyio.Event()
        self._group = anyio.create_task_group()
        self._sender_pid = 0

    def publish(self, topic: str) -> None:
        """Wake the topic's subscribers, here at once and elsewhere soon."""
        payload = payload_of(topic)
        self._local.publish(payload)
        hurried = not topic.startswith(RUN_PREFIX)
        waiting = self._pending if hurried else self._for_followers
        if len(waiting) < TOPICS_MAX:
            waiting.add(payload)
        self._wanted.set()
        if hurried:
            self._urgent.set()

    def subscribe(self, topic: str) -> AbstractAsyncContextManager[Wakeup]:
        """Listen while the context is open."""
        return self._local.subscribe(payload_of(topic))

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        await self._group.start(self._listen)
        self._group.start_soon(self._send)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(kind, error, trace)

    # ------------------------------------------------------------ the listening side

    async def _listen(self, *, task_status: TaskStatus[None]) -> None:
        """Listen for ever; started once it listens, or once it knows that it cannot at once."""
        failed = 0
        signalled = False

        def ready() -> None:
            nonlocal failed, signalled
            failed = 0
            self._local.ring_all()
            if not signalled:
                signalled = True
                task_status.started()

        while True:
            try:
                await self._listen_once(ready)
            except _TROUBLE as error:
                log.info("signals lost the database (%s)", type(error).__name__)
            if not signalled:
                signalled = True
                task_status.started()
            failed += 1
            await _pause(failed)

    async def _listen_once(self, on_ready: Callable[[], None]) -> None:
        connection = await _connect(self._dsn)
        gone = anyio.Event()

        def ended(_connection: object) -> None:
            gone.set()

        try:
            connection.add_termination_listener(ended)
            with anyio.fail_after(PING_S):
                await connection.add_listener(CHANNEL, self._heard)
            on_ready()
            while not gone.is_set():
                with anyio.move_on_after(PING_S):
                    await gone.wait()
                    return
                with anyio.fail_after(PING_S):
                    await connection.execute("SELECT 1")
        finally:
            connection.terminate()

    def _heard(self, _connection: object, pid: int, _channel: str, payload: str) -> None:
        if pid != self._sender_pid:  # what this process sent has woken its own subscribers already
            self._local.publish(payload)

    # ------------------------------------------------------------ the sending side

    async def _gather(self) -> list[str]:
        """Return what is to be sent next, once there is something."""
        await self._wanted.wait()
        with anyio.move_on_after(FOLLOWERS_COALESCE_S):
            await self._urgent.wait()
        await anyio.sleep(COALESCE_S)
        self._wanted, self._urgent = anyio.Event(), anyio.Event()
        topics = sorted(self._pending | self._for_followers)
        self._pending.clear()
        self._for_followers.clear()
        return topics

    def _forget_sender(self, _connection: object) -> None:
        """A connection is gone, at once known or when it is next used: the server may give its number
        to another process, whose signals are news."""
        self._sender_pid = 0

    async def _send(self) -> None:
        """Send what is pending, at most every few milliseconds; what cannot be sent is dropped."""
        connection: _Connection | None = None
        try:
            while True:
                topics = await self._gather()
                try:
                    if connection is None or connection.is_closed():
                        connection = await _connect(self._dsn)
                        connection.add_termination_listener(self._forget_sender)
                        self._sender_pid = connection.get_server_pid()
                    with anyio.fail_after(PING_S):
                        await connection.execute(_NOTIFY, CHANNEL, topics)
                except _TROUBLE as error:
                    log.info("signals were not sent (%s)", type(error).__name__)
                    if connection is not None:
                        connection.terminate()
                        connection = None
                    await _pause(1)
        finally:
            if connection is not None:
                connection.terminate()


_CHANCE = random.random  # noqa: S311 - jitter needs no secrecy


async def _pause(failed: int) -> None:
    limit = min(_BACKOFF_MAX_S, _BACKOFF_S * 2.0 ** min(failed, 10))
    await anyio.sleep(limit * (0.5 + _CHANCE() / 2))
