"""Runs and events as commands print them."""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from perdure.cli.options import print_page
from perdure.engine.journal import STEP_TOOLS
from perdure.ops.output import json_text, print_line, print_table
from perdure.ops.timeline import line_of, may_be_there
from perdure.protocol.base import format_time
from perdure.protocol.failures import FailureCode
from perdure.protocol.runs import Run
from perdure.service.base import Slice
from perdure.service.events import EncodedEvent, as_view
from perdure.service.views import StateFieldView, ToolCallView


def short_fields_of_run(run: Run) -> list[tuple[str, object]]:
    """Return which run it is, and how it stands."""
    return [("run", run.run_id), ("status", run.status)]


def was_cancelled(run: Run) -> bool:
    """Tell whether a run ended because it was cancelled."""
    return run.error is not None and run.error.code is FailureCode.RUN_CANCELLED


def fields_of_run(run: Run) -> list[tuple[str, object]]:
    """Return what a person wants to know of a run."""
    failure = None if run.error is None else f"{run.error.code}: {run.error.reason}"
    return [
        ("run", run.run_id),
        ("agent", f"{run.agent_id} {run.agent_version}"),
        ("thread", run.thread_id),
        ("status", run.status),
        ("state", run.state),
        ("waits for", None if run.waiting_on == "nothing" else run.waiting_on),
        ("interrupts", ", ".join(run.open_interrupts)),
        ("parent", run.parent_run_id),
        ("retry of", run.retry_of),
        ("forked from", run.forked_from),
        ("steps", run.step_index),
        ("attempts", run.attempt),
        ("created", format_time(run.created_at)),
        ("finished", None if run.finished_at is None else format_time(run.finished_at)),
        ("failure", failure),
        ("answer", run.answer),
    ]


def print_calls(calls: Sequence[ToolCallView]) -> None:
    """Print the calls of a run; of those that failed why."""
    if not calls:
        return
    print_line("")
    print_table(
        ("STEP", "TOOL", "STATUS", "EXECUTIONS", "CALL", "ERROR"),
        [
            (
                call.step_index,
                f"step {call.planner_call_id}" if call.tool in STEP_TOOLS else call.tool,
                call.status,
                len(call.executions),
                call.tool_call_id,
                "" if call.error is None else f"{call.error.code}: {call.error.reason}",
            )
            for call in calls
        ],
    )


def print_effects(effects: Sequence[Mapping[str, JsonValue]]) -> None:
    """Print what an ended run has left in the world, and what became of undoing it."""
    left = [effect for effect in effects if may_be_there(effect)]
    if not left:
        return
    print_line("")
    print_table(
        ("LEFT BY", "STATUS", "EXTERNAL REFERENCE", "UNDOING", "CALL"),
        [
            (
                effect.get("tool"),
                effect.get("status"),
                effect.get("external_ref"),
                effect.get("compensation", "not asked"),
                effect.get("tool_call_id"),
            )
            for effect in left
        ],
    )


def print_raw(event: EncodedEvent) -> None:
    """Print an event as JSON."""
    print_line(event.body.decode())


def print_event(event: EncodedEvent) -> None:
    """Print an event as a line, when it says something to a person."""
    view = as_view(event)
    line = line_of(view)
    if line:
        print_line(f"{event.seq:>5}  {format_time(view.time)}  {line}")


def print_state_fields(found: Slice[StateFieldView], *, json: bool) -> None:
    """Print what fields of scope thread or agent hold."""
    print_page(
        found,
        ("FIELD", "RULE", "VERSION", "VALUE", "BY", "UPDATED"),
        lambda item: (
            item.name,
            item.rule,
            item.version,
            "" if item.empty else json_text(item.value),
            item.run_id,
            format_time(item.updated_at),
        ),
        json=json,
    )
