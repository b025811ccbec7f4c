"""Runs of one worker that end on the same fields take turns.

An end is drafted from what a field holds and is thrown away when that has moved. Ends that are
drafted side by side would all lose against one of them, each time anew; one after the other, each
of them stands. Nothing depends on it: other workers are met by the versions of the rows. So one
whose commit is kept waiting, or whose reducer takes long, keeps each other for `HOLD_MAX_S` at most.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from perdure.engine.fields_kept import slots_at_end
from perdure.engine.ports import HostedAgent
from perdure.engine.view import RunView
from perdure.protocol.decisions import Decision, Finish

HOLD_MAX_S = 1.0
"""A turn is over after this time, whether its run has ended or not."""

SharedField = tuple[str, str, str, str]
"""A field that outlives runs: tenant, scope, whose it is, name."""


@dataclass(slots=True)
class _Turn:
    """An asyncio lock: it may be let go of by a timer, not only by the task that took it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    """How many hold it or wait for it."""


class Turns:
    """Who of one worker's runs may end on which fields."""

    def __init__(self) -> None:
        self._turns: dict[SharedField, _Turn] = {}

    @property
    def fields(self) -> set[SharedField]:
        """Return the fields that a run ends on or waits for."""
        return set(self._turns)

    @asynccontextmanager
    async def take(self, fields: Iterable[SharedField]) -> AsyncGenerator[None]:
        """Wait for the turn at all of the fields and hold it. All take them in the same order."""
        async with AsyncExitStack() as held:
            for name in sorted(fields):
                await held.enter_async_context(self._turn(name))
            yield

    @asynccontextmanager
    async def _turn(self, name: SharedField) -> AsyncGenerator[None]:
        turn = self._turns.setdefault(name, _Turn())
        turn.users += 1
        try:
            await turn.lock.acquire()
            over = False

            def end() -> None:
                nonlocal over
                if not over:
                    over = True
                    turn.lock.release()

            timer = asyncio.get_running_loop().call_later(HOLD_MAX_S, end)
            try:
                yield
            finally:
                timer.cancel()
                end()
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[name]


def fields_at_end(view: RunView, agent: HostedAgent, decision: Decision) -> set[SharedField]:
    """Return the fields that the run may leave something in when it ends as decided."""
    if not isinstance(decision, Finish):
        return set()
    facts = view.facts
    return {
        (facts.tenant_id, slot.scope, slot.agent or facts.thread_id, slot.name)
        for slot in slots_at_end(view, agent, decision)
    }
