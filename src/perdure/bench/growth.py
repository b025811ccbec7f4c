"""W2: does a run's thousandth step cost what its first did, in time, bytes and recovery?

Recovery is measured from the start of a process to the first tool it runs in a run whose worker
died at step 10 or 1,000; the lease has run out before. A thread of many short runs shows that what
was said is stored once.
"""

import subprocess
import sys
import time
from statistics import median

from pydantic import BaseModel

from perdure.bench.growth_child import LEASE_S, LONG_STEPS, GrowthJob, GrowthSeen
from perdure.bench.measure import Bench
from perdure.bench.payloads import ARGS_BYTES, RESULT_BYTES

WINDOW = 100
EARLY_STEP = 10
REPETITIONS = 3
THREAD_RUNS = 200
CHILD_LIMIT_S = 600.0


class GrowthRow(BaseModel):
    """W2 on one store. Times in milliseconds; `recovery_ms` is the one at the last step.

    `thread_bytes` is what `thread_messages` of a kilobyte in `thread_runs` runs take.
    """

    workload: str = "w2"
    store: str
    steps: int
    first_ms_per_step: float
    last_ms_per_step: float
    last_over_first: float
    bytes_per_run: int
    information_per_run: int
    bytes_over_information: float
    recovery_ms: float
    recovery_early_ms: float
    thread_messages: int
    thread_runs: int
    thread_bytes: int


def measure_growth(bench: Bench, store: str) -> GrowthRow:
    """Return W2 on one store."""
    with bench.database(store) as (url, size):
        _take(GrowthJob(what="thread", url=url, runs=2))  # the first pages of each table
        before = size()
        marks = _take(GrowthJob(what="long", url=url)).marks_s
        stored = size() - before
    first, last = marks[WINDOW] - marks[0], marks[LONG_STEPS] - marks[LONG_STEPS - WINDOW]
    with bench.database(store) as (url, size):
        _take(GrowthJob(what="thread", url=url, runs=2))
        before = size()
        _take(GrowthJob(what="thread", url=url, runs=THREAD_RUNS))
        thread_bytes = size() - before
    information = LONG_STEPS * (ARGS_BYTES + RESULT_BYTES)
    return GrowthRow(
        store=store,
        steps=LONG_STEPS,
        first_ms_per_step=round(first / WINDOW * 1000, 3),
        last_ms_per_step=round(last / WINDOW * 1000, 3),
        last_over_first=round(last / first, 3),
        bytes_per_run=stored,
        information_per_run=information,
        bytes_over_information=round(stored / information, 3),
        recovery_ms=_recovery_ms(bench, store, LONG_STEPS - 1),
        recovery_early_ms=_recovery_ms(bench, store, EARLY_STEP),
        thread_messages=2 * THREAD_RUNS,
        thread_runs=THREAD_RUNS,
        thread_bytes=thread_bytes,
    )


def _recovery_ms(bench: Bench, store: str, step: int) -> float:
    """Return the median time from a process's start to its first action in a run that was left."""
    seen: list[float] = []
    for _ in range(REPETITIONS):
        with bench.database(store) as (url, _):
            _take(GrowthJob(what="die", url=url, steps=step))
            time.sleep(LEASE_S + 0.2)  # the lease runs out: not part of the measurement
            started = time.monotonic()
            seen.append(_take(GrowthJob(what="recover", url=url)).acted_at_s - started)
    return round(median(seen) * 1000, 1)


def _take(job: GrowthJob) -> GrowthSeen:
    done = subprocess.run(  # our own module, our own arguments
        [sys.executable, "-m", "perdure.bench.growth_child"],
        input=job.model_dump_json(),
        capture_output=True,
        text=True,
        timeout=CHILD_LIMIT_S,
        check=False,
    )
    if done.returncode != 0 or (job.what != "die" and not done.stdout):
        raise RuntimeError(f"a measurement failed: {done.stderr[-2000:]}")
    return GrowthSeen.model_validate_json(done.stdout) if done.stdout else GrowthSeen()


def describe_growth(row: GrowthRow) -> str:
    """Return W2 on one store as a line."""
    return (
        f"{row.workload} {row.store:9} {row.first_ms_per_step:.2f} -> {row.last_ms_per_step:.2f}"
        f" ms/step ({row.last_over_first:.2f} x)  {row.bytes_over_information:.2f} x information"
        f"  recovery {row.recovery_early_ms:.0f} -> {row.recovery_ms:.0f} ms"
        f"  {row.thread_messages} messages {row.thread_bytes / 1e6:.2f} MB"
    )
