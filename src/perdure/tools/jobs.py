"""One execution of a tool as a piece of work that always ends in an outcome, never in an error."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, cast

from pydantic import JsonValue

from perdure.engine.blame import trace_in_code
from perdure.engine.ports import ToolInvocation, ToolOutcome
from perdure.protocol.tools import ToolSpec
from perdure.tools.api import Operation, ToolContext, ToolError, ToolUnavailable
from perdure.tools.caught import Caught
from perdure.tools.results import Checks, Stop, conclude, conclude_error

JobKind = Literal["call", "lookup", "compensate"]
"""Which of a tool's operations is run."""

log = logging.getLogger(__name__)

_EXPECTED = (ToolError, ToolUnavailable, asyncio.CancelledError)
"""What tools raise to say something; it is told to the planner, and no news to an operator."""


@dataclass(slots=True)
class Job:
    """What is to be run, with what, and how its end is judged.

    `stop` is set by the runner before it asks the code to stop, so that a cancellation that was
    asked for is told from one of the tool's own making. A lookup may answer None: it cannot say.
    """

    spec: ToolSpec
    operation: Operation
    context: ToolContext
    args: JsonValue
    checks: Checks
    kind: JobKind = "call"
    stop: Stop | None = None

    @property
    def is_lookup(self) -> bool:
        """Tell whether the code only says what became of an earlier execution."""
        return self.kind == "lookup"

    def run(self) -> ToolOutcome | None:
        """Run sync code to its outcome."""
        value: object = None
        with Caught() as caught:
            value = self.operation.run(self.context, copied(self.args))
        if caught.error is not None:
            return self.end_in_error(caught.error)
        if inspect.iscoroutine(value):
            value.close()
        return self.end(value)

    async def run_async(self) -> ToolOutcome | None:
        """Run async code to its outcome, its cancellation included."""
        value: object = None
        with Caught() as caught:
            running = self.operation.run(self.context, copied(self.args))
            value = await cast("Awaitable[object]", running)
        return self.end(value) if caught.error is None else self.end_in_error(caught.error)

    def end(self, value: object) -> ToolOutcome | None:
        """Return the outcome of code that returned a value."""
        if self.is_lookup and value is None:
            return None
        return conclude(value, self.spec, self.context, self.checks)

    def end_in_error(self, error: BaseException) -> ToolOutcome | None:
        """Return the outcome of code that raised; a lookup that raised cannot say."""
        if not (isinstance(error, _EXPECTED) or self.stop is not None):
            self._log(error)
        if self.is_lookup:
            return None
        return conclude_error(error, self.spec, self.context, self.stop)

    def _log(self, error: BaseException) -> None:
        """Log what nobody meant to raise, with its trace; arguments are not shown."""
        with Caught():  # an error's __str__ is user code
            context = self.context
            log.warning(
                "%s of %s raised %s, run %s, call %s",
                self.kind,
                self.spec.name,
                type(error).__name__,
                context.run_id,
                context.tool_call_id,
                exc_info=(type(error), error, trace_in_code(error) or error.__traceback__),
                extra={"run_id": context.run_id},
            )

    def request_stop(self, stop: Stop) -> None:
        """Note why the code is asked to stop, and let it see that it is."""
        self.stop = stop
        self.context.request_stop()


def job_for(
    invocation: ToolInvocation, operation: Operation, checks: Checks, *, kind: JobKind = "call"
) -> Job:
    """Return the work of an invocation. What undoes a call answers to no schema of the tool, and is
    repeatable by a word of its own.
    """
    spec = invocation.spec
    if kind == "compensate":
        spec = spec.model_copy(
            update={"output_schema": None, "idempotent": spec.compensate_idempotent}
        )
    return Job(
        spec,
        operation,
        ToolContext(invocation),
        invocation.args,
        checks,
        kind,
    )


def copied(value: JsonValue) -> JsonValue:
    """Return a copy of a JSON value that shares nothing that can be changed."""
    if isinstance(value, dict):
        return {
            key: copied(item) if isinstance(item, (dict, list)) else item
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value
