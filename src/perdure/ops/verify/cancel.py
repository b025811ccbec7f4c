"""After an accepted cancel only the closing follows."""

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import CancelEvent, ChildEvent, StateEvent
from perdure.protocol.states import CancelOption, RunState

_NEW_WORK = frozenset({"action", "model", "artifact", "interrupt", "approval_request"})


@rule("I09", "After a cancel raised the epoch, no event of a lower epoch is written but `late`.")
def no_older_epoch(record: RunRecord) -> Found:
    epoch = 0
    for line in record.log:
        if line.epoch < epoch and line.type != "late":
            yield line.name, f"it is of epoch {line.epoch}, after a cancel of epoch {epoch}"
        if isinstance(line.data, CancelEvent):
            epoch = max(epoch, line.data.epoch)


@rule(
    "I10",
    "After a cancel there is no new action, child, model request, artifact, interrupt, execution "
    "or checkpoint, and no success.",
)
def no_new_work(record: RunRecord) -> Found:
    cancel = record.cancelled_at
    if cancel is None:
        return
    for line in record.log:
        if line.seq <= cancel.seq:
            continue
        spawns = isinstance(line.data, ChildEvent) and line.data.phase == "spawned"
        if line.type in _NEW_WORK or spawns:
            yield line.name, f"a {line.type} event follows the cancel at {cancel.seq}"
        if isinstance(line.data, StateEvent) and line.data.state is RunState.SUCCEEDED:
            yield line.name, f"the run succeeds after the cancel at {cancel.seq}"
    for checkpoint in record.checkpoints:
        if checkpoint.seq > cancel.seq:
            yield f"checkpoint {checkpoint.seq}", f"it follows the cancel at {cancel.seq}"
    for row in record.executions:
        if row.started_at > cancel.at:
            yield row.tool_call_id, f"execution {row.number} began after the cancel"


@rule(
    "I11",
    "The row's cancel epoch, action and options are those of the last `cancel` event (0 without "
    "one), and each event raises the epoch by one.",
)
def epoch_of_the_row(record: RunRecord) -> Found:
    if record.hot.retained_from_seq > 1:
        return  # the cancels are gone with the history
    cancels = record.of(CancelEvent)
    epochs = [data.epoch for _, data in cancels]
    if record.hot.cancel_epoch != max(epochs, default=0):
        yield "run", f"its epoch is {record.hot.cancel_epoch}, its cancels are {epochs}"
    if epochs != list(range(1, len(epochs) + 1)):
        yield "run", f"the epochs of its cancels are {epochs}"
    action = cancels[-1][1].action if cancels else None
    if record.hot.cancel_action is not action:
        yield "run", f"its action is {record.hot.cancel_action}, the last cancel's {action}"
    options = cancels[-1][1].options if cancels else CancelOption.NONE
    if record.hot.cancel_options != options:
        yield "run", f"its options are {record.hot.cancel_options}, the last cancel's {options}"


RULES = (no_older_epoch, no_new_work, epoch_of_the_row)
