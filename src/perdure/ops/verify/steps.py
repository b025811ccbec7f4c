"""Steps and checkpoints."""

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import StepEvent
from perdure.protocol.states import StepStatus

_ENDED = frozenset({StepStatus.SUCCEEDED, StepStatus.FAILED, StepStatus.CANCELLED})


@rule(
    "I44",
    "Steps are numbered without gap, from 0 or from where the shared history ends; at most one is "
    "open, the last.",
)
def steps_gapless(record: RunRecord) -> Found:
    indexes = [step.index for step in record.steps]
    if indexes != list(range(record.first_step, record.first_step + len(indexes))):
        yield "run", f"its steps are numbered {indexes[:20]}"
    for step in record.steps:
        if step.status not in _ENDED and step.index != indexes[-1]:
            yield f"step {step.index}", f"it is {step.status}, and others follow it"


@rule("I45", "Every tool call belongs to a step of its run.")
def call_has_step(record: RunRecord) -> Found:
    known = {step.index for step in record.steps}
    for call in record.calls:
        if call.step_index not in known:
            yield call.tool_call_id, f"the run has no step {call.step_index}"


@rule(
    "I46",
    "A step that is over has exactly one `step` event, with its status, at its `last_seq`; others "
    "have none; every `step` event has its step.",
)
def step_ends_once(record: RunRecord) -> Found:
    events: dict[int, list[tuple[int, str]]] = {}
    for line, data in record.of(StepEvent):
        events.setdefault(data.index, []).append((line.seq, data.status))
    for step in record.steps:
        found = events.pop(step.index, [])
        wanted = [(step.last_seq, step.status)] if step.status in _ENDED else []
        is_kept = (step.last_seq or record.hot.last_seq) >= record.hot.retained_from_seq
        if found != wanted and (found or is_kept):
            yield f"step {step.index}", f"its row says {wanted}, the log {found}"
        if (step.ended_at is not None) != (step.status in _ENDED):
            yield f"step {step.index}", f"it is {step.status}, ended at {step.ended_at}"
    for index, found in events.items():
        yield f"step {index}", f"event {found[0][0]} ends it, and it has no row"


@rule(
    "I24",
    "A checkpoint stands at an event of its run, not behind the last one, with the attempt and "
    "epoch of that event.",
)
def checkpoint_has_event(record: RunRecord) -> Found:
    for row in record.checkpoints:
        name, line = f"checkpoint {row.seq}", record.lines_by_seq.get(row.seq)
        if row.seq > record.hot.last_seq:
            yield name, f"the run's last event is {record.hot.last_seq}"
        elif line is None and row.seq >= record.hot.retained_from_seq:
            yield name, "there is no such event"
        elif line is not None and (row.attempt, row.epoch) != (line.attempt, line.epoch):
            yield name, f"it is of attempt {row.attempt}, epoch {row.epoch}; its event is not"


@rule(
    "I25",
    "A checkpoint's parent is the checkpoint before it; the row names the last one.",
)
def checkpoint_chain(record: RunRecord) -> Found:
    previous: int | None = None
    for place, row in enumerate(record.checkpoints):
        first_kept = place == 0 and record.hot.retained_from_seq > 1
        if row.parent_seq != previous and not first_kept:
            yield f"checkpoint {row.seq}", f"its parent is {row.parent_seq}, not {previous}"
        previous = row.seq
    if record.hot.checkpoint_seq != previous:
        yield "run", f"its row names checkpoint {record.hot.checkpoint_seq}, not {previous}"


@rule("I26", "A run has at most one checkpoint at an event.")
def one_checkpoint(record: RunRecord) -> Found:
    seen: set[int] = set()
    for row in record.checkpoints:
        if row.seq in seen:
            yield f"checkpoint {row.seq}", "there is another one at that event"
        seen.add(row.seq)


RULES = (
    steps_gapless,
    call_has_step,
    step_ends_once,
    checkpoint_has_event,
    checkpoint_chain,
    one_checkpoint,
)
