"""A closed loop: as many runs in flight as asked for, until the time is over."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import anyio

WARM_UP_RUNS = 2


@dataclass(slots=True)
class Measured:
    """What a closed loop saw. Seconds."""

    runs: int = 0
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list[float])


async def closed_loop(
    one_run: Callable[[int], Awaitable[None]], *, concurrency: int, seconds: float
) -> Measured:
    """Run `one_run(seed)` in `concurrency` loops for about `seconds`; all of them are counted."""
    measured = Measured()
    for seed in range(WARM_UP_RUNS):
        await one_run(seed)
    seeds = iter(range(WARM_UP_RUNS, 10**9))
    started, cpu = time.monotonic(), time.process_time()
    until = started + seconds

    async def loop() -> None:
        while time.monotonic() < until:
            seed = next(seeds)
            begun = time.monotonic()
            await one_run(seed)
            measured.latencies_s.append(time.monotonic() - begun)
            measured.runs += 1

    async with anyio.create_task_group() as group:
        for _ in range(concurrency):
            group.start_soon(loop)
    measured.elapsed_s = time.monotonic() - started
    measured.cpu_s = time.process_time() - cpu
    return measured
