"""How runs enter the store, and registrations beside them.

Each function is one job of the writer: it looks for what it must refuse before it writes anything,
because other jobs share its transaction.
"""

from collections.abc import Sequence
from typing import Final

from perdure.protocol.base import to_micros
from perdure.protocol.codec import encode
from perdure.protocol.errors import Conflict, Gone, NotFound, ThreadBusy
from perdure.protocol.messages import Role
from perdure.protocol.records import ThreadBase, ThreadRow
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import ParkedOn
from perdure.store import beginning
from perdure.store.lineage import branch_base, branched
from perdure.store.requests import AgentRegistration, Inserted, NewRun, TimerKind, ToolRegistration
from perdure.store.rules import Kept
from perdure.store.sqlite.connection import read_row
from perdure.store.sqlite.moves import supersede
from perdure.store.sqlite.rows import (
    FINGERPRINT,
    Row,
    maybe,
    pack_hot,
    pack_id,
    read_run,
)
from perdure.store.sqlite.threads import find_live, insert_base, insert_thread
from perdure.store.sqlite.transaction import NO_REF, Transaction

_FIRST: Final = 1
"""The position of the first message of a thread."""


def insert_run(tx: Transaction, new: NewRun) -> Inserted:
    """Create a run with all that belongs to it, or return the one that is there."""
    run, thread = pack_id(new.run_id), pack_id(new.thread_id)
    known = _find_known(tx, new, run)
    if known is not None:
        return Inserted(
            row=read_row(read_run, known), created=False, fingerprint=known[FINGERPRINT]
        )
    _check_origin(tx, new)
    active = _enter_thread(tx, new, run, thread)
    if active is not None and new.options.multitask_strategy == "fork":
        new = branched(new, f"run_{active.hex()}")
        thread = pack_id(new.thread_id)
        active = _enter_thread(tx, new, run, thread)
    base = _base_of(tx, new)
    if base is not None:
        insert_base(tx, base)
    first = _FIRST if base is None else base.from_position + 1
    if new.creates_thread:
        insert_thread(tx, _new_thread(tx, new, first))
    queued = active is not None and not beginning.takes_no_turn(new.options)
    superseded = _supersede(tx, new, active)
    facts = beginning.first_facts(new, tx.now)
    hot = beginning.first_hot(new, tx.now, queued=queued)
    position = first if new.creates_thread else _next_position(tx, new, thread)
    _add_input(tx, new, run, thread, position)
    _insert_cold(tx, new, facts, (run, thread, position))
    tx.run("insert_run_state", *pack_hot(Kept(hot=hot)), run)
    tx.append(run, hot, beginning.first_event(new, superseded, base).data, new.event.step_index)
    tx.keep_blobs(run, new.tenant_id, new.blobs, {blob.digest for blob in new.blobs})
    if hot.deadline_at is not None:
        due = to_micros(hot.deadline_at)
        tx.run("insert_timer", run, TimerKind.DEADLINE.value, NO_REF, due)
    if hot.parked_on is ParkedOn.THREAD:
        tx.run("queue_in_thread", thread, position, run)
    else:
        tx.set_ready(run, hot, to_micros(hot.wake_at or tx.now))
    row = RunRow(facts=facts, hot=hot)
    return Inserted(row=row, created=True, fingerprint=new.fingerprint, superseded=superseded)


def _find_known(tx: Transaction, new: NewRun, run: bytes) -> Row | None:
    known = tx.one("find_run", run, None)
    if known is None and new.idempotency_key is not None:
        known = tx.one("find_idempotent_run", new.tenant_id, new.agent_id, new.idempotency_key)
    return known


def _check_origin(tx: Transaction, new: NewRun) -> None:
    if new.origin_run_id is None:
        return
    origin = tx.load(pack_id(new.origin_run_id))
    if origin is None or origin.hot.retained_from_seq > 1:
        raise Gone("the history that the run is to share is no longer kept")


