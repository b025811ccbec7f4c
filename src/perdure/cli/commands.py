"""The table of commands: what each is called, what it does, and where it is.

Commands are reached by name and imported when they are called: `perdure --help` stays quick, and
the demo and the benchmark, which stand beside the command line and not below it, are no imports.
"""

import importlib
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import typer

from perdure.protocol.errors import NotFound


@dataclass(frozen=True, slots=True)
class Command:
    """A command, or a group when `place` names a `typer.Typer`."""

    name: str
    place: str
    help: str


COMMANDS = (
    Command("demo", "perdure.demo.main:demo", "Run the sales analyst on real or sample data."),
    Command("serve", "perdure.cli.serve:serve", "Serve the HTTP API, with a worker inside."),
    Command("worker", "perdure.cli.worker:worker", "Carry out runs until asked to stop."),
    Command("run", "perdure.cli.run:run", "Start a run of an agent."),
    Command("runs", "perdure.cli.runs:app", "List, show, follow and cancel runs."),
    Command("threads", "perdure.cli.threads:app", "List, fork, adopt and delete threads."),
    Command(
        "interrupts", "perdure.cli.interrupts:app", "List, show and answer what waits for people."
    ),
    Command("topics", "perdure.cli.topics:app", "Say who subscribes to a thread's topics."),
    Command("agents", "perdure.cli.agents:app", "List agents, and what they keep."),
    Command("db", "perdure.cli.db:app", "Look at the database's schema, and upgrade it."),
    Command("verify", "perdure.cli.verify:verify", "Check the stored runs for broken promises."),
    Command("drill", "perdure.drill.command:drill", "Rehearse faults on this installation."),
    Command("bench", "perdure.bench.command:bench", "Measure throughput and latency."),
    Command("config", "perdure.cli.config:app", "Show the settings and where they come from."),
)


def build(wanted: Callable[[Command], bool]) -> typer.Typer:
    """Return the program, with those commands loaded that are wanted; others show help only."""
    program = typer.Typer(
        name="perdure",
        help="A durable runtime for agents. Data goes to stdout, everything else to stderr.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    program.callback()(_root)
    for command in COMMANDS:
        loaded = load(command) if wanted(command) else _not_loaded
        if isinstance(loaded, typer.Typer):
            program.add_typer(loaded, name=command.name, help=command.help, no_args_is_help=True)
        else:
            program.command(command.name, short_help=command.help)(loaded)
    return program


def load(command: Command) -> typer.Typer | Callable[..., None]:
    """Return a command's function or group; raise NotFound when it is not installed."""
    module_name, _, attribute = command.place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise NotFound(f"{command.name} is not part of this installation") from None
    return getattr(module, attribute)


def leaves(group: typer.Typer) -> Iterator[tuple[str, Callable[..., object]]]:
    """Give the names and functions of a group's commands, and of groups joined to it without a name."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield command.name or command.callback.__name__, command.callback
    for joined in group.registered_groups:
        assert joined.typer_instance is not None
        yield from leaves(joined.typer_instance)


def _not_loaded() -> None:
    """Stand for a command that was not asked for."""
    raise AssertionError("only commands that were asked for are called")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"perdure {importlib.metadata.version('perdure')}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_show_version, is_eager=True
    ),
) -> None:
    """Take the options of the program itself."""
    del version
