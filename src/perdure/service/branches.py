"""Going on from a run's history: retry and fork (R-10.3, R-7.4)."""

from dataclasses import replace

from pydantic import Field, JsonValue

from perdure.engine.branch import BranchWish, fork_run, retry_run
from perdure.engine.history import load_value
from perdure.engine.submit import RunOrder, Submitted, accepted_before
from perdure.protocol.base import Model
from perdure.protocol.codec import digest
from perdure.protocol.errors import Gone, NotFound, PerdureError
from perdure.protocol.records import CheckpointRow
from perdure.protocol.runs import RunOptions, RunRow
from perdure.protocol.states import TERMINAL
from perdure.service.base import Service, check_storable, known_checkpoint, own_run
from perdure.service.principal import Principal
from perdure.service.runs import RunMade, view_of, with_key

_OWN_OPTIONS = {"idempotency_key": None, "multitask_strategy": "enqueue", "after": None}
"""Options that a run does not pass on to those that go on from it."""


class RetryRequest(Model):
    """How a failed run is to be tried again."""

    checkpoint_id: str | None = Field(
        default=None,
        description="go on from this checkpoint of its history; by default from where it ended",
    )
    redrive: bool = Field(
        default=False,
        description="run the failed calls of its last step with failures again, as they were; by "
        "default the planner is asked what to do about them",
    )
    reason: str | None = Field(default=None, max_length=5000, description="why, for people")
    options: RunOptions | None = Field(
        default=None,
        description="options that are named here replace those of the run; `agent_version` picks "
        "another version than the run's",
    )


class ForkRequest(Model):
    """From where and how a run is to go on in another one."""

    checkpoint_id: str | None = Field(
        default=None,
        description="go on from this checkpoint of its history; by default from where a failed run "
        "ended, from before a succeeded run's last decision, or from the last checkpoint",
    )
    input: JsonValue = Field(
        default=None, description="what the agent gets instead; absent: the run's input"
    )
    state: JsonValue = Field(
        default=None, description="the agent's own state to begin with; absent: as it was there"
    )
    reason: str | None = Field(default=None, max_length=5000, description="why, for people")
    options: RunOptions | None = Field(
        default=None,
        description="options that are named here replace those of the run; `agent_version` picks "
        "another version than the run's",
    )


async def retry(
    service: Service,
    principal: Principal,
    run_id: str,
    request: RetryRequest,
    *,
    header_key: str | None = None,
    trace_id: str | None = None,
) -> RunMade:
    """Open a run on the same thread that goes on from a failed one, or return the one under the
    idempotency key.

    Raises NotFound (run, checkpoint, version), Conflict (the run has not failed, or was rolled
    back), Gone, Invalid, Malformed, IdempotencyMismatch.
    """
    row = await own_run(service, principal, run_id)
    check_storable(request.reason, "/reason")
    asked = request.model_dump(
        mode="json", exclude_unset=True, exclude={"options": {"idempotency_key"}}
    )
    order = RunOrder(
        agent_id=row.facts.agent_id,
        input=None,
        context=row.facts.context,
        options=with_key(_options(row, request.options), header_key),
        caller=principal.as_caller(),
        fingerprint=digest(["retry", run_id, asked]),
        thread_id=row.facts.thread_id,
        trace_id=trace_id,
    )
    wish = BranchWish(
        mode="redrive" if request.redrive else "retry", by=principal.name, reason=request.reason
    )
    try:
        order = replace(order, input=await _input(service, row))
        named = await _checkpoint(service, principal, request.checkpoint_id)
    except PerdureError as refused:
        return await _made(service, await accepted_before(service.core, order, refused))
    made = await retry_run(service.core, row, order, replace(wish, checkpoint=named))
    return await _made(service, made)


async def fork(
    service: Service,
    principal: Principal,
    run_id: str,
    request: ForkRequest,
    *,
    header_key: str | None = None,
    trace_id: str | None = None,
) -> RunMade:
    """Open a run on a thread of its own that goes on from a checkpoint of another, or return the
    one under the idempotency key.

    Raises NotFound (run, checkpoint, version), Conflict (the run was rolled back, or has no
    checkpoint), Gone, Invalid, Malformed, IdempotencyMismatch.
    """
    row = await own_run(service, principal, run_id)
    check_storable(request.reason, "/reason")
    asked = request.model_dump(
        mode="json", exclude_unset=True, exclude={"options": {"idempotency_key"}}
    )
    order = RunOrder(
        agent_id=row.facts.agent_id,
        input=request.input,
        context=row.facts.context,
        options=with_key(_options(row, request.options), header_key),
        caller=principal.as_caller(),
        fingerprint=digest(["fork", run_id, asked]),
        trace_id=trace_id,
    )
    wish = BranchWish(
        mode="fork",
        by=principal.name,
        reason=request.reason,
        edits_state="state" in request.model_fields_set,
        state=request.state,
    )
    try:
        if "input" not in request.model_fields_set:
            order = replace(order, input=await _input(service, row))
        named = await _checkpoint(service, principal, request.checkpoint_id)
    except PerdureError as refused:
        return await _made(service, await accepted_before(service.core, order, refused))
    made = await fork_run(service.core, row, order, replace(wish, checkpoint=named))
    return await _made(service, made)


async def _made(service: Service, made: Submitted) -> RunMade:
    is_over = made.row.hot.state in TERMINAL
    return RunMade(run=await view_of(service, made.row, whole=is_over), created=made.created)


def _options(row: RunRow, wanted: RunOptions | None) -> RunOptions:
    """Return the run's options with those that are named in the request instead of its own."""
    named = {name: getattr(wanted, name) for name in wanted.model_fields_set} if wanted else {}
    pinned = {"agent_version": row.facts.agent_version}
    check_storable(named.get("agent_version"), "/options/agent_version")
    return row.facts.options.model_copy(update={**_OWN_OPTIONS, **pinned, **named})


async def _input(service: Service, row: RunRow) -> JsonValue:
    try:
        return await load_value(service.core, row.facts.tenant_id, row.facts.input)
    except LookupError as error:
        raise Gone(f"the run's input is no longer kept: {error}") from error


async def _checkpoint(
    service: Service, principal: Principal, identifier: str | None
) -> CheckpointRow | None:
    if identifier is None:
        return None
    run_id, seq = known_checkpoint(identifier)
    row = await service.reader.find_checkpoint(principal.tenant_id, run_id, seq)
    if row is None:
        raise NotFound("there is no such checkpoint", field="/checkpoint_id")
    return row
