"""`perdure runs`: retry, repair, fork, update-state, state, diff: going on from what a run has."""

from typing import Annotated

import typer
from pydantic import JsonValue

from perdure.cli.options import (
    Checkpoint,
    Db,
    Json,
    OtherVersion,
    Reason,
    RunArgument,
    json_of,
    on_service,
    print_object,
    request_of,
)
from perdure.ops.output import print_json
from perdure.protocol.runs import Run
from perdure.service import branches as service_branches
from perdure.service import checkpoints as service_checkpoints
from perdure.service import state_updates
from perdure.service.base import Service
from perdure.service.branches import ForkRequest, RetryRequest
from perdure.service.principal import LOCAL
from perdure.service.repairs import RepairRequest, get_repair, repair
from perdure.service.state_updates import StateRequest
from perdure.service.views import CheckpointDiff, CheckpointState, CheckpointView, RepairView

app = typer.Typer()


@app.command("retry")
def retry_(
    run: RunArgument,
    redrive: Annotated[
        bool,
        typer.Option("--redrive", help="Run the failed calls again instead of asking the planner."),
    ] = False,
    checkpoint: Checkpoint = None,
    agent_version: OtherVersion = None,
    reason: Reason = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Go on from a failed run in a new one; what was finished is not done again."""
    options = {"agent_version": agent_version} if agent_version else None
    wish = request_of(
        RetryRequest, checkpoint_id=checkpoint, redrive=redrive, reason=reason, options=options
    )

    async def work(service: Service) -> Run:
        return (await service_branches.retry(service, LOCAL, run, wish)).run

    _print_new_run(on_service(db, work), json)


@app.command("repair")
def repair_(
    run: RunArgument,
    back: Annotated[
        bool,
        typer.Option("--return", help="Go on from its last consistent checkpoint, as a new run."),
    ] = False,
    fail: Annotated[bool, typer.Option("--fail", help="End it.")] = False,
    reason: Reason = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Look at a run that is put aside for repair, or repair it.

    Without --return or --fail it only tells how far the log can be trusted, and what is against
    going on from there. Both need a --reason, and are recorded.
    """
    if back and fail:
        raise typer.BadParameter("--return and --fail exclude each other")
    if not (back or fail):
        _print_repair(on_service(db, lambda service: get_repair(service, LOCAL, run)), json)
        return
    if not reason:
        raise typer.BadParameter("--return and --fail need a --reason")
    wish = request_of(RepairRequest, action="return" if back else "fail", reason=reason)
    _print_new_run(on_service(db, lambda service: repair(service, LOCAL, run, wish)), json)


def _print_repair(found: RepairView, json: bool) -> None:
    fields = [
        ("run", found.run_id),
        ("damage", found.damage or "none: log and checkpoints agree"),
        ("checkpoint", found.checkpoint_id),
        ("can return", "yes" if found.can_return else "no"),
        *(("because", text) for text in found.obstacles),
    ]
    print_object(found, fields, json=json)


@app.command("fork")
def fork_(
    run: RunArgument,
    checkpoint: Checkpoint = None,
    input_: Annotated[
        str | None,
        typer.Option("--input", help="JSON instead of the run's input; @FILE or - reads it."),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help="JSON instead of the agent's own state; @FILE or - reads it."),
    ] = None,
    agent_version: OtherVersion = None,
    reason: Reason = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Go on from a checkpoint of a run in a new one, on a thread of its own."""
    wish: dict[str, JsonValue] = {"checkpoint_id": checkpoint, "reason": reason}
    if input_ is not None:
        wish["input"] = json_of(input_, "--input")
    if state is not None:
        wish["state"] = json_of(state, "--state")
    if agent_version is not None:
        wish["options"] = {"agent_version": agent_version}
    request = request_of(ForkRequest, **wish)

    async def work(service: Service) -> Run:
        return (await service_branches.fork(service, LOCAL, run, request)).run

    _print_new_run(on_service(db, work), json)


@app.command("update-state")
def update_state(
    run: RunArgument,
    state: Annotated[
        str,
        typer.Argument(
            metavar="STATE", help="JSON for the agent's own state; @FILE or - reads it."
        ),
    ],
    reason: Reason = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="The same key again makes no second update.", show_default=False
        ),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Replace the agent's own state of a run that waits for a person."""
    request = request_of(StateRequest, state=json_of(state, "STATE"), reason=reason)

    async def work(service: Service) -> CheckpointView:
        return (await state_updates.update(service, LOCAL, run, request, key=key)).checkpoint

    found = on_service(db, work)
    fields = [("checkpoint", found.checkpoint_id), ("author", found.author)]
    print_object(found, fields, json=json)


@app.command()
def state(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Id of the checkpoint.")],
    db: Db = None,
    json: Json = False,
) -> None:
    """Print the state of a run at a checkpoint, as JSON."""
    del json  # it is JSON either way

    async def work(service: Service) -> CheckpointState:
        return await service_checkpoints.get_state(service, LOCAL, checkpoint)

    print_json(on_service(db, work))


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Id of the first checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Id of the other checkpoint.")],
    db: Db = None,
    json: Json = False,
) -> None:
    """Print the JSON Patch that turns the state at one checkpoint into that at another."""
    del json  # it is JSON either way

    async def work(service: Service) -> CheckpointDiff:
        return await service_checkpoints.diff(service, LOCAL, first, second)

    print_json(on_service(db, work))


def _print_new_run(run: Run, json: bool) -> None:
    fields = [("run", run.run_id), ("thread", run.thread_id), ("status", run.status)]
    print_object(run, fields, json=json)
