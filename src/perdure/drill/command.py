"""The command `perdure drill`, which the command line reaches by name."""

import logging
from typing import Annotated

import typer

from perdure.drill.conduct import Wish, clear_all, conduct
from perdure.drill.report import DrillReport, print_report
from perdure.drill.scenes import SCENES, Scene
from perdure.ops.exits import ExitCode, run_async
from perdure.ops.output import note, print_json, print_line
from perdure.ops.settings import Settings, load_settings
from perdure.protocol.errors import Invalid, NotFound
from perdure.runtime import require_schema
from perdure.telemetry.logs import configure_logs

LEASE_S = 5.0
SCENE_S_MAX = 120.0


def drill(
    scenes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENE]...",
            help=f"Which scenes; all if none is given: {', '.join(s.name for s in SCENES)}.",
            show_default=False,
        ),
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools", help="Only look at the registered tools; play no scene.")
    ] = False,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Exit with 3 when a registered tool lacks idempotency or compensation."
        ),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the drill's runs in the database.")
    ] = False,
    clear: Annotated[
        bool,
        typer.Option("--clear", help="Only delete what earlier drills have left; play no scene."),
    ] = False,
    lease: Annotated[
        float,
        typer.Option(
            "--lease", min=0.5, max=3600, help="Seconds that the drill's workers may be silent."
        ),
    ] = LEASE_S,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds that a scene may take.")
    ] = SCENE_S_MAX,
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            metavar="URL",
            help="Database URL; overrides PERDURE_DB__URL.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document with sorted keys.")
    ] = False,
) -> None:
    """Rehearse faults on this installation, and report what healed itself and what needs a person.

    The drill runs an agent, a queue and a tenant of its own, with workers of its own: it touches no
    run of the installation, beside which it may run, and deletes what it made. Exit code 0: every
    scene went as it should; 1: one did not, and its runs are kept; 3: see --strict.
    """
    wanted = _wanted(scenes or [])
    if (tools or clear) and scenes:
        raise typer.BadParameter("--tools and --clear play no scene")
    settings = load_settings({"db": None if db is None else {"url": db}})
    configure_logs(settings.log.level, settings.log.format)
    logging.getLogger().setLevel(logging.CRITICAL)  # the faults are on purpose
    _check_database(settings)
    run_async(lambda: require_schema(settings))
    if clear:
        _clear(settings, json=json)
        return
    wish = Wish(scenes=[] if tools else wanted, lease_s=lease, timeout_s=timeout, keeps=keep)
    report = run_async(lambda: conduct(settings, wish, tell=note))
    _print(report, json=json)
    raise typer.Exit(_exit_of(report, strict=strict))


def _wanted(names: list[str]) -> list[Scene]:
    wanted = [scene for scene in SCENES if not names or scene.name in names]
    unknown = set(names) - {scene.name for scene in wanted}
    if unknown:
        raise typer.BadParameter(f"there is no scene {', '.join(sorted(unknown))}")
    return wanted


def _check_database(settings: Settings) -> None:
    path = settings.db.sqlite_path
    if path is not None and not path.exists():
        raise NotFound(
            f"there is no database at {path}: a drill is for an installation that is there"
        )
    if path is not None and not path.is_file():
        raise Invalid(f"{path} is no file", field="db")


def _clear(settings: Settings, *, json: bool) -> None:
    count = run_async(lambda: clear_all(settings))
    if json:
        print_json({"cleared": count})
    else:
        print_line(f"{count} threads of drills deleted")


def _print(report: DrillReport, *, json: bool) -> None:
    if json:
        print_json(report)
    else:
        print_report(report)


def _exit_of(report: DrillReport, *, strict: bool) -> ExitCode:
    if not report.passed:
        return ExitCode.RUN_FAILED
    return ExitCode.WAITING_FOR_HUMAN if strict and report.gaps else ExitCode.OK
