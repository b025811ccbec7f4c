"""Admission to a runner: slots for executions at once, and the rate limits of tools.

Both run on the engine's loop only and hand out in the order of asking.
"""

from collections import deque
from dataclasses import dataclass

import anyio

from perdure.protocol.tools import ToolSpec

_TICK_S = 1e-9


class Slots:
    """A number of places, taken and given back."""

    def __init__(self, slots_max: int) -> None:
        self._free = slots_max
        self._waiting: deque[anyio.Event] = deque()

    @property
    def free(self) -> int:
        """Return how many would be given out without waiting."""
        return self._free if not self._waiting else 0

    def take_nowait(self) -> bool:
        """Take a slot if one is free and nobody waits for it."""
        if self._free <= 0 or self._waiting:
            return False
        self._free -= 1
        return True

    async def take_in_turn(self, timeout_s: float) -> bool:
        """Take a slot, waiting at most so long; return whether it was given."""
        return self.take_nowait() or await self.take(timeout_s)

    async def wait(self, timeout_s: float) -> None:
        """Return once a slot may be free, or after a time; takes none."""
        if await self.take(timeout_s):
            self.give_back()

    async def take(self, timeout_s: float) -> bool:
        """Wait for a slot at most so long; return whether it was given."""
        turn = anyio.Event()
        self._waiting.append(turn)
        try:
            with anyio.move_on_after(timeout_s):
                await turn.wait()
        except BaseException:
            if turn.is_set():
                self.give_back()
            raise
        finally:
            if not turn.is_set():
                self._waiting.remove(turn)
        return turn.is_set()

    def give_back(self) -> None:
        """Give a slot back: to the one who has waited longest, if any."""
        if self._waiting:
            self._waiting.popleft().set()
        else:
            self._free += 1


@dataclass(slots=True)
class KeptPlace:
    """A slot of each kind that an execution needs; they go back together, once."""

    taken: list[Slots]

    def give_back(self) -> None:
        """Give them back."""
        while self.taken:
            self.taken.pop().give_back()


@dataclass(slots=True)
class _Bucket:
    full_at: float


class Rates:
    """A token bucket per tool name: a minute's worth at once at most, refilled evenly.

    Kept as the one instant at which the bucket will be full again (GCRA). It counts this process
    only.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def wait_s(self, spec: ToolSpec) -> float:
        """Return how long a call would wait for the tool's turn now; takes none."""
        per_minute = spec.rate_limit_per_minute
        bucket = None if per_minute is None else self._buckets.get(spec.name)
        if per_minute is None or bucket is None:
            return 0.0
        now = anyio.current_time()
        wait_s = max(bucket.full_at, now) + 60.0 / per_minute - now - 60.0
        return wait_s if wait_s > _TICK_S else 0.0

    async def admit(self, spec: ToolSpec, wait_max_s: float) -> bool:
        """Wait for the tool's turn; False, without a wait, when that takes longer than allowed."""
        per_minute = spec.rate_limit_per_minute
        if per_minute is None:
            return True
        now = anyio.current_time()
        interval_s = 60.0 / per_minute
        bucket = self._buckets.setdefault(spec.name, _Bucket(now))
        full_at = max(bucket.full_at, now) + interval_s
        wait_s = full_at - now - 60.0
        if wait_s > wait_max_s:
            return False
        bucket.full_at = full_at
        if wait_s > _TICK_S:
            await anyio.sleep(wait_s)
        return True
