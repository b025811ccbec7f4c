"""The service's surroundings, the page every list answers with, and checks all use cases share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from perdure.engine.core import Core
from perdure.protocol.errors import Invalid, Malformed, NotFound
from perdure.protocol.ids import RUN, is_id, parse_checkpoint_id
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.service.principal import Principal
from perdure.store.reader import Backlog, InterruptFilter, Reader

PAGE_LIMIT_DEFAULT = 50
PAGE_LIMIT_MAX = 200
_INTERRUPTS_PAGE = 500
_READS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Every use case takes this and the principal first."""

    core: Core

    @property
    def reader(self) -> Reader:
        """The reading port."""
        return self.core.reader

    async def ping(self) -> None:
        """Return when the store answers; raise Unavailable otherwise."""
        await self.reader.ping()

    async def backlog(self) -> Backlog:
        """Return how much waits, over all tenants."""
        return await self.reader.backlog()

    def new_request_id(self) -> str:
        """Return a fresh id for a request."""
        return self.core.ids.new("req")


ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class Slice(Generic[ItemT]):
    """A page of a list; `next` is the key to go on after, None at the end."""

    items: list[ItemT]
    next: str | None


def cut(found: list[ItemT], limit: int) -> tuple[list[ItemT], bool]:
    """Return at most `limit` of what was found with `limit` + 1, and whether there is more."""
    return found[:limit], len(found) > limit


async def interrupts_of(service: Service, tenant_id: str, run_id: str) -> list[InterruptRow]:
    """Return all interrupts of a run, oldest first."""
    where, after = InterruptFilter(run_id=run_id), None
    found: list[InterruptRow] = []
    while page := await service.reader.list_interrupts(
        tenant_id, where, after=after, limit=_INTERRUPTS_PAGE
    ):
        found += page
        if len(page) < _INTERRUPTS_PAGE:
            break
        after = page[-1].interrupt_id
    return found


async def own_run(service: Service, principal: Principal, run_id: str) -> RunRow:
    """Return a run of the principal's tenant; raise NotFound for any other id."""
    row = await service.reader.find_run(principal.tenant_id, known(RUN, run_id, "run"))
    if row is None:
        raise NotFound("there is no such run")
    return row


async def of_one_version(
    service: Service, row: RunRow, read: Callable[[RunRow], Awaitable[ItemT]]
) -> ItemT:
    """Return what `read` makes of a run's row and of its parts, all as they were at one seq.

    A run that moved meanwhile is read again, `_READS_MAX` times at most: of one that moves all the
    time the last reading is returned.
    """
    found = await read(row)
    for _ in range(_READS_MAX - 1):
        now = await service.reader.find_run(row.facts.tenant_id, row.facts.run_id)
        if now is None or _place(now) == _place(row):
            break
        row = now
        found = await read(row)
    return found


def _place(row: RunRow) -> tuple[int, int, int]:
    return row.hot.last_seq, row.hot.retained_from_seq, row.hot.attempt


def known(prefix: str, text: str, kind: str) -> str:
    """Return an id of a kind; raise NotFound for text that cannot be one, as for an unknown id."""
    if not is_id(prefix, text):
        raise NotFound(f"there is no such {kind}")
    return text


def known_checkpoint(text: str) -> tuple[str, int]:
    """Return run and seq of a checkpoint's id; raise NotFound for text that cannot be one."""
    try:
        return parse_checkpoint_id(text)
    except Malformed:
        raise NotFound("there is no such checkpoint") from None


def check_storable(text: str | None, field: str) -> None:
    """Raise Invalid for a NUL character in text that stores keep as a column of its own."""
    if text is not None and "\0" in text:
        raise Invalid("the text holds a NUL character", field=field)
