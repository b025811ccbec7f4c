"""Threads: conversations that runs belong to."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, JsonValue

from perdure.protocol.base import Model
from perdure.protocol.codec import encode
from perdure.protocol.errors import Gone, Invalid, NotFound
from perdure.protocol.ids import THREAD
from perdure.protocol.records import ThreadRow
from perdure.protocol.runs import Metadata
from perdure.protocol.values import METADATA_BYTES_MAX
from perdure.service.base import Service, Slice, check_storable, cut, known
from perdure.service.keys import THREADS, check_same, request_key
from perdure.service.principal import Principal
from perdure.service.views import ThreadBaseView, ThreadView
from perdure.store.lineage import TAGS_MAX


class ThreadRequest(Model):
    """A thread as it is asked for."""

    title: str = Field(default="", max_length=500)
    metadata: Metadata = Field(default_factory=dict[str, JsonValue])
    participants: list[dict[str, JsonValue]] = Field(
        default_factory=list[dict[str, JsonValue]],
        max_length=100,
        description="users, agents and roles, and what each may see",
    )
    capabilities: list[Annotated[str, Field(max_length=200)]] = Field(
        default_factory=list[str], max_length=100
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadMade:
    """The thread that stands under a request; `created` False when its key was known."""

    thread: ThreadView
    created: bool


async def create_thread(
    service: Service, principal: Principal, request: ThreadRequest, *, key: str | None = None
) -> ThreadMade:
    """Create a thread, or return the one under the idempotency key.

    Raises Invalid, IdempotencyMismatch (another body; details name the thread), Gone (it was deleted).
    """
    check_storable(request.title, "/title")
    check_size(request.metadata, "/metadata")
    check_size(list(request.participants), "/participants")
    wanted = request_key(key, THREADS, request.model_dump(mode="json"))
    now = service.core.clock.now()
    row = ThreadRow(
        thread_id=service.core.ids.new(THREAD),
        tenant_id=principal.tenant_id,
        title=request.title,
        metadata=request.metadata,
        participants=list(request.participants),
        capabilities=request.capabilities,
        active_run_id=None,
        last_position=0,
        created_at=now,
        updated_at=now,
    )
    known = await service.core.store.create_thread(row, wanted)
    if known is not None and wanted is not None:
        check_same(wanted, known, {"thread_id": known.object_id})
    thread_id = row.thread_id if known is None else known.object_id
    thread = await get_thread(service, principal, thread_id)
    return ThreadMade(thread=thread, created=known is None)


def check_size(value: JsonValue, field: str) -> None:
    """Raise Invalid for a value that is too large to stand beside a thread."""
    if len(encode(value)) > METADATA_BYTES_MAX:
        raise Invalid(f"at most {METADATA_BYTES_MAX} bytes", field=field)


async def get_thread(service: Service, principal: Principal, identifier: str) -> ThreadView:
    """Return one thread. Raises NotFound, Gone."""
    return await view_of_thread(service, await own_thread(service, principal, identifier))


async def list_threads(
    service: Service,
    principal: Principal,
    *,
    after: str | None,
    limit: int,
    metadata: dict[str, JsonValue] | None = None,
) -> Slice[ThreadView]:
    """Return threads, newest first; those whose metadata has these pairs, when they are given.

    Raises Invalid for more than `TAGS_MAX` pairs.
    """
    if metadata is not None and len(metadata) > TAGS_MAX:
        raise Invalid(f"threads are found by at most {TAGS_MAX} pairs at once", field="metadata")
    found = await service.reader.list_threads(
        principal.tenant_id, after=after, limit=limit + 1, metadata=metadata
    )
    rows, more = cut(found, limit)
    views = [await view_of_thread(service, row) for row in rows]
    return Slice(views, rows[-1].thread_id if more else None)


async def own_thread(service: Service, principal: Principal, identifier: str) -> ThreadRow:
    """Return a thread of the principal's tenant.

    Raises NotFound for any other id, Gone for one that was deleted.
    """
    row = await own_tombstone(service, principal, identifier)
    if row.deleted_at is not None:
        raise Gone("the thread was deleted")
    return row


async def own_tombstone(service: Service, principal: Principal, identifier: str) -> ThreadRow:
    """Return a thread of the principal's tenant, deleted or not. Raises NotFound."""
    known(THREAD, identifier, "thread")
    row = await service.reader.find_thread(principal.tenant_id, identifier)
    if row is None:
        raise NotFound("there is no such thread")
    return row


async def view_of_thread(service: Service, row: ThreadRow) -> ThreadView:
    """Return a thread as it is shown."""
    bases = [
        ThreadBaseView.model_construct(
            kind=base.kind,
            thread_id=base.base_thread_id,
            position=base.base_position,
            from_position=base.from_position,
            run_id=base.run_id,
            author=base.author,
            created_at=base.created_at,
        )
        for base in await service.reader.thread_bases(row.thread_id)
    ]
    return ThreadView.model_construct(
        thread_id=row.thread_id,
        tenant_id=row.tenant_id,
        title=row.title,
        metadata=row.metadata,
        participants=row.participants,
        capabilities=row.capabilities,
        active_run_id=row.active_run_id,
        last_position=row.last_position,
        bases=bases,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
