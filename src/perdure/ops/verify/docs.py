"""The reference page of the checks, generated from their table."""

from collections.abc import Mapping, Sequence

from perdure.ops.verify.table import CHECKS, WAITING

_HEAD = """\
# Invariants

`perdure verify` reads a database run by run and reports every row that breaks one of these
statements. Each check is proved by mutants: a clean history of real runs yields no finding, and a
copy of it with the one fault named here is caught by that check.

Ids are those of the design: `I` invariants of stored rows, `C` checks that compute something,
`H` the hot row against the rows beside it, `M` messages, `L` liveness (`L1`, `L3` and `L4` only
when the time is given). `C3` is checked when the journal of a tool is given (`--journal`).
"""


def table(mutants: Mapping[str, Sequence[str]]) -> str:
    """Return the page; `mutants` are the names of the faults that prove a check, by its id."""
    lines = [_HEAD, "| id | statement | mutants |", "|---|---|---|"]
    for check in CHECKS.values():
        names = ", ".join(mutants.get(check.id, ()))
        lines.append(f"| {check.id} | {check.statement} | {names} |")
    lines += ["", "## Not checked here", "", "| id | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in WAITING.items()]
    return "\n".join(lines) + "\n"
