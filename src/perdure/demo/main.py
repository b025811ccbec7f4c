"""`perdure demo`: the sales analyst from question to publication, on this machine alone.

What it keeps is in `.perdure/demo/` and `published/` under the current folder; when that cannot
be written, in a new folder for temporary files.
"""

import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer

from perdure.agents.catalog import Catalog
from perdure.demo.agent import AGENT_ID, MODEL_AGENT_ID, make_model_registry, registry
from perdure.demo.conduct import Order, Outcome, conduct
from perdure.demo.crash import mortal_worker
from perdure.demo.person import Person
from perdure.demo.sample import write_sample
from perdure.demo.timeline import Timeline
from perdure.demo.tools import Place
from perdure.ops.exits import ExitCode, exit_of_run, run_async
from perdure.ops.output import print_json, print_line, print_table
from perdure.ops.settings import DatabaseSettings, Settings, WorkerSettings
from perdure.protocol.errors import Invalid
from perdure.protocol.states import RunState, ToolCallStatus
from perdure.runtime import open_runtime, open_service
from perdure.service.base import Service
from perdure.service.views import ExecutionView
from perdure.telemetry.logs import configure_logs

REGION_DEFAULT = "Germany"
LEASE_OF_DRILL_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The demo as it was asked for."""

    data: Path | None
    region: str
    model: str | None
    base_url: str | None
    yes: bool
    json: bool
    crash: bool
    no_input: bool


def demo(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="CSV",
            help="Sales to analyse; without: a made-up sample.",
            show_default=False,
        ),
    ] = None,
    region: Annotated[
        str, typer.Option("--region", help="Country, exactly as written in the data.")
    ] = REGION_DEFAULT,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Let this language model plan; its key is in OPENAI_API_KEY.",
            show_default=False,
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            "--base-url",
            metavar="URL",
            help="Where the model is; without: OpenAI.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Approve without asking.")] = False,
    no_input: Annotated[
        bool,
        typer.Option("--no-input", help="Ask nothing: leave the run waiting, with exit code 3."),
    ] = False,
    crash: Annotated[
        bool, typer.Option("--crash", help="Kill the worker twice on the way (SIGKILL).")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document with sorted keys at the end.")
    ] = False,
) -> None:
    """Run the sales analyst: which products fell most in the last full week?

    It loads the data, asks it by SQL, writes a report, and asks you before it publishes it. Its
    state is kept in .perdure/demo and published under the current folder; it needs no network.
    """
    request = Request(
        data=data,
        region=region,
        model=model,
        base_url=base_url,
        yes=yes,
        json=json,
        crash=crash,
        no_input=no_input,
    )
    if crash and model is not None:
        raise typer.BadParameter("--crash is for the offline planner: leave --model out")
    configure_logs("error", "auto")
    timeline = Timeline()
    outcome = run_async(lambda: run_demo(request, timeline))
    _report(outcome, json=json)
    ended_well = outcome.run.state is RunState.SUCCEEDED
    proven = _proof(outcome, timeline) if crash and ended_well else True
    raise typer.Exit(exit_of_run(outcome.run) if proven else ExitCode.RUN_FAILED)


# ---------------------------------------------------------------- carrying it out


async def run_demo(request: Request, timeline: Timeline) -> Outcome:
    """Carry out the demo in the current folder. Raises Invalid, Unavailable."""
    base = _base(timeline)
    state = base / ".perdure" / "demo"
    csv = _csv(request, state)
    order = Order(
        agent_id=AGENT_ID if request.model is None else MODEL_AGENT_ID,
        region=request.region,
        place=Place(
            csv=csv,
            database=state / "sales" / f"{sha256(str(csv).encode()).hexdigest()[:16]}.sqlite",
            reports=state / "reports",
            published=base / "published",
        ),
    )
    url = f"sqlite:///{state / 'perdure.db'}"
    person = Person(
        timeline=timeline,
        command=_resolve_command(url),
        yes=request.yes,
        asks=not request.no_input,
    )
    opened = _drilled(state, url, timeline) if request.crash else _embedded(request, url)
    async with opened as service:
        outcome = await conduct(
            service, order, person, timeline, leave_waiting=request.no_input and not request.yes
        )
    if outcome.run.state is RunState.WAITING_HUMAN:
        worker = f"{_program()} worker --agents perdure.demo.agent:registry"
        timeline.say("The run waits for that answer. Once it is given, a worker carries it on:")
        timeline.say(f"  {worker} --db {shlex.quote(url)}", "")
    return outcome


@asynccontextmanager
async def _embedded(request: Request, url: str) -> AsyncGenerator[Service]:
    """Open a runtime in this process."""
    chosen = (
        registry if request.model is None else make_model_registry(request.model, request.base_url)
    )
    settings = Settings(db=DatabaseSettings(url=url))
    async with open_runtime(settings, Catalog([chosen])) as runtime:
        yield runtime.service


@asynccontextmanager
async def _drilled(state: Path, url: str, timeline: Timeline) -> AsyncGenerator[Service]:
    """Open the use cases here, with the worker in a process that kills itself twice."""
    settings = Settings(
        db=DatabaseSettings(url=url), worker=WorkerSettings(lease_ttl_s=LEASE_OF_DRILL_S)
    )
    environment = {
        "PERDURE_DB__URL": url,
        "PERDURE_WORKER__LEASE_TTL_S": str(LEASE_OF_DRILL_S),
        "PERDURE_WORKER__POLL_INTERVAL_S": "0.25",
    }
    marks = Path(tempfile.mkdtemp(prefix="crash-", dir=state))
    try:
        async with (
            open_service(settings) as service,
            mortal_worker(marks, environment, timeline),
        ):
            yield service
    finally:
        shutil.rmtree(marks, ignore_errors=True)


def _base(timeline: Timeline) -> Path:
    """Return the folder that the demo keeps its files under."""
    here = Path.cwd()
    try:
        for folder in (here / ".perdure" / "demo", here / "published"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder):
                pass
        database = here / ".perdure" / "demo" / "perdure.db"
        if database.exists():
            with database.open("r+b"):
                pass
    except OSError as error:
        other = Path(tempfile.mkdtemp(prefix="perdure-demo-"))
        timeline.say(f"{here} cannot be written ({error.strerror}): using {other}", "yellow")
        (other / ".perdure" / "demo").mkdir(parents=True)
        return other
    return here


def _csv(request: Request, state: Path) -> Path:
    if request.data is None:
        path = state / "sample.csv"
        write_sample(path)
        return path
    if not request.data.is_file():
        raise Invalid(f"{request.data} is not a file", field="data")
    return request.data.resolve()


def _resolve_command(url: str) -> str:
    return f"{_program()} interrupts resolve {{}} --approve --db {shlex.quote(url)}"


def _program() -> str:
    """Return how this program is called in a shell."""
    program = Path(sys.argv[0]).absolute()
    found = shutil.which("perdure")
    if program.suffix == ".py" or not program.exists():
        return f"{shlex.quote(sys.executable)} -m perdure.cli.main"
    if found is not None and Path(found).absolute() == program:
        return "perdure"
    return shlex.quote(str(program))


# ---------------------------------------------------------------- saying what came of it


def _report(outcome: Outcome, *, json: bool) -> None:
    if json:
        print_json(outcome.document())
        return
    found = outcome.products if isinstance(outcome.products, list) else []
    rows = [
        [product.get(name) for name in _COLUMNS] for product in found if isinstance(product, dict)
    ]
    print_table([name.upper() for name in _COLUMNS], rows)
    if outcome.run.error is not None:
        print_line(f"{outcome.run.error.code}: {outcome.run.error.reason}")
    print_line(
        f"{outcome.run.state}: publications: {outcome.publications}; "
        f"executions of publish_report: {outcome.publish_executions}"
    )


_COLUMNS = ("stock_code", "description", "before", "after", "change")


def _proof(outcome: Outcome, timeline: Timeline) -> bool:
    """Show that nothing happened twice and nothing committed was done again; tell if so."""
    say = timeline.say
    say("")
    say("What the ledger says after two kills:")
    for call in outcome.calls:
        ends = ", ".join(execution.outcome or "running" for execution in call.executions)
        result = "one result" if call.result_seq is not None else "no result"
        say(f"  {call.tool:18} {len(call.executions)} execution(s) ({ends}), {result}", "")
    repeated = [call.tool for call in outcome.calls if _was_repeated(call.executions)]
    once = outcome.publications == 1
    say(
        f"  effects published: {outcome.publications} (publish_report ran to its work "
        f"{outcome.publish_executions} time(s)); committed results produced again: {len(repeated)}"
    )
    proven = once and not repeated
    if proven:
        say("  Nothing that was committed was done again, and the report was published once.")
    return proven


def _was_repeated(executions: Sequence[ExecutionView]) -> bool:
    """Tell whether a call was handed to its tool again although it had succeeded."""
    return any(execution.outcome is ToolCallStatus.SUCCEEDED for execution in executions[:-1])
