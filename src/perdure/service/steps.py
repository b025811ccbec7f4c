"""Steps with their ordered, typed items, built from the events of the step (R-1.3)."""

from dataclasses import dataclass, field

from perdure.protocol.errors import Malformed, NotFound
from perdure.protocol.events import (
    ActionEvent,
    ApprovalRequestEvent,
    ChildEvent,
    GuardrailEvent,
    HandoffEvent,
    InterruptEvent,
    MessageEvent,
    ModelEvent,
    PlanEvent,
    ResultEvent,
    ResumeEvent,
)
from perdure.protocol.ids import parse_step_id, span_id, step_id
from perdure.protocol.log import DamagedEvent, RecordedEvent, Unknown
from perdure.protocol.records import StepRow
from perdure.protocol.runs import RunRow
from perdure.service.base import Service, Slice, cut, of_one_version, own_run
from perdure.service.principal import Principal
from perdure.service.views import StepItem, StepView

_EVENTS_PER_READ = 200
_CALLS_PER_READ = 200


async def list_steps(
    service: Service, principal: Principal, run_id: str, *, after: int, limit: int
) -> Slice[StepView]:
    """Return steps with a larger index, in order. Raises NotFound."""
    row = await own_run(service, principal, run_id)

    async def read(row: RunRow) -> Slice[StepView]:
        found = await service.reader.list_steps(run_id, after=after, limit=limit + 1)
        steps, more = cut(found, limit)
        items = await _items(service, row, steps)
        views = [_view(row, step, items.get(step.index, [])) for step in steps]
        return Slice(views, str(steps[-1].index) if more else None)

    return await of_one_version(service, row, read)


async def get_step(service: Service, principal: Principal, identifier: str) -> StepView:
    """Return one step. Raises NotFound."""
    try:
        run_id, index = parse_step_id(identifier)
    except Malformed:
        raise NotFound("there is no such step") from None
    found = await list_steps(service, principal, run_id, after=index - 1, limit=1)
    if not found.items or found.items[0].index != index:
        raise NotFound("there is no such step")
    return found.items[0]


def _view(row: RunRow, step: StepRow, items: list[StepItem]) -> StepView:
    return StepView.model_construct(
        step_id=step_id(step.run_id, step.index),
        run_id=step.run_id,
        tenant_id=row.facts.tenant_id,
        index=step.index,
        status=step.status,
        first_seq=step.first_seq,
        last_seq=step.last_seq,
        span_id=span_id(step.run_id, step.index),
        started_at=step.started_at,
        ended_at=step.ended_at,
        items=items,
    )


async def _items(service: Service, row: RunRow, steps: list[StepRow]) -> dict[int, list[StepItem]]:
    """Return the items of consecutive steps, by one walk over their part of the log."""
    if not steps:
        return {}
    builders = {step.index: _Builder(step.index) for step in steps}
    place, end = steps[0].first_seq - 1, steps[-1].last_seq or row.hot.last_seq
    while place < end:
        limit = min(_EVENTS_PER_READ, end - place)
        events = await service.reader.events_after(row.facts.run_id, place, limit=limit)
        if not events:
            break
        for event in events:
            builder = builders.get(event.step_index)
            if builder is not None:
                builder.add(event)
        place = events[-1].seq
    if any(builder.has_open_call for builder in builders.values()):
        await _as_they_stand(service, row, builders, steps)
    return {index: builder.items for index, builder in builders.items()}


async def _as_they_stand(
    service: Service, row: RunRow, builders: dict[int, "_Builder"], steps: list[StepRow]
) -> None:
    """Give open calls the status of their rows: that one began to run is told by no event."""
    after: tuple[int, int] | None = (steps[0].index, -1)
    while after is not None and after[0] <= steps[-1].index:
        calls = await service.reader.list_tool_calls(
            row.facts.run_id, after=after, limit=_CALLS_PER_READ
        )
        for call in calls:
            builder = builders.get(call.step_index)
            if builder is not None and call.result_seq is None:
                builder.stands(call.tool_call_id, call.status)
        after = (calls[-1].step_index, calls[-1].ordinal) if calls else None


@dataclass(slots=True)
class _Builder:
    """Collects the items of one step; an item closes when its second event comes."""

    index: int
    items: list[StepItem] = field(default_factory=list[StepItem])
    places: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def has_open_call(self) -> bool:
        """Tell whether a call of the step has no result yet."""
        return any(item.kind == "tool" and item.end_seq is None for item in self.items)

    def stands(self, ref: str, status: str) -> None:
        """Note how an open call stands."""
        place = self.places.get(ref)
        if place is not None and self.items[place].end_seq is None:
            self.items[place] = self.items[place].model_copy(update={"status": str(status)})

    def add(self, event: RecordedEvent) -> None:
        try:
            data = event.data
        except DamagedEvent:
            return
        if isinstance(data, Unknown):
            return
        if isinstance(data, ResultEvent):
            self._close(data.tool_call_id, data.status, event)
        elif isinstance(data, ResumeEvent):
            self._close(data.interrupt_id, data.outcome, event)
        elif isinstance(data, ChildEvent) and data.child_run_id is not None:
            self._child(event, data, data.child_run_id)
        else:
            self._open(event)

    def _open(self, event: RecordedEvent) -> None:
        match event.data:
            case ModelEvent() as data:
                self._one(event, "model", data.model, data.finish or "succeeded")
            case ActionEvent() as data:
                self._two(event, "tool", data.tool, data.tool_call_id, data.status)
            case ApprovalRequestEvent() as data:
                self._two(event, "interrupt", "approval", data.approval_id, "pending")
            case InterruptEvent() as data:
                self._two(event, "interrupt", data.kind, data.interrupt_id, "pending")
            case HandoffEvent() as data:
                self._one(event, "handoff", data.target, "succeeded")
            case GuardrailEvent() as data:
                self._one(event, "guardrail", data.rule, data.outcome)
            case PlanEvent() as data:
                self._one(event, "plan", f"revision {data.revision}", "succeeded")
            case MessageEvent() as data:
                self._one(event, "message", data.role, "succeeded")
            case _:
                pass

    def _one(self, event: RecordedEvent, kind: str, name: str, status: str) -> None:
        self.items.append(_item(event, kind, name, status, ref=None, is_done=True))

    def _child(self, event: RecordedEvent, data: ChildEvent, child_run_id: str) -> None:
        if data.phase == "result":
            self._close(child_run_id, data.state or "failed", event)
        elif data.phase == "spawned":
            self._two(event, "subtask", data.key or child_run_id, child_run_id, "running")

    def _two(self, event: RecordedEvent, kind: str, name: str, ref: str, status: str) -> None:
        self.places[ref] = len(self.items)
        self.items.append(_item(event, kind, name, status, ref=ref, is_done=False))

    def _close(self, ref: str, status: str, event: RecordedEvent) -> None:
        place = self.places.get(ref)
        if place is not None:
            closed = {"status": status, "end_seq": event.seq, "ended_at": event.at}
            self.items[place] = self.items[place].model_copy(update=closed)


def _item(
    event: RecordedEvent, kind: str, name: str, status: str, *, ref: str | None, is_done: bool
) -> StepItem:
    return StepItem.model_construct(
        id=ref or event.event_id,
        kind=kind,
        name=name,
        status=str(status),
        ref=ref,
        seq=event.seq,
        end_seq=event.seq if is_done else None,
        span_id=span_id(event.run_id, event.step_index),
        started_at=event.at,
        ended_at=event.at if is_done else None,
    )
