"""Runs: create, look, list, wait, cancel."""

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, JsonValue

from perdure.engine.breakpoints import continue_run as continue_paused
from perdure.engine.cancel import cancel_run as engine_cancel
from perdure.engine.feed import wait_for_end
from perdure.engine.submit import RunOrder, submit_run
from perdure.protocol.base import Model
from perdure.protocol.breakpoints import BREAKPOINTS_MAX, Breakpoint
from perdure.protocol.codec import digest
from perdure.protocol.errors import Forbidden, Malformed
from perdure.protocol.events import StateEvent
from perdure.protocol.failures import MEANING, Failure
from perdure.protocol.ids import INTERRUPT, THREAD
from perdure.protocol.log import DamagedEvent
from perdure.protocol.runs import (
    Run,
    RunBranch,
    RunContext,
    RunFacts,
    RunHot,
    RunOptions,
    RunRow,
    next_actions,
    status_of,
    waiting_on,
)
from perdure.protocol.states import (
    TERMINAL,
    CancelAction,
    CancelOption,
    InterruptStatus,
    NextAction,
    RunState,
)
from perdure.protocol.values import WAIT_SECONDS_MAX, BlobRef
from perdure.service.base import Service, Slice, check_storable, cut, known, of_one_version, own_run
from perdure.service.keys import check_key, check_not_ours
from perdure.service.principal import Principal
from perdure.service.threads import own_thread
from perdure.service.trees import interrupts_in_tree
from perdure.service.values import full
from perdure.store.reader import InterruptFilter, RunFilter
from perdure.store.requests import CancelWish

_OPEN_INTERRUPTS_MAX = 200


