"""The script of a seed: all that will be done and all that will go wrong.

It is a list, so that shrinking is leaving out. What an item concerns it names by number (the
third run, worker 2, the fifth commit of a kind); an item whose object does not exist does nothing.
"""

from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.states import CancelAction, CancelOption

WORKERS = 3
FAULTS_END_S = 45.0
"""When the faults are over, in seconds from the start; what they delayed may end later."""

Profile = Literal[
    "mixed", "calm", "crash", "signals", "slow", "clocks", "agents", "commits", "fields"
]

FaultKind = Literal["refused", "ack_lost", "late", "slow", "crash", "crash_after", "pause"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Order a run: its steps are its input. Runs with the same group share a thread.

    `breakpoints` are points, or points and the tool that they are about.
    """

    at: float
    run: int
    agent: str
    steps: tuple[JsonValue, ...]
    group: int | None = None
    strategy: str = "enqueue"
    max_attempts: int = 5
    run_s: float | None = None
    approval_s: float | None = None
    after_s: float | None = None
    priority: int = 0
    breakpoints: tuple[tuple[str, str | None], ...] = ()
    twice: bool = False
    tenant_id: str = TENANT_DEFAULT


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a run."""

    at: float
    run: int
    action: CancelAction
    options: CancelOption = CancelOption.NONE


@dataclass(frozen=True, slots=True)
class Again:
    """Go on from a run's history in another one."""

    at: float
    run: int
    mode: Literal["retry", "redrive", "fork"]


@dataclass(frozen=True, slots=True)
class Adopt:
    """Let a run's thread say what the newest fork of the run says."""

    at: float
    run: int


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Subscribe an agent to a topic of the thread of a group, or end that."""

    at: float
    group: int
    topic: str
    agent: str
    ends: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete the thread of a group."""

    at: float
    group: int


@dataclass(frozen=True, slots=True)
class Keep:
    """How long the histories of ended runs are kept, and content that nothing uses."""

    at: float
    ended_s: float | None
    content_s: float


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
class Drain:
    """Stop a worker in order; another takes its place when it has handed back what it held."""

    at: float
    worker: int


@dataclass(frozen=True, slots=True)
class Release:
    """Bring a release with other versions of the agents, one worker after the other."""

    at: float
    kind: Literal["beside", "continues", "replaces"]
    each_s: float


@dataclass(frozen=True, slots=True)
class Jump:
    """Set a clock: that of a worker, the callers' (the next number), or the database's (None)."""

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
    """How people answer: how slowly, how often two of them at once, and whether they agree.

    `deaf`: how often approvers cannot be told that they are asked.
    """

    at: float
    pause_s: float
    doubled: float
    opposite: float
    idle: float
    deaf: float = 0.0


@dataclass(frozen=True, slots=True)
class Provider:
    """How the world calls back: how late, how often twice or never, and whether it agrees."""

    at: float
    late_s: float
    doubled: float
    opposite: float
    silent: float


Item = (
    Submit
    | Cancel
    | Again
    | Adopt
    | Subscribe
    | Forget
    | Keep
    | Crash
    | Pause
    | Drain
    | Release
    | Jump
    | Fault
    | Weather
    | People
    | Provider
)


@dataclass(frozen=True, slots=True)
class Script:
    """What happens in a seed."""

    seed: int
    items: tuple[Item, ...]
    profile: Profile = "mixed"
