"""The event log of a run, in pages and followed live, as clients see it (R-6.1, R-6.3).

Events are encoded once, as bytes: a page and a stream send the same text. A `state` event shows
the protocol status beside the state (R-6.2), computed from rows that no longer change for that
seq, so every reader at any time gets the same event.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.feed import Cursor, Missing, follow, unbroken
from perdure.engine.live import Fragment
from perdure.protocol.base import SCHEMA_VERSION, format_time
from perdure.protocol.codec import decode, encode
from perdure.protocol.errors import HistoryReset, NotFound
from perdure.protocol.event_views import DeltaData, EventView, LiveDelta
from perdure.protocol.events import DeltaEvent, StateEvent
from perdure.protocol.failures import FailureCode
from perdure.protocol.ids import EVENT, RUN, event_id, span_id
from perdure.protocol.log import DamagedEvent, RecordedEvent, Unknown
from perdure.protocol.runs import RunFacts, RunRow
from perdure.protocol.states import TERMINAL, CancelAction, InterruptKind, RunState, RunStatus
from perdure.service.base import Service, interrupts_of, own_run
from perdure.service.principal import Principal
from perdure.service.runs import view_of
from perdure.service.views import Snapshot

_LINE_ENDS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)
"""Characters that some line readers take for line ends, escaped wherever JSON text is sent."""


@dataclass(frozen=True, slots=True)
class EncodedEvent:
    """An event as one line of JSON, an `EventView`. `is_end`: the run's terminal event.

    `seq` None: live text, a `LiveDelta`. An empty body: all of its text was sent live, only the
    place in the log is to be told. `place` is what a client resumes from, where that is not the seq.
    """

    seq: int | None
    type: str
    body: bytes
    is_end: bool
    place: str | None = None


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """Events of a run in order. `last_seq` is the end of its log, `next` None when reached.

    `gap`: events before the first one are not kept; `gap_frame` says so as an event.
    """

    events: list[EncodedEvent]
    last_seq: int
    next: int | None
    gap: Snapshot | None
    gap_frame: EncodedEvent | None

    def body(self) -> bytes:
        """Return the page as JSON, an `EventPage`."""
        tail = encode({"next": self.next, "last_seq": self.last_seq})
        gap = b"null" if self.gap is None else self.gap.model_dump_json().encode()
        items = b",".join(event.body for event in self.events)
        return b'{"items":[' + items + b'],"gap":' + gap + b"," + tail[1:]


@dataclass(slots=True)
class Projector:
    """Encodes events of one run; keeps the rows that statuses of the past depend on."""

    service: Service
    row: RunRow

    async def encode(self, event: RecordedEvent) -> EncodedEvent:
        """Return an event of the log."""
        try:
            data = event.data
        except DamagedEvent:
            return self._made(event, encode({"damaged": True}), is_end=False)
        match data:
            case DeltaEvent(text=""):
                return EncodedEvent(event.seq, event.type, b"", is_end=False)
            case StateEvent():
                body = await self._state(event, data)
                return self._made(event, encode(body), is_end=data.state in TERMINAL)
            case Unknown():
                return self._made(event, event.raw, is_end=False)
            case _:
                text = data.model_dump_json(exclude={"type"}).encode()
                return self._made(event, text, is_end=False)

    def _made(self, event: RecordedEvent, data: bytes, *, is_end: bool) -> EncodedEvent:
        run_id = event.run_id
        head = encode(
            {
                "event_id": event.event_id,
                "run_id": run_id,
                "seq": event.seq,
                "type": event.type,
                "step_index": event.step_index,
                "time": format_time(event.at),
                "schema_version": event.schema_version,
                "attempt": event.attempt,
                "trace_id": self.row.facts.trace_id,
                "span_id": span_id(run_id, event.step_index),
            }
        )
        body = one_line(head[:-1] + b',"data":' + data + b"}")
        return EncodedEvent(event.seq, event.type, body, is_end)

    def live(self, fragment: Fragment) -> EncodedEvent:
        """Return live text."""
        view = LiveDelta(
            run_id=fragment.run_id,
            step_index=fragment.step_index,
            attempt=fragment.attempt,
            cancel_epoch=fragment.epoch,
            data=DeltaData(
                message_id=fragment.message_id, offset=fragment.offset, text=fragment.text
            ),
        )
        body = one_line(view.model_dump_json().encode())
        return EncodedEvent(None, "delta", body, is_end=False)

    async def _state(self, event: RecordedEvent, data: StateEvent) -> dict[str, JsonValue]:
        body: dict[str, JsonValue] = data.model_dump(mode="json", exclude={"type"})
        body["status"] = await self._status(event, data)
        body["code"] = None if data.failure is None else data.failure.code
        return body

    async def _status(self, event: RecordedEvent, data: StateEvent) -> RunStatus:
        code = None if data.failure is None else data.failure.code
        if data.state is RunState.SUCCEEDED:
            return RunStatus.COMPLETED
        if data.state is RunState.FAILED:
            return await self._failed_status(code)
        if event.epoch > 0:
            return RunStatus.CANCEL_REQUESTED
        if data.state is RunState.PENDING:
            return RunStatus.QUEUED
        if data.state is RunState.WAITING_HUMAN and await self._asks_for_authorisation(event.seq):
            return RunStatus.AUTH_REQUIRED
        waits = data.state is RunState.WAITING_HUMAN
        return RunStatus.INPUT_REQUIRED if waits else RunStatus.RUNNING

    async def _failed_status(self, code: FailureCode | None) -> RunStatus:
        if code is FailureCode.RUN_TIMEOUT:
            return RunStatus.TIMED_OUT
        if code is not FailureCode.RUN_CANCELLED:
            return RunStatus.FAILED
        if self.row.hot.state not in TERMINAL:  # a stronger cancel may have come since
            facts = self.row.facts
            fresh = await self.service.reader.find_run(facts.tenant_id, facts.run_id)
            self.row = fresh or self.row
        rollback = self.row.hot.cancel_action is CancelAction.ROLLBACK
        return RunStatus.CANCELED if rollback else RunStatus.INTERRUPTED

    async def _asks_for_authorisation(self, seq: int) -> bool:
        facts = self.row.facts
        found = await interrupts_of(self.service, facts.tenant_id, facts.run_id)
        return any(
            row.kind is InterruptKind.AUTH
            and row.opened_seq <= seq
            and (row.closed_seq is None or row.closed_seq > seq)
            for row in found
        )


def one_line(body: bytes) -> bytes:
    """Return JSON bytes without any character that a line reader could take for a line end."""
    if body.isascii():
        return body
    for raw, escaped in _LINE_ENDS:
        body = body.replace(raw, escaped)
    return body


@dataclass(slots=True)
class Feed:
    """A place in a run's log that moves forward as it is read."""

    cursor: Cursor
    projector: Projector
    only: frozenset[str] | None = None

    @property
    def ended(self) -> bool:
        """True once the terminal event has been read and nothing is after it."""
        return self.cursor.ended

    async def read(self, *, wait_s: float, limit: int) -> list[EncodedEvent]:
        """Return the next events, at once if there are any; [] after `wait_s` without one.

        Where events are not kept a `gap` comes in their place, whether they went before or
        meanwhile. When live text was asked for, it comes between the events. Of events that are not
        wanted the last one comes without a body when nothing that is wanted follows it: its seq is
        told. The terminal event always comes, or an end could not be told from a cut.
        """
        found = await self.cursor.read_live(wait_s=wait_s, limit=limit)
        if (missing := self.cursor.take_missing()) is not None:
            return [await gap_frame(self.projector.service, self.projector.row, missing)]
        wanted: list[EncodedEvent] = []
        passed: EncodedEvent | None = None
        for item in found:
            if isinstance(item, Fragment):
                if self.only is None or "delta" in self.only:
                    wanted.append(self.projector.live(item))
            elif made := await self._wanted(item):
                wanted.append(made)
                passed = None
            else:
                passed = EncodedEvent(item.seq, item.type, b"", is_end=False)
        return wanted if passed is None else [*wanted, passed]

    async def _wanted(self, event: RecordedEvent) -> EncodedEvent | None:
        if self.only is None or event.type in self.only:
            return await self.projector.encode(event)
        if event.type != "state":
            return None
        made = await self.projector.encode(event)
        return made if made.is_end else None


