"""`perdure serve`: the HTTP API, with a worker inside."""

import socket
from typing import Annotated

import anyio
import typer

from perdure.cli.options import NO_AGENTS, Agents, Db, Json, find_modules_here, settings_of
from perdure.cli.recycling import start_afresh, stop_when_lost
from perdure.ops.exits import ExitCode, exit_of_signal, run_async
from perdure.ops.output import note, print_json
from perdure.ops.process import tune_interpreter
from perdure.ops.settings import Settings
from perdure.ops.stopping import StopSignal, stopping_on_signals
from perdure.protocol.errors import Unavailable
from perdure.runtime import open_app
from perdure.server.serve import check_binding, make_server


def serve(
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on.", show_default=False)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port to listen on.", show_default=False),
    ] = None,
    no_worker: Annotated[
        bool, typer.Option("--no-worker", help="Carry out no runs: workers do it elsewhere.")
    ] = False,
    agents: Agents = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Serve the HTTP API until SIGTERM or Ctrl-C; its documentation is at /docs.

    The first signal ends streams cleanly and drains the worker; a second one ends at once. When too
    many tools never came back, the process does the first by itself and starts afresh.
    """
    find_modules_here()
    settings = settings_of(db, agents=agents, server={"host": host, "port": port})
    listen = settings.server
    # Before a database is made, and a worker takes runs.
    check_binding(listen.host, insecure=listen.insecure)
    if not settings.agents and not no_worker:
        note(f"the worker inside serves {NO_AGENTS}")
    asked, is_lost = run_async(lambda: _serve(settings, with_worker=not no_worker, json=json))
    if is_lost and not asked.number:
        start_afresh()
    raise typer.Exit(exit_of_signal(asked.number) if asked.number else ExitCode.OK)


async def _serve(settings: Settings, *, with_worker: bool, json: bool) -> tuple[StopSignal, bool]:
    """Serve until asked to stop, or until too many tools never came back; tell which."""
    async with open_app(settings, worker=with_worker) as application:
        tune_interpreter()
        server = make_server(application.app, application.settings, application.stopping)
        with _listen(settings.server.host, settings.server.port) as listener:
            _announce(listener, json=json)
            lost = anyio.Event()

            def leave() -> None:
                lost.set()
                server.stop()

            async with (
                stopping_on_signals(server.stop_streams) as asked,
                anyio.create_task_group() as group,
            ):
                if application.worker is not None:
                    group.start_soon(stop_when_lost, application.worker, leave)
                await server.serve(sockets=[listener])
                group.cancel_scope.cancel()
            return asked, lost.is_set()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from None


def _announce(listener: socket.socket, *, json: bool) -> None:
    """Say where the server is: from here on connections are taken, and served in a moment."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if json:
        print_json({"url": url})
    note(f"listening on {url}, documentation at {url}/docs")
