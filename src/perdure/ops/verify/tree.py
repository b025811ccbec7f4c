"""Runs in a tree: whose child a run is, what its parent was told, and who ends first."""

from collections import Counter

from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.record import LogLine, RunRecord
from perdure.protocol.events import ChildEvent, CustomEvent, HandoffEvent
from perdure.protocol.states import TERMINAL, RunState
from perdure.protocol.topics import PUBLISHED_EVENT_NAME


@rule(
    "I21",
    "When a run has ended, so has every child that it did not detach. (An ORPHANED run has ended.)",
)
def parents_end_last(record: RunRecord) -> Found:
    parent = record.parent
    if parent is None or record.facts.detached or record.is_over:
        return
    if parent.hot.state in TERMINAL:
        yield "run", f"its parent {parent.facts.run_id} has ended, it is {record.hot.state}"


@rule(
    "I22",
    "Every child has exactly one `child` event (spawned) in its parent's log, and each such event "
    "its child.",
)
def spawned_once(record: RunRecord) -> Found:
    told = Counter(data.child_run_id for _, data in _phase(record, "spawned"))
    rows = {child.facts.run_id: child for child in record.children}
    for child_id, times in told.items():
        if times != 1:
            yield str(child_id), f"it was spawned {times} times"
        if child_id not in rows:
            yield str(child_id), "it was spawned and is not a child of the run"
    if record.hot.retained_from_seq == 1:
        for child_id in rows.keys() - told.keys():
            yield child_id, "it is a child of the run and was never spawned"


@rule(
    "I23",
    "A child that is not detached has at most one `child` event (result), with the state in which "
    "it ended, and exactly one when its parent succeeded; a detached one has none.",
)
def reported_once(record: RunRecord) -> Found:
    rows = {child.facts.run_id: child for child in record.children}
    told = Counter(data.child_run_id for _, data in _phase(record, "result"))
    for line, data in _phase(record, "result"):
        child = rows.get(data.child_run_id or "")
        if child is None or child.facts.detached:
            yield line.name, f"it tells of {data.child_run_id}, which is no child to be told of"
        elif child.hot.state is not data.state:
            yield line.name, f"it tells {data.state}, the child is {child.hot.state}"
    whole = record.hot.retained_from_seq == 1
    succeeded = record.hot.state is RunState.SUCCEEDED and whole
    for child_id, child in rows.items():
        times = told[child_id]
        if times > 1 or (succeeded and times == 0 and not child.facts.detached):
            yield child_id, f"its result was told {times} times"


@rule(
    "I63",
    "All children of a run that one participant's name stands for run on one thread, the one that "
    "their `child` events (spawned) name, which no other name stands for.",
)
def participants_last(record: RunRecord) -> Found:
    rows = {child.facts.run_id: child for child in record.children}
    threads: dict[str, str] = {}
    for line, data in _phase(record, "spawned"):
        if data.participant is None:
            continue
        known = threads.setdefault(data.participant, data.thread_id or "")
        if known != data.thread_id:
            yield line.name, f"{data.participant} changes from {known} to {data.thread_id}"
        child = rows.get(data.child_run_id or "")
        if child is not None and child.facts.thread_id != data.thread_id:
            where = child.facts.thread_id
            yield line.name, f"it tells of {data.thread_id}, the child runs on {where}"
    if len(set(threads.values())) != len(threads):
        yield "run", "two participants share a thread"


@rule(
    "I64",
    "A `child` event with a topic follows the publication that it names, at most once for each "
    "agent; the run that it names is detached and stands in the inbox that it names.",
)
def delivered_once(record: RunRecord) -> Found:
    rows = {child.facts.run_id: child for child in record.children}
    seen: set[tuple[int | None, str | None]] = set()
    for line, data in record.of(ChildEvent):
        if data.topic is None:
            continue
        source = record.lines_by_seq.get(data.published_seq or 0)
        if not _says(source, data.topic) or (source is not None and source.seq >= line.seq):
            yield line.name, f"nothing was published to {data.topic} at {data.published_seq}"
        delivery = (data.published_seq, data.agent_id)
        if delivery in seen:
            yield line.name, f"it was delivered to {data.agent_id} before"
        seen.add(delivery)
        child = rows.get(data.child_run_id or "")
        if child is None:
            continue
        if not child.facts.detached or child.facts.thread_id != data.thread_id:
            yield line.name, f"{data.child_run_id} is not a run of the inbox {data.thread_id}"


def _says(line: LogLine | None, topic: str) -> bool:
    data = line.data if line is not None else None
    if not isinstance(data, CustomEvent) or data.name != PUBLISHED_EVENT_NAME:
        return False
    dropped = data.value is None  # a large one, which this record does not keep
    return dropped or (isinstance(data.value, dict) and data.value.get("topic") == topic)


@rule(
    "I39",
    "The tool calls that a run made, those of its ended children and what is kept for the others "
    "stay within its budget. (Each child's budget is what was kept for it: so the tree does.)",
)
def calls_in_budget(record: RunRecord) -> Found:
    limit = record.facts.options.budget.tool_calls
    if limit is None or not record.replay.whole:
        return
    snapshot = record.replay.snapshot
    made = {row.tool_call_id for row in record.executions}
    made |= {data.tool_call_id for _, data in _phase(record, "spawned") if data.tool_call_id}
    below = snapshot.children_use.tool_calls if snapshot.children_use is not None else 0
    kept = sum(child.use.tool_calls or 0 for child in snapshot.open_children.values())
    used = len(made) + (below or 0) + kept
    if used > limit:
        yield "run", f"{used} calls were made or are kept, the budget is {limit}"
    delivered = {data.child_run_id for _, data in record.of(ChildEvent) if data.topic is not None}
    for child in record.children:
        if child.facts.run_id in delivered:
            continue  # a subscriber's run is paid for by who subscribed
        if child.facts.options.budget.tool_calls is None:
            yield child.facts.run_id, "its parent has a budget of tool calls, it has none"


@rule(
    "H9",
    "The agent that carries a run out is that of its last `handoff`, if there was one.",
)
def agent_agrees(record: RunRecord) -> Found:
    handoffs = record.of(HandoffEvent)
    told = (handoffs[-1][1].target, handoffs[-1][1].target_version) if handoffs else None
    if record.hot.retained_from_seq == 1 and record.facts.active_agent != told:
        yield "run", f"it is carried out by {record.facts.active_agent}, handed to {told}"


def _phase(record: RunRecord, phase: str) -> list[tuple[LogLine, ChildEvent]]:
    return [(line, data) for line, data in record.of(ChildEvent) if data.phase == phase]


RULES = (
    parents_end_last,
    spawned_once,
    reported_once,
    participants_last,
    delivered_once,
    calls_in_budget,
    agent_agrees,
)
