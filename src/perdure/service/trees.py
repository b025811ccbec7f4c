"""Trees of runs: what is below a run, what is asked there, and cancelling many runs at once."""

from dataclasses import dataclass, field

from pydantic import Field

from perdure.engine.cancel import cancel_run as engine_cancel
from perdure.protocol.base import Model
from perdure.protocol.errors import Conflict, Invalid
from perdure.protocol.records import InterruptRow
from perdure.protocol.runs import RunRow
from perdure.protocol.states import CancelOption, InterruptStatus, RunState
from perdure.service.base import Service, check_storable
from perdure.service.principal import Principal
from perdure.store.reader import InterruptFilter, RunFilter
from perdure.store.requests import CancelWish

TREE_MAX = 2000
CANCELLED_AT_ONCE_MAX = 500
_PAGE = 500


async def runs_below(
    service: Service, row: RunRow, *, only_waited_for: bool = False
) -> list[RunRow]:
    """Return the runs below a run, oldest first; of a very large tree the newest only.

    With `only_waited_for` without those that were detached, and what is below them.
    """
    where = RunFilter(root_run_id=row.facts.root_run_id)
    tree = await service.reader.list_runs(row.facts.tenant_id, where, after=None, limit=TREE_MAX)
    inside = {row.facts.run_id}
    below: list[RunRow] = []
    for item in reversed(tree):
        if only_waited_for and item.facts.detached:
            continue
        if item.facts.parent_run_id in inside:
            inside.add(item.facts.run_id)
            below.append(item)
    return below


async def interrupts_in_tree(
    service: Service,
    row: RunRow,
    *,
    status: InterruptStatus | None,
    after: str | None,
    limit: int,
    only_waited_for: bool = False,
) -> list[InterruptRow]:
    """Return questions of a run and of those below it (see `runs_below`), oldest first (R-13.5)."""
    rows = [row, *await runs_below(service, row, only_waited_for=only_waited_for)]
    if status is InterruptStatus.PENDING:
        rows = [item for item in rows if item.hot.open_interrupts > 0]
    found: list[InterruptRow] = []
    for item in rows:
        where = InterruptFilter(status=status, run_id=item.facts.run_id)
        found += await service.reader.list_interrupts(
            item.facts.tenant_id, where, after=after, limit=limit
        )
    return sorted(found, key=lambda one: one.interrupt_id)[:limit]


class CancelManyRequest(Model):
    """Which runs to cancel. What is left out matches every run; at least one must be given."""

    agent_id: str | None = Field(default=None, max_length=100)
    thread_id: str | None = Field(default=None, pattern="^thr_[0-9a-f]{32}$")
    state: RunState | None = None
    tag: str | None = Field(default=None, max_length=200, description="one of the run's tags")
    all: bool = Field(default=False, description="every unfinished run, when nothing else is given")
    reason: str | None = Field(default=None, max_length=5000, description="why, for people")
    compensate: bool = Field(
        default=False, description="undo what their tools did, where they can, before they end"
    )
    discard_artifacts: bool = Field(
        default=False, description="discard what they made, when they end"
    )
    limit: int = Field(
        default=100, ge=1, le=CANCELLED_AT_ONCE_MAX, description="runs in this request at most"
    )


class CancelledMany(Model):
    """What was cancelled. `more`: the limit was reached, send the request again."""

    run_ids: list[str]
    more: bool


@dataclass(slots=True)
class _Batch:
    wanted: CancelManyRequest
    run_ids: list[str] = field(default_factory=list[str])

    @property
    def is_full(self) -> bool:
        return len(self.run_ids) >= self.wanted.limit

    def takes(self, row: RunRow) -> bool:
        """Tell whether a run is to be cancelled, and was not before."""
        tag = self.wanted.tag
        return row.hot.cancel_epoch == 0 and (tag is None or tag in row.facts.options.tags)


async def cancel_many(
    service: Service, principal: Principal, request: CancelManyRequest, *, source: str = "api"
) -> CancelledMany:
    """Cancel unfinished runs by filter, the newest first; each is durable by itself.

    The same request again goes on with what is left. Raises Invalid without any filter.
    """
    given = (request.agent_id, request.thread_id, request.state, request.tag)
    if all(item is None for item in given) and not request.all:
        raise Invalid("name which runs to cancel, or say `all`", field="/all")
    check_storable(request.agent_id, "/agent_id")
    check_storable(request.tag, "/tag")
    where = RunFilter(
        state=request.state,
        agent_id=request.agent_id,
        thread_id=request.thread_id,
        unfinished=True,
    )
    options = CancelOption.of(
        compensate=request.compensate, discard_artifacts=request.discard_artifacts
    )
    batch = _Batch(request)
    after: str | None = None
    while True:
        page = await service.reader.list_runs(principal.tenant_id, where, after=after, limit=_PAGE)
        for row in page:
            if not batch.takes(row):
                continue
            if batch.is_full:
                return CancelledMany(run_ids=batch.run_ids, more=True)
            wish = CancelWish(
                action=row.facts.options.cancel_policy,
                by=principal.name,
                source=source,
                reason=request.reason,
                options=options,
            )
            await _cancel(service, principal, row, wish)
            batch.run_ids.append(row.facts.run_id)
        if len(page) < _PAGE:
            return CancelledMany(run_ids=batch.run_ids, more=False)
        after = page[-1].facts.run_id


async def _cancel(service: Service, principal: Principal, row: RunRow, wish: CancelWish) -> None:
    try:
        await engine_cancel(service.core, principal.tenant_id, row.facts.run_id, wish)
    except Conflict:  # damaged: the cancel stands, and the run is put aside
        return
