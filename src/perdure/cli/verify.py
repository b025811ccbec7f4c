"""`perdure verify`: check the stored runs."""

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.options import Db, Json, on_service
from perdure.ops.exits import ExitCode
from perdure.ops.output import note, print_json, print_line
from perdure.ops.verify import CHECKS, Finding, VerifyReport
from perdure.ops.verify import verify as verify_rows
from perdure.ops.verify.outside import read_journal
from perdure.service.base import Service

FINDINGS_MAX = 10_000
"""So many findings are printed as JSON; of more only the number."""


def verify(
    run: Annotated[
        str | None, typer.Option("--run", help="Check this run only.", show_default=False)
    ] = None,
    tenant: Annotated[
        str | None,
        typer.Option("--tenant", help="Check the runs of this tenant only.", show_default=False),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            metavar="FILE",
            help="Compare with what tools did: JSON lines with the idempotency `key` of each "
            "effect.",
            show_default=False,
        ),
    ] = None,
    db: Db = None,
    json: Json = False,
) -> None:
    """Check every stored run from its rows alone; exit code 1 when a promise is broken.

    Runs may go on meanwhile: a check looks at what was committed when it read.
    """
    found: list[Finding] = []
    effects = None if journal is None else read_journal(journal)

    def take(finding: Finding) -> None:
        if not json:
            print_line(f"{finding.check}  {finding.run_id}  {finding.subject}: {finding.text}")
        elif len(found) < FINDINGS_MAX:
            found.append(finding)

    async def work(service: Service) -> VerifyReport:
        return await verify_rows(
            service.reader, tenant_id=tenant, run_id=run, on_finding=take, journal=effects
        )

    report = on_service(db, work)
    if json:
        print_json(
            {
                "by_check": report.by_check,
                "checks": len(CHECKS),
                "events": report.events,
                "findings": found,
                "findings_left_out": report.findings - len(found),
                "moving": report.moving,
                "runs": report.runs,
                "unreadable": report.unreadable,
            }
        )
    note(
        f"{report.runs} runs and {report.events} events read, {len(CHECKS)} checks: "
        f"{report.findings} findings, {report.unreadable} runs unreadable, "
        f"{report.moving} left out because they went on"
    )
    broken = not report.is_clean or report.unreadable > 0
    raise typer.Exit(ExitCode.RUN_FAILED if broken else ExitCode.OK)
