"""The processes of a campaign: workers and servers, each in a place that is filled again.

Whoever disturbs a place takes it first, so that two faults at once never disturb the same one. A
process that ends although nobody told it to is a finding; the one exception is a process that
could not reach the database while it started: a supervisor starts it again, as here.
"""

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc

from perdure.ops.exits import ExitCode
from perdure.testing.chaos.report import Record
from perdure.testing.stopping import DISTURBED, stop_between_writes

RESTART_S = 0.5
START_S = 120.0
END_S = 90.0
LOOK_S = 0.05
TAIL_CHARS = 3000
STOP_TRIES_S = 10.0
AFTERWARDS_S = 20.0
"""How long after a disturbance an effect may come that was begun before it ended."""


@dataclass(slots=True)
class Disturbances:
    """When processes were stopped or cut off: then, and right after it, they may act once although
    their lease is over. By time of day, for payments note theirs."""

    times: dict[int, list[tuple[float, float]]] = field(
        default_factory=dict[int, list[tuple[float, float]]]
    )
    """By process id, from when and until when; one that goes on has no end yet."""

    def begin(self, pid: int) -> None:
        """Note that a process is disturbed from now on."""
        self.times.setdefault(pid, []).append((time.time(), math.inf))

    def end(self, pid: int) -> None:
        """Note that one of the disturbances of a process is over."""
        times = self.times.get(pid, [])
        for place, (since, until) in enumerate(times):
            if until == math.inf:
                times[place] = (since, time.time() + AFTERWARDS_S)
                return

    def end_all(self, pid: int) -> None:
        """Note that a process has ended: another one may get its id."""
        for _ in self.times.get(pid, []):
            self.end(pid)

    def excuses(self, pid: int, at: float) -> bool:
        """Tell whether a process may have acted at that time although its lease was over."""
        return any(since <= at <= until for since, until in self.times.get(pid, []))