async def read_page(
    service: Service,
    principal: Principal,
    run_id: str,
    *,
    after: int,
    limit: int,
    only: frozenset[str] | None = None,
) -> EncodedPage:
    """Return events with a larger seq. Raises NotFound, HistoryReset (a cursor of the future).

    With `only`, those of these types among the next `limit`; `next` goes behind all of them.
    """
    row = await own_run(service, principal, run_id)
    check_cursor(row, after)
    kept = await service.reader.events_after(run_id, after, limit=limit)
    missing = None
    if kept and kept[0].seq > after + 1:
        missing = Missing(after=after, kept_from=kept[0].seq)
    found = unbroken(kept, kept[0].seq - 1) if kept else []
    projector = Projector(service, row)
    wanted = [event for event in found if only is None or event.type in only]
    events = [await projector.encode(event) for event in wanted]
    last = found[-1].seq if found else after
    gap = None if missing is None else await _snapshot(service, row, missing)
    return EncodedPage(
        events=events,
        last_seq=max(row.hot.last_seq, last),
        next=last if last < row.hot.last_seq else None,
        gap=gap,
        gap_frame=None if gap is None else _frame(gap, row.facts),
    )


async def starting_point(
    service: Service, principal: Principal, run_id: str, after: int
) -> "StartingPoint":
    """Return what a stream from `after` begins with. Raises NotFound, HistoryReset."""
    row = await own_run(service, principal, run_id)
    check_cursor(row, after)
    ended = row.hot.state in TERMINAL and after >= row.hot.last_seq
    return StartingPoint(row=row, after=after, is_over=ended)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """Where a stream begins. `is_over`: the run is terminal and nothing is after the cursor."""

    row: RunRow
    after: int
    is_over: bool


