"""`perdure-sim`: plays seeds, says what failed, and makes the script of a failure short."""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

from perdure.testing.sim.planted import NOTHING, PLANTED, Planted
from perdure.testing.sim.play import Outcome, simulate
from perdure.testing.sim.script import PROFILES, draw_script
from perdure.testing.sim.shrink import shrink

LAST_LINES = 40
HASH_SEED = "0"
"""Sets of texts are ordered by their hashes; with this they are so alike in every process."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Play the seeds that the arguments name; exit with 1 when one fails, 2 for bad arguments."""
    if arguments is None and os.environ.get("PYTHONHASHSEED") != HASH_SEED:
        os.environ["PYTHONHASHSEED"] = HASH_SEED
        command = [sys.executable, "-m", "perdure.testing.sim.command", *sys.argv[1:]]
        os.execv(sys.executable, command)  # noqa: S606  # this very program again
    raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Play the seeds and return the exit code."""
    options = _parser().parse_args(arguments)
    first, last = options.seeds
    planted = next((one for one in PLANTED if one.name == options.planted), NOTHING)
    began = time.monotonic()
    told: list[dict[str, object]] = []
    coverage: Counter[str] = Counter()
    failed: list[Outcome] = []
    played = runs = events = 0
    for seed in range(first, last + 1):
        outcome = simulate(draw_script(seed, options.profile), planted)
        coverage += outcome.coverage
        played += 1
        runs, events = runs + outcome.runs, events + outcome.events
        if options.digests:
            told.append({"seed": seed, "digest": outcome.digest})
        if not outcome.is_green:
            failed.append(_shrunk(outcome, planted, wanted=options.shrink))
            if not options.json:
                _say(_story(failed[-1], outcome.digest))
            if len(failed) >= options.failures:
                break
    summary: dict[str, object] = {
        "profile": options.profile,
        "planted": planted.name,
        "seeds": played,
        "failed": [_failure(outcome) for outcome in failed],
        "runs": runs,
        "events": events,
        "seconds": round(time.monotonic() - began, 1),
        "coverage": dict(sorted(coverage.items())),
    }
    if options.digests:
        summary["digests"] = told
    _say(json.dumps(summary, indent=1) if options.json else _table(summary, coverage, failed))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perdure-sim", description="Simulate Perdure, deterministically, by seed."
    )
    parser.add_argument(
        "--seeds", type=_range, default=(1, 100), help="one seed, or a range such as 1..500"
    )
    parser.add_argument("--profile", choices=PROFILES, default="mixed", help="what goes wrong")
    parser.add_argument(
        "--planted",
        choices=[planted.name for planted in PLANTED],
        help="put this fault into the engine, to see that it is found",
    )
    parser.add_argument("--failures", type=int, default=1, help="stop after so many (1)")
    parser.add_argument("--json", action="store_true", help="say it as one JSON document")
    parser.add_argument("--digests", action="store_true", help="with --json: each seed's digest")
    parser.add_argument(
        "--no-shrink", dest="shrink", action="store_false", help="show the failing script whole"
    )
    return parser


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("..")
    try:
        found = int(first), int(last or first)
    except ValueError:
        raise argparse.ArgumentTypeError("a seed, or a range such as 1..500") from None
    if not 0 <= found[0] <= found[1]:
        raise argparse.ArgumentTypeError("a range goes up, from 0 or more")
    return found


def _shrunk(outcome: Outcome, planted: Planted, *, wanted: bool) -> Outcome:
    return shrink(outcome, planted) if wanted else outcome


def _failure(outcome: Outcome) -> dict[str, object]:
    return {
        "seed": outcome.script.seed,
        "digest": outcome.digest,
        "findings": [str(finding) for finding in outcome.findings],
        "script": [str(item) for item in outcome.script.items],
    }


def _story(outcome: Outcome, digest: str) -> str:
    lines = [
        f"seed {outcome.script.seed} of {outcome.script.profile} failed; digest {digest}",
        "What was found in the shortest script that fails alike:",
        *(f"  {finding}" for finding in outcome.findings),
        "The script:",
        *(f"  {item}" for item in outcome.script.items),
        f"The last {LAST_LINES} lines of its trace:",
        *outcome.trace[-LAST_LINES:],
    ]
    return "\n".join(lines)


def _table(summary: dict[str, object], coverage: Counter[str], failed: list[Outcome]) -> str:
    lines = [f"{count:8} {name}" for name, count in sorted(coverage.items())]
    seeds = ", ".join(str(outcome.script.seed) for outcome in failed)
    lines.append(
        f"{summary['seeds']} seeds, {summary['runs']} runs, {summary['events']} events in "
        f"{summary['seconds']} s; failed: {seeds or 'none'}"
    )
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
