"""What the end of a run tells of its effects, and of what became of undoing them (R-9.4).

The end is kept when the history goes (R-6.8): from then on it alone says what was undone, so that
nobody undoes it again or goes on from it. A list that is too long is cut there last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from perdure.engine.closing import EFFECTS_TOLD_MAX, effect_of, finished_effects
from perdure.engine.core import Core
from perdure.engine.undone import WORDS, Tail, asks_to_compensate, became_of_undoing, tail_of
from perdure.engine.view import RunView
from perdure.protocol.events import CompensationEvent
from perdure.protocol.records import ToolCallRow
from perdure.protocol.runs import RunRow

TRIED_TOLD_MAX = 10_000
"""So many calls that were tried to be undone are told, when it is more than all effects may be."""
_TRIED = frozenset({"failed", "unknown", "succeeded"})


def effects_told(
    run_id: str,
    effects: Sequence[dict[str, JsonValue]],
    undone: Sequence[tuple[ToolCallRow, str]],
    *,
    otherwise: str = "none",
) -> list[dict[str, JsonValue]]:
    """Return the effects of a run, each with what became of undoing it, and those below it.

    `otherwise` is said of the run's own calls that `undone` has no word for.
    """
    words = {call.tool_call_id: word for call, word in undone}
    told: list[dict[str, JsonValue]] = []
    for effect in effects:
        word = words.pop(str(effect["tool_call_id"]), "none" if "run_id" in effect else otherwise)
        told.append({**effect, "compensation": word})
    for call, word in undone:
        if call.tool_call_id in words:
            other: dict[str, JsonValue] = {} if call.run_id == run_id else {"run_id": call.run_id}
            told.append({**other, **effect_of(call), "compensation": word})
    return _bounded(told)


def _bounded(told: list[dict[str, JsonValue]]) -> list[dict[str, JsonValue]]:
    """Leave out what is over the limit: first what nobody tried to undo, last what was undone."""
    tried = sum(effect["compensation"] in _TRIED for effect in told)
    room = max(EFFECTS_TOLD_MAX, min(tried, TRIED_TOLD_MAX))
    if len(told) <= room:
        return told
    places = sorted(range(len(told)), key=lambda place: _weight(told[place]), reverse=True)
    return [told[place] for place in sorted(places[:room])]


def _weight(effect: dict[str, JsonValue]) -> int:
    word = str(effect["compensation"])
    return WORDS.index(word) if word in _TRIED else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """What a run that goes on nowhere has left: effects, and ends of tries that nobody will record."""

    effects: list[dict[str, JsonValue]]
    cut_off: list[CompensationEvent]


async def left_behind(core: Core, row: RunRow, view: RunView) -> LeftBehind:
    """Return what a run has left whose log may be damaged, for its end.

    Where it cannot be read what was undone, that is `unknown` of every call.
    """
    effects = await finished_effects(core, view)
    if not asks_to_compensate(row.hot.cancel_options):
        return LeftBehind(effects=effects, cut_off=[])
    tail = await tail_of(core, row)
    undone: list[tuple[ToolCallRow, str]] = []
    tries = {call: [one for _, one in told] for call, told in tail.tries.items()}
    for tool_call_id, told in tries.items():
        call = await core.reader.find_tool_call(row.facts.tenant_id, tool_call_id)
        if call is not None:
            undone.append((call, became_of_undoing(told)))
    otherwise = "unknown" if tail.is_part else "none"
    return LeftBehind(
        effects=effects_told(row.facts.run_id, effects, undone, otherwise=otherwise),
        cut_off=_cut_off(tail),
    )


async def cut_off_tries(core: Core, row: RunRow) -> list[CompensationEvent]:
    """Return the ends of tries that nobody will record, as the run ends without them."""
    if not asks_to_compensate(row.hot.cancel_options):
        return []
    return _cut_off(await tail_of(core, row))


def _cut_off(tail: Tail) -> list[CompensationEvent]:
    last = [tries[-1][1] for tries in tail.tries.values()]
    return [one.model_copy(update={"status": "unknown"}) for one in last if one.status == "started"]
