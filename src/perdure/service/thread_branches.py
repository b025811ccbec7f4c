"""Branches of threads: fork, adopt and delete, by reference (R-11.1, R-11.3, R-7.5)."""

from pydantic import Field

from perdure.protocol.base import Model
from perdure.protocol.errors import Invalid
from perdure.protocol.ids import THREAD
from perdure.protocol.records import BaseKind, ThreadBase, ThreadRow
from perdure.protocol.runs import Metadata
from perdure.service.base import Service, Slice, check_storable, cut
from perdure.service.keys import check_same, request_key
from perdure.service.principal import Principal
from perdure.service.threads import ThreadMade, check_size, get_thread, own_thread, own_tombstone
from perdure.service.views import BranchView, ThreadView

EXPIRE_PAGE = 100


class ThreadForkRequest(Model):
    """From where a thread is to be forked, and what the fork is called."""

    position: int | None = Field(
        default=None,
        ge=0,
        description="the last message of the thread that the fork says too; absent: all of them, a "
        "copy by reference. Fields of the thread that were written later begin with nothing there",
    )
    title: str | None = Field(
        default=None, max_length=500, description="absent: the title of the thread"
    )
    metadata: Metadata | None = Field(
        default=None, description="absent: the metadata of the thread"
    )


class AdoptRequest(Model):
    """Which branch of a thread is to be what the thread says."""

    branch_id: str = Field(max_length=100, description="the thread that was forked from this one")


async def fork_thread(
    service: Service,
    principal: Principal,
    thread_id: str,
    request: ThreadForkRequest,
    *,
    key: str | None = None,
) -> ThreadMade:
    """Create a thread that says what another one says up to a position, or return the one under
    the idempotency key. No message is copied.

    Raises NotFound, Gone, Invalid (`/position`), IdempotencyMismatch.
    """
    source = await own_thread(service, principal, thread_id)
    check_storable(request.title, "/title")
    if request.metadata is not None:
        check_size(request.metadata, "/metadata")
    position = source.last_position if request.position is None else request.position
    if position > source.last_position:
        raise Invalid("the thread has not come to this position", field="/position")
    asked = request.model_dump(mode="json", exclude_unset=True)
    wanted = request_key(key, f"fork {source.thread_id}", asked)
    now = service.core.clock.now()
    row = ThreadRow(
        thread_id=service.core.ids.new(THREAD),
        tenant_id=principal.tenant_id,
        title=source.title if request.title is None else request.title,
        metadata=source.metadata if request.metadata is None else request.metadata,
        participants=source.participants,
        capabilities=source.capabilities,
        active_run_id=None,
        last_position=position,
        created_at=now,
        updated_at=now,
    )
    base = ThreadBase(
        thread_id=row.thread_id,
        from_position=position,
        base_thread_id=source.thread_id,
        base_position=position,
        kind=BaseKind.FORK,
        author=principal.name,
        created_at=now,
    )
    known = await service.core.store.create_thread(row, wanted, base)
    if known is not None and wanted is not None:
        check_same(wanted, known, {"thread_id": known.object_id})
    made = row.thread_id if known is None else known.object_id
    return ThreadMade(thread=await get_thread(service, principal, made), created=known is None)


async def list_branches(
    service: Service, principal: Principal, thread_id: str, *, after: str | None, limit: int
) -> Slice[BranchView]:
    """Return the branches of a thread, oldest first, those that were adopted marked.

    Raises NotFound, Gone.
    """
    thread = await own_thread(service, principal, thread_id)
    bases = await service.reader.thread_bases(thread.thread_id)
    adopted = {base.base_thread_id: base for base in bases if base.kind is BaseKind.ADOPT}
    found = await service.reader.list_branches(thread.thread_id, after=after, limit=limit + 1)
    rows, more = cut(found, limit)
    views = [_view(row, adopted.get(row.thread_id)) for row in rows]
    return Slice(views, rows[-1].thread_id if more else None)


def _view(fork: ThreadBase, adopted: ThreadBase | None) -> BranchView:
    return BranchView.model_construct(
        thread_id=fork.thread_id,
        position=fork.base_position,
        run_id=fork.run_id,
        author=fork.author,
        created_at=fork.created_at,
        adopted_at=None if adopted is None else adopted.created_at,
        adopted_by=None if adopted is None else adopted.author,
    )


async def adopt_branch(
    service: Service, principal: Principal, thread_id: str, request: AdoptRequest
) -> ThreadView:
    """Let a thread say what a branch of it says, instead of what it said since the fork.

    Once more is the same again. Raises NotFound, Gone, Conflict, ThreadBusy.
    """
    thread = await own_thread(service, principal, thread_id)
    branch = await own_thread(service, principal, request.branch_id)
    await service.core.store.adopt_branch(
        principal.tenant_id, thread.thread_id, branch.thread_id, principal.name
    )
    return await get_thread(service, principal, thread.thread_id)


async def delete_thread(service: Service, principal: Principal, thread_id: str) -> None:
    """Delete a thread with its messages and the history of its runs. Once more is the same again.

    A tombstone stays, and of its runs what retention leaves. Raises NotFound, ThreadBusy.
    """
    thread = await own_tombstone(service, principal, thread_id)
    store = service.core.store
    await store.delete_thread(principal.tenant_id, thread.thread_id)
    while (
        await store.expire_deleted(thread.thread_id, after=None, limit=EXPIRE_PAGE)
    ).runs == EXPIRE_PAGE:
        pass