@asynccontextmanager
async def follow_run(
    service: Service,
    start: StartingPoint,
    *,
    live: bool = False,
    only: frozenset[str] | None = None,
) -> AsyncGenerator[Feed]:
    """Follow a run from its starting point; holds no connection while nothing happens.

    With `live`, text of replies comes as it is said, if the run is streamed and carried out in
    this process. With `only`, events of these types; the cursor moves over all.

    Raises NotFound, HistoryReset.
    """
    run_id = start.row.facts.run_id
    async with follow(service.core, run_id, start.after, live=live) as cursor:
        yield Feed(cursor, Projector(service, start.row), only)


def check_cursor(row: RunRow, after: int) -> None:
    """Raise HistoryReset for a cursor beyond the end of the run's log."""
    if after > row.hot.last_seq:
        raise HistoryReset(
            "the cursor is beyond the end of this run's log; read it from the start",
            details={"last_seq": row.hot.last_seq},
        )


async def gap_frame(service: Service, row: RunRow, missing: Missing) -> EncodedEvent:
    """Return the event that stands for events that are not kept, with the run as it is by then."""
    return _frame(await _snapshot(service, row, missing), row.facts)


async def _snapshot(service: Service, row: RunRow, missing: Missing) -> Snapshot:
    now = await service.reader.find_run(row.facts.tenant_id, row.facts.run_id)
    run = await view_of(service, now or row)
    return Snapshot.model_construct(kept_from=missing.kept_from, run=run)


def _frame(gap: Snapshot, facts: RunFacts) -> EncodedEvent:
    """Return a gap as an event; reading goes on after its seq."""
    seq, run = gap.kept_from - 1, gap.run
    head = encode(
        {
            "event_id": event_id(facts.run_id, seq),
            "run_id": facts.run_id,
            "seq": seq,
            "type": "gap",
            "step_index": run.step_index,
            "time": format_time(run.updated_at),
            "schema_version": SCHEMA_VERSION,
            "attempt": run.attempt,
            "trace_id": facts.trace_id,
            "span_id": span_id(facts.run_id, run.step_index),
        }
    )
    body = one_line(head[:-1] + b',"data":' + gap.model_dump_json().encode() + b"}")
    return EncodedEvent(seq, "gap", body, is_end=False)


async def get_event(service: Service, principal: Principal, identifier: str) -> EncodedEvent:
    """Return one event by its id. Raises NotFound."""
    run_id, seq = _parse(identifier)
    row = await own_run(service, principal, run_id)
    is_possible = 0 < seq <= row.hot.last_seq
    found = await service.reader.events_after(run_id, seq - 1, limit=1) if is_possible else []
    if not found or found[0].seq != seq:
        raise NotFound("there is no such event")
    return await Projector(service, row).encode(found[0])


def _parse(identifier: str) -> tuple[str, int]:
    prefix, _, rest = identifier.partition("_")
    digits, _, seq = rest.partition("_")
    if prefix != EVENT or not (seq.isascii() and seq.isdigit() and len(seq) <= 18):
        raise NotFound("there is no such event")
    return f"{RUN}_{digits}", int(seq)


def as_view(event: EncodedEvent) -> EventView:
    """Return an encoded event as a model, for callers in this process."""
    return EventView.model_validate(decode(event.body))
