"""The page of states: tables and diagrams made from the tables that the runtime goes by."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import RunHot, next_actions, status_of, waiting_on
from perdure.protocol.states import (
    ANSWERS,
    STEP_TRANSITIONS,
    TERMINAL,
    TOOL_CALL_TRANSITIONS,
    TRANSITIONS,
    CancelAction,
    InterruptKind,
    ParkedOn,
    RunState,
)

_HEAD = """\
# States

Everything on this page is made from the tables in `perdure.protocol.states` and
`perdure.protocol.runs`, by which the engine decides and every store refuses.

## Run

Only the runtime moves a run. A state that no arrow leaves is final: nothing moves the run again.

"""

_STATUS_HEAD = """
## Status

The protocol status is computed from the run's row at every reading and stored nowhere. `waiting_on`
says what the run waits for at the moment. The rows below are examples, one for each way to reach a
status; the first that fits a run holds.

| a run that … | state | status | waiting_on | next actions |
|---|---|---|---|---|
"""

_INTERRUPT_HEAD = """
## Interrupt

An interrupt is `pending`, then `answered`, `expired` or `cancelled` for good.

| kind | answers |
|---|---|
"""

_CONTINUED = "none: the run is continued (`POST /v1/runs/{run_id}/continue`)"

MachineState = TypeVar("MachineState", bound=StrEnum)

_AT = datetime(2026, 1, 1, tzinfo=UTC)
_S = RunState


def _hot(state: RunState, **fields: object) -> RunHot:
    return replace(RunHot(state=state, step_index=0, last_seq=1, updated_at=_AT), **fields)


def _failed(code: FailureCode, **fields: object) -> RunHot:
    return _hot(_S.FAILED, code=code, **fields)


EXAMPLES: tuple[tuple[str, RunHot], ...] = (
    ("succeeded", _hot(_S.SUCCEEDED)),
    ("ran out of time", _failed(FailureCode.RUN_TIMEOUT)),
    (
        "was cancelled with `rollback`",
        _failed(FailureCode.RUN_CANCELLED, cancel_epoch=1, cancel_action=CancelAction.ROLLBACK),
    ),
    (
        "was cancelled with `interrupt`",
        _failed(FailureCode.RUN_CANCELLED, cancel_epoch=1, cancel_action=CancelAction.INTERRUPT),
    ),
    ("failed otherwise", _failed(FailureCode.INTERNAL)),
    (
        "has an accepted cancel that is not carried out yet",
        _hot(_S.EXECUTING, lease_owner="w", attempt=1, cancel_epoch=1),
    ),
    (
        "asks a person to sign in",
        _hot(_S.WAITING_HUMAN, waiting_kind=InterruptKind.AUTH, attempt=1, open_interrupts=1),
    ),
    (
        "asks a person anything else",
        _hot(_S.WAITING_HUMAN, waiting_kind=InterruptKind.INPUT, attempt=1, open_interrupts=1),
    ),
    (
        "paused at a breakpoint",
        _hot(_S.WAITING_HUMAN, waiting_kind=InterruptKind.BREAKPOINT, attempt=1, open_interrupts=1),
    ),
    ("stands behind another run of its thread", _hot(_S.PENDING, parked_on=ParkedOn.THREAD)),
    ("is to start at a later time", _hot(_S.PENDING, parked_on=ParkedOn.TIMER)),
    ("can be claimed for the first time", _hot(_S.PENDING)),
    ("is held by a worker that plans", _hot(_S.PLANNING, lease_owner="w", attempt=1)),
    ("is held by a worker that runs tools", _hot(_S.EXECUTING, lease_owner="w", attempt=1)),
    ("sleeps until a time", _hot(_S.PLANNING, attempt=1, parked_on=ParkedOn.TIMER)),
    ("waits out a back-off", _hot(_S.PLANNING, attempt=1, parked_on=ParkedOn.RETRY)),
    ("waits for a child run", _hot(_S.EXECUTING, attempt=1, parked_on=ParkedOn.CHILD)),
    ("waits for a callback", _hot(_S.EXECUTING, attempt=1, parked_on=ParkedOn.CALLBACK)),
    ("was put aside: its log is damaged", _hot(_S.PLANNING, attempt=1, parked_on=ParkedOn.REPAIR)),
    ("is about to be ended", _hot(_S.PLANNING, attempt=1, parked_on=ParkedOn.CLOSING)),
    ("was answered or handed back, and can be claimed", _hot(_S.EXECUTING, attempt=1)),
    ("lost its worker, and can be claimed", _hot(_S.EXECUTING, attempt=1, faults=1)),
)
"""A row for each way to reach a status, for the page and its test."""


def states_page() -> str:
    """Return the page."""
    return "".join(
        [
            _HEAD,
            _run_diagram(),
            _run_table(),
            _STATUS_HEAD,
            *(_status_row(text, hot) for text, hot in EXAMPLES),
            "\n## Step\n\nOne round of the planner's decision.\n\n",
            _machine(STEP_TRANSITIONS),
            "\n## Tool call\n\nThe last seven are outcomes: a call has exactly one, and keeps it.\n\n",
            _machine(TOOL_CALL_TRANSITIONS),
            _INTERRUPT_HEAD,
            *(
                f"| `{kind}` | {_codes(answers) or _CONTINUED} |\n"
                for kind, answers in ANSWERS.items()
            ),
        ]
    )


def _diagram(arrows: Iterable[str], start: str, ends: Iterable[str]) -> str:
    lines = [f"    [*] --> {start}", *(f"    {arrow}" for arrow in arrows)]
    lines += [f"    {end} --> [*]" for end in ends]
    return "```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n\n"


def _run_diagram() -> str:
    labels: dict[tuple[RunState, RunState], list[str]] = {}
    for (source, why), target in TRANSITIONS.items():
        labels.setdefault((source, target), []).append(why)
    arrows = [
        f"{source} --> {target}: {', '.join(found)}" for (source, target), found in labels.items()
    ]
    return _diagram(arrows, RunState.PENDING, [state for state in RunState if state in TERMINAL])


def _run_table() -> str:
    rows = [
        f"| `{source}` | `{why}` | `{target}` |" for (source, why), target in TRANSITIONS.items()
    ]
    return "| from | transition | to |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def _status_row(text: str, hot: RunHot) -> str:
    cells = (hot.state, status_of(hot), waiting_on(hot))
    actions = _codes(next_actions(hot)) or "none"
    return f"| {text} | {' | '.join(f'`{cell}`' for cell in cells)} | {actions} |\n"


def _machine(table: Mapping[MachineState, frozenset[MachineState]]) -> str:
    """Return the diagram and the table of a machine; outcomes are drawn as one box when many."""
    first = next(iter(table))
    order = {state: place for place, state in enumerate(type(first))}
    table = dict(sorted(table.items(), key=lambda item: order[item[0]]))
    ends = [state for state, targets in table.items() if not targets]
    arrows: list[str] = []
    rows: list[str] = []
    for source, found in table.items():
        targets = sorted(found, key=order.__getitem__)
        if len(ends) > 3 and set(ends) <= set(found):
            arrows.append(f"{source} --> outcome")
            targets = [target for target in targets if target not in ends]
        arrows += [f"{source} --> {target}" for target in targets]
        to = _codes(sorted(found, key=order.__getitem__)) or "final"
        rows.append(f"| `{source}` | {to} |\n")
    drawn = ["outcome"] if len(ends) > 3 else ends
    return _diagram(arrows, first, drawn) + "| from | to |\n|---|---|\n" + "".join(rows)


def _codes(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)
