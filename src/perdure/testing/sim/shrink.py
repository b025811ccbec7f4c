"""Making a failing script short: leave out what the failure does not need."""

from dataclasses import replace

from perdure.testing.sim.planted import NOTHING, Planted
from perdure.testing.sim.play import Outcome, simulate
from perdure.testing.sim.script import Item, Script
from perdure.testing.sim.stores import StoreKind

PLAYS_MAX = 300


def shrink(
    outcome: Outcome,
    planted: Planted = NOTHING,
    plays_max: int = PLAYS_MAX,
    *,
    store: StoreKind = "memory",
) -> Outcome:
    """Return the outcome of a shorter script that fails the same check; as short as it gets."""
    best = outcome
    checks = {finding.check for finding in outcome.findings}
    left = plays_max
    size = max(1, len(best.script.items) // 2)
    while size >= 1 and left > 0:
        place, shorter = 0, False
        while place < len(best.script.items) and left > 0:
            items = best.script.items
            found = _try(
                best.script, (*items[:place], *items[place + size :]), checks, planted, store
            )
            left -= 1
            if found is not None:
                best, shorter = found, True
            else:
                place += size
        size = size if shorter and size == 1 else size // 2
    return best


def _try(
    script: Script, items: tuple[Item, ...], checks: set[str], planted: Planted, store: StoreKind
) -> Outcome | None:
    outcome = simulate(replace(script, items=items), planted, store=store)
    same = any(finding.check in checks for finding in outcome.findings)
    return outcome if same else None
