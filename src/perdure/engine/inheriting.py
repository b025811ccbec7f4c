"""Making ready a call that a run takes over from its origin."""

from dataclasses import replace

from perdure.engine.core import Core
from perdure.engine.history import load_value
from perdure.engine.sharing import undone_elsewhere
from perdure.engine.snapshot import OpenCall
from perdure.engine.view import RunView
from perdure.protocol.states import ToolCallStatus
from perdure.protocol.values import Value

_MAY_HAVE_HAPPENED = frozenset(
    {
        ToolCallStatus.RUNNING,
        ToolCallStatus.PENDING,
        ToolCallStatus.SUCCEEDED,
        ToolCallStatus.PARTIAL,
        ToolCallStatus.TIMED_OUT,
        ToolCallStatus.UNKNOWN,
    }
)


async def taken_over(core: Core, view: RunView, call: OpenCall) -> OpenCall:
    """Return the call with its arguments whole, and whether its effect may have happened.

    What has become of it since the shared part of the log is read from its row. A fork goes on
    beside its origin, which carries the call out itself: one that had not begun there gets a key of
    its own, so that no two runs act under one. So does one whose effect another run that took it over
    has undone: under the old key nothing would happen any more.
    """
    tenant = view.facts.tenant_id
    args = await load_value(core, tenant, Value(inline=call.args, ref=call.args_ref))
    row = await core.reader.find_tool_call(tenant, call.tool_call_id)
    status = call.status if row is None else row.status
    in_doubt = call.may_have_happened or status in _MAY_HAVE_HAPPENED
    if not in_doubt:
        heeded = status is ToolCallStatus.FAILED and call.repeatable  # it may have acted and failed
        keeps = view.facts.forked_from is None or heeded
        return replace(call, args=args, effect_key=call.effect_key if keeps else "")
    undone = await undone_elsewhere(core, view.facts, call.effect_key)
    return replace(
        call,
        args=args,
        may_have_happened=undone == "unknown" or (undone != "succeeded" and not call.repeatable),
        effect_key="" if undone in {"succeeded", "unknown"} else call.effect_key,
    )
