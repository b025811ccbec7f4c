"""The script of a seed: all that will be done and all that will go wrong, drawn before it begins.

It is a list, so that shrinking is leaving out. What an item concerns it names by number (the
third run, worker 2, the fifth commit of a kind); an item whose object does not exist does nothing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from perdure.protocol.states import CancelAction
from perdure.testing.faults import Boundary

WORKERS = 3
FAULTS_END_S = 60.0
"""When the faults are over, in seconds from the start; what they delayed may end later."""

Profile = Literal["mixed", "calm", "crash", "signals", "slow"]

FaultKind = Literal["refused", "ack_lost", "late", "slow", "crash", "crash_after", "pause"]


@dataclass(frozen=True, slots=True)
class Submit:
    """Order a run: its steps are its input. Runs with the same group share a thread."""

    at: float
    run: int
    agent: str
    steps: tuple[JsonValue, ...]
    group: int | None
    strategy: str
    max_attempts: int
    run_s: float | None
    twice: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a run."""

    at: float
    run: int
    action: CancelAction


@dataclass(frozen=True, slots=True)
class Crash:
    """End a worker as kill -9 does; another takes its place after a while."""

    at: float
    worker: int
    back_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop a worker as SIGSTOP does, for a while."""

    at: float
    worker: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Jump:
    """Set a clock: that of a worker, or the database's (None)."""

    at: float
    worker: int | None
    by_s: float


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong when a method of a port, or a boundary, is met for the nth time."""

    at: float
    where: str
    nth: int
    kind: FaultKind
    amount_s: float


@dataclass(frozen=True, slots=True)
class Weather:
    """How many of the signals are lost, doubled, sent to others or late."""

    at: float
    lost: float
    doubled: float
    misdirected: float
    late: float


@dataclass(frozen=True, slots=True)
class People:
    """How people answer: how slowly, how often two of them at once, and whether they agree."""

    at: float
    pause_s: float
    doubled: float
    opposite: float
    idle: float


Item = Submit | Cancel | Crash | Pause | Jump | Fault | Weather | People


@dataclass(frozen=True, slots=True)
class Script:
    """What happens in a seed."""

    seed: int
    items: tuple[Item, ...]
    profile: Profile = "mixed"


def draw_script(seed: int, profile: Profile = "mixed") -> Script:
    """Return the script of a seed."""
    chance = random.Random(f"{profile} {seed}")  # noqa: S311  # to be repeated, not to be secret
    runs = _runs(chance)
    faults: list[Item] = []
    for draw in _PROFILES[profile]:
        faults += draw(chance)
    people = People(
        at=0.0,
        pause_s=chance.uniform(1.0, 8.0),
        doubled=chance.choice([0.0, 0.3, 0.8]),
        opposite=chance.choice([0.0, 0.5]),
        idle=chance.choice([0.0, 0.2]),
    )
    items = sorted([*runs, *_cancels(chance, runs), people, *faults], key=lambda i: i.at)
    return Script(seed, tuple(items), profile)


# ---------------------------------------------------------------- what callers do


def _runs(chance: random.Random) -> list[Submit]:
    count = chance.randint(2, 7)
    return [_submit(chance, number) for number in range(count)]


def _submit(chance: random.Random, number: int) -> Submit:
    grouped = chance.random() < 0.3
    return Submit(
        at=round(chance.uniform(0.0, 30.0), 3),
        run=number,
        agent=chance.choice(["loop", "loop", "code"]),
        steps=tuple(_steps(chance, 0)),
        group=chance.randrange(2) if grouped else None,
        strategy=chance.choice(["enqueue", "enqueue", "reject", "interrupt", "rollback"]),
        max_attempts=chance.choice([2, 5, 10]),
        run_s=chance.choice([None, None, None, 20.0, 60.0]),
        twice=chance.random() < 0.1,
    )


def draw_steps(chance: random.Random) -> list[JsonValue]:
    """Return the steps of one run: calls, children, questions, sleeps."""
    return _steps(chance, 0)


def _steps(chance: random.Random, depth: int) -> list[JsonValue]:
    return [_step(chance, depth) for _ in range(chance.randint(1, 4))]


_TOOLS = (
    "echo",
    "slow",
    "pay",
    "pay",
    "pay_idempotent",
    "pay_with_lookup",
    "publish",
    "publish",
    "flaky",
    "draw",
)


def _step(chance: random.Random, depth: int) -> JsonValue:
    kind = chance.random()
    if kind < 0.65 or (kind < 0.85 and depth >= 2):
        count = chance.choice([1, 1, 2, 3])
        calls: list[JsonValue] = [
            [chance.choice(_TOOLS), chance.randint(1, 99)] for _ in range(count)
        ]
        return ["call", calls]
    if kind < 0.75:
        count = chance.randint(1, 3)
        children: list[JsonValue] = [_steps(chance, depth + 1) for _ in range(count)]
        return ["spawn", children, chance.random() < 0.8]
    if kind < 0.87:
        return ["ask", chance.randint(1, 99)]
    return ["sleep", round(chance.uniform(0.1, 12.0), 3)]


def _cancels(chance: random.Random, runs: Sequence[Submit]) -> list[Item]:
    cancels: list[Item] = []
    for _ in range(chance.choice([0, 1, 1, 2])):
        run = chance.choice(runs)
        at = round(run.at + chance.uniform(0.1, 15.0), 3)
        cancels.append(Cancel(at, run.run, chance.choice(list(CancelAction))))
    return cancels


# ---------------------------------------------------------------- what goes wrong

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
    "events_after",
    "find_run",
    "due_timers",
)
_KINDS: tuple[FaultKind, ...] = ("refused", "ack_lost", "ack_lost", "late", "slow")


def _crashes(chance: random.Random) -> list[Item]:
    return [
        Crash(_when(chance), chance.randrange(WORKERS), round(chance.uniform(0.0, 25.0), 3))
        for _ in range(chance.randint(0, 3))
    ]


def _pauses(chance: random.Random) -> list[Item]:
    return [
        Pause(_when(chance), chance.randrange(WORKERS), round(chance.uniform(1.0, 30.0), 3))
        for _ in range(chance.randint(0, 3))
    ]


def _jumps(chance: random.Random) -> list[Item]:
    """A clock that is wrong for long makes timers and sleeps of code as long: not drawn."""
    if chance.random() < 0.75:
        return []
    worker = chance.choice([None, *range(WORKERS)])
    steps = [-20.0, -1.0, 5.0, 15.0, 20.0 if worker is not None else 3600.0]
    return [Jump(_when(chance), worker, chance.choice(steps))]


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


def _weather(chance: random.Random) -> list[Item]:
    lost = chance.choice([0.0, 0.1, 0.5, 1.0])
    return [Weather(0.0, lost, *(chance.choice([0.0, 0.2]) for _ in range(3)))]


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
_PROFILES: dict[Profile, Sequence[_Draw]] = {
    "mixed": (_crashes, _pauses, _jumps, _port_faults, _boundary_crashes, _weather),
    "calm": (),
    "crash": (_crashes, _boundary_crashes, _boundary_crashes),
    "signals": (_weather,),
    "slow": (_slowness, _weather),
}
PROFILES: tuple[Profile, ...] = tuple(_PROFILES)
