"""One campaign: a fleet over a database, a load of clients, and one fault after the other.

After each fault a new client starts a run, which must end within a bound that is relative to what
such a run took before anything went wrong. When time is up the faults are over, the clients end
with the runs that they follow, all processes are told to end, and everything is checked.
"""

import random
import socket
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc

from perdure.engine.core import Core
from perdure.ops.settings import DatabaseSettings, Settings
from perdure.protocol.errors import Unavailable
from perdure.runtime import open_core
from perdure.testing.chaos.agents import FOLDER_VARIABLE, REGISTRY, Provider
from perdure.testing.chaos.api import Api
from perdure.testing.chaos.checks import all_runs, check
from perdure.testing.chaos.clients import Load
from perdure.testing.chaos.faults import FAULTS, Fault, Scene
from perdure.testing.chaos.fleet import Fleet
from perdure.testing.chaos.grounds import Ground, StoreName, postgres_ground, sqlite_ground
from perdure.testing.chaos.report import Record

PROGRESS_S = 60.0
"""What a new run may take to end after a fault at least; on a slow machine it may take more."""

PROGRESS_FACTOR = 60.0
"""How many times as long as before the first fault a new run may take."""

SLOW_LEASES = 2.0
"""Of a new run that took more than so many leases the report says what happened to it."""

SETTLE_S = 300.0
LOOK_S = 0.5
PAUSE_S = 1.5
TOGETHER = 0.25
"""How often a fault of a process and one of the database happen at once."""

