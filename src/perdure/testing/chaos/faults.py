"""The faults of a campaign. Each happens, lasts as long as it has to, and is over on return.

What it does to the world is all it knows; that new runs end afterwards is checked by the campaign.
"""

import random
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.to_thread
import asyncpg

from perdure.testing.chaos.fleet import Fleet, Place
from perdure.testing.chaos.grounds import Ground, PostgresGround, SqliteGround, StoreName
from perdure.testing.chaos.report import Record
from perdure.testing.proxy import FlakyProxy
from perdure.testing.stopping import DISTURBED

SLOW_STATEMENT_S = 0.2
LOSSES = 6
HALVES = 4
LOCK_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What faults are done to."""

    fleet: Fleet
    ground: Ground
    record: Record
    chance: random.Random
    lease_s: float


Act = Callable[[Scene], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: its name, its ids in the catalogue, where it applies and what it touches.

    Two faults that touch different things may happen at once.
    """

    name: str
    ids: tuple[str, ...]
    stores: tuple[StoreName, ...]
    touches: Literal["processes", "database"]
    act: Act


# ---------------------------------------------------------------- processes


async def kill_worker(scene: Scene) -> None:
    """End a worker as a power cut does."""
    async with scene.fleet.taken(scene.chance, scene.fleet.workers) as places:
        for place in places:
            scene.fleet.kill(place, scene.chance.uniform(0.0, 1.5 * scene.lease_s))


async def kill_server(scene: Scene) -> None:
    """End a server, in the midst of requests and streams."""
    async with scene.fleet.taken(scene.chance, scene.fleet.servers) as places:
        for place in places:
            scene.fleet.kill(place, scene.chance.uniform(0.0, 2.0))


async def kill_all(scene: Scene) -> None:
    """End all processes at once."""
    fleet = scene.fleet
    async with fleet.taken(scene.chance, fleet.places, len(fleet.places)) as places:
        for place in places:
            fleet.kill(place, 0.0)


async def drain_worker(scene: Scene) -> None:
    """Deploy: a worker is asked to end, and another one takes its place."""
    async with scene.fleet.taken(scene.chance, scene.fleet.workers) as places:
        for place in places:
            await scene.fleet.drain(place)


async def drain_server(scene: Scene) -> None:
    """Deploy a server."""
    async with scene.fleet.taken(scene.chance, scene.fleet.servers) as places:
        for place in places:
            await scene.fleet.drain(place)


async def stop_past_lease(scene: Scene) -> None:
    """Stop a worker for longer than its lease, and let it go on."""
    await _stop_worker(scene, 1.5 * scene.lease_s, scene.ground.url)


async def stop_within_lease(scene: Scene) -> None:
    """Stop a worker for less than its lease."""
    await _stop_worker(scene, 0.3 * scene.lease_s, scene.ground.url)


async def stop_anywhere(scene: Scene) -> None:
    """Stop a worker wherever it is, inside a transaction too, for longer than its lease."""
    await _stop_worker(scene, 1.5 * scene.lease_s, None)


async def _stop_worker(scene: Scene, for_s: float, url: str | None) -> None:
    fleet = scene.fleet
    async with fleet.taken(scene.chance, fleet.workers) as places:
        for place in places:
            await fleet.stop(place, url)
            await anyio.sleep(for_s)
            fleet.go_on(place)


async def stop_server(scene: Scene) -> None:
    """Stop a server for a while: its clients go elsewhere."""
    fleet = scene.fleet
    async with fleet.taken(scene.chance, fleet.servers) as places:
        for place in places:
            await fleet.stop(place, scene.ground.url)
            await anyio.sleep(scene.chance.uniform(0.5, 4.0))
            fleet.go_on(place)


async def swizzle(scene: Scene) -> None:
    """Stop several workers one after the other, and let them go on in another order."""
    fleet, chance = scene.fleet, scene.chance
    count = chance.randint(2, max(2, len(fleet.workers)))
    async with fleet.taken(chance, fleet.workers, count) as places:
        for place in places:
            await fleet.stop(place, scene.ground.url)
            await anyio.sleep(chance.uniform(0.0, 0.3 * scene.lease_s))
        await anyio.sleep(1.2 * scene.lease_s)
        for place in chance.sample(places, len(places)):
            fleet.go_on(place)
            await anyio.sleep(chance.uniform(0.0, 0.3 * scene.lease_s))


async def stop_and_kill(scene: Scene) -> None:
    """Stop a worker past its lease and kill it: it never learns of it."""
    fleet = scene.fleet
    async with fleet.taken(scene.chance, fleet.workers) as places:
        for place in places:
            await fleet.stop(place, scene.ground.url)
            await anyio.sleep(1.2 * scene.lease_s)
            fleet.kill(place, 0.0)


# ---------------------------------------------------------------- PostgreSQL


def _postgres(scene: Scene) -> PostgresGround:
    assert isinstance(scene.ground, PostgresGround)
    return scene.ground


async def restart_fast(scene: Scene) -> None:
    """Restart PostgreSQL as an operator does."""
    await anyio.to_thread.run_sync(_postgres(scene).server.restart, "fast")


async def restart_immediate(scene: Scene) -> None:
    """Restart PostgreSQL as after a crash: it recovers from its log."""
    await anyio.to_thread.run_sync(_postgres(scene).server.restart, "immediate")


async def kill_backends(scene: Scene) -> None:
    """Terminate all connections, or some of them, busy or idle."""
    share = scene.chance.choice([0.3, 1.0])
    try:
        connection = await asyncpg.connect(_postgres(scene).url, timeout=10)
    except (OSError, *DISTURBED):
        return  # the server is being restarted, which has ended them all
    try:
        await connection.execute(_TERMINATE, share)
    except (OSError, *DISTURBED):
        return
    finally:
        connection.terminate()


_TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
 WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < $1
"""


def _proxied(scene: Scene) -> list[tuple[Place, FlakyProxy]]:
    """Return the workers that come through a proxy, each with it."""
    ground, workers = _postgres(scene), scene.fleet.workers
    return [
        (place, ground.proxies[number])
        for number, place in enumerate(workers)
        if ground.is_proxied(number, len(workers))
    ]


async def lose_commit_replies(scene: Scene) -> None:
    """Let transactions be applied and their answers be lost, several times in a row."""
    for _, proxy in _proxied(scene):
        before = proxy.lost
        for _ in range(LOSSES):
            proxy.lose_answer(scene.chance.randint(1, 12))
            await anyio.sleep(scene.chance.uniform(0.05, 0.4))
        proxy.lose_no_answer()
        scene.record.count("wire", "answers of transactions lost", proxy.lost - before)


async def cut_in_the_middle(scene: Scene) -> None:
    """Cut connections in the midst of an answer or a request."""
    for _, proxy in _proxied(scene):
        before = proxy.halved
        for _ in range(HALVES):
            which = scene.chance.random() < 0.5
            proxy.halves_answer, proxy.halves_request = which, not which
            await anyio.sleep(scene.chance.uniform(0.05, 0.4))
        proxy.halves_answer = proxy.halves_request = False
        scene.record.count("wire", "messages cut in half", proxy.halved - before)


async def slow_statements(scene: Scene) -> None:
    """Let each statement take 200 ms for two leases."""
    ways = _proxied(scene)
    for _, proxy in ways:
        proxy.delay_s = SLOW_STATEMENT_S
    await anyio.sleep(2.0 * scene.lease_s)
    for _, proxy in ways:
        proxy.delay_s = 0.0


async def cut_off(scene: Scene) -> None:
    """Cut workers off from the database for longer than their lease, but from nothing else."""
    ways = _proxied(scene)
    for place, proxy in ways:
        scene.fleet.cut_off(place)
        proxy.refuses = True
        proxy.cut_all()
    await anyio.sleep(1.5 * scene.lease_s)
    for place, proxy in ways:
        proxy.refuses = False
        scene.fleet.joined_again(place)


async def restart_pooler(scene: Scene) -> None:
    """Restart the pooler of the workers that come through it."""
    pooler = _postgres(scene).pooler
    if pooler is not None:
        await anyio.to_thread.run_sync(pooler.restart)


# ---------------------------------------------------------------- SQLite


def _sqlite(scene: Scene) -> SqliteGround:
    assert isinstance(scene.ground, SqliteGround)
    return scene.ground


async def disk_full(scene: Scene) -> None:
    """Let the file system be full for a while."""
    disk = _sqlite(scene).disk
    if disk is None:
        return
    await anyio.to_thread.run_sync(disk.fill)
    try:
        await anyio.sleep(scene.chance.uniform(0.5, 1.5) * scene.lease_s)
    finally:
        disk.clear()


async def lock_database(scene: Scene) -> None:
    """Let another process hold the write lock, for up to twice the lease."""
    for_s = min(LOCK_S, scene.chance.uniform(0.2, 2.0) * scene.lease_s)
    with closing(await _connected(scene)) as connection:
        try:
            await anyio.to_thread.run_sync(connection.execute, "BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return  # the disk is full, or a process was stopped with the lock in its hand
        await anyio.sleep(for_s)
        connection.execute("ROLLBACK")


async def long_reader(scene: Scene) -> None:
    """Let another process keep a snapshot, so that the write-ahead log grows."""
    with closing(await _connected(scene)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        await anyio.sleep(scene.chance.uniform(1.0, 3.0) * scene.lease_s)
        connection.execute("ROLLBACK")


async def _connected(scene: Scene) -> sqlite3.Connection:
    path = _sqlite(scene).path
    return await anyio.to_thread.run_sync(
        lambda: sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
    )


BOTH: tuple[StoreName, ...] = ("sqlite", "postgres")


def _on(
    stores: Sequence[StoreName],
    touches: Literal["processes", "database"],
    acts: Sequence[tuple[str, str, Act]],
) -> list[Fault]:
    return [
        Fault(name=name, ids=tuple(ids.split()), stores=tuple(stores), touches=touches, act=act)
        for name, ids, act in acts
    ]


FAULTS: tuple[Fault, ...] = (
    *_on(
        BOTH,
        "processes",
        (
            ("kill worker", "F01", kill_worker),
            ("kill server", "F07", kill_server),
            ("kill all", "F09", kill_all),
            ("drain worker", "F06", drain_worker),
            ("drain server", "F06 F07", drain_server),
            ("stop past lease", "F03", stop_past_lease),
            ("stop within lease", "F04", stop_within_lease),
            ("stop and kill", "F01 F03", stop_and_kill),
            ("stop server", "F07 F32", stop_server),
            ("swizzle", "F05", swizzle),
        ),
    ),
    *_on(("postgres",), "processes", (("stop anywhere", "F03", stop_anywhere),)),
    *_on(
        ("postgres",),
        "database",
        (
            ("restart fast", "F12", restart_fast),
            ("restart immediate", "F12", restart_immediate),
            ("kill backends", "F14", kill_backends),
            ("lose commit replies", "F13", lose_commit_replies),
            ("cut in the middle", "F13", cut_in_the_middle),
            ("slow statements", "F22", slow_statements),
            ("cut off", "F28", cut_off),
            ("restart pooler", "F15", restart_pooler),
        ),
    ),
    *_on(
        ("sqlite",),
        "database",
        (
            ("disk full", "F19", disk_full),
            ("lock database", "F20", lock_database),
            ("long reader", "F20", long_reader),
        ),
    ),
)
