"""Calling a held run's tools: arguments, time limit, and asking what became of an execution."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

import anyio

from perdure.engine.closing import invocation_of
from perdure.engine.held import Finished, HeldRun
from perdure.engine.ports import ToolOutcome
from perdure.engine.results import Known, runtime_result
from perdure.engine.snapshot import OpenCall
from perdure.protocol.codec import decode
from perdure.protocol.errors import Unavailable
from perdure.protocol.failures import FailureCode
from perdure.protocol.states import ToolCallStatus
from perdure.protocol.tools import ToolSpec


async def fetch_args(attempt: HeldRun, call: OpenCall) -> None:
    """Load the arguments of a call that are kept by reference, however long the store is away."""
    if call.args_ref is None or call.args is not None:
        return
    core, tenant = attempt.around.core, attempt.view.facts.tenant_id
    data: bytes | None = None
    while True:
        with suppress(Unavailable):
            data = await core.reader.read_blob(tenant, call.args_ref.digest)
            break
        attempt.check_lease()
        await anyio.sleep(core.settings.poll_interval_s)
    if data is None:
        raise LookupError(f"the arguments {call.args_ref.digest} are not stored")
    call.args = decode(data)


def time_limit_s(attempt: HeldRun, spec: ToolSpec) -> float:
    """Return the shorter of what the tool and the run allow, else the default."""
    of_tool, of_run = spec.timeout_s, attempt.view.facts.options.timeouts.tool_s
    if of_tool is not None and of_run is not None:
        return min(of_tool, of_run)
    given = of_run if of_tool is None else of_tool
    return attempt.around.core.settings.tool_timeout_s if given is None else given


async def clarify(attempt: HeldRun, call: OpenCall) -> Finished:
    """Find out about an execution whose worker is gone (R-5.7)."""
    number = attempt.view.executions_of(call.tool_call_id).count
    spec = attempt.around.tools.find(call.tool, call.version)
    if spec is not None and spec.has_lookup:
        await fetch_args(attempt, call)
        attempt.check_lease()
        known = await _look_up(attempt, call, spec)
        if known is not None:
            return Finished(call=call, execution=number, outcome=known, source="lookup")
    reason = "the worker was lost while the call ran"
    if call.overdue:
        reason = "no callback came in time"
    outcome = runtime_result(ToolCallStatus.UNKNOWN, FailureCode.TOOL_OUTCOME_UNKNOWN, reason)
    return Finished(call=call, execution=number, outcome=outcome, source="lost")


async def looked_up(attempt: HeldRun, item: Finished) -> Finished:
    """Ask the tool once more when its execution ended with an unknown outcome."""
    if item.outcome.result.status is not ToolCallStatus.UNKNOWN or item.source != "tool":
        return item
    spec = attempt.around.tools.find(item.call.tool, item.call.version)
    if spec is None or not spec.has_lookup:
        return item
    known = await _look_up(attempt, item.call, spec)
    if known is None:
        return item
    return Finished(call=item.call, execution=item.execution, outcome=known, source="lookup")


async def _look_up(attempt: HeldRun, call: OpenCall, spec: ToolSpec) -> ToolOutcome | None:
    limit_s = time_limit_s(attempt, spec)
    return await attempt.around.tools.lookup(
        invocation_of(attempt.view, call, spec, timeout_s=limit_s)
    )


def known_of(came: Iterable[Finished], told: Mapping[str, Known]) -> dict[str, Known]:
    """Return what is known of calls that have not ended: what came of them, and what lookups told.

    An execution that was cut off does not know its outcome: then what was told counts.
    """
    known = dict(told)
    for item in came:
        is_unknown = item.outcome.result.status is ToolCallStatus.UNKNOWN
        if not is_unknown or item.call.tool_call_id not in known:
            by = "runtime" if item.source == "lost" else item.source
            known[item.call.tool_call_id] = Known(outcome=item.outcome, by=by)
    return known