PORT_FIRST, PORT_END = 23_000, 30_000
PORT_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a campaign is to be. It ends after `seconds`, or after `rounds` faults if that is set.

    `faults` names the kinds that are drawn; none: all that the store has.
    """

    store: StoreName
    seconds: float = 60.0
    rounds: int | None = None
    seed: int = 1
    workers: int = 4
    servers: int = 2
    clients: int = 16
    lease_s: float = 3.0
    faults: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class _Course:
    """The parts of a campaign while it goes on."""

    plan: Plan
    record: Record
    ground: Ground
    fleet: Fleet
    load: Load
    chance: random.Random
    bound_s: float = PROGRESS_S
    deck: list[Fault] = field(default_factory=list[Fault])


async def run_campaign(plan: Plan, folder: Path) -> Record:
    """Run a campaign in an empty folder and return what it saw."""
    record = Record(plan.store, plan.seed)
    outside = folder / "outside"
    outside.mkdir()
    provider = Provider(outside)
    fleet = Fleet(record=record, folder=folder)
    load = Load(Api(record), provider, record, plan.seed)
    async with _ground(plan, folder, record) as ground:
        async with open_core(_own_settings(ground)):
            pass  # the schema is there before so many ask for it at once
        course = _Course(
            plan=plan,
            record=record,
            ground=ground,
            fleet=fleet,
            load=load,
            chance=load.chance("faults"),
        )
        async with anyio.create_task_group() as group:
            try:
                await _play(course, group)
            finally:
                fleet.abandon()
                group.cancel_scope.cancel()
        async with open_core(_own_settings(ground)) as core:
            await check(core, record, load.told, provider.payments(), fleet.disturbances)
    return record


@asynccontextmanager
async def _ground(plan: Plan, folder: Path, record: Record) -> AsyncGenerator[Ground]:
    if plan.store == "postgres":
        async with postgres_ground(plan.workers, record) as postgres:
            yield postgres
    else:
        async with sqlite_ground(folder, record) as sqlite:
            yield sqlite


def _own_settings(ground: Ground) -> Settings:
    return Settings(db=DatabaseSettings(url=ground.url, pool_max=3))


async def _play(course: _Course, group: anyio.abc.TaskGroup) -> None:
    """Play the campaign; return with all processes ended."""
    load, clients = course.load, _Clients()
    load.api.ports = _start(course, group)
    await course.fleet.until_ready()
    async with load.api.http, anyio.create_task_group() as people:
        people.start_soon(load.people)
        await _calibrate(course)
        for number in range(course.plan.clients):
            people.start_soon(clients.run, load, number)
        await _disturb(course)
        await course.fleet.until_ready()
        load.closing = True
        await _settle(course, clients)
        people.cancel_scope.cancel()
    await course.fleet.close()


def _start(course: _Course, group: anyio.abc.TaskGroup) -> list[int]:
    """Fill all places; return the servers' ports."""
    plan, ground, fleet = course.plan, course.ground, course.fleet
    common = {
        FOLDER_VARIABLE: str(fleet.folder / "outside"),
        "PERDURE_DB__POOL_MAX": "4",
        "PERDURE_LOG__LEVEL": "warning",
        "PERDURE_LOG__FORMAT": "json",
        "PERDURE_WORKER__LEASE_TTL_S": str(plan.lease_s),
        "PERDURE_WORKER__POLL_INTERVAL_S": "0.5",
        "PERDURE_WORKER__DRAIN_GRACE_S": "5",
        "PERDURE_SERVER__SHUTDOWN_GRACE_S": "5",
        "PERDURE_CHILDREN__CANCEL_DEADLINE_S": str(max(5.0, 2 * plan.lease_s)),
    }
    for number in range(plan.workers):
        words = ["worker", "--agents", REGISTRY, "--json"]
        way = ground.way_of(number, plan.workers)
        fleet.add(group, f"worker-{number}", words, {**common, **way})
    ports = _free_ports(plan.servers)
    for number, port in enumerate(ports):
        words = ["serve", "--no-worker", "--port", str(port), "--json"]
        fleet.add(group, f"server-{number}", words, {**common, "PERDURE_DB__URL": ground.url})
    return ports


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, apart from those of outgoing connections.

    They are drawn by the system's chance: a campaign beside this one, whose server is dead for a
    moment, has others.
    """
    ports = random.SystemRandom().sample(range(PORT_FIRST, PORT_END), k=count * PORT_TRIES)
    found = [port for port in ports if _is_free(port)][:count]
    if len(found) < count:
        raise RuntimeError("no free ports for the servers")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class _Clients:
    """Counts the clients that have not ended."""

    def __init__(self) -> None:
        self.left = 0

    async def run(self, load: Load, number: int) -> None:
        self.left += 1
        try:
            await load.client(number)
        finally:
            self.left -= 1


# ---------------------------------------------------------------- the faults


async def _calibrate(course: _Course) -> None:
    """Measure what a small run takes while nothing is wrong."""
    took = await _progress(course, "start")
    course.bound_s = max(PROGRESS_S, PROGRESS_FACTOR * took)


async def _progress(course: _Course, fault: str) -> float:
    """Let a new client start a run and see its end; a finding when that takes too long."""
    began = time.monotonic()
    run_id, workers = None, course.fleet.workers
    ready = sum(place.is_ready and not place.stopped for place in workers)
    with anyio.move_on_after(course.bound_s) as scope:
        run_id = await course.load.probe()
    took = time.monotonic() - began
    course.record.took(fault, took)
    if run_id is not None and took > SLOW_LEASES * course.plan.lease_s:
        story = await course.load.story(run_id)
        course.record.slow.append(
            f"{took:.1f} s after {fault}, {ready} of {len(workers)} workers ready: {story}"
        )
    if scope.cancelled_caught:
        course.record.found(
            "progress", f"no new run ended within {course.bound_s:.0f} s after: {fault}"
        )
    return took


async def _disturb(course: _Course) -> None:
    """Let one fault after the other happen, or two at once, until time is up."""
    plan, chance = course.plan, course.chance
    until = time.monotonic() + plan.seconds
    done = 0
    while time.monotonic() < until and (plan.rounds is None or done < plan.rounds):
        chosen = _draw(course)
        name = " + ".join(fault.name for fault in chosen)
        async with anyio.create_task_group() as group:
            for fault in chosen:
                course.record.count("faults", fault.name)
                group.start_soon(_act, course, fault)
        done += 1
        await _progress(course, name)
        await anyio.sleep(PAUSE_S * chance.random())


async def _act(course: _Course, fault: Fault) -> None:
    """Let a fault happen; one that cannot be brought about is a finding, and the campaign goes on."""
    scene = Scene(
        fleet=course.fleet,
        ground=course.ground,
        record=course.record,
        chance=random.Random(f"{course.chance.random()} {fault.name}"),  # noqa: S311  # to be repeated
        lease_s=course.plan.lease_s,
    )
    try:
        await fault.act(scene)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is reported
        course.record.found("campaign", f"{fault.name} could not be brought about: {error!r}")


def _draw(course: _Course) -> Sequence[Fault]:
    """Take the next fault from a shuffled deck of all kinds, at times one of the other sort too."""
    first = _next(course)
    others = [fault for fault in _kinds(course) if fault.touches != first.touches]
    if not others or course.chance.random() >= TOGETHER:
        return (first,)
    return (first, course.chance.choice(others))


def _next(course: _Course) -> Fault:
    if not course.deck:
        course.deck = list(_kinds(course))
        course.chance.shuffle(course.deck)
    return course.deck.pop()


def _kinds(course: _Course) -> list[Fault]:
    return [
        fault
        for fault in FAULTS
        if course.plan.store in fault.stores
        and (not course.plan.faults or fault.name in course.plan.faults)
        and fault.name not in course.record.left_out
    ]


# ---------------------------------------------------------------- the end


async def _settle(course: _Course, clients: _Clients) -> None:
    """Wait until the clients have seen their runs end, and everything has ended."""
    bound_s = max(SETTLE_S, 2 * course.bound_s)
    with anyio.move_on_after(bound_s) as scope:
        while clients.left:  # noqa: ASYNC110  # many clients, no bell
            await anyio.sleep(LOOK_S)
        async with open_core(_own_settings(course.ground)) as core:
            while await _is_unfinished(core):  # noqa: ASYNC110  # other processes ring no bell
                await anyio.sleep(LOOK_S)
    if scope.cancelled_caught:
        course.record.found("progress", f"not all had ended {bound_s:.0f} s after the last fault")


async def _is_unfinished(core: Core) -> bool:
    try:
        async for _ in all_runs(core, unfinished=True):
            return True
    except Unavailable:
        return True
    return False
