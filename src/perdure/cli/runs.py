"""`perdure runs`: list, show, events, cancel, continue; the rest stands in `going_on`."""

from collections.abc import Callable
from typing import Annotated

import typer
from pydantic import JsonValue, ValidationError

from perdure.cli import going_on, parts, waiting
from perdure.cli.options import (
    LIMIT_DEFAULT,
    AfterRun,
    Db,
    Json,
    Limit,
    Reason,
    RunArgument,
    on_service,
    print_object,
    print_page,
    usage_error,
)
from perdure.cli.showing import (
    fields_of_run,
    print_calls,
    print_effects,
    print_event,
    print_raw,
    short_fields_of_run,
    was_cancelled,
)
from perdure.ops.exits import ExitCode
from perdure.ops.output import (
    note,
    print_fields,
    print_json,
    print_table,
)
from perdure.protocol.base import format_time
from perdure.protocol.codec import decode
from perdure.protocol.errors import Conflict
from perdure.protocol.runs import Run
from perdure.protocol.states import (
    TERMINAL,
    CancelAction,
    CancelOption,
    InterruptKind,
    InterruptStatus,
    RunState,
)
from perdure.service import runs as service_runs
from perdure.service.base import Service, Slice, own_run
from perdure.service.effects import effects_left
from perdure.service.events import EncodedEvent, follow_run, read_page, starting_point
from perdure.service.principal import LOCAL
from perdure.service.runs import ContinueRequest
from perdure.service.tool_calls import list_tool_calls
from perdure.service.trees import CancelManyRequest, cancel_many, runs_below
from perdure.service.views import (
    ToolCallView,
)
from perdure.store.reader import InterruptFilter

app = typer.Typer()
app.add_typer(going_on.app)
app.add_typer(parts.app)
app.add_typer(waiting.app)

_PAGE = 200

TakeEvent = Callable[[EncodedEvent], None]


@app.command("list")
def list_(
    state: Annotated[
        RunState | None,
        typer.Option("--state", help="Only runs in this state.", show_default=False),
    ] = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Only runs of this agent.", show_default=False)
    ] = None,
    thread: Annotated[
        str | None, typer.Option("--thread", help="Only runs of this thread.", show_default=False)
    ] = None,
    unfinished: Annotated[
        bool, typer.Option("--unfinished", help="Only runs that have not ended.")
    ] = False,
    limit: Limit = LIMIT_DEFAULT,
    after: AfterRun = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """List runs, newest first."""

    async def work(service: Service) -> Slice[Run]:
        return await service_runs.list_runs(
            service,
            LOCAL,
            state=state,
            agent_id=agent,
            thread_id=thread,
            unfinished=unfinished,
            after=after,
            limit=limit,
        )

    print_page(
        on_service(db, work),
        ("RUN", "AGENT", "STATUS", "STEPS", "CREATED"),
        lambda run: (
            run.run_id,
            run.agent_id,
            run.status,
            run.step_index,
            format_time(run.created_at),
        ),
        json=json,
    )