@dataclass(slots=True, kw_only=True)
class Place:
    """A place for one process at a time. `told` is the signal that was to end it."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    said: Path
    process: anyio.abc.Process | None = None
    told: signal.Signals | None = None
    back_s: float = 0.0
    taken: bool = False
    starting: bool = False
    stopped: bool = False
    starts: int = 0

    @property
    def is_worker(self) -> bool:
        """Tell whether its processes carry out runs."""
        return self.name.startswith("worker")

    @property
    def is_ready(self) -> bool:
        """Tell whether the process has said that it works."""
        return self.process is not None and self.said.exists() and self.said.stat().st_size > 0

    def send(self, number: signal.Signals) -> None:
        """Send a signal; one that comes after its end is lost, as signals are."""
        process = self.process
        if process is not None and process.returncode is None:
            process.send_signal(number)


@dataclass(slots=True, kw_only=True)
class Fleet:
    """All places."""

    record: Record
    folder: Path
    closing: bool = False
    disturbances: Disturbances = field(default_factory=Disturbances)

    places: list[Place] = field(default_factory=list[Place])

    @property
    def workers(self) -> list[Place]:
        """All places of workers."""
        return [place for place in self.places if place.is_worker]

    @property
    def servers(self) -> list[Place]:
        """All places of servers."""
        return [place for place in self.places if not place.is_worker]

    def add(
        self,
        group: anyio.abc.TaskGroup,
        name: str,
        words: Sequence[str],
        environment: Mapping[str, str],
    ) -> Place:
        """Fill a new place with a process, and keep it filled."""
        place = Place(
            name=name,
            command=[sys.executable, "-P", "-m", "perdure.cli.main", *words],
            environment={**_inherited(), **environment},
            log=self.folder / f"{name}.log",
            said=self.folder / f"{name}.out",
        )
        self.places.append(place)
        group.start_soon(self._keep, place)
        return place

    async def _keep(self, place: Place) -> None:
        while not self.closing:
            process = await self._start(place)
            try:
                code = await process.wait()
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        process.kill()
                    await process.aclose()
            self.disturbances.end_all(process.pid)
            self._judge(place, code)
            place.process = None
            place.stopped = False
            place.told = None
            await anyio.sleep(place.back_s)
            place.back_s = RESTART_S

    async def _start(self, place: Place) -> anyio.abc.Process:
        place.starting = True
        try:
            return await self._begin(place)
        finally:
            place.starting = False

    async def _begin(self, place: Place) -> anyio.abc.Process:
        place.said.unlink(missing_ok=True)
        with place.log.open("ab") as errors, place.said.open("wb") as output:
            process = await anyio.open_process(
                place.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                cwd=self.folder,
                env=place.environment,
                start_new_session=True,
            )
        place.process = process
        place.starts += 1
        self.record.count("processes", "started")
        return process

    def _judge(self, place: Place, code: int) -> None:
        """Say whether a process was right to end so."""
        if place.told is signal.SIGKILL and code == -signal.SIGKILL:
            self.record.count("processes", "killed")
        elif place.told is signal.SIGTERM and code == 128 + signal.SIGTERM:
            self.record.count("processes", "ended in order")
        elif place.told is signal.SIGTERM and code == -signal.SIGTERM and not place.is_ready:
            self.record.count("processes", "told to end while they started")
        elif code == ExitCode.UNREACHABLE and not place.is_ready:
            self.record.count("processes", "found no database when they started")
        else:
            told = "nobody told it to" if place.told is None else f"told by {place.told.name}"
            self.record.found("processes", f"{place.name} ended with {code}, {told}: {tail(place)}")

    # ---------------------------------------------------------------- taking places

    @asynccontextmanager
    async def taken(
        self, chance: random.Random, places: Sequence[Place], count: int = 1
    ) -> AsyncGenerator[list[Place]]:
        """Take up to so many free places whose process works; they are free again afterwards."""
        free = [place for place in places if not place.taken and place.is_ready]
        chosen = chance.sample(free, min(count, len(free)))
        for place in chosen:
            place.taken = True
        try:
            yield chosen
        finally:
            for place in chosen:
                place.taken = False

    def kill(self, place: Place, back_s: float) -> None:
        """End a process as a power cut does; another one takes its place after a while."""
        place.told, place.back_s = signal.SIGKILL, back_s
        place.send(signal.SIGKILL)

    async def stop(self, place: Place, url: str | None) -> None:
        """Stop a process; with a database's URL not inside a transaction, as far as that is found
        out in time."""
        process = place.process
        if process is None:
            return
        self.disturbances.begin(process.pid)
        place.stopped = True
        if url is None:
            place.send(signal.SIGSTOP)
            return
        try:
            with anyio.move_on_after(STOP_TRIES_S):
                await stop_between_writes(url, place.send)
        except (OSError, *DISTURBED):
            pass  # the database is disturbed too, and has ended all transactions
        place.send(signal.SIGSTOP)

    def go_on(self, place: Place) -> None:
        """Let a stopped process go on."""
        place.stopped = False
        place.send(signal.SIGCONT)
        self.joined_again(place)

    def cut_off(self, place: Place) -> None:
        """Note that a process was cut off from its database."""
        if place.process is not None:
            self.disturbances.begin(place.process.pid)

    def joined_again(self, place: Place) -> None:
        """Note that nothing keeps a process from its database any more."""
        if place.process is not None:
            self.disturbances.end(place.process.pid)

    async def drain(self, place: Place, back_s: float = RESTART_S) -> None:
        """Ask a process to end, and wait until it has; a finding when it never does."""
        process = place.process
        if process is None:
            return
        place.told, place.back_s = signal.SIGTERM, back_s
        place.send(signal.SIGTERM)
        with anyio.move_on_after(END_S):
            await process.wait()
            return
        self.record.found("processes", f"{place.name} did not end by SIGTERM: {tail(place)}")
        self.kill(place, back_s)

    async def until_ready(self) -> None:
        """Return once every place has a process that works."""
        with anyio.move_on_after(START_S) as scope:
            while not all(place.is_ready for place in self.places):  # noqa: ASYNC110  # no bell
                await anyio.sleep(LOOK_S)
        if scope.cancelled_caught:
            for place in self.places:
                if not place.is_ready:
                    self.record.found("processes", f"{place.name} does not start: {tail(place)}")

    async def close(self) -> None:
        """End all processes in order."""
        self.closing = True
        async with anyio.create_task_group() as group:
            for place in self.places:
                group.start_soon(self._close, place)

    async def _close(self, place: Place) -> None:
        while place.starting:  # noqa: ASYNC110  # a process rings no bell
            await anyio.sleep(LOOK_S)
        self.go_on(place)
        await self.drain(place)

    def abandon(self) -> None:
        """Kill what is left."""
        self.closing = True
        for place in self.places:
            self.kill(place, 0.0)


def tail(place: Place) -> str:
    """Return the end of what the processes of a place logged."""
    return place.log.read_text(encoding="utf-8", errors="replace")[-TAIL_CHARS:]


def _inherited() -> dict[str, str]:
    """Return the environment without settings of ours: a campaign's own are given whole."""
    ours = ("PERDURE_", "PG")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
