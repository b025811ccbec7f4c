"""Replaying the log: the fold against every checkpoint and the row, and strict JSON (C1, C6).

`Replayer` sees each event once, with its payload, while the log is read page by page; the rules
at the end read what it found.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from perdure.engine.fold import fold
from perdure.engine.snapshot import RunSnapshot, snapshot_digest
from perdure.ops.verify.checks import Found, rule
from perdure.ops.verify.deltas import Speech
from perdure.ops.verify.record import LogLine, Replay, RunRecord, line_of
from perdure.protocol.base import SCHEMA_VERSION
from perdure.protocol.codec import DEPTH_MAX, encode, parse_strict
from perdure.protocol.errors import PerdureError
from perdure.protocol.log import DamagedEvent, EventData, RecordedEvent, Unknown
from perdure.protocol.records import CheckpointRow
from perdure.protocol.runs import Counters
from perdure.protocol.schema import is_readable
from perdure.protocol.states import is_open

STORED_DEPTH_MAX = DEPTH_MAX + 16
"""A value of the allowed depth, inside what an event wraps around it."""


def problem_of_bytes(data: bytes) -> str | None:
    """Return why stored JSON is not strict, or None."""
    try:
        parse_strict(data, depth_max=STORED_DEPTH_MAX, elements_max=None)
    except PerdureError as error:
        return error.message
    return None


def problem_of_value(value: JsonValue) -> str | None:
    """Return why a value that was stored is no strict JSON, or None."""
    try:
        return problem_of_bytes(encode(value))
    except (ValueError, TypeError, RecursionError) as error:
        return str(error)


class Replayer:
    """Folds a log event by event and notes where it differs from what is stored."""

    def __init__(self, base: RunSnapshot | None, *, from_start: bool) -> None:
        self.replay = Replay(whole=from_start and base is not None)
        if base is not None:
            self.replay.snapshot = base
        self._differs = False
        self._speech = Speech(from_start=from_start)
        self.replay.speech_places = self._speech.places
        self.replay.speech_texts = self._speech.texts

    def feed(self, event: RecordedEvent, checkpoint: CheckpointRow | None) -> LogLine:
        """Take the next event, with the checkpoint that stands at it; return what is kept."""
        name = f"event {event.seq}"
        problem = problem_of_bytes(event.raw)
        if problem is not None:
            self.replay.not_strict.append((name, problem))
        if not is_readable(event.schema_version):
            self.replay.whole = False  # another release's: it is read, not judged
        try:
            data = event.data
        except DamagedEvent as error:
            self._broken(name, str(error))
            return line_of(event, None)
        self._speech.feed(event, data)
        if self.replay.whole:
            self._fold(name, event.seq, data)
        if checkpoint is not None and self.replay.whole:
            self._compare(checkpoint)
        return line_of(event, data)

    def note_value(self, subject: str, value: JsonValue) -> None:
        """Note a stored document that is no strict JSON."""
        problem = problem_of_value(value)
        if problem is not None:
            self.replay.not_strict.append((subject, problem))

    def _fold(self, name: str, seq: int, data: EventData | Unknown) -> None:
        if isinstance(data, Unknown):
            self._broken(name, f"its type {data.type} is not known to this release")
            return
        try:
            fold(self.replay.snapshot, seq, data)
        except (ValueError, TypeError) as error:
            self._broken(name, f"it cannot be replayed: {error}")

    def _broken(self, name: str, text: str) -> None:
        if self.replay.whole:
            self.replay.mismatches.append((name, text))
        self.replay.whole = False

    def _compare(self, row: CheckpointRow) -> None:
        """Compare a checkpoint; only the first difference is noted, others follow from it."""
        if row.schema_version != SCHEMA_VERSION:
            return
        snapshot = self.replay.snapshot
        same_digest = snapshot_digest(snapshot) == row.digest
        same_state = snapshot.agent_state == row.agent_state
        if (same_digest and same_state) or self._differs:
            return
        self._differs = True
        what = "agent state" if same_digest else "digest"
        text = f"the log up to here does not fold to its {what}"
        self.replay.mismatches.append((f"checkpoint {row.seq}", text))


@rule(
    "C1",
    "Folding the log gives the digest and agent state of every checkpoint, and in the end what "
    "the run's row says: state, code, step, open calls and interrupts, counters, epoch, attempt. "
    "Not for damage before the `repair` event by which the run was ended for it.",
)
def replay_agrees(record: RunRecord) -> Found:
    found = record.replay.mismatches
    if found and min(_seq_of(subject) for subject, _ in found) > record.given_up_at:
        yield from found  # what differs behind damage that is told follows from that
    if not record.replay.whole:
        return
    told, folded = _told(record), _folded(record.replay.snapshot)
    for name, value in told.items():
        if value != folded[name]:
            yield "run", f"{name}: its row says {value}, its log {folded[name]}"


def _seq_of(subject: str) -> int:
    return int(subject.rpartition(" ")[2])


def _told(record: RunRecord) -> dict[str, object]:
    hot = record.hot
    return {
        "state": hot.state,
        "code": hot.code,
        "step_index": hot.step_index,
        "last_seq": hot.last_seq,
        "attempt": hot.attempt,
        "cancel_epoch": hot.cancel_epoch,
        "open_calls": hot.open_calls,
        "open_interrupts": hot.open_interrupts,
        "calls without a result": sorted(
            call.tool_call_id for call in record.calls if is_open(call.status)
        ),
        "interrupts without an answer": sorted(row.interrupt_id for row in record.pending),
        "counters": hot.counters.model_copy(update={"waiting_ms": 0}),
    }


def _folded(snapshot: RunSnapshot) -> Mapping[str, object]:
    return {
        "state": snapshot.state,
        "code": snapshot.code,
        "step_index": snapshot.step_index,
        "last_seq": snapshot.last_seq,
        "attempt": snapshot.attempt,
        "cancel_epoch": snapshot.cancel_epoch,
        "open_calls": len(snapshot.open_calls),
        "open_interrupts": len(snapshot.open_interrupts),
        "calls without a result": sorted(snapshot.open_calls),
        "interrupts without an answer": sorted(snapshot.open_interrupts),
        "counters": Counters(
            model_calls=snapshot.model_calls,
            tool_calls=snapshot.tool_calls,
            input_tokens=snapshot.input_tokens,
            output_tokens=snapshot.output_tokens,
            cost=snapshot.cost,
            retries=snapshot.retries,
        ),
    }


@rule(
    "C6",
    "Every stored document is strict JSON: UTF-8, no NaN, no lone surrogate, no duplicate key, "
    "no integer beyond 2^53 - 1; and every row can be read. Damaged events of a run that was ended "
    "for that are told by its `repair` event.",
)
def strict_json(record: RunRecord) -> Found:
    told = {f"event {seq}" for seq in range(1, record.given_up_at)}
    for subject, text in record.replay.not_strict:
        if subject not in told:
            yield subject, text


RULES = (replay_agrees, strict_json)
