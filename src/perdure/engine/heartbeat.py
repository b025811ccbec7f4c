"""Renewing the leases of a worker, all in one statement (decision 16).

`LoopHeartbeat` runs on the engine's loop: for stores whose writer puts renewals first. Either
stops what is no longer trusted in time, also while a renewal gets no answer.
`ThreadHeartbeat` has a thread, a loop and thereby a connection of its own: a busy engine loop
delays no renewal, and one that shows no pulse for half a lease gets none.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import anyio
from anyio.from_thread import BlockingPortal, start_blocking_portal

from perdure.engine.core import Core
from perdure.protocol.errors import PerdureError
from perdure.store.requests import LeaseKey, Renewal

log = logging.getLogger(__name__)


class Holder(Protocol):
    """A worker, as its heartbeat sees it."""

    worker_id: str

    def lease_keys(self) -> list[LeaseKey]:
        """Return the leases to renew; called from any thread."""
        ...

    def renewed(self, key: LeaseKey, *, held: bool, epoch: int, valid_until: float) -> None:
        """Take the answer for one lease; called on the engine's loop."""
        ...

    def stop_expired(self) -> None:
        """Stop what is no longer trusted; called on the engine's loop."""
        ...


class Heartbeat(Protocol):
    """Keeps a worker's leases alive."""

    async def run(self, holder: Holder) -> None:
        """Beat until cancelled."""
        ...

    def beat_now(self) -> None:
        """Beat once soon, whatever the interval; called on the engine's loop."""
        ...


Answers = list[tuple[LeaseKey, Renewal]]

BUSY_BEAT_S = 1.0
"""How soon the heart beats again when the row of a lease was locked by somebody else."""
_NOT_PROLONGED = 0.0


async def _renew(core: Core, holder: Holder) -> tuple[Answers, float]:
    """Renew all leases; return the answers and until when the held ones are trusted."""
    settings = core.settings
    valid_until = core.clock.monotonic() + settings.lease_ttl_s - settings.lease_margin_s
    keys = holder.lease_keys()
    if not keys:
        return [], valid_until
    try:
        answers = await core.store.renew_leases(holder.worker_id, keys, settings.lease_ttl_s)
    except PerdureError as error:
        log.warning("heartbeat failed: %s", error)
        return [], valid_until
    return list(zip(keys, answers, strict=True)), valid_until


def _deliver(holder: Holder, answers: Answers, valid_until: float) -> None:
    for key, answer in answers:
        holder.renewed(
            key,
            held=answer.held,
            epoch=answer.cancel_epoch,
            valid_until=_NOT_PROLONGED if answer.busy else valid_until,
        )
    holder.stop_expired()


def _next_s(core: Core, answers: Answers) -> float:
    """Return how long the heart rests after a beat."""
    rest_s = core.settings.heartbeat_s
    return min(BUSY_BEAT_S, rest_s) if any(answer.busy for _, answer in answers) else rest_s


def _look_s(core: Core) -> float:
    return min(1.0, core.settings.lease_ttl_s / 10)


class LoopHeartbeat:
    """Beats on the engine's own loop."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._bell = anyio.Event()

    def beat_now(self) -> None:
        """Beat once soon."""
        self._bell.set()

    async def run(self, holder: Holder) -> None:
        """Beat until cancelled."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch, holder)
            rest_s = self._core.settings.heartbeat_s
            while True:
                with anyio.move_on_after(rest_s):
                    await self._bell.wait()
                self._bell = anyio.Event()
                answers, valid_until = await _renew(self._core, holder)
                _deliver(holder, answers, valid_until)
                rest_s = _next_s(self._core, answers)

    async def _watch(self, holder: Holder) -> None:
        """Stop what runs out while a renewal waits for its answer."""
        while True:
            holder.stop_expired()
            await anyio.sleep(_look_s(self._core))


class ThreadHeartbeat:
    """Beats on a thread of its own, as long as the engine's loop shows a pulse."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._pulse = core.clock.monotonic()
        self._beat_soon: Callable[[], None] = lambda: None

    def beat_now(self) -> None:
        """Beat once soon."""
        self._beat_soon()

    async def run(self, holder: Holder) -> None:
        """Show the engine's pulse to the beating thread until cancelled."""
        engine_loop = asyncio.get_running_loop()
        with start_blocking_portal() as portal:
            beats = _Beats(self._core, holder, engine_loop, self._is_alive)
            self._beat_soon = lambda: _ring(portal, beats)
            done = portal.start_task_soon(beats.run)
            try:
                while True:
                    self._pulse = self._core.clock.monotonic()
                    holder.stop_expired()
                    if done.done():
                        done.result()  # a heart that stopped takes its worker down, at once
                    await anyio.sleep(_look_s(self._core))
            finally:
                self._beat_soon = lambda: None
                done.cancel()

    def _is_alive(self) -> bool:
        silent = self._core.clock.monotonic() - self._pulse
        return silent < self._core.settings.lease_ttl_s / 2


def _ring(portal: BlockingPortal, beats: "_Beats") -> None:
    portal.start_task_soon(beats.ring)


class _Beats:
    """The loop in the heartbeat's thread."""

    def __init__(
        self,
        core: Core,
        holder: Holder,
        engine_loop: asyncio.AbstractEventLoop,
        is_alive: Callable[[], bool],
    ) -> None:
        self._core = core
        self._holder = holder
        self._engine_loop = engine_loop
        self._bell = anyio.Event()
        self._is_alive = is_alive

    def ring(self) -> None:
        self._bell.set()

    async def run(self) -> None:
        rest_s = self._core.settings.heartbeat_s
        while True:
            with anyio.move_on_after(rest_s):
                await self._bell.wait()
            self._bell = anyio.Event()
            rest_s = _next_s(self._core, await self._beat())

    async def _beat(self) -> Answers:
        if not self._is_alive():
            log.error("the engine's loop shows no pulse; its leases are not renewed")
            return []
        answers, valid_until = await _renew(self._core, self._holder)
        self._engine_loop.call_soon_threadsafe(_deliver, self._holder, answers, valid_until)
        return answers
