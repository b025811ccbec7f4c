"""What tools did outside, by a journal of their own, against the calls in the database (C3)."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from perdure.ops.verify.checks import Finding, Found, rule
from perdure.ops.verify.record import RunRecord
from perdure.protocol.codec import digest, parse_strict
from perdure.protocol.errors import Invalid, PerdureError
from perdure.protocol.events import CompensationEvent
from perdure.protocol.records import ToolCallRow

NAMED_MAX = 100
"""So many keys that no call has are told one by one."""


@dataclass(slots=True)
class Journal:
    """How often something happened under each idempotency key; memory grows with the keys."""

    _times: dict[bytes, int] = field(default_factory=dict[bytes, int])
    _known: set[bytes] = field(default_factory=set[bytes])
    _first: dict[bytes, str] = field(default_factory=dict[bytes, str])
    _calls: dict[bytes, "_Call"] = field(default_factory=dict[bytes, "_Call"])

    def add(self, key: str) -> None:
        """Note an effect."""
        mark = _mark(key)
        self._times[mark] = self._times.get(mark, 0) + 1
        if len(self._first) < NAMED_MAX:
            self._first.setdefault(mark, key)

    def times(self, key: str) -> int:
        """Return how often something happened under a key that the database knows."""
        mark = _mark(key)
        found = self._times.get(mark, 0)
        if found:
            self._known.add(mark)
        return found

    def account(self, run_id: str, call: ToolCallRow, executed: int) -> None:
        """Note how often a run executed a call. A retry executes its origin's under the same key."""
        key = call.effect_key or ""
        if self.times(key):
            known = self._calls.setdefault(_mark(key), _Call(run_id, call.tool_call_id))
            known.executed += executed
            known.repeatable = known.repeatable and call.repeatable

    def overdone(self, on_finding: Callable[[Finding], None]) -> None:
        """Tell of the calls that took effect more often than all runs that were read account for."""
        for mark, call in self._calls.items():
            times = self._times[mark]
            allowed = min(1, call.executed) if call.repeatable else call.executed
            if times > allowed:
                text = f"{times} effects, {allowed} are accounted for"
                on_finding(
                    Finding(check="C3", run_id=call.run_id, subject=call.tool_call_id, text=text)
                )

    def unknown(self, on_finding: Callable[[Finding], None]) -> None:
        """Tell of the effects that no call of the database accounts for."""
        for mark, times in self._times.items():
            if mark not in self._known:
                key = self._first.get(mark, f"sha256 {mark.hex()}…")
                text = f"{times} effects under a key that no call has"
                on_finding(Finding(check="C3", run_id="", subject=key, text=text))


@dataclass(slots=True)
class _Call:
    """What is known of the calls under one key, told as the first that was read."""

    run_id: str
    tool_call_id: str
    executed: int = 0
    repeatable: bool = True


def read_journal(path: Path) -> Journal:
    """Return the journal in a file of JSON lines, objects with a `key`; raise Invalid."""
    journal = Journal()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    journal.add(_key_of(line, f"{path}, line {number}"))
    except OSError as error:
        raise Invalid(f"the journal cannot be read: {error}") from error
    return journal


def _key_of(line: bytes, where: str) -> str:
    try:
        value = parse_strict(line)
    except PerdureError as error:
        raise Invalid(f"{where}: {error.message}") from error
    key = value.get("key") if isinstance(value, dict) else None
    if not isinstance(key, str):
        raise Invalid(f"{where}: not an object with a text as `key`")
    return key


def _mark(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()[:16]


@dataclass(frozen=True, slots=True)
class Effects:
    """A record beside the journal."""

    record: RunRecord
    journal: Journal


@rule(
    "C3",
    "By the journal of a tool, each call took effect at most once, or, when it must not be "
    "repeated, at most as often as it was executed (each time after the first was decided: I28); "
    "it was undone at most once; and nothing took effect that no call accounts for.",
    scope="journal",
)
def effects_are_accounted_for(effects: Effects) -> Found:
    record, journal = effects.record, effects.journal
    for call in record.calls:
        executed = len(record.executions_by_call.get(call.tool_call_id, []))
        journal.account(record.row.facts.run_id, call, executed)
    for call in (*record.calls, *record.calls_before):
        for key in _keys(call):
            journal.times(key)
    for key in {data.key for _, data in record.of(CompensationEvent)}:
        times = journal.times(key)
        if times > 1:
            yield "run", f"{times} effects of undoing under {key}"


def _keys(call: ToolCallRow) -> Iterator[str]:
    """Yield the keys under which a call, and undoing it, may have had an effect."""
    if call.effect_key:
        yield call.effect_key
        yield digest(["compensate", call.effect_key])


RULES = (effects_are_accounted_for,)
