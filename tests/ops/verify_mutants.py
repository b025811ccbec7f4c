"""The mutants of `verify_mutants.sql`, read."""

import re
from dataclasses import dataclass
from pathlib import Path

from perdure.protocol.log import TYPE_NUMBER

FILE = Path(__file__).with_suffix(".sql")
TYPES = {f"t_{name}": number for name, number in TYPE_NUMBER.items()}
_HEAD = "-- mutant: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A fault that `check` must catch in the run of `scene`."""

    check: str
    scene: str
    name: str
    statements: tuple[str, ...]
    other: str
    whole: bool
    """Verify the whole database: the fault is not one run's."""
    in_s: float | None
    """Verify with the liveness checks, so many seconds after the history was made."""
    in_journal: bool
    """Its statements select the keys of effects that the journal has too many of."""


def _read(block: str) -> Mutant:
    head, _, sql = block.partition("\n")
    check, scene, name, *options = [part.strip() for part in head.split("|")]
    given = dict(re.findall(r"(\w+)(?:=([\w ]+))?", options[0] if options else ""))
    return Mutant(
        check=check,
        scene=scene,
        name=name,
        statements=tuple(part.strip() for part in sql.split(";") if part.strip()),
        other=given.get("other", scene),
        whole="whole" in given,
        in_s=float(given["in_s"]) if "in_s" in given else None,
        in_journal="journal" in given,
    )


MUTANTS = tuple(_read(block) for block in FILE.read_text(encoding="utf-8").split(_HEAD)[1:])


def by_check() -> dict[str, list[str]]:
    """Return the names of the mutants of each check."""
    found: dict[str, list[str]] = {}
    for mutant in MUTANTS:
        found.setdefault(mutant.check, []).append(mutant.name)
    return found
