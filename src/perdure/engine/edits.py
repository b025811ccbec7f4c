"""What an edit of a call's arguments must not change: what its effect key has stood for already.

A call that a run takes over keeps its key (R-5.6), so that a tool that heeds keys has one effect.
With other arguments such a tool would answer with the effect of the first ones.
"""

from pydantic import JsonValue

from perdure.engine.core import Core
from perdure.engine.origin import OriginGone, origins_of
from perdure.protocol.codec import digest
from perdure.protocol.errors import Conflict
from perdure.protocol.records import InterruptRow
from perdure.store.reader import Reader

PAGE = 500


async def check_edit(core: Core, question: InterruptRow, args: JsonValue) -> None:
    """Raise Conflict when the question's call was begun with other arguments under its key.

    That may have been in a run that its run goes on from; one whose history is gone is not asked.
    """
    if question.tool_call_id is None:
        return
    call = await core.reader.find_tool_call(question.tenant_id, question.tool_call_id)
    run = await core.reader.find_run(question.tenant_id, question.run_id)
    if call is None or run is None:
        return
    lineage = [run.facts.run_id]
    try:
        shared = await origins_of(core.reader, run.facts)
    except OriginGone:
        shared = []
    lineage += [one.facts.run_id for one in reversed(shared)]
    wanted = digest(args)
    for run_id in lineage:
        if await _begun_with(core.reader, run_id, call.effect_key) - {wanted}:
            raise Conflict(
                "the call was begun before under its effect key, with other arguments: approve it"
                " as it is, or reject it and let a new call be decided",
                field="/args",
                details={"run_id": run_id, "effect_key": call.effect_key},
            )


async def _begun_with(reader: Reader, run_id: str, effect_key: str) -> set[str]:
    """Return the digests of the arguments that a run's executions under a key were begun with."""
    begun: dict[str, set[str]] = {}
    for one in await reader.list_executions(run_id):
        begun.setdefault(one.tool_call_id, set()).add(one.args_digest)
    found, after = set[str](), None
    while begun:
        page = await reader.list_tool_calls(run_id, after=after, limit=PAGE)
        for call in page:
            if call.effect_key == effect_key:
                found |= begun.get(call.tool_call_id, set())
        if len(page) < PAGE:
            break
        after = (page[-1].step_index, page[-1].ordinal)
    return found
