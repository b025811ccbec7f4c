"""`perdure bench`: W1 beside the floor of each store, or W2 (growth), as a table or as JSON."""

import sys
from typing import TextIO

from pydantic import BaseModel

from perdure.bench.growth import GrowthRow, describe_growth, measure_growth
from perdure.bench.machine import describe_machine
from perdure.bench.measure import STORES, Bench, Point, Row, stores

CONCURRENCY_DEFAULT = (1, 16, 64)
SECONDS_DEFAULT = 5.0
WORKLOADS = ("w1", "w2")


class Report(BaseModel):
    """The whole of a benchmark."""

    machine: dict[str, str | int | float]
    rows: list[Row] | list[GrowthRow]


def run_bench(
    *,
    workload: str = "w1",
    concurrency: tuple[int, ...] = CONCURRENCY_DEFAULT,
    seconds: float = SECONDS_DEFAULT,
    wanted: tuple[str, ...] = STORES,
    isolated: bool = False,
    progress: TextIO = sys.stderr,
) -> Report:
    """Measure every point and return the report; a line of progress for each goes to stderr.

    Raises ValueError for an unknown workload or store.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload {workload!r}; known: {', '.join(WORKLOADS)}")
    unknown = set(wanted) - set(STORES)
    if unknown:
        raise ValueError(f"unknown store {min(unknown)!r}; known: {', '.join(STORES)}")
    rows: list[Row] = []
    with stores(wanted) as bench:
        if workload == "w2":
            return Report(machine=describe_machine(), rows=_measure_growth(bench, wanted, progress))
        for store in wanted:
            for in_flight in concurrency:
                point = Point(
                    store=store, concurrency=in_flight, seconds=seconds, isolated=isolated
                )
                rows.append(bench.measure(point))
                progress.write(describe_row(rows[-1]) + "\n")
                progress.flush()
    return Report(machine=describe_machine(), rows=rows)


def _measure_growth(bench: Bench, wanted: tuple[str, ...], progress: TextIO) -> list[GrowthRow]:
    rows: list[GrowthRow] = []
    for store in wanted:
        rows.append(measure_growth(bench, store))
        progress.write(describe_growth(rows[-1]) + "\n")
        progress.flush()
    return rows


def describe(row: Row | GrowthRow) -> str:
    """Return a row of either workload as a line."""
    return describe_growth(row) if isinstance(row, GrowthRow) else describe_row(row)


def describe_row(row: Row) -> str:
    """Return a point as a line: the figure, and its ratio to the floor of the same minute."""
    share = row.steps_per_s / row.floor_steps_per_s
    return (
        f"{row.workload} {row.store:9}{row.concurrency:4} in flight"
        f" {row.steps_per_s:9.0f} steps/s ({share:.3f} of the floor's {row.floor_steps_per_s:.0f})"
        f"  p50 {row.p50_ms:8.1f} ms ({row.p50_ms / row.floor_p50_ms:.1f} x)"
        f"  cpu {row.cpu_ms_per_run:6.2f} ms/run"
        f"  {row.bytes_per_run:7.0f} B/run ({row.bytes_per_run / row.information_per_run:.2f} x)"
    )
