"""Checkpoints: positions in the log from which a run can be rebuilt."""

import jsonpatch

from perdure.engine.load import Damaged
from perdure.engine.snapshot import STATE_UPDATE_EVENT_NAME
from perdure.engine.states import state_at
from perdure.protocol.errors import Conflict, Gone, NotFound
from perdure.protocol.events import CustomEvent
from perdure.protocol.log import RecordedEvent
from perdure.protocol.records import CheckpointRow
from perdure.protocol.runs import RunRow
from perdure.service.base import Service, Slice, cut, known_checkpoint, own_run
from perdure.service.principal import Principal
from perdure.service.tool_calls import data_of
from perdure.service.values import events_at
from perdure.service.views import CheckpointDiff, CheckpointState, CheckpointView


async def list_checkpoints(
    service: Service, principal: Principal, run_id: str, *, before: int | None, limit: int
) -> Slice[CheckpointView]:
    """Return a run's checkpoints, newest first. Raises NotFound."""
    run = await own_run(service, principal, run_id)
    found = await service.reader.list_checkpoints(run_id, before=before, limit=limit + 1)
    rows, more = cut(found, limit)
    events = await events_at(service.reader, run_id, (row.seq for row in rows))
    views = [await _view(service, run, row, events.get(row.seq)) for row in rows]
    return Slice(views, str(rows[-1].seq) if more else None)


async def get_checkpoint(service: Service, principal: Principal, identifier: str) -> CheckpointView:
    """Return one checkpoint. Raises NotFound."""
    row = await _find(service, principal, identifier)
    events = await events_at(service.reader, row.run_id, (row.seq,))
    run = await own_run(service, principal, row.run_id)
    return await _view(service, run, row, events.get(row.seq))


async def get_state(service: Service, principal: Principal, identifier: str) -> CheckpointState:
    """Return what the log says of a run at a checkpoint. Raises NotFound, Gone, Conflict."""
    row = await _find(service, principal, identifier)
    run = await own_run(service, principal, row.run_id)
    try:
        state = await state_at(service.core, run, row.seq)
    except Damaged as error:
        damaged = error
    else:
        return CheckpointState(
            checkpoint_id=row.checkpoint_id, run_id=row.run_id, seq=row.seq, values=state
        )
    now = await own_run(service, principal, row.run_id)  # the history may have gone meanwhile
    if now.hot.retained_from_seq > 1:
        raise Gone("the history of the run is no longer kept") from damaged
    raise Conflict(f"the history of the run is damaged: {damaged}") from damaged


async def diff(service: Service, principal: Principal, first: str, second: str) -> CheckpointDiff:
    """Return how the state at one checkpoint becomes that at another, as a JSON Patch.

    Raises NotFound, Gone, Conflict.
    """
    before = await get_state(service, principal, first)
    after = await get_state(service, principal, second)
    patch = jsonpatch.make_patch(before.values, after.values).patch
    return CheckpointDiff(first=first, second=second, patch=patch)


async def _find(service: Service, principal: Principal, identifier: str) -> CheckpointRow:
    run_id, seq = known_checkpoint(identifier)
    row = await service.reader.find_checkpoint(principal.tenant_id, run_id, seq)
    if row is None:
        raise NotFound("there is no such checkpoint")
    return row


def _by_hand(event: RecordedEvent | None) -> tuple[str | None, str | None]:
    """Return author and reason of an update of the state by hand; (None, None) for all else."""
    data = data_of(event, CustomEvent)
    value = data.value if data is not None and data.name == STATE_UPDATE_EVENT_NAME else None
    if not isinstance(value, dict):
        return None, None
    reason = value.get("reason")
    return str(value.get("by")), None if reason is None else str(reason)


async def _view(
    service: Service, run: RunRow, row: CheckpointRow, event: RecordedEvent | None
) -> CheckpointView:
    facts, parent_seq = run.facts, row.parent_seq
    parent_run_id = None if parent_seq is None else row.run_id
    if parent_seq is None and facts.origin_run_id is not None and facts.origin_seq is not None:
        shared = await service.reader.list_checkpoints(
            facts.origin_run_id, before=facts.origin_seq + 1, limit=1
        )
        if shared:
            parent_run_id, parent_seq = shared[0].run_id, shared[0].seq
    author, reason = _by_hand(event)
    return CheckpointView.model_construct(
        checkpoint_id=row.checkpoint_id,
        run_id=row.run_id,
        tenant_id=facts.tenant_id,
        seq=row.seq,
        parent_run_id=parent_run_id,
        parent_seq=parent_seq,
        step_index=row.step_index,
        attempt=row.attempt,
        cancel_epoch=row.epoch,
        schema_version=row.schema_version,
        agent_state=row.agent_state,
        author=author,
        reason=reason,
        digest=row.digest,
        created_at=row.created_at,
    )
