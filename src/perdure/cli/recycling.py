"""Starting a process afresh whose tools never came back: a stuck thread ends only with it."""

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import anyio

from perdure.engine.worker import Worker
from perdure.tools.runner import LocalToolRunner

LOOK_S = 1.0

log = logging.getLogger(__name__)


async def stop_when_lost(worker: Worker, stop: Callable[[], None]) -> None:
    """Call `stop` once code that never returned has used up what there is for it."""
    while isinstance(worker.tools, LocalToolRunner):
        await anyio.sleep(LOOK_S)
        if worker.tools.wants_recycle:
            log.error("too many tools never came back: the process starts afresh")
            stop()
            return


def start_afresh() -> NoReturn:
    """Put the same command in the place of this process."""
    command = [sys.executable, "-m", "perdure.cli.main", *sys.argv[1:]]
    os.execv(sys.executable, command)  # noqa: S606  # no shell is wanted
