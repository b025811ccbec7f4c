"""The messages of a thread as a planner sees them, each with its content."""

from pydantic import JsonValue, TypeAdapter

from perdure.engine.core import Core
from perdure.engine.lineage import messages_before
from perdure.protocol.codec import decode
from perdure.protocol.events import MessageEvent, StateEvent
from perdure.protocol.messages import Message, Part, TextPart, parts_of_value
from perdure.protocol.records import MessageRow
from perdure.protocol.states import CancelAction
from perdure.protocol.values import BlobRef, Value

HISTORY_MESSAGES_MAX = 200
"""How many of the thread's latest messages a planner sees before its run's own input."""

_parts: TypeAdapter[list[Part]] = TypeAdapter(list[Part])


async def load_history(
    core: Core, thread_id: str, until: int, own: frozenset[str]
) -> list[Message]:
    """Return the thread's messages up to a position, as a planner sees them.

    Not those of the `own` runs: the run and those whose history it shares; not those of runs that
    were retried (the retry's input says the same) or rolled back; not what runs were asked that
    wait behind it.
    """
    rows = await messages_before(core.reader, thread_id, until=until, limit=HISTORY_MESSAGES_MAX)
    asked_at = min(
        (row.position for row in rows if _is_input(row) and row.run_id in own), default=0
    )
    rows = [
        row
        for row in rows
        if row.run_id not in own and not (_is_input(row) and row.position > asked_at)
    ]
    hidden = await _hidden(core, rows)
    return [await load_message(core, row) for row in rows if row.run_id not in hidden]


def _is_input(row: MessageRow) -> bool:
    return row.run_id is not None and row.seq is None


async def _hidden(core: Core, rows: list[MessageRow]) -> set[str | None]:
    """Return the runs whose messages planners do not see.

    A retry that was rolled back hides itself and shows again what it had retried.
    """
    hidden = set[str | None]()
    for run_id, tenant_id in {row.run_id: row.tenant_id for row in rows}.items():
        run = None if run_id is None else await core.reader.find_run(tenant_id, run_id)
        if run is None:
            continue
        if run.hot.cancel_action is CancelAction.ROLLBACK:
            hidden.add(run_id)
        elif run.facts.retry_of is not None:
            hidden.add(run.facts.retry_of)
    return hidden


async def load_message(core: Core, row: MessageRow) -> Message:
    """Return a message with its content: its own body, its run's input, or its event."""
    parts, ref = await _content(core, row)
    return Message(
        message_id=row.message_id,
        thread_id=row.thread_id,
        tenant_id=row.tenant_id,
        position=row.position,
        run_id=row.run_id,
        role=row.role,
        author=row.author,
        parts=parts,
        ref=ref,
        created_at=row.created_at,
    )


async def _content(core: Core, row: MessageRow) -> tuple[list[Part], BlobRef | None]:
    if row.run_id is None:
        return _parts.validate_python(row.body), None
    if row.seq is None:
        run = await core.reader.find_run(row.tenant_id, row.run_id)
        value = run.facts.input if run is not None else Value()
        return parts_of_value(value), value.ref
    events = await core.reader.events_after(row.run_id, row.seq - 1, limit=1)
    match events[0].data if events else None:
        case StateEvent(answer=answer, answer_ref=ref):
            return parts_of_value(Value(inline=answer, ref=ref)), ref
        case MessageEvent(parts=parts):
            return _parts.validate_python(parts), None
        case _:
            return [TextPart(text="")], None


async def load_value(core: Core, tenant_id: str, value: Value) -> JsonValue:
    """Return a value whole, from the blob store when it is kept there."""
    if value.ref is None:
        return value.inline
    data = await core.reader.read_blob(tenant_id, value.ref.digest)
    if data is None:
        raise LookupError(f"the content {value.ref.digest} is not stored")
    return decode(data)
