"""The drill of `--crash`: a worker that kills itself at the worst moments, and its watchman.

The worker is a real process and dies by SIGKILL: once right after the SQL tool has run, before
its result is committed, and once while publishing, when the publication is in its place but the
tool has not returned. A mark on disk makes each happen once; the watchman starts the next worker.
"""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio

from perdure.demo import publish, sales
from perdure.demo.timeline import Timeline
from perdure.ops.process import stop_child
from perdure.protocol.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")

AFTER_SQL = "after-sql"
WHILE_PUBLISHING = "while-publishing"
DEATHS = {
    AFTER_SQL: "right after the SQL tool ran: its result was not committed",
    WHILE_PUBLISHING: "while publishing: the publication is there, the worker did not learn of it",
}

STARTS_MAX = 10
STOP_S = 10.0
SHOWN_AFTER_S = 0.3
"""What the dead worker had committed is shown before its death is."""


def arm(marks: Path) -> None:
    """Make this process kill itself at both moments, unless its mark is there already."""
    sales.falling_products = _fatal_once(marks / AFTER_SQL, sales.falling_products)
    publish.put_in_place = _fatal_once(marks / WHILE_PUBLISHING, publish.put_in_place)


def _fatal_once(mark: Path, function: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return result
        os.kill(os.getpid(), signal.SIGKILL)
        return result

    return call


@asynccontextmanager
async def mortal_worker(
    marks: Path, environment: Mapping[str, str], timeline: Timeline
) -> AsyncGenerator[None]:
    """Keep a worker running, and start another one each time it kills itself.

    `marks` is an empty folder; `environment` holds the worker's settings.
    """
    async with anyio.create_task_group() as group:
        group.start_soon(_keep_running, marks, environment, timeline)
        yield
        group.cancel_scope.cancel()


async def _keep_running(marks: Path, environment: Mapping[str, str], timeline: Timeline) -> None:
    log = marks / "worker.log"
    for number in range(1, STARTS_MAX + 1):
        died_of = _marked(marks)
        code = await _run_once(marks, environment, log)
        new = sorted(_marked(marks) - died_of)
        await anyio.sleep(SHOWN_AFTER_S)
        if code != -signal.SIGKILL or not new:
            raise Unavailable(f"worker {number} ended with {code}; its log is {log}")
        timeline.say(f"   worker {number} killed (SIGKILL) {DEATHS[new[0]]}", "bold red")
        timeline.say(
            f"   worker {number + 1} starts; the lease of the dead one has to expire", "red"
        )
    raise Unavailable(f"the worker died {STARTS_MAX} times")


def _marked(marks: Path) -> set[str]:
    return {name for name in DEATHS if (marks / name).exists()}


async def _run_once(marks: Path, environment: Mapping[str, str], log: Path) -> int:
    """Run a worker until it ends; when cancelled, ask it to stop by closing its stdin."""
    command = [sys.executable, "-P", "-m", "perdure.demo.worker", str(marks)]
    with log.open("ab") as errors:
        process = await anyio.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        return await process.wait()
    finally:
        with anyio.move_on_after(2 * STOP_S, shield=True):
            await stop_child(process, STOP_S)
