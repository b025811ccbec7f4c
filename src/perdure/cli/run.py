"""`perdure run`: start a run, and wait for it if asked."""

from dataclasses import dataclass
from typing import Annotated

import typer
from pydantic import JsonValue, ValidationError

from perdure.cli.options import (
    Agents,
    Db,
    Json,
    find_modules_here,
    json_of,
    open_existing,
    print_object,
    settings_of,
    usage_error,
)
from perdure.cli.showing import fields_of_run
from perdure.cli.waiting import WAIT_S_DEFAULT, end_with, must_be_here, open_here, wait_for
from perdure.ops.exits import run_async
from perdure.ops.output import note
from perdure.ops.settings import Settings
from perdure.protocol.runs import Run, RunOptions
from perdure.service.base import Service
from perdure.service.principal import LOCAL
from perdure.service.runs import RunRequest, create_run

AgentVersion = Annotated[
    str | None,
    typer.Option("--agent-version", help="Version; the newest if not given.", show_default=False),
]
Thread = Annotated[
    str | None,
    typer.Option("--thread", help="Thread to run on; a new one if not given.", show_default=False),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", help="Idempotency key: the same key is the same run.", show_default=False
    ),
]
StartAfter = Annotated[
    str | None,
    typer.Option(
        "--after",
        metavar="TIME",
        help="Start no earlier: an RFC 3339 time, or seconds from now.",
        show_default=False,
    ),
]
Queue = Annotated[
    str | None,
    typer.Option("--queue", help="Queue whose workers take it; `default`.", show_default=False),
]
Priority = Annotated[
    int | None,
    typer.Option(
        "--priority", help="-100 to 100; larger comes first. 0 if not given.", show_default=False
    ),
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        min=0,
        help=f"Seconds to wait at most, with --wait or --here. {WAIT_S_DEFAULT} if not given.",
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A run as it was asked for, and how long to wait for it."""

    agent: str
    request: RunRequest
    thread: str | None
    key: str | None
    wait_s: float

    async def on(self, service: Service) -> Run:
        made = await create_run(
            service, LOCAL, self.agent, self.request, thread_id=self.thread, header_key=self.key
        )
        note(f"run {made.run.run_id}" + ("" if made.created else " (known by its key)"))
        return await wait_for(service, made.run.run_id, self.wait_s)


def run(
    agent: Annotated[str, typer.Argument(help="Id of the agent.")],
    input: Annotated[
        str, typer.Option("--input", metavar="JSON", help="Its input: JSON, @file, or - for stdin.")
    ] = "null",
    agent_version: AgentVersion = None,
    thread: Thread = None,
    key: Key = None,
    after: StartAfter = None,
    queue: Queue = None,
    priority: Priority = None,
    options: Annotated[
        str, typer.Option("--options", metavar="JSON", help="Run options, as in the API.")
    ] = "{}",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it ends or waits for a person.")
    ] = False,
    timeout: Timeout = None,
    here: Annotated[
        bool,
        typer.Option(
            "--here",
            help="Carry it out in this process, which meanwhile is a worker for other runs of its "
            "agents, too; implies --wait.",
        ),
    ] = False,
    agents: Agents = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Start a run of an agent; it is durable before this returns.

    Without --here a worker or server on the same database carries it out. With --wait the exit
    code tells what came of it: 0 succeeded, 1 failed, 3 waits for a person, 124 goes on.
    """
    waits = wait or here
    must_be_here(agents, here=here)
    if timeout is not None and not waits:
        raise typer.BadParameter("--timeout needs --wait: without it nothing is waited for")
    flags: dict[str, JsonValue] = {
        "agent_version": agent_version,
        "after": _seconds_or_time(after),
        "queue": queue,
        "priority": priority,
    }
    start = _Start(
        agent=agent,
        request=RunRequest(input=json_of(input, "--input"), options=_options(options, flags)),
        thread=thread,
        key=key,
        wait_s=(WAIT_S_DEFAULT if timeout is None else timeout) if waits else 0,
    )
    if here:
        find_modules_here()
    settings = settings_of(db, agents=agents)
    found = run_async(lambda: _start_here(start, settings) if here else _start(start, settings))
    if waits:
        end_with(found, json=json)
    print_object(found, fields_of_run(found), json=json)


async def _start(start: _Start, settings: Settings) -> Run:
    async with open_existing(settings) as service:
        return await start.on(service)


async def _start_here(start: _Start, settings: Settings) -> Run:
    async with open_here(settings, start.agent, start.request.options.queue) as service:
        return await start.on(service)


def _seconds_or_time(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _options(text: str, flags: dict[str, JsonValue]) -> RunOptions:
    value: JsonValue = json_of(text, "--options")
    if isinstance(value, dict):
        value |= {name: given for name, given in flags.items() if given is not None}
    try:
        return RunOptions.model_validate(value)
    except ValidationError as error:
        raise usage_error(error, "/options") from None
