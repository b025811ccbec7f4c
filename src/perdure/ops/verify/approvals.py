"""What happens to an approval between its question and its answer."""

from perdure.engine.snapshot import APPROVAL_EVENT_NAME
from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.events import ApprovalRequestEvent, CustomEvent, ResumeEvent


@rule(
    "I76",
    "Who was told of an approval, or may decide it instead, is recorded while it is open; it is "
    "escalated once at most, to those whom its request names, and told of only if it says so.",
)
def while_open(record: RunRecord) -> Found:
    opened: dict[str, ApprovalRequestEvent] = {}
    escalated: set[str] = set()
    for line in record.log:
        match line.data:
            case ApprovalRequestEvent() as asked:
                opened[asked.approval_id] = asked
            case ResumeEvent(interrupt_id=closed):
                opened.pop(closed, None)
            case CustomEvent(name=name, value=dict() as value) if name == APPROVAL_EVENT_NAME:
                key, phase = str(value.get("approval_id")), value.get("phase")
                asked = opened.get(key)
                if asked is None:
                    yield line.name, f"{phase} of {key}, which is not an open approval"
                elif phase == "escalated" and (
                    key in escalated or value.get("approvers") != list(asked.escalate_to)
                ):
                    yield line.name, f"{key} is escalated a second time, or to others than it says"
                elif phase in {"notified", "not_notified"} and not asked.notifies:
                    yield line.name, f"{key} is told of, and does not ask for that"
                if phase == "escalated":
                    escalated.add(key)
            case _:
                pass


RULES = (while_open,)
