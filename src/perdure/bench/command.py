"""The command `perdure bench`, which the command line reaches by name."""

from typing import Annotated

import typer

from perdure.bench.main import CONCURRENCY_DEFAULT, SECONDS_DEFAULT, describe, run_bench
from perdure.bench.measure import STORES
from perdure.ops.output import print_json, print_line


def bench(
    workload: Annotated[str, typer.Option("--workload", help="What to run: w1, w2.")] = "w1",
    concurrency: Annotated[
        list[int] | None,
        typer.Option(
            "--concurrency",
            min=1,
            help="Runs at once; may be given several times. Without: "
            f"{', '.join(map(str, CONCURRENCY_DEFAULT))}.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="How long to measure each point.")
    ] = SECONDS_DEFAULT,
    store: Annotated[
        list[str] | None,
        typer.Option(
            "--store",
            help=f"Which stores; may be given several times. Without: {', '.join(STORES)}.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document with sorted keys.")
    ] = False,
) -> None:
    """Measure throughput, latency and bytes beside the floor of the same database (w1), or what
    a run of a thousand steps costs at its end, in time, bytes and recovery (w2).

    PostgreSQL is started for it and removed afterwards.
    """
    try:
        report = run_bench(
            workload=workload,
            concurrency=tuple(concurrency or CONCURRENCY_DEFAULT),
            seconds=seconds,
            wanted=tuple(store or STORES),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if json:
        print_json(report)
        return
    for row in report.rows:
        print_line(describe(row))
