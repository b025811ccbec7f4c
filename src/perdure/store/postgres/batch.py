"""A batch of commits as the arrays of `commit_batch`: one group of arrays for each table.

Arrays go over the wire in binary and are unnested by the server, so that a batch of any size is
one statement. The first array of a group names the place (from 1) of the commit in the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.codec import encode
from perdure.protocol.ids import hex_of
from perdure.protocol.log import TYPE_NUMBER
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import Counters
from perdure.protocol.states import TERMINAL, RunState, ToolCallStatus
from perdure.store.commits import CallUpdate, Commit
from perdure.store.postgres.wire import data_out, digest_out, digest_out_or_none, id_out, text_out
from perdure.store.rules import starts, terminal_seq

Cells = list[Any]
_GROUPS = {
    "commits": 24,
    "events": 5,
    "steps": 5,
    "calls": 16,
    "call_updates": 6,
    "executions": 5,
    "execution_ends": 4,
    "checkpoints": 6,
    "messages": 6,
}


class Group:
    """The rows of one table, turned into columns."""

    __slots__ = ("_width", "rows")

    def __init__(self, width: int) -> None:
        self._width = width
        self.rows: list[tuple[Any, ...]] = []

    def columns(self) -> list[Cells]:
        """Return one array a column.

        A column of nothing but NULLs is an empty array: the server fills what is shorter with NULLs,
        and the driver looks at each value of an array twice.
        """
        if not self.rows:
            return [[] for _ in range(self._width)]
        columns = zip(*self.rows, strict=True)
        return [[] if _is_empty(column) else list(column) for column in columns]


def _is_empty(column: tuple[Any, ...]) -> bool:
    return column[0] is None and column.count(None) == len(column)


@dataclass(slots=True)
class Batch:
    """The groups of a batch."""

    groups: dict[str, Group] = field(
        default_factory=lambda: {name: Group(width) for name, width in _GROUPS.items()}
    )

    def arguments(self, clock: datetime | None, *, queue_allowed: bool) -> list[object]:
        """Return the arguments of `commit_batch`, in order."""
        out: list[object] = [clock, queue_allowed]
        for name, group in self.groups.items():
            out.extend(group.columns())
            if name == "commits":
                out.append(SCHEMA_VERSION)
        return out

    def present(self, commits: Sequence[Commit]) -> frozenset[str]:
        """Return the names of the optional parts of `commit_batch` that these commits have."""
        found = {name for name, group in self.groups.items() if group.rows}
        for commit in commits:
            ends = commit.hot.state in TERMINAL
            if ends:
                found.add("ends")
            if ends or commit.messages:
                found.add("thread")
            if commit.attempt_end is not None:
                found.add("attempts")
        return frozenset(found)


def build(commits: Sequence[Commit]) -> Batch:
    """Return the arrays of commits that are sorted by run id."""
    batch = Batch()
    groups = batch.groups
    fill: tuple[tuple[list[tuple[Any, ...]], Callable[[Commit, int], list[tuple[Any, ...]]]], ...]
    fill = (
        (groups["commits"].rows, _commit_rows),
        (groups["events"].rows, _event_rows),
        (groups["steps"].rows, _step_rows),
        (groups["messages"].rows, _message_rows),
        (groups["checkpoints"].rows, _checkpoint_rows),
    )
    for place, commit in enumerate(commits, start=1):
        for rows, make in fill:
            rows.extend(make(commit, place))
        if commit.new_calls or commit.call_updates:
            _fill_calls(groups, commit, place)
        if commit.new_executions or commit.execution_ends:
            _fill_executions(groups, commit, place)
    return batch


_NO_COUNTERS = Counters()


def encode_counters(counters: Counters) -> bytes:
    """Return the stored form of a run's counters, without those that are zero."""
    if counters is _NO_COUNTERS:
        return b"{}"
    return counters.model_dump_json(exclude_defaults=True).encode()


def _commit_rows(commit: Commit, place: int) -> list[tuple[Any, ...]]:
    """Return the cells of a commit; NULL for what the statement takes as zero or false: most columns
    of that kind hold nothing else.
    """
    guard, hot = commit.guard, commit.hot
    ends = hot.state in TERMINAL
    return [
        (
            hex_of(commit.run_id),
            hex_of(commit.commit_id),
            guard.token,
            guard.any_holder or None,
            guard.epoch or None,
            guard.from_state,
            guard.expected_seq,
            guard.expected_seq + len(commit.events),
            hot.state,
            hot.step_index,
            hot.faults or None,
            None if ends else hot.parked_on,
            hot.waiting_kind,
            hot.code,
            hot.open_calls,
            hot.open_interrupts or None,
            hot.open_children or None,
            encode_counters(hot.counters),
            hot.checkpoint_seq,
            starts(commit) or None,
            terminal_seq(commit) if ends else None,
            commit.attempt_end,
            commit.ready_in_s,
            len(commit.messages) or None,
        )
    ]


