"""`perdure verify`: check the stored runs."""

from typing import Annotated

import typer

from perdure.cli.options import Db, Json, on_service
from perdure.ops.exits import ExitCode
from perdure.ops.output import note, print_json, print_line
from perdure.ops.verify import CHECKS, Finding, VerifyReport
from perdure.ops.verify import verify as verify_rows
from perdure.service.base import Service


def verify(
    run: Annotated[
        str | None, typer.Option("--run", help="Check this run only.", show_default=False)
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Check every stored run from its rows alone; exit code 1 when a promise is broken.

    Runs may go on meanwhile: a check looks at what was committed when it read.
    """
    found: list[Finding] = []

    def take(finding: Finding) -> None:
        found.append(finding)
        if not json:
            print_line(f"{finding.check}  {finding.run_id}  {finding.subject}: {finding.text}")

    async def work(service: Service) -> VerifyReport:
        return await verify_rows(service.reader, tenant_id=None, run_id=run, on_finding=take)

    report = on_service(db, work)
    if json:
        print_json(
            {
                "checks": len(CHECKS),
                "events": report.events,
                "findings": found,
                "moving": report.moving,
                "runs": report.runs,
                "unreadable": report.unreadable,
            }
        )
    note(
        f"{report.runs} runs and {report.events} events read, {len(CHECKS)} checks: "
        f"{len(found)} findings, {report.unreadable} runs unreadable, "
        f"{report.moving} left out because they went on"
    )
    broken = bool(found) or report.unreadable > 0
    raise typer.Exit(ExitCode.RUN_FAILED if broken else ExitCode.OK)
