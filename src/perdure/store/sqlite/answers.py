"""Answers of a thread to those who wait in event loops: one call into each loop for all of them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Asked:
    """What a thread was asked for: who waits, and in which loop."""

    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


@dataclass(slots=True)
class Outcome:
    """What came of it: a value or an error."""

    asked: Asked
    value: object = None
    error: Exception | None = None


def answer_all(outcomes: Sequence[Outcome]) -> None:
    """Answer from a thread, with one call into each loop."""
    loops: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for outcome in outcomes:
        loops.setdefault(outcome.asked.loop, []).append(outcome)
    for loop, mine in loops.items():
        try:
            loop.call_soon_threadsafe(resolve, mine)
        except RuntimeError:  # the loop is closed: nobody waits any more
            continue


def resolve(outcomes: Sequence[Outcome]) -> None:
    """Answer from the loop itself; whoever was cancelled waits no more."""
    for outcome in outcomes:
        answer = outcome.asked.answer
        if answer.done():
            continue
        if outcome.error is None:
            answer.set_result(outcome.value)
        else:
            answer.set_exception(outcome.error)
