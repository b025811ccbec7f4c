"""The journal of code agents: what their functions asked for, in the order of their code."""

from collections.abc import Iterator

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.events import (
    ActionEvent,
    ArtifactEvent,
    ChildEvent,
    CustomEvent,
    InterruptEvent,
    ModelEvent,
    ResultEvent,
    ResumeEvent,
)

_MARK = "~"


@rule(
    "H8",
    "A position of a code agent is recorded once, and within a branch one operation at a time, in "
    "the order of its code: the next one after the one before has its result.",
)
def one_operation_at_a_time(record: RunRecord) -> Found:
    recorded: dict[str, int] = {}
    reached: dict[str, int] = {}
    new: dict[str, int] = {}
    step = -1
    waiting: dict[str, tuple[str, list[tuple[str, int]]]] = {}
    for line in record.log:
        waiting.pop(_ends(line) or "", None)
        position = _position_of(line)
        if position is None:
            continue
        if position in recorded:
            yield line.name, f"{position} was recorded by event {recorded[position]}"
        recorded[position] = line.seq
        if _MARK in position:
            continue
        if line.step_index != step:  # what one decision records has no order of its own
            reached |= new
            step = line.step_index
        path = list(_levels(position))
        yield from _in_order(line, position, path, reached)
        for branch, index in path:
            new[branch] = max(new.get(branch, -1), index)
        yield from _alone(line, position, path, waiting)
        ended_by = _ended_by(line)
        if ended_by is not None:
            waiting[ended_by] = (position, path)


def _in_order(
    line: LogLine, position: str, path: list[tuple[str, int]], reached: dict[str, int]
) -> Found:
    for branch, index in path:
        last = reached.get(branch, -1)
        if index < last or (index == last and (branch, index) == path[-1]):
            yield line.name, f"{position} comes after index {last} of branch {branch!r}"


def _alone(
    line: LogLine,
    position: str,
    path: list[tuple[str, int]],
    waiting: dict[str, tuple[str, list[tuple[str, int]]]],
) -> Found:
    steps = dict(path)
    for other, other_path in waiting.values():
        if any(steps.get(branch, index) > index for branch, index in other_path):
            yield line.name, f"{position} is recorded while {other} before it has no result"


def _position_of(line: LogLine) -> str | None:
    match line.data:
        case (
            ActionEvent(position=position)
            | InterruptEvent(position=position)
            | ModelEvent(position=position)
            | CustomEvent(position=position)
            | ArtifactEvent(position=position)
            | ChildEvent(position=position)
        ):
            return position
        case _:
            return None


def _ends(line: LogLine) -> str | None:
    """Return the id of the call, question or child whose result an event is."""
    match line.data:
        case ResultEvent(tool_call_id=ended) | ResumeEvent(interrupt_id=ended):
            return ended
        case ChildEvent(phase="result", child_run_id=child_run_id):
            return child_run_id
        case _:
            return None


def _ended_by(line: LogLine) -> str | None:
    match line.data:
        case ActionEvent(tool_call_id=tool_call_id):
            return tool_call_id
        case InterruptEvent(interrupt_id=interrupt_id):
            return interrupt_id
        case ChildEvent(phase="spawned", detached=False, child_run_id=child_run_id):
            return child_run_id
        case _:
            return None


def _levels(position: str) -> Iterator[tuple[str, int]]:
    """Return branch and index of an operation and of each gather around it; nonsense has none."""
    parts = position.split(".")
    if len(parts) % 2 and all(part.isdigit() for part in parts):
        for end in range(0, len(parts), 2):
            yield ".".join(parts[:end]), int(parts[end])


RULES = (one_operation_at_a_time,)
