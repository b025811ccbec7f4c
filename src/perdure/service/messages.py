"""Messages of a thread: attributed, in order, with their content joined from where it stands."""

from dataclasses import dataclass
from typing import cast

from pydantic import Field, JsonValue, TypeAdapter

from perdure.engine.history import load_message
from perdure.engine.lineage import messages_after
from perdure.protocol.base import Model
from perdure.protocol.errors import NotFound
from perdure.protocol.ids import MESSAGE
from perdure.protocol.messages import Message, Part, Role
from perdure.protocol.records import MessageRow
from perdure.service.base import Service, Slice, cut, known
from perdure.service.keys import check_same, request_key
from perdure.service.principal import Principal
from perdure.service.threads import own_thread

_PARTS: TypeAdapter[list[Part]] = TypeAdapter(list[Part])


class MessageRequest(Model):
    """A message as it is appended."""

    role: Role = Role.USER
    parts: list[Part] = Field(min_length=1, max_length=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageMade:
    """The message that stands under a request; `created` False when its key was known."""

    message: Message
    created: bool


async def append_message(
    service: Service,
    principal: Principal,
    thread_id: str,
    request: MessageRequest,
    *,
    key: str | None = None,
) -> MessageMade:
    """Append a message that belongs to no run, or return the one under the idempotency key.

    Raises NotFound for the thread, Invalid, IdempotencyMismatch (another body; details name the
    message).
    """
    thread = await own_thread(service, principal, thread_id)
    parts = cast("JsonValue", _PARTS.dump_python(request.parts, mode="json"))
    wanted = request_key(key, thread.thread_id, [request.role, parts])
    made = await service.core.store.append_message(
        tenant_id=principal.tenant_id,
        thread_id=thread.thread_id,
        message_id=service.core.ids.new(MESSAGE),
        role=request.role,
        author=principal.name,
        body=parts,
        key=wanted,
    )
    if isinstance(made, MessageRow):
        return MessageMade(message=await load_message(service.core, made), created=True)
    assert wanted is not None, "only a key is replayed"
    check_same(wanted, made, {"message_id": made.object_id})
    message = await get_message(service, principal, made.object_id)
    return MessageMade(message=message, created=False)


async def get_message(service: Service, principal: Principal, identifier: str) -> Message:
    """Return one message. Raises NotFound."""
    known(MESSAGE, identifier, "message")
    row = await service.reader.find_message(principal.tenant_id, identifier)
    if row is None:
        raise NotFound("there is no such message")
    return await load_message(service.core, row)


async def list_messages(
    service: Service, principal: Principal, thread_id: str, *, after: int, limit: int
) -> Slice[Message]:
    """Return what the thread says behind a position, in order. Raises NotFound, Gone."""
    thread = await own_thread(service, principal, thread_id)
    found = await messages_after(service.reader, thread.thread_id, after=after, limit=limit + 1)
    rows, more = cut(found, limit)
    messages = [await load_message(service.core, row) for row in rows]
    return Slice(messages, str(rows[-1].position) if more else None)
