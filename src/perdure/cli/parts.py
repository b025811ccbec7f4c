"""`perdure runs`: checkpoints, attempts, artifacts, artifact, callback: what a run consists of."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import JsonValue

from perdure.cli.options import (
    LIMIT_DEFAULT,
    AfterArtifact,
    Db,
    Json,
    Limit,
    RunArgument,
    json_of,
    on_service,
    print_object,
    print_page,
    request_of,
)
from perdure.ops.output import note, print_bytes, print_json
from perdure.protocol.base import format_time
from perdure.service import artifacts as service_artifacts
from perdure.service import attempts as service_attempts
from perdure.service import checkpoints as service_checkpoints
from perdure.service.artifacts import Content
from perdure.service.base import Service, Slice
from perdure.service.principal import LOCAL
from perdure.service.tool_calls import CallbackRequest, GivenResult, give_result
from perdure.service.views import ArtifactView, AttemptView, CheckpointView

app = typer.Typer()


@app.command("checkpoints")
def checkpoints_(
    run: RunArgument,
    limit: Limit = LIMIT_DEFAULT,
    before: Annotated[
        int | None,
        typer.Option(
            "--after",
            metavar="SEQ",
            min=1,
            max=2**31 - 1,
            help="Go on behind this seq, the `next` of a page.",
            show_default=False,
        ),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """List a run's checkpoints, newest first: `state`, `diff`, `retry` and `fork` take their ids."""

    async def work(service: Service) -> Slice[CheckpointView]:
        return await service_checkpoints.list_checkpoints(
            service, LOCAL, run, before=before, limit=limit
        )

    print_page(
        on_service(db, work),
        ("CHECKPOINT", "SEQ", "STEP", "ATTEMPT", "AUTHOR", "CREATED"),
        lambda item: (
            item.checkpoint_id,
            item.seq,
            item.step_index,
            item.attempt,
            item.author,
            format_time(item.created_at),
        ),
        json=json,
    )


@app.command("attempts")
def attempts_(run: RunArgument, db: Db = None, json: Json = False) -> None:
    """List which workers held a run, and how each hold ended."""

    async def work(service: Service) -> Slice[AttemptView]:
        return Slice(await service_attempts.list_attempts(service, LOCAL, run), None)

    print_page(
        on_service(db, work),
        ("ATTEMPT", "WORKER", "ENDED BY", "STARTED", "ENDED"),
        lambda item: (
            item.attempt,
            item.worker_id,
            item.end_reason,
            format_time(item.started_at),
            None if item.ended_at is None else format_time(item.ended_at),
        ),
        json=json,
    )


@app.command("artifacts")
def artifacts_(
    run: RunArgument,
    limit: Limit = LIMIT_DEFAULT,
    after: AfterArtifact = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """List what a run made, oldest first."""

    async def work(service: Service) -> Slice[ArtifactView]:
        return await service_artifacts.list_artifacts(service, LOCAL, run, after=after, limit=limit)

    print_page(
        on_service(db, work),
        ("ARTIFACT", "NAME", "VERSION", "BYTES", "STATUS", "TYPE"),
        lambda item: (
            item.artifact_id,
            item.name,
            item.version,
            item.size,
            item.status,
            item.media_type,
        ),
        json=json,
    )


@app.command("artifact")
def artifact_(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="Id of the artifact.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the content there.", show_default=False),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Print the content of an artifact as it is, or what is known of it with --json.

    On a terminal what could steer it is refused: give --out, or send stdout elsewhere.
    """
    if json and out is not None:
        raise typer.BadParameter("give at most one of --json, --out")
    if json:
        print_json(on_service(db, lambda it: service_artifacts.get_artifact(it, LOCAL, artifact)))
        return

    async def work(service: Service) -> Content:
        return await service_artifacts.read_content(service, LOCAL, artifact)

    data = on_service(db, work).data
    if out is None:
        print_bytes(data)
        return
    try:
        out.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"--out: {out}: {error.strerror}") from None
    note(f"{len(data)} bytes written to {out}")


@app.command("callback")
def callback_(
    call: Annotated[str, typer.Argument(metavar="CALL", help="Id of the tool call.")],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            metavar="JSON",
            help="It succeeded with this; JSON, @FILE, or - for stdin.",
            show_default=False,
        ),
    ] = None,
    failed: Annotated[
        str | None,
        typer.Option("--failed", metavar="TEXT", help="It failed: why.", show_default=False),
    ] = None,
    ref: Annotated[
        str | None,
        typer.Option("--ref", help="The id of its effect outside.", show_default=False),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Tell the result of a call that comes by callback. The same result again changes nothing."""
    if (output is None) == (failed is None):
        raise typer.BadParameter("give exactly one of --output, --failed")
    wish: dict[str, JsonValue] = {"status": "succeeded", "external_ref": ref}
    if output is not None:
        wish["output"] = json_of(output, "--output")
    if failed is not None:
        wish |= {"status": "failed", "error": {"reason": failed}}
    request = request_of(CallbackRequest, **wish)

    async def work(service: Service) -> GivenResult:
        return await give_result(service, LOCAL, call, request)

    given = on_service(db, work)
    fields = [("call", given.call.tool_call_id), ("status", given.call.status)]
    print_object(given.call, fields, json=json)
