"""Runs tools: the one gate between the engine and code that may do anything (R-5.8).

Trusted tools run inline on the engine's loop, async tools of users on the user loop, sync ones in
threads, those with `isolation="process"` in child processes. What a tool does ends as an outcome
of its own call. An execution that is given up keeps its slot's replacement only up to a bound:
then new calls are TOOL_UNAVAILABLE and `wants_recycle` asks the worker for a new process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from types import TracebackType
from typing import Self, cast

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from pydantic import JsonValue

from perdure.engine.ports import ToolInvocation, ToolOutcome
from perdure.protocol.failures import FailureCode
from perdure.protocol.tools import ToolResult, ToolSpec
from perdure.protocol.values import BLOB_BYTES_MAX
from perdure.tools.api import Operation, Tool
from perdure.tools.bridge import Call
from perdure.tools.caught import Caught
from perdure.tools.frames import call_frame
from perdure.tools.jobs import Job, JobKind, copied, job_for
from perdure.tools.limits import KeptPlace, Rates, Slots
from perdure.tools.process import ProcessCall, ProcessEnd, ProcessPool
from perdure.tools.registry import ToolRegistry
from perdure.tools.results import (
    Checks,
    crashed,
    not_found,
    stopped,
    timed_out,
    too_large,
    unavailable,
    unknown,
)
from perdure.tools.usercode import UserCode

log = logging.getLogger(__name__)

_NO_PLACE = KeptPlace([])
"""What is kept for an execution that takes no slot."""

LOOKUP_TIMEOUT_S = 10.0
KILL_WAIT_S = 1.0
STOP_S = 10.0


class LocalToolRunner:
    """A ToolRunner over a registry, in this process. Use as an async context manager.

    A call waits for a slot and for its rate limit at most its timeout, and then answers
    TOOL_UNAVAILABLE; the timeout itself counts from the start of the tool. `slots_max` bounds
    executions at once of whatever kind, `processes_max` the worker processes among them. With
    `inline` everything runs on the engine's loop, for simulations.
    """

    def __init__(
        self,
        registry: ToolRegistry,
        *,
        grace_s: float = 5.0,
        output_bytes_max: int = BLOB_BYTES_MAX,
        slots_max: int = 128,
        lost_slots_max: int = 16,
        processes_max: int = 4,
        process_environment: Mapping[str, str] | None = None,
        process_memory_bytes_max: int | None = None,
        user_code: UserCode | None = None,
        inline: bool = False,
    ) -> None:
        self.registry = registry
        self.user_code = user_code or UserCode(lost_slots_max=lost_slots_max)
        self._owns_user_code = user_code is None
        self._grace_s = grace_s
        self._inline = inline
        self._checks = Checks(output_bytes_max=output_bytes_max)
        self._slots = Slots(slots_max)
        self._process_slots = Slots(processes_max)
        self._processes = ProcessPool(
            environment=process_environment, memory_bytes_max=process_memory_bytes_max
        )
        self._rates = Rates()

    async def __aenter__(self) -> Self:
        if self._owns_user_code:
            await self.user_code.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._processes.close()
        if self._owns_user_code:
            with anyio.move_on_after(STOP_S, shield=True):
                await self.user_code.__aexit__(kind, error, traceback)

    # ---------------------------------------------------------------- what the worker asks

    @property
    def free_slots(self) -> int:
        """Return how many more calls would start at once."""
        return 0 if self.user_code.exhausted else self._slots.free

    def reserve(self, spec: ToolSpec, timeout_s: float) -> KeptPlace | None:
        """Keep a place; see the port. What is refused anyway when it is run waits for nothing: when
        too many calls never returned, or its rate would let it wait longer than its timeout.
        """
        if 0 < self._rates.wait_s(spec) <= timeout_s:
            return None
        needed = self._needed(spec)
        if not needed:
            return _NO_PLACE
        taken: list[Slots] = []
        for slots in needed:
            if not slots.take_nowait():
                KeptPlace(taken).give_back()
                return None
            taken.append(slots)
        return KeptPlace(taken)

    async def wait_for_place(self, spec: ToolSpec, wait_s: float) -> None:
        """Wait for the place that a tool lacks; see the port."""
        rest_s = self._rates.wait_s(spec)
        if rest_s > 0:
            await anyio.sleep(min(wait_s, rest_s))
            return
        for slots in self._needed(spec):
            if slots.free == 0:
                await slots.wait(wait_s)
                return

    def _needed(self, spec: ToolSpec) -> list[Slots]:
        """Return of which slots an execution takes one each."""
        tool = self.registry.get(spec.name, spec.version)
        if tool is None or tool.spec.trusted or self._inline or self.user_code.exhausted:
            return []
        if tool.isolation == "process":
            return [self._slots, self._process_slots]
        return [self._slots]

    @property
    def lost_slots(self) -> int:
        """Return how many executions were given up and still run."""
        return self.user_code.lost_slots

    @property
    def wants_recycle(self) -> bool:
        """Tell whether so much is lost that this process should be replaced."""
        return self.user_code.exhausted

    def find(self, name: str, version: str | None) -> ToolSpec | None:
        """Return a tool's declaration; None for the version means the newest."""
        return self.registry.find(name, version)

    def problem_with_args(self, spec: ToolSpec, args: JsonValue) -> str | None:
        """Return what is wrong with arguments by the tool's schema, or None."""
        return self._checks.schemas.problem_with_args(spec, args)

    async def invoke(self, invocation: ToolInvocation) -> ToolOutcome:
        """Run a tool to an outcome; see the port."""
        spec = invocation.spec
        tool = self.registry.get(spec.name, spec.version)
        if tool is None:
            return ToolOutcome(result=not_found(spec.name, spec.version))
        if spec.rate_limit_per_minute is not None and not await self._rates.admit(
            spec, invocation.timeout_s
        ):
            return _unavailable(f"its limit is {spec.rate_limit_per_minute} calls a minute")
        operation = tool.call
        if invocation.body is not None:
            body = invocation.body
            operation = Operation(run=lambda _context, _args: body.run(), is_async=body.is_async)
        outcome = await self._run(tool, operation, invocation, "call")
        # only a lookup has none; should one be missing all the same, nothing is known of the effect
        return outcome or _outcome(unknown("the execution ended without a word"))

    async def lookup(self, invocation: ToolInvocation) -> ToolOutcome | None:
        """Ask the tool what became of an earlier execution; None: it cannot say (in 10 s)."""
        tool = self.registry.get(invocation.spec.name, invocation.spec.version)
        if tool is None or tool.lookup is None:
            return None
        return await self._run(tool, tool.lookup, invocation, "lookup")

    async def compensate(self, invocation: ToolInvocation) -> ToolOutcome:
        """Have a tool undo a call; see the port."""
        spec = invocation.spec
        tool = self.registry.get(spec.name, spec.version)
        if tool is None or tool.compensate is None:
            return ToolOutcome(result=not_found(spec.name, spec.version), begun=False)
        outcome = await self._run(tool, tool.compensate, invocation, "compensate")
        return outcome or _outcome(unknown("the compensation ended without a word"))

    # ---------------------------------------------------------------- where it runs

    async def _run(
        self, tool: Tool, operation: Operation, invocation: ToolInvocation, kind: JobKind
    ) -> ToolOutcome | None:
        execution = _Execution(
            self, job_for(invocation, operation, self._checks, kind=kind), invocation
        )
        if tool.spec.trusted or self._inline:
            return await execution.run_inline()
        place = invocation.place
        if place is None and not await self._slots.take_in_turn(execution.timeout_s):
            return execution.refuse(f"no slot became free within {execution.timeout_s:g} s")
        try:
            if tool.isolation == "process":
                return await self._run_in_process(tool, execution)
            if self.user_code.exhausted:
                return execution.refuse("too many earlier calls never returned")
            return await execution.run_beside()
        finally:
            if place is None:
                self._slots.give_back()

    async def _run_in_process(self, tool: Tool, execution: "_Execution") -> ToolOutcome | None:
        slots, place = self._process_slots, execution.invocation.place
        if place is None and not await slots.take_in_turn(execution.timeout_s):
            return execution.refuse(f"no process became free within {execution.timeout_s:g} s")
        try:
            frame = call_frame(
                execution.invocation,
                tool.import_path,
                self._checks.output_bytes_max,
                kind=execution.job.kind,
            )
            return await execution.run_in_process(ProcessCall(self._processes, frame))
        finally:
            if place is None:
                slots.give_back()

    @property
    def grace_s(self) -> float:
        """Return how long a cancelled execution is waited for."""
        return self._grace_s


