"""Creating a run: durable before it is answered, once per idempotency key (R-3.1, R-3.2)."""

from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue

from perdure.engine.cancel import finish_superseded
from perdure.engine.core import Core
from perdure.engine.schema import check_schema, problem_with_value
from perdure.engine.values import keep
from perdure.protocol.agents import AgentCard
from perdure.protocol.base import RUNTIME_VERSION
from perdure.protocol.codec import encode
from perdure.protocol.errors import (
    IdempotencyMismatch,
    Invalid,
    NotFound,
    PerdureError,
    Unavailable,
)
from perdure.protocol.events import StateEvent
from perdure.protocol.ids import MESSAGE, RUN, THREAD, hex_of
from perdure.protocol.log import NewEvent
from perdure.protocol.runs import START_AFTER_MAX_S, Caller, RunContext, RunOptions, RunRow
from perdure.protocol.states import RunState
from perdure.protocol.values import METADATA_BYTES_MAX, Value
from perdure.signals.ports import QUEUE_TOPIC, run_topic, thread_topic
from perdure.store.requests import Inserted, NewRun
from perdure.store.rules import after


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """A run as a caller asks for it; `fingerprint` is the digest of the request's body."""

    agent_id: str
    input: JsonValue
    context: RunContext
    options: RunOptions
    caller: Caller
    fingerprint: str
    thread_id: str | None = None
    trace_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a run begins: from nothing, or from the history of another that its event names."""

    event: StateEvent = StateEvent(state=RunState.PENDING)
    step_index: int = 0
    retry_of: str | None = None
    forked_from: str | None = None


FROM_NOTHING = Start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """The run under the order; `created` False when its key was known."""

    row: RunRow
    created: bool


async def submit_run(core: Core, order: RunOrder, start: Start = FROM_NOTHING) -> Submitted:
    """Create the run and wake the workers; end the run that it cancelled on its thread.

    Raises NotFound for an unknown agent, version or thread, Invalid when the input does not fit
    the agent's input schema, IdempotencyMismatch when the key stands for another body (details
    name the run), ThreadBusy when the options say reject. An order whose key is known is answered
    by its run, also when it would be refused today.
    """
    try:
        new = await _new_run(core, order, start)
    except PerdureError as refused:
        return await accepted_before(core, order, refused)
    inserted = await core.store.insert_run(new)
    _check_same(order, inserted)
    # an insert whose acknowledgement was lost finds its own run when it is sent again
    created = inserted.created or inserted.row.facts.run_id == new.run_id
    if created:
        core.signals.publish(QUEUE_TOPIC)
        core.signals.publish(run_topic(new.run_id))
        core.signals.publish(thread_topic(inserted.row.facts.thread_id))
    if inserted.superseded is not None:
        await finish_superseded(core, new.tenant_id, inserted.superseded)
    return Submitted(row=inserted.row, created=created)


async def accepted_before(core: Core, order: RunOrder, refused: PerdureError) -> Submitted:
    """Return the run that an order made when it came first; raise why it is refused if none.

    Looked for only then, so that an order that is in order costs no further statement.
    """
    key = order.options.idempotency_key
    if key is None or isinstance(refused, Unavailable):
        raise refused
    known = await core.reader.find_run_by_key(order.caller.tenant_id, order.agent_id, key)
    if known is None:
        raise refused
    _check_same(order, known)
    return Submitted(row=known.row, created=False)


def _check_same(order: RunOrder, inserted: Inserted) -> None:
    if inserted.fingerprint != order.fingerprint:
        run_id = inserted.row.facts.run_id
        raise IdempotencyMismatch(
            "the idempotency key was used with another body", details={"run_id": run_id}
        )


async def _card(core: Core, order: RunOrder) -> AgentCard:
    version = order.options.agent_version
    card = await core.directory.find(order.agent_id, version)
    if card is None:
        named = order.agent_id if version is None else f"{order.agent_id} of version {version}"
        raise NotFound(f"there is no agent {named[:300]}", field="agent_id")
    return card


def _check(card: AgentCard, order: RunOrder) -> None:
    if len(encode(order.context.model_dump(mode="json"))) > METADATA_BYTES_MAX:
        raise Invalid(f"the context has at most {METADATA_BYTES_MAX} bytes", field="/context")
    if card.input_schema is not None:
        problem = problem_with_value(card.input_schema, order.input)
        if problem is not None:
            raise Invalid(f"the input does not fit the agent at {problem}", field="/input")
    if order.options.output_schema is not None:
        check_schema(order.options.output_schema, field="/options/output_schema")


def _may_branch(order: RunOrder) -> bool:
    return order.thread_id is not None and order.options.multitask_strategy == "fork"


async def _start_at(core: Core, options: RunOptions) -> datetime | None:
    """Return when a delayed run starts, by the store's time; None: at once. Raises Invalid."""
    if options.after is None:
        return None
    now, limit_s = await core.reader.now(), options.timeouts.run_s
    start_at = options.after if isinstance(options.after, datetime) else after(now, options.after)
    delay_s = (start_at - now).total_seconds()
    if delay_s <= 0:
        return None
    if delay_s > START_AFTER_MAX_S:
        raise Invalid(
            f"a run starts at most {START_AFTER_MAX_S} seconds from now", field="/options/after"
        )
    if limit_s is not None and delay_s >= limit_s:
        raise Invalid("the total time of the run is over before it starts", field="/options/after")
    return start_at


async def _new_run(core: Core, order: RunOrder, start: Start) -> NewRun:
    card = await _card(core, order)
    _check(card, order)
    kept, origin = keep(order.input), start.event.origin
    start_at = await _start_at(core, order.options)
    run_id = core.ids.new(RUN)
    return NewRun(
        run_id=run_id,
        tenant_id=order.caller.tenant_id,
        agent_id=card.agent_id,
        agent_version=card.version,
        thread_id=order.thread_id or core.ids.new(THREAD),
        creates_thread=order.thread_id is None,
        message_id=core.ids.new(MESSAGE),
        input=Value(inline=kept.inline, ref=kept.ref),
        context=order.context,
        options=order.options,
        caller=order.caller,
        trace_id=order.trace_id or hex_of(core.ids.new("trc")),
        required_runtime=RUNTIME_VERSION,
        idempotency_key=order.options.idempotency_key,
        fingerprint=order.fingerprint,
        event=NewEvent(
            data=start.event.model_copy(update={"start_at": start_at}) if start_at else start.event,
            step_index=start.step_index,
        ),
        start_at=start_at,
        queue=order.options.queue,
        priority=order.options.priority,
        branches_from=start.forked_from,
        branch_thread_id=core.ids.new(THREAD) if _may_branch(order) else None,
        retry_of=start.retry_of,
        forked_from=start.forked_from,
        origin_run_id=origin.run_id if origin is not None else None,
        origin_seq=origin.seq if origin is not None else None,
        blobs=kept.blobs,
    )