@app.command()
def show(
    run: RunArgument,
    tree: Annotated[
        bool, typer.Option("--tree", help="Show the run with all runs below it.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Show a run with its answer or failure, its tool calls, and what a cancel has left."""
    if tree:
        _show_tree(run, db, json=json)
        return

    async def work(service: Service) -> tuple[Run, list[ToolCallView], list[dict[str, JsonValue]]]:
        found = await service_runs.get_run(service, LOCAL, run)
        calls = await list_tool_calls(service, LOCAL, run, after=None, limit=_PAGE)
        return found, calls.items, await effects_left(service, LOCAL, run)

    found, calls, effects = on_service(db, work)
    if json:
        print_json(found)
        return
    print_fields(fields_of_run(found))
    print_calls(calls)
    print_effects(effects)


def _show_tree(run_id: str, db: Db, *, json: bool) -> None:
    async def work(service: Service) -> list[Run]:
        row = await own_run(service, LOCAL, run_id)
        below = await runs_below(service, row)
        return [await service_runs.view_of(service, item) for item in (row, *below)]

    found = on_service(db, work)
    if json:
        print_json({"items": found})
        return
    top = found[0].depth
    print_table(
        ("RUN", "AGENT", "STATUS", "STEPS", "WAITS FOR"),
        [
            (
                "  " * (run.depth - top) + run.run_id,
                run.active_agent_id,
                run.status,
                run.step_index,
                run.waiting_on,
            )
            for run in _in_tree_order(found)
        ],
    )


def _in_tree_order(runs: list[Run]) -> list[Run]:
    """Return the runs of a tree with each one's children behind it, oldest first."""
    below: dict[str | None, list[Run]] = {}
    for run in runs[1:]:
        below.setdefault(run.parent_run_id, []).append(run)
    ordered: list[Run] = []
    waiting = [runs[0]]
    while waiting:
        run = waiting.pop()
        ordered.append(run)
        waiting += reversed(below.get(run.run_id, []))
    return ordered


@app.command("cancel-many")
def cancel_many_(
    agent: Annotated[
        str | None, typer.Option("--agent", help="Runs of this agent.", show_default=False)
    ] = None,
    thread: Annotated[
        str | None, typer.Option("--thread", help="Runs of this thread.", show_default=False)
    ] = None,
    state: Annotated[
        RunState | None, typer.Option("--state", help="Runs in this state.", show_default=False)
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", help="Runs with this tag.", show_default=False)
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every run, when nothing else is given.")
    ] = False,
    reason: Reason = None,
    compensate: Annotated[
        bool, typer.Option("--compensate", help="Undo what their tools did, where they can.")
    ] = False,
    discard_artifacts: Annotated[
        bool, typer.Option("--discard-artifacts", help="Discard the artifacts they made.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Ask all unfinished runs that match to stop, in batches."""
    try:
        wish = CancelManyRequest(
            agent_id=agent,
            thread_id=thread,
            state=state,
            tag=tag,
            all=every,
            reason=reason,
            compensate=compensate,
            discard_artifacts=discard_artifacts,
        )
    except ValidationError as error:
        raise usage_error(error) from None

    async def work(service: Service) -> list[str]:
        run_ids: list[str] = []
        more = True
        while more:
            batch = await cancel_many(service, LOCAL, wish, source="cli")
            run_ids += batch.run_ids
            more = batch.more
        return run_ids

    run_ids = on_service(db, work)
    print_object({"run_ids": run_ids}, [("cancelled", len(run_ids))], json=json)


@app.command()
def events(
    run: RunArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as events come, until the run ends.")
    ] = False,
    after: Annotated[int, typer.Option("--after", min=0, help="Begin behind this seq.")] = 0,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help="Print one JSON object a line, as in the API.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Print the events of a run, in order.

    The text passes over events that say nothing to a person, as a step's end, so that numbers are
    missing in it; --json and --jsonl have every event.
    """
    if json and follow:
        raise typer.BadParameter("--json prints one document: use --jsonl to follow")
    if json and jsonl:
        raise typer.BadParameter("give at most one of --json, --jsonl")
    collected: list[EncodedEvent] = []
    take = collected.append if json else print_raw if jsonl else print_event
    read = _follow if follow else _read

    async def work(service: Service) -> None:
        await read(service, run, after, take)

    on_service(db, work)
    if json:
        print_json([decode(event.body) for event in collected])


async def _follow(service: Service, run_id: str, after: int, take: TakeEvent) -> None:
    start = await starting_point(service, LOCAL, run_id, after)
    async with follow_run(service, start) as feed:
        while not feed.ended:
            for event in await feed.read(wait_s=5.0, limit=_PAGE):
                take(event)


async def _read(service: Service, run_id: str, after: int, take: TakeEvent) -> None:
    seq: int | None = after
    while seq is not None:
        page = await read_page(service, LOCAL, run_id, after=seq, limit=_PAGE)
        for event in page.events if page.gap_frame is None else [page.gap_frame, *page.events]:
            take(event)
        seq = page.next if page.events else None


@app.command()
def cancel(
    run: RunArgument,
    reason: Reason = None,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Later runs of the thread do not see its messages.")
    ] = False,
    compensate: Annotated[
        bool, typer.Option("--compensate", help="Undo what its tools did, where they can.")
    ] = False,
    discard_artifacts: Annotated[
        bool, typer.Option("--discard-artifacts", help="Discard the artifacts it made.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Ask a run to stop. It ends at once when no worker holds it, else in a moment.

    A run that had ended is left as it is; with --compensate or --discard-artifacts, which it does
    not heed any more, the exit code is then 5.
    """
    action = CancelAction.ROLLBACK if rollback else None
    wish = CancelOption.of(compensate=compensate, discard_artifacts=discard_artifacts)

    async def work(service: Service) -> tuple[Run, bool]:
        before = (await own_run(service, LOCAL, run)).hot
        found = await service_runs.cancel_run(
            service,
            LOCAL,
            run,
            action=action,
            reason=reason,
            compensate=compensate,
            discard_artifacts=discard_artifacts,
            source="cli",
        )
        ended_before = before.state in TERMINAL and wish not in before.cancel_options
        ended_meanwhile = found.state in TERMINAL and not was_cancelled(found)
        return found, ended_before or ended_meanwhile

    found, is_late = on_service(db, work)
    print_object(found, short_fields_of_run(found), json=json)
    if not is_late:
        return
    if wish is CancelOption.NONE:
        note(f"the run had ended before ({found.status}): there was nothing left to cancel")
        return
    note(f"this cancel changed nothing: the run had ended before ({found.status})")
    raise typer.Exit(ExitCode.CONFLICT)


@app.command("continue")
def continue_(
    run: RunArgument,
    step: Annotated[
        bool, typer.Option("--step", help="Only to the end of one step, not to a breakpoint.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Let a run that is paused at a breakpoint go on. This answers and approves nothing."""

    async def work(service: Service) -> Run:
        where = InterruptFilter(status=InterruptStatus.PENDING, run_id=run)
        found = await service.reader.list_interrupts(
            LOCAL.tenant_id, where, after=None, limit=_PAGE
        )
        paused = [row for row in found if row.kind is InterruptKind.BREAKPOINT]
        if not paused:
            await service_runs.get_run(service, LOCAL, run)
            raise Conflict("the run is not paused at a breakpoint")
        request = ContinueRequest(
            interrupt_id=paused[0].interrupt_id, mode="step" if step else "next"
        )
        return await service_runs.continue_run(service, LOCAL, run, request)

    found = on_service(db, work)
    print_object(found, short_fields_of_run(found), json=json)
