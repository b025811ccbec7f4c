"""`perdure db`: the database's schema."""

import typer

from perdure.cli.options import Db, Json, settings_of
from perdure.ops.exits import ExitCode, run_async
from perdure.ops.output import note, print_fields, print_json
from perdure.ops.settings import Settings, masked_url
from perdure.runtime import database_status, make_database
from perdure.store.status import SchemaState

app = typer.Typer()


@app.command()
def status(db: Db = None, json: Json = False) -> None:
    """Show how the schema stands to this release, changing nothing; exit code 1 when behind."""
    settings = settings_of(db)

    async def body() -> SchemaState:
        return await database_status(settings)

    found = run_async(body)
    _print(settings, found, json=json)
    raise typer.Exit(ExitCode.RUN_FAILED if found.pending else ExitCode.OK)


@app.command()
def upgrade(db: Db = None, json: Json = False) -> None:
    """Apply the migrations that the database lacks, and make it if it is not there.

    `worker`, `serve`, `demo` and `run --here` do so by themselves. Every other command refuses a
    database that lacks some, with exit code 5, and changes nothing.
    """
    settings = settings_of(db)

    async def body() -> tuple[SchemaState, SchemaState]:
        before = await database_status(settings)
        async with make_database(settings):
            return before, await database_status(settings)

    before, after = run_async(body)
    for name in before.pending:
        note(f"applied {name}")
    _print(settings, after, json=json)


def _print(settings: Settings, state: SchemaState, *, json: bool) -> None:
    url = masked_url(settings.db.url)
    if json:
        print_json(
            {
                "url": url,
                "database_version": state.database_version,
                "code_version": state.code_version,
                "pending": list(state.pending),
            }
        )
        return
    print_fields(
        [
            ("database", url),
            ("version", f"{state.database_version} (this release: {state.code_version})"),
            ("pending", ", ".join(state.pending)),
        ]
    )
