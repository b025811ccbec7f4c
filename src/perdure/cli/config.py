"""`perdure config`: the settings in force."""

from typing import Annotated

import typer

from perdure.cli.options import Db, Json
from perdure.ops.output import print_json, print_table
from perdure.ops.settings import flattened, load_settings, read_sources, source_of

app = typer.Typer()


@app.callback()
def config() -> None:
    """Show the settings and where they come from."""


@app.command()
def show(
    sources: Annotated[
        bool, typer.Option("--sources", help="Say for each setting where it comes from.")
    ] = False,
    db: Db = None,
    json: Json = False,
) -> None:
    """Show the settings in force, passwords masked."""
    flags: dict[str, object] = {"db": None if db is None else {"url": db}}
    values = flattened(load_settings(flags))
    if not sources:
        if json:
            print_json(values)
        else:
            print_table(("SETTING", "VALUE"), list(values.items()))
        return
    read = read_sources(flags)
    origins = {name: source_of(read, tuple(name.split("."))) for name in values}
    if json:
        print_json(
            {name: {"source": origins[name], "value": value} for name, value in values.items()}
        )
    else:
        print_table(
            ("SETTING", "VALUE", "SOURCE"),
            [(name, value, origins[name]) for name, value in values.items()],
        )
