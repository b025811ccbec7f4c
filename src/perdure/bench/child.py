"""One measurement in a process of its own: reads what to measure from stdin, prints what it saw.

`{"what": "w1" | "floor", "url": …, "concurrency": …, "seconds": …, "signals": …, "isolated": …}`
"""

import json
import os
import sys
from pathlib import Path
from typing import Literal

import anyio
from pydantic import BaseModel

from perdure.bench.floor_postgres import FloorPostgres
from perdure.bench.floor_sqlite import FloorSqlite
from perdure.bench.loop import Measured, closed_loop
from perdure.bench.workload import AGENT_ID, catalog
from perdure.engine.feed import wait_for_end
from perdure.engine.submit import RunOrder, submit_run
from perdure.ops.process import tune_interpreter
from perdure.ops.settings import Settings
from perdure.protocol.runs import Caller, RunContext, RunOptions
from perdure.protocol.states import RunState
from perdure.runtime import open_runtime

RUN_LIMIT_S = 60.0


class Job(BaseModel):
    """What to measure."""

    what: Literal["w1", "floor"]
    url: str
    concurrency: int
    seconds: float
    signals: Literal["auto", "local"] = "auto"
    isolated: bool = False


class Seen(BaseModel):
    """What was measured."""

    runs: int
    elapsed_s: float
    cpu_s: float
    latencies_ms: list[float]


async def measure_floor(job: Job) -> Measured:
    """Measure the minimal writes."""
    path = job.url.removeprefix("sqlite:///")
    floor = FloorSqlite(Path(path)) if path != job.url else FloorPostgres(job.url)
    async with floor:
        return await closed_loop(floor.one_run, concurrency=job.concurrency, seconds=job.seconds)


async def measure_w1(job: Job) -> Measured:
    """Measure the runtime: create a run, wait for its end, check that it succeeded."""
    settings = Settings.model_validate({"db": {"url": job.url}, "signals": job.signals})
    caller = Caller(tenant_id="default", principal="bench")
    async with open_runtime(settings, catalog(isolated=job.isolated)) as runtime:
        core = runtime.service.core
        tune_interpreter()

        async def one_run(seed: int) -> None:
            order = RunOrder(
                agent_id=AGENT_ID,
                input=seed,
                context=RunContext(),
                options=RunOptions(),
                caller=caller,
                fingerprint="",
            )
            submitted = await submit_run(core, order)
            row = await wait_for_end(core, submitted.row.facts.run_id, RUN_LIMIT_S)
            assert row.hot.state is RunState.SUCCEEDED, row.hot.state

        return await closed_loop(one_run, concurrency=job.concurrency, seconds=job.seconds)


def main() -> None:
    """Measure what stdin asks for."""
    job = Job.model_validate_json(sys.stdin.read())
    measured = anyio.run(measure_w1 if job.what == "w1" else measure_floor, job)
    seen = Seen(
        runs=measured.runs,
        elapsed_s=measured.elapsed_s,
        cpu_s=measured.cpu_s,
        latencies_ms=[value * 1000 for value in measured.latencies_s],
    )
    json.dump(seen.model_dump(), sys.stdout)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
