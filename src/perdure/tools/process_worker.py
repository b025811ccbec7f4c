"""The child side of `isolation="process"`: imports a tool, runs it, writes its outcome.

Started as `python -m perdure.tools.process_worker READ_FD WRITE_FD MEMORY_BYTES_MAX`. The end of
the request pipe means that the parent is gone: the whole process group is then killed, whatever
the tool is doing.
"""

import asyncio
import importlib
import logging
import os
import queue
import resource
import signal
import sys
import threading
from types import FrameType
from typing import Any

from perdure.engine.ports import ToolOutcome
from perdure.tools.api import Operation
from perdure.tools.caught import Caught
from perdure.tools.frames import HEADER, AnswerFrame, CallFrame, ended_frame, packed
from perdure.tools.jobs import Job, job_for
from perdure.tools.jobs import log as log_of_jobs
from perdure.tools.results import Checks


class _Refused(Exception):
    """The tool cannot be run here; nothing of it was started."""


def main(arguments: list[str]) -> None:
    """Serve calls until the parent closes the request pipe."""
    read_fd, write_fd, memory_bytes_max = (int(text) for text in arguments)
    for pipe in (read_fd, write_fd):
        os.set_inheritable(pipe, False)
    if memory_bytes_max:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    # until a tool runs, an interrupt that came too late for the last one is ignored
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(read_fd, requests), daemon=True).start()
    log_of_jobs.addHandler(logging.NullHandler())  # the parent logs what a tool raised
    checks = Checks()
    while True:
        frame = CallFrame.model_validate_json(requests.get())
        _write(write_fd, _answer(frame, checks, write_fd))


def _read_requests(read_fd: int, requests: "queue.SimpleQueue[bytes]") -> None:
    with os.fdopen(read_fd, "rb") as pipe:
        while True:
            header = pipe.read(HEADER.size)
            body = pipe.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""
            if not body:
                os.killpg(0, signal.SIGKILL)
            requests.put(body)


def _answer(frame: CallFrame, checks: Checks, write_fd: int) -> AnswerFrame:
    try:
        tool = _find(frame)
    except _Refused as error:
        return AnswerFrame(kind="refused", reason=str(error))
    checks.output_bytes_max = frame.output_bytes_max
    operation = getattr(tool, frame.kind)
    job = job_for(frame.invocation(tool.spec), operation, checks, kind=frame.kind)
    _write(write_fd, AnswerFrame(kind="started"))
    outcome: ToolOutcome | None = None
    with Caught() as caught:  # an exit in a task of the tool's own, too
        outcome = asyncio.run(_run_async(job)) if operation.is_async else _run_sync(job)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ended_frame(outcome if caught.error is None else job.end_in_error(caught.error))


def _run_sync(job: Job) -> ToolOutcome | None:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        job.request_stop("cancel")
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    return job.run()


async def _run_async(job: Job) -> ToolOutcome | None:
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        job.request_stop("cancel")
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
    return await job.run_async()


def _find(frame: CallFrame) -> Any:
    module_name, _, path = frame.import_path.partition(":")
    found: Any = None
    with Caught() as caught:  # importing runs code of the user
        found = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    if caught.error is not None:
        raise _Refused(f"{frame.import_path} cannot be imported: {caught.error!r}"[:2000])
    if not isinstance(getattr(found, "call", None), Operation):
        raise _Refused(f"{frame.import_path} is not a tool")
    if found.spec.definition_digest != frame.definition_digest:
        raise _Refused(f"{frame.import_path} has another definition in the worker process")
    if not isinstance(getattr(found, frame.kind, None), Operation):
        raise _Refused(f"{frame.import_path} has no {frame.kind}")
    return found


def _write(write_fd: int, frame: AnswerFrame) -> None:
    data = memoryview(packed(frame))
    while data:
        data = data[os.write(write_fd, data) :]


if __name__ == "__main__":
    main(sys.argv[1:])
