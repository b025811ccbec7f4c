"""Options that several commands share, and opening what they work on."""

import logging
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, JsonValue, ValidationError

from perdure.cli.names import option_of
from perdure.ops.exits import run_async
from perdure.ops.output import note, print_fields, print_json, print_table
from perdure.ops.settings import Settings, load_settings
from perdure.protocol.codec import parse_strict
from perdure.protocol.errors import NotFound, PerdureError
from perdure.protocol.fields import FIELD_NAME
from perdure.protocol.ids import ARTIFACT, INTERRUPT, RUN, THREAD, is_id
from perdure.protocol.wording import first_problem
from perdure.runtime import open_service, require_schema
from perdure.service.base import PAGE_LIMIT_DEFAULT, PAGE_LIMIT_MAX, Service, Slice
from perdure.telemetry.logs import configure_logs

T = TypeVar("T")
Request = TypeVar("Request", bound=BaseModel)

NO_AGENTS = "no agents: name their registry with --agents MODULE:REGISTRY"

Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="URL",
        help="Database: sqlite:///path or postgresql://…; PERDURE_DB__URL says the same.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document with sorted keys instead of text.")
]
Agents = Annotated[
    list[str] | None,
    typer.Option(
        "--agents",
        metavar="MODULE:REGISTRY",
        help="Agents to serve; may be given several times.",
        show_default=False,
    ),
]
Limit = Annotated[
    int, typer.Option("--limit", min=1, max=PAGE_LIMIT_MAX, help="How many to list at most.")
]


def _after(prefix: str) -> Any:
    """Return the option that goes on behind an id of a kind; any other word is refused."""

    def check(value: str | None) -> str | None:
        if value is not None and not is_id(prefix, value):
            raise typer.BadParameter(f"not an id of the form {prefix}_<32 hex digits>")
        return value

    return typer.Option(
        "--after",
        metavar="ID",
        help="Go on behind this id, the `next` of a page.",
        callback=check,
        show_default=False,
    )


AfterRun = Annotated[str | None, _after(RUN)]
AfterThread = Annotated[str | None, _after(THREAD)]
AfterInterrupt = Annotated[str | None, _after(INTERRUPT)]
AfterArtifact = Annotated[str | None, _after(ARTIFACT)]


def _field_name(value: str | None) -> str | None:
    if value is not None and not FIELD_NAME.fullmatch(value):
        raise typer.BadParameter("not the name of a field")
    return value


AfterField = Annotated[
    str | None,
    typer.Option(
        "--after",
        metavar="FIELD",
        help="Go on behind this field, the `next` of a page.",
        callback=_field_name,
        show_default=False,
    ),
]

Reason = Annotated[
    str | None, typer.Option("--reason", help="Why; kept in the log.", show_default=False)
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]

Checkpoint = Annotated[
    str | None,
    typer.Option("--checkpoint", help="Go on from this checkpoint.", show_default=False),
]
OtherVersion = Annotated[
    str | None, typer.Option("--agent-version", help="With another version.", show_default=False)
]

LIMIT_DEFAULT = PAGE_LIMIT_DEFAULT


def settings_of(
    db: str | None = None,
    *,
    agents: list[str] | None = None,
    server: dict[str, object] | None = None,
    queues: list[str] | None = None,
) -> Settings:
    """Return the settings with these flags on top, and send logs to stderr as they say."""
    settings = load_settings(
        {
            "db": None if db is None else {"url": db},
            "agents": tuple(agents) if agents else None,
            "worker": {"queues": tuple(queues)} if queues else None,
            "server": {name: value for name, value in (server or {}).items() if value is not None},
        }
    )
    configure_logs(settings.log.level, settings.log.format)
    return settings


def on_service(db: str | None, work: Callable[[Service], Awaitable[T]]) -> T:
    """Run work on the use cases over the database, in a loop of its own."""
    settings = settings_of(db)
    logging.getLogger().setLevel(logging.ERROR)  # a short command says itself what it did

    async def body() -> T:
        async with open_existing(settings) as service:
            return await work(service)

    return run_async(body)


@asynccontextmanager
async def open_existing(settings: Settings) -> AsyncGenerator[Service]:
    """Open the use cases over a database that is there, with this release's schema.

    Neither is made here: raises NotFound without a file, Conflict when migrations are to be applied.
    """
    path = settings.db.sqlite_path
    if path is not None and not path.exists() and not path.parent.is_file():
        raise NotFound(
            f"there is no database at {path}; name it with --db or PERDURE_DB__URL, or make it "
            "with `perdure db upgrade`"
        )
    if path is None or path.exists():
        await require_schema(settings)
    async with open_service(settings) as service:
        yield service


def print_page(
    found: Slice[T], heads: Sequence[str], cells: Callable[[T], Sequence[object]], *, json: bool
) -> None:
    """Print a page of a list: a table, and how to go on; or one JSON document."""
    if json:
        print_json({"items": found.items, "next": found.next})
        return
    print_table(heads, [cells(item) for item in found.items])
    if not found.items:
        note("nothing found")
    if found.next:
        note(f"more: --after {found.next}")


def print_object(value: object, fields: Sequence[tuple[str, object]], *, json: bool) -> None:
    """Print an object: as JSON, or what a person wants to know of it."""
    if json:
        print_json(value)
    else:
        print_fields(fields)


def usage_error(error: ValidationError, prefix: str = "") -> typer.BadParameter:
    """Return the usage error for a request that does not fit; `prefix` is what it is part of."""
    place, text = first_problem(error)
    pointer = "".join(f"/{part}" for part in place)
    where = option_of(prefix + pointer, sys.argv[1:]) if prefix + pointer else ""
    return typer.BadParameter(f"{where}: {text}" if where else text)


def request_of(model: type[Request], **fields: object) -> Request:
    """Return the request that words of the command line make; raise BadParameter if they do not."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise usage_error(error) from None


def find_modules_here() -> None:
    """Let agents be imported from the current folder, behind everything that is installed."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def json_of(text: str, option: str) -> JsonValue:
    """Return the value of a JSON option: the text, `@file`, or `-` for stdin; exit code 2 if not.

    Raises BadParameter for text that is not JSON, with what is wrong.
    """
    try:
        if text == "-":
            return parse_strict(sys.stdin.buffer.read())
        if text.startswith("@"):
            return parse_strict(Path(text[1:]).read_bytes())
        return parse_strict(text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise typer.BadParameter(f"{option}: {text[1:]}: {error.strerror}") from None
    except PerdureError as error:
        message = error.message.replace("the body", "the value")
        if text[:1].isalpha():
            message += "; a text needs its quotes: '\"…\"'"
        raise typer.BadParameter(f"{option}: {message}") from None