def _enter_thread(tx: Transaction, new: NewRun, run: bytes, thread: bytes) -> bytes | None:
    """Make or find the thread; return its active run, if the new one has to queue in it."""
    if tx.one("find_message", pack_id(new.message_id), None) is not None:
        raise Conflict("the message exists")
    row = tx.one("find_active_run", thread)
    if new.creates_thread:
        if row is not None:
            raise Conflict("the thread exists")
        return None
    if row is None:
        raise NotFound("no such thread")
    find_live(tx, new.tenant_id, new.thread_id)
    if row[0] is None:
        tx.run("activate_thread", thread, None, run)
        return None
    if new.options.multitask_strategy == "reject":
        raise ThreadBusy("the thread has an active run", details={"run_id": f"run_{row[0].hex()}"})
    active: bytes = row[0]
    return active


def _supersede(tx: Transaction, new: NewRun, active: bytes | None) -> str | None:
    """Cancel the thread's active run when the new one asks for it; return which was cancelled."""
    wish = beginning.superseding(new)
    if wish is None or active is None or not supersede(tx, active, wish):
        return None
    return f"run_{active.hex()}"


def _base_of(tx: Transaction, new: NewRun) -> ThreadBase | None:
    """Return what the run's new thread says of the thread that it branches from."""
    if new.branches_from is None:
        return None
    place = tx.one("find_place", pack_id(new.branches_from))
    if place is None or place[2] is not None:
        raise Gone("the thread was deleted")
    return branch_base(new, f"thr_{place[0].hex()}", place[1], tx.now)


def _new_thread(tx: Transaction, new: NewRun, first: int) -> ThreadRow:
    """Return the thread of a run as that run's input leaves it."""
    return ThreadRow(
        thread_id=new.thread_id,
        tenant_id=new.tenant_id,
        title="",
        metadata={},
        participants=[],
        capabilities=[],
        active_run_id=new.run_id,
        last_position=first,
        created_at=tx.now,
        updated_at=tx.now,
    )


def _add_input(tx: Transaction, new: NewRun, run: bytes, thread: bytes, position: int) -> None:
    tx.run(
        "insert_message",
        thread,
        position,
        pack_id(new.message_id),
        new.tenant_id,
        run,
        None,
        Role.USER.value,
        new.caller.principal,
        tx.now_micros,
        None,
    )


def _next_position(tx: Transaction, new: NewRun, thread: bytes) -> int:
    place = tx.one("next_position", tx.now_micros, thread, new.tenant_id)
    assert place is not None, "the thread was found"
    position: int = place[0]
    return position


def _insert_cold(
    tx: Transaction, new: NewRun, facts: RunFacts, place: tuple[bytes, bytes, int]
) -> None:
    run, thread, position = place
    tx.run(
        "insert_run",
        run,
        facts.tenant_id,
        facts.agent_id,
        facts.agent_version,
        thread,
        pack_id(facts.root_run_id),
        maybe(pack_id, facts.parent_run_id),
        maybe(pack_id, facts.retry_of),
        maybe(pack_id, facts.forked_from),
        maybe(pack_id, facts.origin_run_id),
        facts.origin_seq,
        new.queue,
        new.priority,
        facts.options.faults_max,
        facts.required_runtime,
        facts.schema_version,
        position,
        facts.trace_id,
        new.idempotency_key,
        new.fingerprint,
        to_micros(facts.created_at),
        facts.input.model_dump_json(exclude_defaults=True).encode(),
        facts.context.model_dump_json(exclude_defaults=True).encode(),
        facts.options.model_dump_json(exclude_defaults=True).encode(),
        facts.caller.model_dump_json(exclude_defaults=True).encode(),
        facts.depth,
        int(facts.detached),
    )


def register(
    tx: Transaction, agents: Sequence[AgentRegistration], tools: Sequence[ToolRegistration]
) -> None:
    """Record versions; one that is replaced keeps the time of its first registration."""
    for agent in agents:
        card = encode(agent.card)
        tx.run("upsert_agent", agent.agent_id, agent.version, agent.digest, tx.now_micros, card)
    for tool in tools:
        spec = encode(tool.spec)
        tx.run("upsert_tool", tool.name, tool.version, tool.digest, tx.now_micros, spec)