def _event_rows(commit: Commit, place: int) -> list[tuple[Any, ...]]:
    first = commit.guard.expected_seq + 1
    return [
        (
            place,
            first + i,
            event.step_index,
            TYPE_NUMBER[event.data.type],
            data_out(event.encoded()),
        )
        for i, event in enumerate(commit.events)
    ]


def _step_rows(commit: Commit, place: int) -> list[tuple[Any, ...]]:
    latest = {step.index: step for step in commit.steps}
    if len(latest) < len(commit.steps):  # opened and moved on in one commit
        for step in reversed(commit.steps):
            latest[step.index] = replace(latest[step.index], first_seq=step.first_seq)
    return [
        (place, step.index, step.first_seq, step.last_seq, step.status) for step in latest.values()
    ]


def _message_rows(commit: Commit, place: int) -> list[tuple[Any, ...]]:
    return [
        (place, hex_of(m.message_id), number, m.seq, m.role, m.author.encode())
        for number, m in enumerate(commit.messages, start=1)
    ]


def _checkpoint_rows(commit: Commit, place: int) -> list[tuple[Any, ...]]:
    point = commit.checkpoint
    if point is None:
        return []
    return [
        (
            place,
            point.seq,
            point.parent_seq,
            point.step_index,
            digest_out(point.digest),
            encode(point.agent_state),
        )
    ]


def _updated(call: ToolCallRow, update: CallUpdate) -> ToolCallRow:
    return replace(
        call,
        status=update.status,
        effective_digest=update.effective_digest or call.effective_digest,
        external_ref=update.external_ref or call.external_ref,
        result_seq=update.result_seq if update.result_seq is not None else call.result_seq,
    )


def _merged(first: CallUpdate, second: CallUpdate) -> CallUpdate:
    return CallUpdate(
        tool_call_id=first.tool_call_id,
        status=second.status,
        effective_digest=second.effective_digest or first.effective_digest,
        external_ref=second.external_ref or first.external_ref,
        result_seq=second.result_seq if second.result_seq is not None else first.result_seq,
    )


def _fill_calls(groups: dict[str, Group], commit: Commit, place: int) -> None:
    """Add new calls and updates; one row is written once, so what meets is merged here."""
    new = {call.tool_call_id: call for call in commit.new_calls}
    updates: dict[str, CallUpdate] = {}
    for update in commit.call_updates:
        key = update.tool_call_id
        if key in new:
            new[key] = _updated(new[key], update)
        else:
            updates[key] = _merged(updates[key], update) if key in updates else update
    groups["calls"].rows.extend(_call_cells(call, place) for call in new.values())
    groups["call_updates"].rows.extend(
        (
            place,
            hex_of(update.tool_call_id),
            update.status,
            update.result_seq,
            digest_out_or_none(update.effective_digest),
            text_out(update.external_ref),
        )
        for update in updates.values()
    )


def _call_cells(call: ToolCallRow, place: int) -> tuple[Any, ...]:
    same = call.effective_digest == call.args_digest
    return (
        place,
        hex_of(call.tool_call_id),
        call.step_index,
        call.ordinal,
        call.action_seq,
        call.result_seq,
        call.repeatable,
        call.needs_approval or None,
        call.status,
        call.side_effect,
        call.tool.encode(),
        call.version,
        digest_out(call.args_digest),
        None if same else digest_out(call.effective_digest),
        call.effect_key,
        text_out(call.external_ref),
    )


def _fill_executions(groups: dict[str, Group], commit: Commit, place: int) -> None:
    """Add new executions and ends; an execution that also ends here is one row."""
    ends: dict[tuple[str, int], ToolCallStatus] = {
        (end.tool_call_id, end.number): end.outcome for end in commit.execution_ends
    }
    created = {call.tool_call_id: call.args_digest for call in commit.new_calls}
    for run in commit.new_executions:
        same = created.get(run.tool_call_id) == run.args_digest
        digest = None if same else digest_out(run.args_digest)
        outcome = ends.pop((run.tool_call_id, run.number), None)
        cells = (place, hex_of(run.tool_call_id), run.number, digest, outcome)
        groups["executions"].rows.append(cells)
    groups["execution_ends"].rows.extend(
        (place, id_out(call_id), number, outcome) for (call_id, number), outcome in ends.items()
    )


def holds_only_hot_parts(commit: Commit) -> bool:
    """Tell whether `commit_batch` alone writes the whole commit."""
    guard = commit.guard
    return not (
        commit.new_interrupts
        or commit.interrupt_closes
        or commit.artifacts
        or commit.blobs
        or commit.ready_in_s is not None
        or commit.close_in_s is not None
        or guard.token is None
        or RunState.WAITING_HUMAN in {guard.from_state, commit.hot.state}
        or any(run.approval_id is not None for run in commit.new_executions)
        or commit.new_children
        or commit.reports_to is not None
        or commit.reported
        or commit.new_callbacks
        or commit.callbacks_over
        or commit.notices
        or commit.handed_to is not None
        or commit.unmoved_since is not None
        or commit.discards is not None
        or commit.state_values
    )
