"""The hot row against the rows beside it: what it counts, and what will wake the run."""

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import AttemptEvent, ChildEvent, StateEvent
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunHot
from perdure.protocol.states import ParkedOn, RunState, StepStatus, ToolCallStatus, is_open
from perdure.store.requests import TimerKind

_ENDED = frozenset({StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED})


@rule("H1", "The counts on the run's row are those of the rows beside it.")
def counts_agree(record: RunRecord) -> Found:
    counted = {
        "open_calls": (
            record.hot.open_calls,
            sum(is_open(call.status) for call in record.calls),
        ),
        "open_interrupts": (record.hot.open_interrupts, len(record.pending)),
        "open_children": (record.hot.open_children, _open_children(record)),
        "step_index": (
            record.hot.step_index,
            record.first_step + sum(step.status in _ENDED for step in record.steps),
        ),
    }
    for name, (told, real) in counted.items():
        if told != real:
            yield "run", f"{name} is {told}, there are {real}"


def _open_children(record: RunRecord) -> int:
    """Count the children in the log that are neither detached nor told of."""
    phases = [
        data.phase
        for _, data in record.of(ChildEvent)
        if (data.phase == "spawned" and not data.detached) or data.phase == "result"
    ]
    return phases.count("spawned") - phases.count("result")


@rule(
    "H4",
    "A run that goes on has a deadline timer exactly when its row has a deadline, an expiry timer "
    "for each pending interrupt that expires, a callback timer for each call that waits for its "
    "callback, and no others but a closing timer and the reports of children that have ended.",
)
def timers_agree(record: RunRecord) -> Found:
    if record.is_over:
        return
    found = {(timer.kind, timer.ref) for timer in record.timers}
    found.discard((TimerKind.CLOSE, None))
    found -= {(TimerKind.CHILD, child.facts.run_id) for child in record.children}
    wanted: set[tuple[TimerKind, str | None]] = {
        (TimerKind.EXPIRY, row.interrupt_id) for row in record.pending if row.expires_at is not None
    }
    wanted |= {(TimerKind.CALLBACK, call.tool_call_id) for call in _by_callback(record)}
    if record.hot.deadline_at is not None:
        wanted.add((TimerKind.DEADLINE, None))
    for kind, ref in sorted(found - wanted, key=str):
        yield "run", f"a {kind} timer of {ref} is left"
    for kind, ref in sorted(wanted - found, key=str):
        yield "run", f"the {kind} timer of {ref} is missing"


def _by_callback(record: RunRecord) -> list[ToolCallRow]:
    """Return the calls that wait for their callback: `pending`, and not for a child."""
    children = {data.tool_call_id for _, data in record.of(ChildEvent)}
    return [
        call
        for call in record.calls
        if call.status is ToolCallStatus.PENDING and call.tool_call_id not in children
    ]


@rule(
    "H10",
    "A call that waits for its callback was handed to its tool, and the last of its executions "
    "ended `pending`.",
)
def pending_was_said(record: RunRecord) -> Found:
    for call in _by_callback(record):
        executions = record.executions_by_call.get(call.tool_call_id, [])
        last = executions[-1].outcome if executions else None
        if last is not ToolCallStatus.PENDING:
            yield call.tool_call_id, f"it waits for its callback, its last execution is {last}"


@rule(
    "L6",
    "A run that goes on has exactly one thing that moves it: a holder, an entry in `ready`, a "
    "person who is asked, its children, a callback, the run before it in its thread, a closing timer, or an "
    "operator.",
)
def one_waker(record: RunRecord) -> Found:
    if record.is_over:
        return
    wakers = _wakers(record)
    if len(wakers) != 1:
        yield "run", f"it is moved by {', '.join(wakers) or 'nothing'}"


def _wakers(record: RunRecord) -> list[str]:
    hot = record.hot
    closing = any(timer.kind is TimerKind.CLOSE for timer in record.timers)
    asked = hot.state is RunState.WAITING_HUMAN and bool(record.pending)
    active = record.thread.active_run_id if record.thread is not None else None
    found = {
        "its holder": hot.lease_owner is not None,
        "an entry in ready": record.is_ready,
        "a closing timer": closing and hot.parked_on is not ParkedOn.CHILD,
        "its children": hot.parked_on is ParkedOn.CHILD and hot.open_children > 0,
        "a callback": hot.parked_on is ParkedOn.CALLBACK and bool(_by_callback(record)),
        "a person": asked and hot.parked_on is None,
        "the run before it in its thread": hot.parked_on is ParkedOn.THREAD
        and active not in {None, record.facts.run_id},
        "an operator": hot.parked_on is ParkedOn.REPAIR,
    }
    return [name for name, moves in found.items() if moves]


@rule(
    "H11",
    "A delayed run is claimed no earlier than its first event says; until then its row waits on a "
    "timer with that time, or behind another run of its thread.",
)
def delays_are_kept(record: RunRecord) -> Found:
    hot = record.hot
    start_at = next((data.start_at for line, data in record.of(StateEvent) if line.seq == 1), None)
    delayed = hot.state is RunState.PENDING and hot.parked_on is ParkedOn.TIMER
    whole = bool(record.log) and record.log[0].seq == 1
    if delayed and whole and hot.wake_at != start_at:
        yield "run", f"its row wakes at {hot.wake_at}, its first event says {start_at}"
    if start_at is None:
        return
    if _can_be_claimed(hot) and hot.updated_at < start_at:
        yield "run", f"it can be claimed before {start_at}"
    for line, data in record.of(AttemptEvent):
        if data.phase in {"claimed", "recovered"} and line.at < start_at:
            yield line.name, f"it was claimed before {start_at}"


def _can_be_claimed(hot: RunHot) -> bool:
    return hot.state is RunState.PENDING and hot.lease_owner is None and hot.parked_on is None


RULES = (counts_agree, timers_agree, pending_was_said, one_waker, delays_are_kept)
