"""`perdure threads`: list, show, state, fork, branches, adopt, delete."""

from typing import Annotated

import typer
from pydantic import JsonValue

from perdure.cli.options import (
    LIMIT_DEFAULT,
    AfterField,
    AfterThread,
    Db,
    Json,
    Limit,
    json_of,
    on_service,
    print_page,
    request_of,
)
from perdure.cli.showing import print_state_fields
from perdure.ops.output import print_fields, print_json, print_line
from perdure.protocol.base import format_time
from perdure.service import state_fields, thread_branches
from perdure.service import threads as service_threads
from perdure.service.base import Service, Slice
from perdure.service.principal import LOCAL
from perdure.service.thread_branches import AdoptRequest, ThreadForkRequest
from perdure.service.views import BranchView, StateFieldView, ThreadView

app = typer.Typer()

ThreadArgument = Annotated[str, typer.Argument(metavar="THREAD", help="Id of the thread.")]


@app.command("list")
def list_(
    metadata: Annotated[
        str | None,
        typer.Option(
            "--metadata",
            metavar="JSON",
            help="Only threads whose metadata has these pairs.",
            show_default=False,
        ),
    ] = None,
    limit: Limit = LIMIT_DEFAULT,
    after: AfterThread = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """List threads, newest first."""
    wanted = None if metadata is None else _pairs(json_of(metadata, "--metadata"))

    async def work(service: Service) -> Slice[ThreadView]:
        return await service_threads.list_threads(
            service, LOCAL, after=after, limit=limit, metadata=wanted
        )

    print_page(
        on_service(db, work),
        ("THREAD", "TITLE", "LAST", "ACTIVE RUN", "UPDATED"),
        lambda item: (
            item.thread_id,
            item.title,
            item.last_position,
            item.active_run_id or "",
            format_time(item.updated_at),
        ),
        json=json,
    )


def _pairs(value: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(value, dict):
        raise typer.BadParameter("a JSON object is expected", param_hint="--metadata")
    return value


@app.command()
def show(thread: ThreadArgument, db: Db = None, json: Json = False) -> None:
    """Show a thread."""

    async def work(service: Service) -> ThreadView:
        return await service_threads.get_thread(service, LOCAL, thread)

    _print(on_service(db, work), json=json)


@app.command()
def fork(
    thread: ThreadArgument,
    position: Annotated[
        int | None,
        typer.Option(
            "--position", help="The last message of the fork; all by default.", show_default=False
        ),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", help="Title of the fork.", show_default=False)
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Fork or copy a thread, by reference."""
    request = request_of(ThreadForkRequest, position=position, title=title)

    async def work(service: Service) -> ThreadView:
        return (await thread_branches.fork_thread(service, LOCAL, thread, request)).thread

    _print(on_service(db, work), json=json)


@app.command()
def branches(
    thread: ThreadArgument,
    limit: Limit = LIMIT_DEFAULT,
    after: AfterThread = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """List the branches of a thread, oldest first."""

    async def work(service: Service) -> Slice[BranchView]:
        return await thread_branches.list_branches(service, LOCAL, thread, after=after, limit=limit)

    print_page(
        on_service(db, work),
        ("BRANCH", "FROM", "BESIDE", "BY", "ADOPTED"),
        lambda item: (
            item.thread_id,
            item.position,
            item.run_id or "",
            item.author,
            "" if item.adopted_at is None else format_time(item.adopted_at),
        ),
        json=json,
    )


@app.command()
def state(
    thread: ThreadArgument,
    limit: Limit = LIMIT_DEFAULT,
    after: AfterField = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Show what a thread's state fields hold."""

    async def work(service: Service) -> Slice[StateFieldView]:
        return await state_fields.thread_state(service, LOCAL, thread, after=after, limit=limit)

    print_state_fields(on_service(db, work), json=json)


@app.command()
def adopt(
    thread: ThreadArgument,
    branch: Annotated[str, typer.Argument(metavar="BRANCH", help="Id of the branch.")],
    db: Db = None,
    json: Json = False,
) -> None:
    """Let a thread say what a branch of it says."""
    request = request_of(AdoptRequest, branch_id=branch)

    async def work(service: Service) -> ThreadView:
        return await thread_branches.adopt_branch(service, LOCAL, thread, request)

    _print(on_service(db, work), json=json)


@app.command()
def delete(thread: ThreadArgument, db: Db = None, json: Json = False) -> None:
    """Delete a thread, its messages and the history of its runs."""

    async def work(service: Service) -> None:
        await thread_branches.delete_thread(service, LOCAL, thread)

    on_service(db, work)
    if json:
        print_json({"thread_id": thread, "deleted": True})
        return
    print_line(f"{thread} is deleted")


def _print(thread: ThreadView, *, json: bool) -> None:
    if json:
        print_json(thread)
        return
    based = [f"{base.kind} of {base.thread_id} up to {base.position}" for base in thread.bases]
    print_fields(
        [
            ("thread", thread.thread_id),
            ("title", thread.title),
            ("last position", str(thread.last_position)),
            ("active run", thread.active_run_id or ""),
            ("says", ", ".join(based)),
            ("updated", format_time(thread.updated_at)),
        ]
    )