class RunRequest(Model):
    """A run as it is asked for."""

    input: JsonValue = Field(description="what the agent gets; any JSON value")
    context: RunContext = Field(
        default_factory=RunContext,
        description="who and what the run is for; extra fields pass through",
    )
    options: RunOptions = Field(default_factory=RunOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMade:
    """The run that stands under a request; `created` False when its key was known."""

    run: Run
    created: bool


def fingerprint(agent_id: str, thread_id: str | None, request: RunRequest) -> str:
    """Return the digest by which two requests under one idempotency key are the same.

    The agent version counts as it was asked for; the key itself, waiting and the form of the
    answer do not (decision 34). A field at its default counts like an absent one.
    """
    options = request.options.model_dump(
        mode="json", exclude={"idempotency_key"}, exclude_defaults=True
    )
    context = request.context.model_dump(mode="json", exclude_defaults=True)
    return digest([agent_id, thread_id, request.input, context, options])


async def create_run(
    service: Service,
    principal: Principal,
    agent_id: str,
    request: RunRequest,
    *,
    thread_id: str | None = None,
    header_key: str | None = None,
    trace_id: str | None = None,
) -> RunMade:
    """Create a run, durable when this returns, or return the one under the idempotency key.

    Raises NotFound (agent, version, thread), Forbidden (another tenant's context), Malformed
    (header and body name different keys), Invalid, IdempotencyMismatch, ThreadBusy.
    """
    check_storable(agent_id, "/agent_id")
    check_storable(request.options.agent_version, "/options/agent_version")
    tenant = request.context.tenant_id
    if tenant is not None and tenant != principal.tenant_id:
        raise Forbidden(
            "the context names a tenant that is not the caller's", field="/context/tenant_id"
        )
    if thread_id is not None:
        known(THREAD, thread_id, "thread")
    options = with_key(request.options, header_key)
    submitted = await submit_run(
        service.core,
        RunOrder(
            agent_id=agent_id,
            input=request.input,
            context=request.context,
            options=options,
            caller=principal.as_caller(),
            fingerprint=fingerprint(agent_id, thread_id, request),
            thread_id=thread_id,
            trace_id=trace_id,
        ),
    )
    is_over = submitted.row.hot.state in TERMINAL
    run = await view_of(service, submitted.row, whole=is_over)
    return RunMade(run=run, created=submitted.created)


def with_key(options: RunOptions, header_key: str | None) -> RunOptions:
    """Return the options with the key of header or body. Raises Malformed when they differ."""
    key = options.idempotency_key
    check_storable(key, "/options/idempotency_key")
    check_not_ours(key, "/options/idempotency_key")
    if header_key is None:
        return options
    check_key(header_key)
    if key is not None and key != header_key:
        raise Malformed(
            "the Idempotency-Key header and the body name different keys",
            field="/options/idempotency_key",
        )
    return options.model_copy(update={"idempotency_key": header_key})


async def get_run(service: Service, principal: Principal, run_id: str) -> Run:
    """Return a run with its input and answer whole. Raises NotFound."""
    row = await own_run(service, principal, run_id)
    return await view_of(service, row, whole=True)


async def last_seq(service: Service, principal: Principal, run_id: str) -> int:
    """Return the seq of a run's last event. Raises NotFound."""
    return (await own_run(service, principal, run_id)).hot.last_seq


async def list_runs(
    service: Service,
    principal: Principal,
    *,
    state: RunState | None = None,
    agent_id: str | None = None,
    thread_id: str | None = None,
    parent_run_id: str | None = None,
    unfinished: bool = False,
    after: str | None = None,
    limit: int,
) -> Slice[Run]:
    """Return runs, newest first."""
    check_storable(agent_id, "agent_id")
    where = RunFilter(
        state=state,
        agent_id=agent_id,
        thread_id=thread_id,
        parent_run_id=parent_run_id,
        unfinished=unfinished,
    )
    found = await service.reader.list_runs(principal.tenant_id, where, after=after, limit=limit + 1)
    rows, more = cut(found, limit)
    items = [await view_of(service, row) for row in rows]
    return Slice(items, rows[-1].facts.run_id if more else None)


async def list_children(
    service: Service,
    principal: Principal,
    run_id: str,
    *,
    unfinished: bool,
    after: str | None,
    limit: int,
) -> Slice[Run]:
    """Return the runs that a run started, newest first. Raises NotFound."""
    row = await own_run(service, principal, run_id)
    return await list_runs(
        service,
        principal,
        parent_run_id=row.facts.run_id,
        unfinished=unfinished,
        after=after,
        limit=limit,
    )


async def list_thread_runs(
    service: Service, principal: Principal, thread_id: str, *, after: str | None, limit: int
) -> Slice[Run]:
    """Return the runs of a thread, newest first. Raises NotFound, Gone."""
    thread = await own_thread(service, principal, thread_id)
    return await list_runs(service, principal, thread_id=thread.thread_id, after=after, limit=limit)


async def wait_for_run(service: Service, principal: Principal, run_id: str, seconds: float) -> Run:
    """Return the run once it is terminal, or as it stands after `seconds` (60 at most).

    Waiting neither holds nor changes the run. Raises NotFound.
    """
    row = await own_run(service, principal, run_id)
    if row.hot.state not in TERMINAL and seconds > 0:
        row = await wait_for_end(service.core, run_id, min(seconds, WAIT_SECONDS_MAX))
    return await view_of(service, row, whole=True)


async def cancel_run(
    service: Service,
    principal: Principal,
    run_id: str,
    *,
    action: CancelAction | None = None,
    reason: str | None = None,
    compensate: bool = False,
    discard_artifacts: bool = False,
    source: str = "api",
) -> Run:
    """Accept a cancel, durably, and return the run with its new epoch; idempotent.

    Without an action the run's own `cancel_policy` says which. After `rollback` planners of later
    runs do not see the run's messages, and nothing goes on from it. With `compensate` what its
    tools did is undone, where they can, before the run ends; with `discard_artifacts` what it made
    is discarded when it ends. Raises NotFound.
    """
    row = await own_run(service, principal, run_id)
    wish = CancelWish(
        action=action or row.facts.options.cancel_policy,
        by=principal.name,
        source=source,
        reason=reason,
        options=CancelOption.of(compensate=compensate, discard_artifacts=discard_artifacts),
    )
    row = await engine_cancel(service.core, principal.tenant_id, row.facts.run_id, wish)
    return await view_of(service, row)


class ContinueRequest(Model):
    """How a run that is paused at a breakpoint goes on."""

    interrupt_id: str = Field(description="the breakpoint it is paused at")
    mode: Literal["next", "step"] = Field(
        default="next", description="to the next breakpoint, or to the end of one step"
    )
    breakpoints: tuple[Breakpoint, ...] | None = Field(
        default=None, max_length=BREAKPOINTS_MAX, description="replace those of the run"
    )


async def continue_run(
    service: Service, principal: Principal, run_id: str, request: ContinueRequest
) -> Run:
    """Let a run that is paused at a breakpoint go on; the same request again changes nothing.

    Raises NotFound, Conflict (not a breakpoint), AlreadyAnswered (continued otherwise), Gone.
    """
    row = await own_run(service, principal, run_id)
    known(INTERRUPT, request.interrupt_id, "interrupt")
    await continue_paused(
        service.core,
        principal.tenant_id,
        row.facts.run_id,
        request.interrupt_id,
        mode=request.mode,
        by=principal.name,
        breakpoints=request.breakpoints,
    )
    return await get_run(service, principal, run_id)


async def view_of(service: Service, row: RunRow, *, whole: bool = False) -> Run:
    """Return a run as it is shown; `whole` also fetches an input and answer kept as blobs.

    What is asked is of the same moment as the row: a run that moved meanwhile is shown as it is now.
    """

    async def view(row: RunRow) -> Run:
        return await _view(service, row, whole=whole)

    asks = row.hot.open_interrupts > 0 or row.hot.open_children > 0
    return await (of_one_version(service, row, view) if asks else view(row))


async def _view(service: Service, row: RunRow, *, whole: bool) -> Run:
    facts, hot = row.facts, row.hot
    asked = await _open_interrupts(service, row)
    answer, answer_ref, error = await _ending(service, row)
    first = await _creation(service, facts)
    value = facts.input.inline
    if whole:
        answer = await full(service.reader, facts.tenant_id, answer, answer_ref)
        value = await full(service.reader, facts.tenant_id, value, facts.input.ref)
    return Run.model_construct(
        run_id=facts.run_id,
        tenant_id=facts.tenant_id,
        agent_id=facts.agent_id,
        agent_version=facts.agent_version,
        active_agent_id=facts.agent_now[0],
        active_agent_version=facts.agent_now[1],
        thread_id=facts.thread_id,
        root_run_id=facts.root_run_id,
        parent_run_id=facts.parent_run_id,
        depth=facts.depth,
        detached=facts.detached,
        open_children=hot.open_children,
        retry_of=facts.retry_of,
        forked_from=facts.forked_from,
        origin_run_id=facts.origin_run_id,
        origin_seq=facts.origin_seq,
        supersedes=first.supersedes,
        branch=_branch(first),
        state=hot.state,
        status=status_of(hot),
        waiting_on=waiting_on(hot),
        waiting_since=hot.waiting_since,
        wake_at=hot.wake_at,
        step_index=hot.step_index,
        attempt=hot.attempt,
        cancel_epoch=hot.cancel_epoch,
        last_seq=hot.last_seq,
        retained_from_seq=hot.retained_from_seq,
        input=value,
        input_ref=facts.input.ref,
        context=facts.context,
        options=facts.options,
        caller=facts.caller,
        answer=answer,
        answer_ref=answer_ref,
        error=error,
        usage=hot.counters,
        open_interrupts=asked,
        next_actions=_actions(hot, asked),
        trace_id=facts.trace_id,
        created_at=facts.created_at,
        started_at=hot.started_at,
        finished_at=hot.finished_at,
        updated_at=hot.updated_at,
        deadline_at=hot.deadline_at,
        schema_version=facts.schema_version,
    )


async def _creation(service: Service, facts: RunFacts) -> StateEvent:
    """Return the run's first event, while it is kept, when it tells what happened on the thread."""
    plain = facts.options.multitask_strategy in {"enqueue", "reject"}
    if not plain or facts.forked_from is not None:
        events = await service.reader.events_after(facts.run_id, 0, limit=1)
        if events and isinstance(events[0].data, StateEvent):
            return events[0].data
    return StateEvent(state=RunState.PENDING)


def _branch(first: StateEvent) -> RunBranch | None:
    """Return what the run's thread was branched from for it."""
    if first.branch is None:
        return None
    return RunBranch.model_construct(
        thread_id=first.branch.thread_id,
        position=first.branch.position,
        run_id=first.branch.run_id,
    )


def _actions(hot: RunHot, asked: list[str]) -> list[NextAction]:
    """Return what may be done next; what is asked below the run can be answered here too."""
    actions = next_actions(hot)
    below = len(asked) > hot.open_interrupts
    if below and hot.cancel_epoch == 0 and NextAction.AUTHORISE not in actions:
        actions = [NextAction.ANSWER_INTERRUPT, *actions]
    return list(dict.fromkeys(actions))


async def _ending(
    service: Service, row: RunRow
) -> tuple[JsonValue, BlobRef | None, Failure | None]:
    """Return answer and failure, from the terminal event; from the code when that is gone."""
    hot = row.hot
    if hot.terminal_seq is None:
        return None, None, None
    found = await service.reader.events_after(row.facts.run_id, hot.terminal_seq - 1, limit=1)
    try:
        data = found[0].data if found else None
    except DamagedEvent:
        data = None
    if isinstance(data, StateEvent) and found[0].seq == hot.terminal_seq:
        return data.answer, data.answer_ref, data.failure
    if hot.code is None:
        return None, None, None
    return None, None, Failure(code=hot.code, reason=MEANING[hot.code][0])


async def _open_interrupts(service: Service, row: RunRow) -> list[str]:
    """Return what is asked in the run and in those it waits for: it can be answered by id (R-13.5)."""
    if row.hot.open_interrupts == 0 and row.hot.open_children == 0:
        return []
    if row.hot.open_children > 0:
        found = await interrupts_in_tree(
            service,
            row,
            status=InterruptStatus.PENDING,
            after=None,
            limit=_OPEN_INTERRUPTS_MAX,
            only_waited_for=True,
        )
        return [interrupt.interrupt_id for interrupt in found]
    where = InterruptFilter(status=InterruptStatus.PENDING, run_id=row.facts.run_id)
    found = await service.reader.list_interrupts(
        row.facts.tenant_id, where, after=None, limit=_OPEN_INTERRUPTS_MAX
    )
    return [interrupt.interrupt_id for interrupt in found]
