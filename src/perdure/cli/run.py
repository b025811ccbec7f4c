"""`perdure run`: start a run, and wait for it if asked."""

from typing import Annotated

import typer
from pydantic import JsonValue, ValidationError

from perdure.cli.options import Agents, Db, Json, find_modules_here, json_of, settings_of
from perdure.cli.runs import fields_of_run
from perdure.ops.exits import ExitCode, exit_of_run, run_async
from perdure.ops.output import note, print_fields, print_json
from perdure.ops.settings import Settings
from perdure.protocol.errors import Invalid
from perdure.protocol.runs import Run, RunOptions
from perdure.protocol.states import TERMINAL, RunState
from perdure.runtime import open_runtime, open_service
from perdure.service.base import Service
from perdure.service.events import follow_run, starting_point
from perdure.service.principal import LOCAL
from perdure.service.runs import RunRequest, create_run, get_run

WAIT_S_DEFAULT = 3600.0


def run(
    agent: Annotated[str, typer.Argument(help="Id of the agent.")],
    input: Annotated[
        str, typer.Option("--input", metavar="JSON", help="Its input: JSON, @file, or - for stdin.")
    ] = "null",
    agent_version: Annotated[
        str | None,
        typer.Option(
            "--agent-version", help="Version; the newest if not given.", show_default=False
        ),
    ] = None,
    thread: Annotated[
        str | None,
        typer.Option(
            "--thread", help="Thread to run on; a new one if not given.", show_default=False
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--key", help="Idempotency key: the same key is the same run.", show_default=False
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(
            "--after",
            metavar="TIME",
            help="Start no earlier: an RFC 3339 time, or seconds from now.",
            show_default=False,
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option("--queue", help="Queue whose workers take it; `default`.", show_default=False),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority",
            help="-100 to 100; larger comes first. 0 if not given.",
            show_default=False,
        ),
    ] = None,
    options: Annotated[
        str, typer.Option("--options", metavar="JSON", help="Run options, as in the API.")
    ] = "{}",
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until it ends or waits for a person.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Seconds to wait at most, with --wait.")
    ] = WAIT_S_DEFAULT,
    here: Annotated[
        bool, typer.Option("--here", help="Carry it out in this process; implies --wait.")
    ] = False,
    agents: Agents = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Start a run of an agent; it is durable before this returns.

    Without --here a worker or server on the same database carries it out. With --wait the exit
    code tells what came of it: 0 succeeded, 1 failed, 3 waits for a person, 124 goes on.
    """
    flags: dict[str, JsonValue] = {
        "agent_version": agent_version,
        "after": _seconds_or_time(after),
        "queue": queue,
        "priority": priority,
    }
    if agents and not here:
        raise typer.BadParameter("--agents needs --here: a worker or server has its own")
    request = RunRequest(input=json_of(input, "--input"), options=_options(options, flags))
    if here:
        find_modules_here()
    settings = settings_of(db, agents=agents)

    async def body() -> Run:
        if not here:
            async with open_service(settings) as service:
                return await _start(service, timeout if wait else 0)
        return await _start_here(settings)

    async def _start_here(settings: Settings) -> Run:
        async with open_runtime(settings) as runtime:
            served = [hosted.card.agent_id for hosted in runtime.worker.catalog.served()]
            if agent not in served:
                raise Invalid(
                    f"this process does not serve {agent}, only {', '.join(served) or 'no agents'}: "
                    "name its registry with --agents MODULE:REGISTRY"
                )
            return await _start(runtime.service, timeout)

    async def _start(service: Service, seconds: float) -> Run:
        made = await create_run(service, LOCAL, agent, request, thread_id=thread, header_key=key)
        note(f"run {made.run.run_id}" + ("" if made.created else " (known by its key)"))
        return await wait_for(service, made.run.run_id, seconds)

    found = run_async(body)
    if json:
        print_json(found)
    else:
        print_fields(fields_of_run(found))
    raise typer.Exit(exit_of_run(found.state) if wait or here else ExitCode.OK)


async def wait_for(service: Service, run_id: str, seconds: float) -> Run:
    """Return the run once it ends or waits for a person, or as it stands after `seconds`."""
    clock = service.core.clock.monotonic
    end = clock() + seconds
    start = await starting_point(service, LOCAL, run_id, 0)
    async with follow_run(service, start) as feed:
        while not feed.ended and (left := end - clock()) > 0:
            await feed.read(wait_s=min(left, 5.0), limit=200)
            state = (await get_run(service, LOCAL, run_id)).state
            if state in TERMINAL or state is RunState.WAITING_HUMAN:
                break
    return await get_run(service, LOCAL, run_id)


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
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise typer.BadParameter(f"--options: {where}: {first['msg']}") from None
