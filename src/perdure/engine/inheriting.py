"""Making ready a call that a run takes over from its origin."""

from collections.abc import Collection, Mapping
from dataclasses import replace

from perdure.engine.elsewhere import is_forked_off
from perdure.engine.history import load_value
from perdure.engine.kin import Kin
from perdure.engine.snapshot import OpenCall, is_side_effect
from perdure.engine.undone import MAY_HAVE_ACTED, has_left
from perdure.engine.view import RunView
from perdure.protocol.records import ToolCallRow
from perdure.protocol.states import ToolCallStatus
from perdure.protocol.values import Value


async def taken_over(
    kin: Kin,
    view: RunView,
    call: OpenCall,
    undone: Mapping[str, str],
    elsewhere: Collection[str],
) -> OpenCall:
    """Return the call with its arguments whole, and whether its effect may have happened.

    What has become of it since the shared part of the log is read from its row. A fork goes on
    beside its origin, which carries the call out itself: one that had not begun there gets a key of
    its own, so that no two runs act under one. So does one whose effect another run that took it over
    has undone: under the old key nothing would happen any more. A person is asked where it is not
    known whether that was undone, or a run that shares the history cannot be read; and where another
    run makes the call under the same key, as two retries of one run do: also when one of several
    that have made it was undone. `undone`: what became of undoing effects elsewhere, by keys;
    `elsewhere`: the keys of calls that others make.
    """
    tenant = view.facts.tenant_id
    args = await load_value(kin.core, tenant, Value(inline=call.args, ref=call.args_ref))
    row = await kin.core.reader.find_tool_call(tenant, call.tool_call_id)
    status = call.status if row is None else row.status
    in_doubt = call.may_have_happened or status in MAY_HAVE_ACTED
    if row is not None and not call.repeatable:
        in_doubt = in_doubt or await has_left(kin.core, row)
    heeded = status is ToolCallStatus.FAILED and call.repeatable  # it may have acted and failed
    origin = "" if row is None else row.run_id
    keeps = in_doubt or heeded or not await is_forked_off(kin, view.facts, origin)
    in_doubt = in_doubt or (keeps and call.effect_key in elsewhere)
    word = undone.get(call.effect_key)
    leaves_doubt = is_side_effect(call.side_effect) or not call.repeatable
    if word != "succeeded" and kin.is_part and keeps and leaves_doubt:
        word = "unknown"
    if word == "succeeded":
        keeps = False
        if row is not None and await _is_undone(kin, row, tenant):
            in_doubt = call.effect_key in elsewhere
    return replace(
        call,
        args=args,
        may_have_happened=word == "unknown" or (in_doubt and not call.repeatable),
        effect_key=call.effect_key if keeps else "",
    )


async def _is_undone(kin: Kin, call: ToolCallRow, tenant: str) -> bool:
    run = await kin.find(call.run_id, tenant)
    return run is not None and await kin.has_undone(run, call)
