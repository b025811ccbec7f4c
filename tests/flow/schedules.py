"""Random schedules of answers: three branches that ask twice, answered by two sessions (B4)."""

import random
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from perdure.agents.code import Context, agent
from perdure.engine.answers import Answered, Reply, answer_interrupt
from perdure.engine.core import Core
from perdure.engine.feed import follow
from perdure.protocol.base import TENANT_DEFAULT
from perdure.protocol.errors import AlreadyAnswered
from perdure.protocol.events import InterruptEvent, ResumeEvent, StateEvent
from perdure.protocol.states import TERMINAL, Answer, RunState

BRANCHES = 3
ROUNDS = 2
WAIT_S = 60.0


@agent("asker", "1")
async def asker(ctx: Context, input: object) -> object:
    """Ask twice in each of three branches, with a step after each answer."""

    async def branch(number: int) -> list[Any]:
        told: list[Any] = []
        for turn in range(ROUNDS):
            word = await ctx.interrupt({"branch": number, "turn": turn})
            told.append(await ctx.step(str.upper, word, name="note"))
        return told

    return await ctx.gather(*[branch(number) for number in range(BRANCHES)])


def answer_to(payload: Any) -> str:
    """Return what a question is to be answered."""
    return f"b{payload['branch']} t{payload['turn']}"


EXPECTED = [[f"B{number} T{turn}" for turn in range(ROUNDS)] for number in range(BRANCHES)]


async def play(cores: Sequence[Core], run_id: str, seed: int) -> None:
    """Answer everything a run asks, in an order and by sessions that the seed chooses.

    Each answer is given twice at once, the second sometimes another one: one counts.
    """
    chance = random.Random(seed)  # noqa: S311  # a schedule, no secret
    questions: dict[str, Any] = {}
    closed: set[str] = set()
    with anyio.fail_after(WAIT_S):
        async with follow(cores[0], run_id, 0) as cursor:
            while not cursor.ended:
                for event in await cursor.read(wait_s=WAIT_S):
                    match event.data:
                        case InterruptEvent() as asked:
                            questions[asked.interrupt_id] = asked.payload
                        case ResumeEvent() as resume:
                            assert resume.interrupt_id not in closed, "answered twice"
                            closed.add(resume.interrupt_id)
                        case StateEvent(state=RunState.WAITING_HUMAN):
                            await _answer_all(cores, questions, chance)
                        case StateEvent() as end if end.state in TERMINAL:
                            assert end.answer == EXPECTED, (seed, end)
                        case _:
                            pass
    assert len(closed) == BRANCHES * ROUNDS


async def _answer_all(
    cores: Sequence[Core], questions: dict[str, Any], chance: random.Random
) -> None:
    order = sorted(questions, key=lambda interrupt_id: answer_to(questions[interrupt_id]))
    chance.shuffle(order)
    for interrupt_id in order:
        right = answer_to(questions.pop(interrupt_id))
        first, second = chance.sample(list(cores), 2)
        told: list[Answered] = []
        if chance.random() < 0.5:
            async with anyio.create_task_group() as group:
                group.start_soon(_answer, first, interrupt_id, right, told)
                group.start_soon(_answer, second, interrupt_id, right, told)
            assert sorted(item.replayed for item in told) == [False, True]
        else:
            await _answer(first, interrupt_id, right, told)
            with pytest.raises(AlreadyAnswered):
                await _answer(second, interrupt_id, "something else", told)


async def _answer(core: Core, interrupt_id: str, value: str, told: list[Answered]) -> None:
    reply = Reply(answer=Answer.RESPOND, by="ada", value=value)
    told.append(await answer_interrupt(core, TENANT_DEFAULT, interrupt_id, reply))
