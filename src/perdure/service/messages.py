"""Messages of a thread: attributed, in order, with their content joined from where it stands."""

from typing import cast

from pydantic import Field, JsonValue, TypeAdapter

from perdure.engine.history import load_message
from perdure.protocol.base import Model
from perdure.protocol.ids import MESSAGE
from perdure.protocol.messages import Message, Part, Role
from perdure.service.base import Service, Slice, cut
from perdure.service.principal import Principal
from perdure.service.threads import own_thread

_PARTS: TypeAdapter[list[Part]] = TypeAdapter(list[Part])


class MessageRequest(Model):
    """A message as it is appended."""

    role: Role = Role.USER
    parts: list[Part] = Field(min_length=1, max_length=100)


async def append_message(
    service: Service, principal: Principal, thread_id: str, request: MessageRequest
) -> Message:
    """Append a message that belongs to no run. Raises NotFound for the thread."""
    thread = await own_thread(service, principal, thread_id)
    row = await service.core.store.append_message(
        tenant_id=principal.tenant_id,
        thread_id=thread.thread_id,
        message_id=service.core.ids.new(MESSAGE),
        role=request.role,
        author=principal.name,
        body=cast("JsonValue", _PARTS.dump_python(request.parts, mode="json")),
    )
    return await load_message(service.core, row)


async def list_messages(
    service: Service, principal: Principal, thread_id: str, *, after: int, limit: int
) -> Slice[Message]:
    """Return messages with a larger position, in order. Raises NotFound."""
    thread = await own_thread(service, principal, thread_id)
    found = await service.reader.list_messages(thread.thread_id, after=after, limit=limit + 1)
    rows, more = cut(found, limit)
    messages = [await load_message(service.core, row) for row in rows]
    return Slice(messages, str(rows[-1].position) if more else None)
