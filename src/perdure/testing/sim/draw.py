"""Draws the script of a seed, before anything of it begins: by the seed and the profile alone."""

import random
from collections.abc import Sequence
from typing import Literal

from pydantic import JsonValue

from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.states import CancelAction, CancelOption
from perdure.testing.sim.draw_faults import FAULTS, MIXED, commit_faults, slow_commits, weather
from perdure.testing.sim.script import (
    Adopt,
    Again,
    Cancel,
    Forget,
    Item,
    People,
    Profile,
    Provider,
    Script,
    Submit,
    Subscribe,
)

PROFILES: tuple[Profile, ...] = tuple(FAULTS)
GROUPS = 2
TOPICS = ("news", "orders")


def draw_script(seed: int, profile: Profile = "mixed") -> Script:
    """Return the script of a seed."""
    chance = random.Random(f"{profile} {seed}")  # noqa: S311  # to be repeated, not to be secret
    if profile == "fields":
        return Script(seed, tuple(sorted(_fields(chance), key=lambda item: item.at)), profile)
    runs = _runs(chance, profile)
    items: list[Item] = [*runs, *_callers(chance, runs), _people(chance), _provider(chance)]
    for draw in FAULTS[profile]:
        items += draw(chance)
    return Script(seed, tuple(sorted(items, key=lambda item: item.at)), profile)


# ---------------------------------------------------------------- what callers do


def _runs(chance: random.Random, profile: Profile) -> list[Submit]:
    count = chance.randint(2, 6)
    grouped = 0.8 if profile == "agents" else 0.35
    return [_submit(chance, number, grouped) for number in range(count)]


def _submit(chance: random.Random, number: int, grouped: float) -> Submit:
    is_grouped = chance.random() < grouped
    agent = chance.choice(["loop", "loop", "loop", "code", "code", "talk"])
    return Submit(
        at=round(chance.uniform(0.0, 24.0), 3),
        run=number,
        agent=agent,
        steps=tuple(_steps(chance, 1 if agent == "talk" else 0)),
        group=chance.randrange(GROUPS) if is_grouped else None,
        strategy=chance.choice(_STRATEGIES),
        max_attempts=chance.choice([2, 5, 10]),
        run_s=chance.choice([None, None, None, 20.0, 60.0]),
        approval_s=chance.choice([None, None, 8.0]),
        after_s=chance.choice([None, None, None, None, 6.0]),
        priority=chance.choice([0, 0, 0, 5, -5]),
        breakpoints=_breakpoints(chance),
        twice=chance.random() < 0.1,
    )


_STRATEGIES = (
    "enqueue",
    "enqueue",
    "reject",
    "interrupt",
    "rollback",
    "fork",
    "optimistic",
    "optimistic",
)


def _breakpoints(chance: random.Random) -> tuple[tuple[str, str | None], ...]:
    if chance.random() < 0.85:
        return ()
    points = ["before_step", "after_step", "before_tool", "after_tool"]
    drawn: list[tuple[str, str | None]] = []
    for _ in range(chance.choice([1, 1, 2])):
        point = chance.choice(points)
        about = chance.choice([None, "pay", "echo", "publish"]) if "tool" in point else None
        drawn.append((point, about))
    return tuple(drawn)


def draw_steps(chance: random.Random) -> list[JsonValue]:
    """Return the steps of one run of plain tools: calls, children, questions, sleeps."""
    return [_plain_step(chance, 0) for _ in range(chance.randint(1, 4))]


