"""Worker processes for tools with `isolation="process"`: what they do ends with them.

A few workers are kept and reused. Each leads its own session; at a timeout the whole process group
is killed. A worker gets an explicit environment, its output is drained and capped, and the end of
the parent ends it. One thread of the runner's pool drives a worker during a call and alone touches
its pipes; `interrupt` and `kill` wake that thread through a pipe of their own.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from perdure.engine.ports import ToolOutcome
from perdure.tools.frames import HEADER, AnswerFrame, CallFrame, packed

LOG_BYTES_MAX = 16 * 1024
CHUNK_BYTES = 256 * 1024
EXIT_WAIT_S = 2.0
ENVELOPE_BYTES = 1024 * 1024

ENVIRONMENT_NAMES = (
    "PATH",
    "HOME",
    "USER",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
"""What a worker inherits of the environment; nothing else, secrets least of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a call in a worker ended; `log` is the end of what the worker printed."""

    kind: Literal["ended", "refused", "crashed", "killed", "too_large"]
    started: bool
    outcome: ToolOutcome | None = None
    reason: str = ""
    log: str = ""


class _Worker:
    """A child process with its pipes."""

    def __init__(self, environment: Mapping[str, str], memory_bytes_max: int | None) -> None:
        child_in, self.to_child = os.pipe()
        self.from_child, child_out = os.pipe()
        self.log, child_log = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603 (our own interpreter and module)
                [
                    sys.executable,
                    "-m",
                    "perdure.tools.process_worker",
                    str(child_in),
                    str(child_out),
                    str(memory_bytes_max or 0),
                ],
                stdin=subprocess.DEVNULL,
                stdout=child_log,
                stderr=child_log,
                pass_fds=(child_in, child_out),
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            for pipe in (self.to_child, self.from_child, self.log):
                os.close(pipe)
            raise
        finally:
            for pipe in (child_in, child_out, child_log):
                os.close(pipe)
        for pipe in (self.to_child, self.from_child, self.log):
            os.set_blocking(pipe, False)

    def end(self) -> None:
        """Kill the worker and forget it."""
        self.kill()
        self.close()

    def close(self) -> None:
        """Close the pipes."""
        for pipe in (self.to_child, self.from_child, self.log):
            os.close(pipe)

    def kill(self) -> int | None:
        """Kill the whole group and reap the child; return its exit status."""
        # the child is not reaped yet, so its id cannot belong to another process
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(EXIT_WAIT_S)
        return None


class ProcessPool:
    """Keeps idle workers. Safe from several threads; `processes_max` is kept by the caller."""

    def __init__(
        self,
        *,
        environment: Mapping[str, str] | None = None,
        memory_bytes_max: int | None = None,
    ) -> None:
        self._environment = dict(environment or {})
        self._memory_bytes_max = memory_bytes_max
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> _Worker:
        """Return an idle worker or a fresh one; raise OSError when none can be started."""
        while True:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                return _Worker(self._child_environment(), self._memory_bytes_max)
            if worker.process.poll() is None:
                return worker
            worker.end()

    def give_back(self, worker: _Worker) -> None:
        """Keep a worker for the next call."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
                return
        worker.end()

    def close(self) -> None:
        """End the idle workers; those at work end with their calls."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.end()

    def _child_environment(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in ENVIRONMENT_NAMES if name in os.environ}
        paths = [path or str(Path.cwd()) for path in sys.path]
        return {**inherited, "PYTHONPATH": os.pathsep.join(paths), **self._environment}


class ProcessCall:
    """One call in a worker process. `run` blocks a pool thread; the rest is for the engine."""

    def __init__(self, pool: ProcessPool, frame: CallFrame) -> None:
        self._pool = pool
        self._frame = frame
        self._answer_bytes_max = 2 * frame.output_bytes_max + ENVELOPE_BYTES
        self._wake_read, self._wake_write = os.pipe()
        self._lock = threading.Lock()
        self._interrupted = False
        self._done = False
        self._started = False
        self._heard_more = False
        self._log = bytearray()
        self._answers = bytearray()
        self._request = memoryview(packed(frame))

    def interrupt(self) -> None:
        """Ask the tool to stop: KeyboardInterrupt in sync code, cancellation in async code."""
        self._wake(b"i")

    def kill(self) -> None:
        """Kill the worker and all that it started in its group."""
        self._wake(b"k")

    def discard(self) -> None:
        """Free what a call holds that was given up before it started."""
        self._close()

    def run(self) -> ProcessEnd:
        """Run the call to its end. Never raises for what the child does."""
        try:
            try:
                worker = self._pool.take()
            except OSError as error:
                return ProcessEnd(
                    kind="refused", started=False, reason=f"no process can be started: {error}"
                )
            return self._run_in(worker)
        finally:
            self._close()

    def _run_in(self, worker: _Worker) -> ProcessEnd:
        try:
            end = self._converse(worker)
        except BaseException:
            worker.end()
            raise
        if end.kind in {"ended", "refused"} and not self._interrupted:
            self._pool.give_back(worker)
            return end
        status = worker.kill()
        if end.kind == "killed":
            end = self._last_words(worker)
        elif end.kind == "crashed":
            end = self._end("crashed", reason=end.reason or _exit_text(status))
        worker.close()
        return end

    def _last_words(self, worker: _Worker) -> ProcessEnd:
        """Read what a killed worker had written: it writes `started` before it runs the tool."""
        while (end := self._read_answers(worker)) is None and self._heard_more:
            pass
        if end is not None and end.kind != "crashed":
            return end
        return self._end("killed", reason="it was killed")

    def _converse(self, worker: _Worker) -> ProcessEnd:
        with selectors.DefaultSelector() as selector:
            selector.register(worker.from_child, selectors.EVENT_READ)
            selector.register(worker.log, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            selector.register(worker.to_child, selectors.EVENT_WRITE)
            while True:
                for key, _ in selector.select():
                    end = self._serve(key.fd, worker, selector)
                    if end is not None:
                        return end

    def _serve(
        self, pipe: int, worker: _Worker, selector: selectors.BaseSelector
    ) -> ProcessEnd | None:
        if pipe == self._wake_read:
            return self._woken(worker)
        if pipe == worker.to_child:
            self._send(worker, selector)
            return None
        if pipe == worker.log:
            self._read_log(worker, selector)
            return None
        return self._read_answers(worker)

    def _woken(self, worker: _Worker) -> ProcessEnd | None:
        if b"k" in os.read(self._wake_read, 16) or not self._started:
            return self._end("killed")
        self._interrupted = True
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(signal.SIGINT)
        return None

    def _send(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        try:
            sent = os.write(worker.to_child, self._request)
        except BlockingIOError:
            return
        except OSError:  # it died: the end of its answers tells
            selector.unregister(worker.to_child)
            return
        self._request = self._request[sent:]
        if not self._request:
            selector.unregister(worker.to_child)

    def _read_log(self, worker: _Worker, selector: selectors.BaseSelector) -> None:
        chunk = os.read(worker.log, CHUNK_BYTES)
        if not chunk:
            selector.unregister(worker.log)
            return
        self._log += chunk
        del self._log[:-LOG_BYTES_MAX]

    def _read_answers(self, worker: _Worker) -> ProcessEnd | None:
        try:
            chunk = os.read(worker.from_child, CHUNK_BYTES)
        except BlockingIOError:
            chunk = None
        self._heard_more = bool(chunk)
        if chunk is None:
            return None
        if not chunk:
            self._drain_log(worker)
            return self._end("crashed")
        self._answers += chunk
        while len(self._answers) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._answers)
            if size > self._answer_bytes_max:
                return self._end("too_large", reason=f"its answer is {size} bytes long")
            if len(self._answers) < HEADER.size + size:
                return None
            body = bytes(self._answers[HEADER.size : HEADER.size + size])
            del self._answers[: HEADER.size + size]
            end = self._heard(body)
            if end is not None:
                return end
        return None

    def _heard(self, body: bytes) -> ProcessEnd | None:
        try:
            answer = AnswerFrame.model_validate_json(body)
            outcome = answer.outcome()
        except (ValidationError, ValueError):
            return self._end("crashed", reason="its answer cannot be read")
        match answer.kind:
            case "started":
                self._started = True
                return None
            case "ended":
                return ProcessEnd(kind="ended", started=True, outcome=outcome)
            case "refused":
                return self._end("refused", reason=answer.reason)

    def _drain_log(self, worker: _Worker) -> None:
        with contextlib.suppress(OSError):
            self._log += os.read(worker.log, CHUNK_BYTES)
            del self._log[:-LOG_BYTES_MAX]

    def _end(
        self, kind: Literal["refused", "crashed", "killed", "too_large"], reason: str = ""
    ) -> ProcessEnd:
        log = self._log.decode(errors="replace")
        return ProcessEnd(kind=kind, started=self._started, reason=reason, log=log)

    def _wake(self, byte: bytes) -> None:
        with self._lock:
            if not self._done:
                os.write(self._wake_write, byte)

    def _close(self) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                os.close(self._wake_read)
                os.close(self._wake_write)


def _exit_text(status: int | None) -> str:
    if status is None:
        return "its process does not end"
    if status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process exited with status {status}"
