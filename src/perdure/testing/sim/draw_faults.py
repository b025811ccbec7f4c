"""Draws what goes wrong in a seed."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from perdure.testing.faults import Boundary
from perdure.testing.sim.script import (
    FAULTS_END_S,
    WORKERS,
    Crash,
    Drain,
    Fault,
    FaultKind,
    Item,
    Jump,
    Keep,
    Pause,
    Profile,
    Release,
    Weather,
)

HOUR_S = 3600.0
_METHODS = (
    "insert_run",
    "claim_runs",
    "renew_leases",
    "commit",
    "commit",
    "commit",
    "request_cancel",
    "requeue_expired",
    "record_late",
    "release_runs",
    "take_away",
    "put_subscription",
    "expire_history",
    "register",
    "events_after",
    "find_run",
    "find_interrupt",
    "find_tool_call",
    "due_timers",
    "leases_of",
)
_KINDS: tuple[FaultKind, ...] = ("refused", "ack_lost", "ack_lost", "late", "slow")


def _crashes(chance: random.Random) -> list[Item]:
    return [
        Crash(_when(chance), chance.randrange(WORKERS), round(chance.uniform(0.0, 20.0), 3))
        for _ in range(chance.randint(0, 3))
    ]


def _pauses(chance: random.Random) -> list[Item]:
    return [
        Pause(_when(chance), chance.randrange(WORKERS), round(chance.uniform(1.0, 30.0), 3))
        for _ in range(chance.randint(0, 3))
    ]


def _drains(chance: random.Random) -> list[Item]:
    return [
        Drain(_when(chance), chance.randrange(WORKERS)) for _ in range(chance.choice([0, 0, 1]))
    ]


def _release(chance: random.Random) -> list[Item]:
    if chance.random() < 0.75:
        return []
    kinds: list[Any] = ["beside", "continues", "replaces"]
    each_s = round(chance.uniform(0.0, 6.0), 3)
    return [Release(round(chance.uniform(3.0, 25.0), 3), chance.choice(kinds), each_s)]


def _keep(chance: random.Random) -> list[Item]:
    if chance.random() < 0.75:
        return []
    return [Keep(0.0, chance.choice([None, 0.0, 10.0]), chance.choice([0.0, 15.0]))]


def _jumps(chance: random.Random) -> list[Item]:
    return [_jump(chance)] if chance.random() < 0.25 else []


def _many_jumps(chance: random.Random) -> list[Item]:
    return [_jump(chance) for _ in range(chance.randint(1, 4))]


def _jump(chance: random.Random) -> Jump:
    """The database's clock goes back by no more than what the rest of a play makes up for: until
    it has caught up no lease runs out.
    """
    worker = chance.choice([None, *range(WORKERS + 1)])
    steps = [-20.0, -1.0, 5.0, 15.0, 20.0, HOUR_S, 5 * HOUR_S]
    if worker is not None:
        steps += [-HOUR_S, -7 * HOUR_S]
    return Jump(_when(chance), worker, chance.choice(steps))


def _port_faults(chance: random.Random) -> list[Item]:
    return [
        Fault(
            0.0,
            chance.choice(_METHODS) if chance.random() < 0.5 else chance.choice(list(Boundary)),
            chance.choice([1, 1, 2, 3, 5, 8, 13, 30]),
            chance.choice(_KINDS),
            round(chance.uniform(0.05, 8.0), 3),
        )
        for _ in range(chance.randint(0, 10))
    ]


def commit_faults(chance: random.Random) -> list[Item]:
    """Lose commits, or their answers."""
    kinds: tuple[FaultKind, ...] = ("refused", "ack_lost", "late")
    return [
        Fault(
            0.0,
            "commit",
            chance.randint(1, 60),
            chance.choice(kinds),
            round(chance.uniform(0.05, 8.0), 3),
        )
        for _ in range(10)
    ]


def _boundary_crashes(chance: random.Random) -> list[Item]:
    kinds: tuple[FaultKind, ...] = ("crash", "crash_after", "pause")
    return [
        Fault(
            0.0,
            chance.choice(list(Boundary)),
            chance.choice([1, 1, 2, 3, 5, 8]),
            chance.choice(kinds),
            round(chance.uniform(0.5, 25.0), 3),
        )
        for _ in range(chance.randint(0, 5))
    ]


def weather(chance: random.Random) -> list[Item]:
    """Lose signals, send them twice or elsewhere."""
    lost = chance.choice([0.0, 0.1, 0.5, 1.0])
    return [Weather(0.0, lost, *(chance.choice([0.0, 0.2]) for _ in range(3)))]


def slow_commits(chance: random.Random) -> list[Item]:
    """Let much happen between what a run reads at its end and the commit that ends it."""
    return [
        Fault(0.0, "commit", chance.randint(1, 120), "slow", round(chance.uniform(0.05, 4.0), 3))
        for _ in range(25)
    ]


def _slowness(chance: random.Random) -> list[Item]:
    return [
        Fault(
            0.0,
            chance.choice(_METHODS),
            chance.randint(1, 40),
            "slow",
            round(chance.uniform(1.0, 20.0), 3),
        )
        for _ in range(20)
    ]


def _when(chance: random.Random) -> float:
    return round(chance.uniform(0.5, FAULTS_END_S), 3)


_Draw = Callable[[random.Random], list[Item]]
MIXED: Sequence[_Draw] = (
    _crashes,
    _pauses,
    _drains,
    _release,
    _keep,
    _jumps,
    _port_faults,
    _boundary_crashes,
    weather,
)
FAULTS: dict[Profile, Sequence[_Draw]] = {
    "mixed": MIXED,
    "calm": (),
    "crash": (_crashes, _drains, _boundary_crashes, _boundary_crashes),
    "signals": (weather,),
    "slow": (_slowness, weather),
    "clocks": (_many_jumps, _crashes, _keep),
    "commits": (commit_faults, _pauses),
    "agents": (_release, _drains, _port_faults, weather),
    "fields": (),
}
