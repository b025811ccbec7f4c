"""States that were updated by hand."""

from perdure.engine.snapshot import STATE_UPDATE_EVENT_NAME
from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import CustomEvent, StateEvent
from perdure.protocol.states import RunState


@rule(
    "I81",
    "A state is updated by hand only while the run waits for a person, and never once it is being "
    "cancelled; the update names its author, has a checkpoint, and its key no other update.",
)
def updated_while_waiting(record: RunRecord) -> Found:
    state: RunState | None = None
    keys: set[str] = set()
    checkpoints = {row.seq for row in record.checkpoints}
    for line in record.log:
        match line.data:
            case StateEvent() as moved:
                state = moved.state
            case CustomEvent(name=name, value=value) if name == STATE_UPDATE_EVENT_NAME:
                said = value if isinstance(value, dict) else {}
                if state not in {None, RunState.WAITING_HUMAN}:
                    yield line.name, f"it updates the state of a run that is {state}"
                if line.epoch > 0:
                    yield line.name, "it updates the state of a run that is being cancelled"
                if not said.get("by"):
                    yield line.name, "it updates the state and names no author"
                if line.seq not in checkpoints and line.seq >= record.hot.retained_from_seq:
                    yield line.name, "it updates the state and has no checkpoint"
                key = said.get("key")
                if key is not None and str(key) in keys:
                    yield line.name, f"another update has its key {key}"
                keys |= set() if key is None else {str(key)}
            case _:
                pass


RULES = (updated_while_waiting,)
