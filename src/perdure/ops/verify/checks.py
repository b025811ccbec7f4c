"""What a check is: an id, a statement in words, and a pure function that yields what breaks it.

A check's function yields (subject, text) pairs: the row that breaks the statement, and how. It
reads nothing but the record it is given and never raises for what a damaged database may hold.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Scope = Literal["run", "thread", "agent", "store", "live", "journal"]
Found = Iterable[tuple[str, str]]
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row that breaks a statement. `subject` names it, e.g. `event 7` or a tool call's id."""

    check: str
    run_id: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A statement that must hold, and over what it is checked."""

    id: str
    statement: str
    scope: Scope


@dataclass(frozen=True, slots=True)
class Rule(Generic[Record]):
    """A check with the function that looks for what breaks it."""

    check: Check
    function: Callable[[Record], Found]
    needs_content: bool = False
    """It judges what is stored by digest, which a sweep does not read."""

    def findings(self, record: Record, run_id: str) -> Iterable[Finding]:
        """Yield what breaks the statement in one record."""
        for subject, text in self.function(record):
            yield Finding(check=self.check.id, run_id=run_id, subject=subject, text=text)


def rule(
    id: str, statement: str, *, scope: Scope = "run", needs_content: bool = False
) -> Callable[[Callable[[Record], Found]], Rule[Record]]:
    """Make a check of a function over one record."""

    def decorate(function: Callable[[Record], Found]) -> Rule[Record]:
        check = Check(id=id, statement=statement, scope=scope)
        return Rule(check, function, needs_content)

    return decorate
