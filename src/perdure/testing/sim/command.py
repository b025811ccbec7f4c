"""`perdure-sim`: plays seeds, says what failed, and makes the script of a failure short."""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perdure.testing.sim.draw import PROFILES, draw_script
from perdure.testing.sim.planted import NOTHING, PLANTED, Planted
from perdure.testing.sim.play import Outcome, simulate
from perdure.testing.sim.script import Profile
from perdure.testing.sim.shrink import shrink
from perdure.testing.sim.stores import STORES, StoreKind

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


@dataclass(frozen=True, slots=True)
class _Order:
    """How seeds are to be played, as processes tell each other."""

    profile: Profile
    store: StoreKind
    planted: str

    def play(self, seed: int) -> Outcome:
        """Play one; what is green keeps no trace."""
        planted = _planted(self.planted)
        outcome = simulate(draw_script(seed, self.profile), planted, store=self.store)
        return replace(outcome, trace=()) if outcome.is_green else outcome


@dataclass(slots=True)
class _Told:
    """What all plays came to."""

    seeds: int = 0
    runs: int = 0
    events: int = 0
    callbacks: int = 0
    coverage: Counter[str] = field(default_factory=Counter[str])
    failed: list[Outcome] = field(default_factory=list[Outcome])
    digests: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def add(self, outcome: Outcome) -> None:
        """Add a play."""
        self.seeds += 1
        self.runs += outcome.runs
        self.events += outcome.events
        self.callbacks += outcome.callbacks
        self.coverage += outcome.coverage
        self.digests.append({"seed": outcome.script.seed, "digest": outcome.digest})


def run(arguments: Sequence[str]) -> int:
    """Play the seeds and return the exit code."""
    options = _parser().parse_args(arguments)
    order = _Order(options.profile, options.store, options.planted or NOTHING.name)
    began, told = time.monotonic(), _Told()
    for outcome in _played(order, range(options.seeds[0], options.seeds[1] + 1), options.jobs):
        told.add(outcome)
        if not outcome.is_green:
            short = _shrunk(outcome, order) if options.shrink else outcome
            told.failed.append(short)
            if not options.json:
                _say(_story(short, outcome.digest))
            if len(told.failed) >= options.failures:
                break
        if options.progress and told.seeds % options.progress == 0:
            _say(_line(told, order, time.monotonic() - began))
    seconds = time.monotonic() - began
    if options.json:
        _say(json.dumps(_summary(told, order, seconds, digests=options.digests), indent=1))
    else:
        _say(table(told.coverage) if options.short else _table(told.coverage))
        _say(_line(told, order, seconds))
    return 1 if told.failed else 0


def _played(order: _Order, seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """Yield what each seed came to, in their order, whatever number of processes plays them."""
    if jobs <= 1:
        yield from map(order.play, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(order.play, seeds, chunksize=4)


def _planted(name: str) -> Planted:
    return next((one for one in PLANTED if one.name == name), NOTHING)


def _summary(told: _Told, order: _Order, seconds: float, *, digests: bool) -> dict[str, object]:
    summary: dict[str, object] = {
        "profile": order.profile,
        "store": order.store,
        "planted": order.planted,
        "seeds": told.seeds,
        "failed": [_failure(outcome) for outcome in told.failed],
        "runs": told.runs,
        "events": told.events,
        "callbacks": told.callbacks,
        "seconds": round(seconds, 1),
        "coverage": dict(sorted(told.coverage.items())),
    }
    return {**summary, "digests": told.digests} if digests else summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perdure-sim", description="Simulate Perdure, deterministically, by seed."
    )
    parser.add_argument(
        "--seeds", type=_range, default=(1, 100), help="one seed, or a range such as 1..500"
    )
    parser.add_argument("--profile", choices=PROFILES, default="mixed", help="what goes wrong")
    parser.add_argument("--store", choices=STORES, default="memory", help="over which store")
    parser.add_argument("--jobs", type=int, default=1, help="play in so many processes (1)")
    parser.add_argument(
        "--planted",
        choices=[planted.name for planted in PLANTED],
        help="put this fault into the engine, to see that it is found",
    )
    parser.add_argument("--failures", type=int, default=1, help="stop after so many (1)")
    parser.add_argument(
        "--progress", type=int, default=0, metavar="N", help="say after each N seeds how it stands"
    )
    parser.add_argument(
        "--short", action="store_true", help="sum the table of what was exercised up by kind"
    )
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


def _shrunk(outcome: Outcome, order: _Order) -> Outcome:
    return shrink(outcome, _planted(order.planted), store=order.store)


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


def _table(coverage: Counter[str]) -> str:
    return "\n".join(f"{count:8} {name}" for name, count in sorted(coverage.items()))


def table(coverage: Counter[str]) -> str:
    """Return by the first word of what was exercised how many things it was, and how often."""
    kinds: dict[str, list[int]] = {}
    for name, count in coverage.items():
        kinds.setdefault(name.split(" ")[0], []).append(count)
    return "\n".join(
        f"{sum(counts):8} times {len(counts):3} of {kind}" for kind, counts in sorted(kinds.items())
    )


def _line(told: _Told, order: _Order, seconds: float) -> str:
    seeds = ", ".join(str(outcome.script.seed) for outcome in told.failed)
    return (
        f"simulation over {order.store}: {told.seeds} seeds, {told.runs} runs, {told.events} events, "
        f"{told.callbacks} callbacks in {seconds:.1f} s; failed: {seeds or 'none'}"
    )


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
