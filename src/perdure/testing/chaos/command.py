"""`perdure-chaos`: runs campaigns, says what they saw, and exits with 1 when something was found."""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio

from perdure.testing.chaos.campaign import Plan, run_campaign
from perdure.testing.chaos.faults import FAULTS
from perdure.testing.chaos.report import Record

STORES = ("sqlite", "postgres")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaigns that the arguments name; exit with 1 when one finds something."""
    raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the campaigns and return the exit code."""
    options = _parser().parse_args(arguments)
    stores = STORES if options.store == "both" else (options.store,)
    records = [
        _campaign(
            Plan(
                store=store,
                seconds=options.minutes * 60,
                rounds=options.rounds,
                seed=options.seed,
                workers=options.workers,
                servers=options.servers,
                clients=options.clients,
                lease_s=options.lease,
                faults=tuple(options.fault),
            ),
            keep=options.keep,
        )
        for store in stores
    ]
    told = [record.as_json() for record in records]
    document = json.dumps(told if len(told) > 1 else told[0], indent=1)
    if options.json == "-":
        sys.stdout.write(document + "\n")
    elif options.json:
        Path(options.json).write_text(document + "\n", encoding="utf-8")
    return 1 if any(record.findings for record in records) else 0


def _campaign(plan: Plan, *, keep: Path | None) -> Record:
    """Run a campaign in a folder that is deleted when nothing was found, unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"perdure-chaos-{plan.store}-", dir=keep))
    record = anyio.run(run_campaign, plan, folder)
    sys.stderr.write(record.as_text() + "\n")
    if record.findings or keep is not None:
        sys.stderr.write(f"logs of the processes: {folder}\n")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return record


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perdure-chaos",
        description="Disturb real processes and databases while runs go on, and check what is left.",
    )
    parser.add_argument("--store", choices=[*STORES, "both"], default="both", help="database")
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="how long faults go on, for each store (1)"
    )
    parser.add_argument("--rounds", type=int, help="end after so many faults, if that is sooner")
    parser.add_argument("--seed", type=int, default=1, help="draws faults and runs (1)")
    parser.add_argument("--workers", type=int, default=4, help="worker processes (4)")
    parser.add_argument("--servers", type=int, default=2, help="API servers (2)")
    parser.add_argument(
        "--clients", type=int, default=16, help="runs that are followed at once (16)"
    )
    parser.add_argument("--lease", type=float, default=3.0, help="seconds of a worker's lease (3)")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        choices=[fault.name for fault in FAULTS],
        help="draw only faults of this kind; may be given several times",
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; `-`: to stdout")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs and database here")
    return parser


if __name__ == "__main__":
    main()