class _Execution:
    """One execution on its way through the runner."""

    __slots__ = ("_runner", "_user_code", "invocation", "job", "timeout_s")

    def __init__(self, runner: LocalToolRunner, job: Job, invocation: ToolInvocation) -> None:
        self._runner = runner
        self._user_code = runner.user_code
        self.job = job
        self.invocation = invocation
        self.timeout_s = LOOKUP_TIMEOUT_S if job.is_lookup else invocation.timeout_s

    def refuse(self, reason: str) -> ToolOutcome | None:
        """Return the outcome of a call that never started."""
        return None if self.job.is_lookup else _unavailable(f"it was not started: {reason}")

    # ---------------------------------------------------------------- inline

    async def run_inline(self) -> ToolOutcome | None:
        """Run on the engine's loop, with the same handling of errors.

        Sync code has no timeout, and nothing can cancel the call while it runs.
        """
        if not self.job.operation.is_async:
            return self.job.run()
        outcome = await self._inline_outcome()
        try:
            await checkpoint_if_cancelled()
        except BaseException:
            if outcome is not None:
                self.invocation.on_late(outcome)
            raise
        return outcome

    async def _inline_outcome(self) -> ToolOutcome | None:
        job = self.job
        value: object = None
        with anyio.move_on_after(self.timeout_s) as scope:
            with Caught() as caught:
                running = job.operation.run(job.context, copied(job.args))
                value = await cast("Awaitable[object]", running)
            if isinstance(caught.error, anyio.get_cancelled_exc_class()) and _is_cancelled(scope):
                raise caught.error
            if caught.error is not None:
                return job.end_in_error(caught.error)
        return self._timed_out() if scope.cancelled_caught else job.end(value)

    # ---------------------------------------------------------------- user loop and threads

    async def run_beside(self) -> ToolOutcome | None:
        """Run on the user loop or in a thread."""
        try:
            call = self._start()
        except RuntimeError as error:
            return self.refuse(f"no thread can be started: {error}")
        try:
            ended = await call.wait(self.timeout_s)
        except BaseException:
            with anyio.move_on_after(self._runner.grace_s + KILL_WAIT_S, shield=True):
                await self._give_up(call)
            raise
        return call.value if ended else self._time_out(call)

    def _start(self) -> Call[ToolOutcome | None]:
        if self.job.operation.is_async:
            label = f"{self.job.spec.name} of run {self.invocation.run_id}"
            return self._user_code.run_async(self.job.run_async, label)
        return self._user_code.run_sync(self.job.run)

    def _time_out(self, call: Call[ToolOutcome | None]) -> ToolOutcome | None:
        if self._user_code.withdraw(call):
            return self.refuse(f"no thread was free within {self.timeout_s:g} s")
        self.job.request_stop("timeout")
        self._user_code.request_stop(call)
        self._user_code.abandon(call, self._report_late)
        return self._timed_out()

    def _timed_out(self) -> ToolOutcome | None:
        if self.job.is_lookup:
            return None
        result = timed_out(self.job.spec, self.timeout_s)
        ref = self.job.context.noted_ref
        return _outcome(result.model_copy(update={"external_ref": ref}))

    async def _give_up(self, call: Call[ToolOutcome | None]) -> None:
        """End a call whose caller is cancelled: ask, wait the grace period, abandon."""
        if not call.ended:
            if self._user_code.withdraw(call):
                return
            self.job.request_stop("cancel")
            self._user_code.request_stop(call)
            try:
                await call.wait(self._runner.grace_s)
            finally:
                if not call.ended:
                    self._user_code.abandon(call, self._report_late)
        if call.ended:
            self._report_late(call)

    def _report_late(self, call: Call[ToolOutcome | None]) -> None:
        if call.value is not None and not self.job.is_lookup:
            self.invocation.on_late(call.value)

    # ---------------------------------------------------------------- processes

    async def run_in_process(self, process: ProcessCall) -> ToolOutcome | None:
        """Run in a worker process; what is given up is killed, so nothing comes late."""
        try:
            call = self._user_code.run_sync(process.run)
        except RuntimeError as error:
            process.discard()
            return self.refuse(f"no thread can be started: {error}")
        try:
            ended = await call.wait(self.timeout_s)
        except BaseException:
            with anyio.move_on_after(self._runner.grace_s + 2 * KILL_WAIT_S, shield=True):
                await self._interrupt(call, process)
            raise
        if not ended:
            await self._kill(call, process)
            return self._judge(call) if call.ended else self._timed_out()
        return self._judge(call)

    async def _interrupt(self, call: Call[ProcessEnd], process: ProcessCall) -> None:
        process.interrupt()
        await call.wait(self._runner.grace_s)
        if not call.ended:
            await self._kill(call, process)
        end = call.value
        if end is None or self.job.is_lookup or not end.started:
            return
        self.job.stop = "cancel"
        outcome = self._judge(call)
        if outcome is not None:
            self.invocation.on_late(outcome)

    async def _kill(self, call: Call[ProcessEnd], process: ProcessCall) -> None:
        process.kill()
        with anyio.CancelScope(shield=True):
            await call.wait(KILL_WAIT_S)
        if not call.ended:
            self._user_code.abandon(call, lambda _: None)

    def _judge(self, call: Call[ProcessEnd]) -> ToolOutcome | None:
        if call.value is None:  # a fault of ours, not of the tool's
            raise call.error or RuntimeError("a process call ended without a word")
        end, spec = call.value, self.job.spec
        if self.job.is_lookup:
            return end.outcome if end.kind == "ended" else None
        if not end.started:
            return _unavailable(_with_log(end))
        if self.job.stop == "cancel" and end.kind in {"killed", "crashed"}:
            return _outcome(stopped(spec, "cancel"))
        match end.kind:
            case "ended":
                self._log_raised(end.outcome)
                return end.outcome
            case "too_large":
                return _outcome(too_large(end.reason))
            case "killed":
                return _outcome(timed_out(spec, self.timeout_s))
            case "refused" | "crashed":
                return _outcome(crashed(spec, _with_log(end)))

    def _log_raised(self, outcome: ToolOutcome | None) -> None:
        """Log an error that nobody meant to raise; its trace has stayed in the child."""
        error = None if outcome is None else outcome.result.error
        if error is not None and error.code is FailureCode.TOOL_ERROR and "at" in error.details:
            log.warning(
                "%s of %s raised %s at %s, run %s, call %s",
                self.job.kind,
                self.job.spec.name,
                error.reason,
                error.details["at"],
                self.invocation.run_id,
                self.invocation.tool_call_id,
                extra={"run_id": self.invocation.run_id},
            )


def _is_cancelled(scope: anyio.CancelScope) -> bool:
    """Tell a cancellation from outside, by scope or task, from one of the tool's own making."""
    task = asyncio.current_task()
    return scope.cancel_called or (task is not None and task.cancelling() > 0)


def _with_log(end: ProcessEnd) -> str:
    printed = end.log.strip()[-1000:]
    return f"{end.reason}; it printed: {printed}" if printed else end.reason


def _outcome(result: ToolResult) -> ToolOutcome:
    return ToolOutcome(result=result)


def _unavailable(reason: str) -> ToolOutcome:
    return ToolOutcome(result=unavailable(reason), begun=False)
