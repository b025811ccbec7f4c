"""Declared state in a run: the writes of decisions and calls, as events of the run's log.

Nobody else sees them while the run goes on. Each is checked behind those before it.
"""

from collections.abc import Mapping

from pydantic import JsonValue

from perdure.engine.draft import Draft
from perdure.engine.fields_read import as_told
from perdure.engine.ports import AuthorError, FieldWrite
from perdure.engine.schema import problem_with_value
from perdure.engine.view import RunView
from perdure.protocol.codec import clean, encode
from perdure.protocol.decisions import DecisionBase, WriteField
from perdure.protocol.errors import Invalid
from perdure.protocol.events import CustomEvent
from perdure.protocol.failures import Failure, FailureCode, Stage
from perdure.protocol.fields import (
    FIELD_EVENT_NAME,
    LOOP_MARK,
    WRITES_MAX,
    Slot,
    StateField,
    called_place,
    conflict,
    decided_place,
    place_of,
    slot_of,
    write_of,
)
from perdure.protocol.folding import FoldedField
from perdure.protocol.values import INLINE_BYTES_MAX

WRITE_ONCE = (
    "let one call of a step replace the field, or give it a rule that merges, and start a new run; "
    "a retry of this one shares both writes"
)


def clash_of_calls(view: RunView) -> Failure | None:
    """Return why a run without a function of code cannot go on: two calls of a step replaced one
    field. Code is told of it where its branches join.
    """
    decided: dict[str, JsonValue] = {}
    for folded in view.snapshot.folded.values():
        if folded.rule == "replace" and folded.has_parallel:
            decided |= folded.writes()
    clash = conflict({at: one for at, one in decided.items() if at.startswith(LOOP_MARK)})
    if clash is None:
        return None
    name, first, second = clash
    return Failure(
        code=FailureCode.CONFLICT,
        reason=f"two calls of one step replaced the field {name}",
        stage=Stage.TOOL,
        details={"field": name, "first": first, "second": second, "advice": WRITE_ONCE},
    )


class _Checks:
    """Checks writes that are not in the log yet, each behind those before it."""

    def __init__(self, view: RunView, fields: Mapping[str, StateField]) -> None:
        self._view = view
        self._fields = fields
        self._folded: dict[Slot, FoldedField] = {}

    def check(self, name: str, value: JsonValue, place: str) -> dict[str, JsonValue]:
        """Return the write, if it fits; a reducer is asked when it is merged. Raises Invalid."""
        declared = self._fields.get(name)
        if declared is None:
            raise Invalid(f"the state has no field {name!r}")
        told = write_of(declared, self._view.agent_id, value)
        if len(encode(value)) > INLINE_BYTES_MAX:
            raise Invalid(f"a value of the field {name} has at most {INLINE_BYTES_MAX} bytes")
        if declared.reducer is not None:
            return told
        try:
            after = self._after(place, told)
        except ValueError as error:
            raise Invalid(f"the field {name} does not take it: {error}") from error
        problem = problem_with_field(declared, after)
        if problem is not None:
            raise Invalid(problem)
        return told

    def _after(self, place: str, told: dict[str, JsonValue]) -> JsonValue:
        slot = slot_of(told)
        folded = self._folded.get(slot)
        if folded is None:
            logged = self._view.snapshot.folded.get(slot) or FoldedField()
            logged.value()
            folded = self._folded[slot] = logged.copy()
        folded.add(place, told)
        held = folded.value()
        assert held, "it was just written"
        return held[0]


def checked_writes(
    view: RunView, fields: Mapping[str, StateField], decision: DecisionBase
) -> dict[str, JsonValue]:
    """Return the writes that a decision carries, by place. Raises AuthorError for one that does not
    fit, and for too many.
    """
    records = [record for record in decision.records if isinstance(record, WriteField)]
    if len(records) > WRITES_MAX:
        raise AuthorError(f"a decision makes at most {WRITES_MAX} writes")
    step, checks = view.snapshot.step_index, _Checks(view, fields)
    prefix = decided_place(step, 0)[:-1]
    used = sum(place.startswith(prefix) for place in view.snapshot.writes) if records else 0
    found: dict[str, JsonValue] = {}
    for number, record in enumerate(records, start=used):
        place = decided_place(step, number)
        try:
            found[place] = checks.check(record.field, clean(record.value), place)
        except Invalid as error:
            raise AuthorError(error.message) from error
    return found


def draft_field_writes(draft: Draft, decision: DecisionBase) -> None:
    """Draft the writes that a decision carries. Raises AuthorError as `checked_writes`."""
    for place, told in checked_writes(draft.view, draft.fields, decision).items():
        draft.add(CustomEvent(name=FIELD_EVENT_NAME, value={**as_told(told), "at": place}))


def draft_tool_writes(
    draft: Draft, tool_call_id: str, writes: tuple[FieldWrite, ...]
) -> str | None:
    """Draft what a call wrote to the state, all of it or nothing; return what is wrong with it."""
    if not writes:
        return None
    call = draft.view.snapshot.open_calls[tool_call_id]
    ordinal = _shared_calls(draft.view, call.step_index) + call.ordinal
    checks = _Checks(draft.view, draft.fields)
    told: dict[str, dict[str, JsonValue]] = {}
    for number, write in enumerate(writes):
        place = called_place(call.position, call.step_index, ordinal, number)
        try:
            told[place] = checks.check(write.field, write.value, place)
        except Invalid as error:
            return error.message
    for place, value in told.items():
        written = {**value, "at": place, "call": tool_call_id}
        draft.add(CustomEvent(name=FIELD_EVENT_NAME, value=written))
    return None


def _shared_calls(view: RunView, step: int) -> int:
    """Return behind how many calls those of this step write: a run that goes on in a step of its
    origin makes some calls of it anew, counted from 0, beside the writes of others.
    """
    own = view.snapshot.step_calls
    mark = called_place(None, step, 0, 0).partition(".")[0] + "."
    ordinals = [
        place_of(place)[2]
        for place, write in view.snapshot.writes.items()
        if place.startswith(mark) and as_told(write).get("call") not in own
    ]
    return max(ordinals, default=-1) + 1


def problem_with_field(declared: StateField, after: JsonValue) -> str | None:
    """Return why a field cannot hold what a write would leave in it; None when it can."""
    if declared.outlasts and len(encode(after)) > INLINE_BYTES_MAX:
        return f"the field {declared.name} holds at most {INLINE_BYTES_MAX} bytes"
    if declared.json_schema is None:
        return None
    problem = problem_with_value(declared.json_schema, after)
    return None if problem is None else f"the field {declared.name} does not fit at {problem}"