_PLAIN_TOOLS = (
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


def _plain_step(chance: random.Random, depth: int) -> JsonValue:
    kind = chance.random()
    if kind < 0.65 or (kind < 0.85 and depth >= 2):
        return _calls(chance, _PLAIN_TOOLS)
    if kind < 0.75:
        children: list[JsonValue] = [
            [_plain_step(chance, depth + 1) for _ in range(chance.randint(1, 4))]
            for _ in range(chance.randint(1, 3))
        ]
        return ["spawn", children, chance.random() < 0.8]
    if kind < 0.87:
        return ["ask", chance.randint(1, 99)]
    return ["sleep", round(chance.uniform(0.1, 12.0), 3)]


def _calls(chance: random.Random, tools: Sequence[str]) -> JsonValue:
    count = chance.choice([1, 1, 2, 3])
    return ["call", [[chance.choice(tools), chance.randint(1, 99)] for _ in range(count)]]


def _steps(chance: random.Random, depth: int) -> list[JsonValue]:
    return [_step(chance, depth) for _ in range(chance.randint(1, 4 - min(depth, 2)))]


_TOOLS = (
    "echo",
    "slow",
    "pay",
    "pay",
    "pay_idempotent",
    "pay_idempotent",
    "pay_with_lookup",
    "publish",
    "publish",
    "transfer",
    "order",
    "order_with_lookup",
    "flaky",
    "draw",
)


def _step(chance: random.Random, depth: int) -> JsonValue:
    kind = chance.random()
    if kind < 0.56 or (kind < 0.66 and depth >= 2):
        return _calls(chance, _TOOLS)
    if kind < 0.66:
        count = chance.randint(1, 3)
        children: list[JsonValue] = [_steps(chance, depth + 1) for _ in range(count)]
        return ["spawn", children, chance.random() < 0.8, chance.random() < 0.15]
    if kind < 0.76:
        return ["ask", chance.randint(1, 99), chance.choice([None, None, 6.0])]
    if kind < 0.84:
        return ["sleep", round(chance.uniform(0.1, 10.0), 3)]
    if kind < 0.92:
        return ["tell", chance.choice(TOPICS), chance.randint(1, 99)]
    if kind < 0.96:
        return ["note", chance.randint(1, 99)]
    return ["handoff"]


def _callers(chance: random.Random, runs: Sequence[Submit]) -> list[Item]:
    """What is asked of runs and threads that are there."""
    items: list[Item] = []
    for _ in range(chance.choice([0, 1, 1, 2])):
        run = chance.choice(runs)
        at = round(run.at + chance.uniform(0.1, 15.0), 3)
        options = CancelOption(chance.choice([0, 0, 1, 1, 2, 3]))
        items.append(Cancel(at, run.run, chance.choice(list(CancelAction)), options))
    modes: list[Literal["retry", "redrive", "fork"]] = ["retry", "redrive", "fork"]
    for _ in range(chance.choice([0, 0, 0, 1, 2])):
        run = chance.choice(runs)
        at = round(run.at + chance.uniform(3.0, 25.0), 3)
        items.append(Again(at, run.run, chance.choice(modes)))
    return [*items, *_threads(chance)]


def _threads(chance: random.Random) -> list[Item]:
    items: list[Item] = []
    for group in range(GROUPS):
        for _ in range(chance.choice([0, 1, 2])):
            at = round(chance.uniform(0.0, 12.0), 3)
            topic, agent = chance.choice(TOPICS), chance.choice(["loop", "code"])
            items.append(Subscribe(at, group, topic, agent))
            if chance.random() < 0.2:
                later = round(at + chance.uniform(0.0, 20.0), 3)
                items.append(Subscribe(later, group, topic, agent, ends=True))
        if chance.random() < 0.1:
            items.append(Forget(round(chance.uniform(10.0, 60.0), 3), group))
    return items


def _people(chance: random.Random) -> People:
    return People(
        at=0.0,
        pause_s=chance.uniform(1.0, 8.0),
        doubled=chance.choice([0.0, 0.3, 0.8]),
        opposite=chance.choice([0.0, 0.5]),
        idle=chance.choice([0.0, 0.2]),
        deaf=chance.choice([0.0, 0.4]),
    )


def _provider(chance: random.Random) -> Provider:
    return Provider(
        at=0.0,
        late_s=chance.choice([0.5, 6.0, 15.0]),
        doubled=chance.choice([0.0, 0.3, 0.8]),
        opposite=chance.choice([0.0, 0.5]),
        silent=chance.choice([0.0, 0.3]),
    )


# ---------------------------------------------------------------- fields that outlive their runs

TENANT_OTHER = "other"
KEEPING = ("keeper", "keeper", "keeper", "keeper.code", "keeper.code")
NUMBER_MAX = 10**6


def _fields(chance: random.Random) -> list[Item]:
    """Return the items of a play about fields: of many runs that keep to few threads and agents."""
    crowd = round(chance.uniform(0.0, 10.0), 3) if chance.random() < 0.35 else None
    count = chance.randint(3, 8)
    runs = [_keeping(chance, number, crowd) for number in range(count)]
    mine = [run for run in runs if run.tenant_id == TENANT_DEFAULT]
    items: list[Item] = [*runs, _people(chance), _provider(chance)]
    if mine:
        items += _on_keepers(chance, mine)
    draws = (
        [*MIXED, commit_faults, slow_commits, slow_commits]
        if chance.random() < 0.8
        else [weather, slow_commits]
    )
    for draw in draws:
        if chance.random() < 0.6:
            items += draw(chance)
    return items


def _keeping(chance: random.Random, number: int, crowd: float | None) -> Submit:
    at = chance.uniform(0.0, 16.0) if crowd is None else crowd + chance.uniform(0.0, 0.05)
    is_other = chance.random() < 0.15
    plain = is_other or chance.random() < 0.3
    steps_count = chance.randint(1, 4) if crowd is None else chance.choice([0, 1, 1, 2])
    steps: list[JsonValue] = [_keeping_step(chance, 0, plain) for _ in range(steps_count)]
    if chance.random() < 0.4:
        steps.append(["stumble"])
    if chance.random() < 0.5 or not steps:
        steps.append(["last", _number(chance)])
    is_grouped = chance.random() < 0.6
    group = GROUPS if is_other else chance.randrange(GROUPS)
    return Submit(
        at=round(at, 3),
        run=number,
        agent=chance.choice(KEEPING),
        steps=tuple(steps),
        group=group if is_grouped else None,
        strategy=chance.choice((*_STRATEGIES, "optimistic", "enqueue")),
        max_attempts=chance.choice([2, 5, 10]),
        run_s=chance.choice([None, None, None, None, 20.0]),
        approval_s=chance.choice([None, None, 8.0]),
        priority=chance.choice([0, 0, 0, 5, -5]),
        breakpoints=() if is_other else _breakpoints(chance),
        twice=chance.random() < 0.1,
        tenant_id=TENANT_OTHER if is_other else TENANT_DEFAULT,
    )


def _number(chance: random.Random) -> int:
    return chance.randint(1, NUMBER_MAX)


_PLAIN_JOTS = ("jot", "jot", "jot_slow", "jot_slow", "jot_flaky", "echo")
_JOTS = (*_PLAIN_JOTS, "jot_paid", "jot_paid", "pay", "publish", "order", "flaky")


def _keeping_step(chance: random.Random, depth: int, plain: bool) -> JsonValue:
    """Return a step; a `plain` one asks nobody, and changes nothing outside."""
    kind, tools = chance.random(), _PLAIN_JOTS if plain else _JOTS
    if kind < 0.55:
        calls: list[JsonValue] = [
            [chance.choice(tools), _number(chance)] for _ in range(chance.choice([1, 1, 2, 3]))
        ]
        return ["keep", _number(chance), calls]
    if kind < 0.67:
        return ["both", _number(chance), _number(chance)]
    if kind < 0.76:
        return ["sleep", round(chance.uniform(0.1, 6.0), 3)]
    if kind < 0.84:
        return ["handoff"]
    if kind < 0.92 and depth < 1:
        children: list[JsonValue] = [
            [_keeping_step(chance, depth + 1, plain) for _ in range(chance.randint(1, 2))]
            for _ in range(chance.randint(1, 3))
        ]
        return ["spawn", children, chance.random() < 0.8]
    if plain:
        return ["call", [["slow", chance.randint(1, 99)]]]
    return ["ask", chance.randint(1, 99), chance.choice([None, None, 6.0])]


def _on_keepers(chance: random.Random, runs: Sequence[Submit]) -> list[Item]:
    """What is asked of runs that keep something: most of all to go on from them."""
    items: list[Item] = []
    for _ in range(chance.choice([0, 1, 1, 2])):
        run = chance.choice(runs)
        at = round(run.at + chance.uniform(0.1, 15.0), 3)
        items.append(Cancel(at, run.run, chance.choice(list(CancelAction)), CancelOption.NONE))
    modes: list[Literal["retry", "redrive", "fork"]] = ["retry", "redrive", "fork", "fork"]
    for _ in range(chance.choice([0, 1, 2, 3, 5])):
        run = chance.choice(runs)
        at = round(run.at + chance.uniform(1.0, 30.0), 3)
        mode = chance.choice(modes)
        items.append(Again(at, run.run, mode))
        if mode == "fork" and chance.random() < 0.4:
            items.append(Adopt(round(at + chance.uniform(2.0, 25.0), 3), run.run))
    if chance.random() < 0.1:
        items.append(Forget(round(chance.uniform(10.0, 60.0), 3), chance.randrange(GROUPS)))
    return items
