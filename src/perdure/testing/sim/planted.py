"""Faults that can be planted into the engine in memory, to see that the simulation finds them."""

from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any
from unittest import mock

from pydantic import JsonValue

from perdure.engine import fields_read
from perdure.engine.answers import Answered, Reply, answer_interrupt
from perdure.engine.core import Core
from perdure.protocol.runs import RunFacts, RunHot
from perdure.protocol.states import InterruptStatus
from perdure.store import rules
from perdure.store.commits import Commit, CommitResult, NewStateValue
from perdure.store.memory import applying
from perdure.store.memory import state_values as memory_values
from perdure.store.reader import InterruptFilter
from perdure.store.requests import ClaimWant
from perdure.store.sqlite import committing
from perdure.store.sqlite import state_values as sqlite_values
from perdure.store.sqlite.gathering import Rows
from perdure.store.sqlite.prepared import Prepared
from perdure.store.sqlite.transaction import Transaction
from perdure.testing.sim.script import Profile

Give = Callable[[Core, str, str, Reply], Awaitable[Answered]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A fault of the engine's, as it is put in for a play."""

    name: str
    patches: tuple[tuple[object, str, Any], ...] = ()
    acknowledge_early: bool = False
    """Commits are acknowledged that never reach the database."""

    cancel_by_signal: bool = False
    """The cancel of a held run becomes durable only once a worker hears its signal."""

    answer: Give = answer_interrupt
    profile: Profile = "mixed"
    """What finds it soon."""

    @contextmanager
    def patched(self) -> Generator[None]:
        """Put the fault in; it is gone afterwards."""
        with ExitStack() as stack:
            for target, name, value in self.patches:
                stack.enter_context(mock.patch.object(target, name, value))
            yield


NOTHING = Planted(name="nothing")


def _unfenced(commit: Commit, hot: RunHot) -> CommitResult | None:
    """Judge by the state alone, whoever writes and whatever was written meanwhile."""
    guard = commit.guard
    token = None if guard.token is None else hot.lease_token
    owner = hot.lease_owner or "nobody"
    guard = replace(guard, token=token, expected_seq=hot.last_seq)
    return rules.judge(replace(commit, guard=guard), replace(hot, lease_owner=owner))


_advance: Callable[[Transaction, Rows, Prepared], CommitResult] = vars(committing)["_advance"]


def _advance_unfenced(tx: Transaction, rows: Rows, prepared: Prepared) -> CommitResult:
    """Write to a row of SQLite as if whoever writes held it, behind what was written meanwhile."""
    kept = tx.load(prepared.run)
    if kept is not None:
        held = kept.hot.lease_owner is not None
        guard = replace(
            prepared.commit.guard,
            token=kept.hot.lease_token if held else None,
            expected_seq=kept.hot.last_seq,
        )
        prepared = replace(prepared, commit=replace(prepared.commit, guard=guard))
    return _advance(tx, rows, prepared)


def _pass_nobody(tx: Transaction, part: Sequence[Prepared]) -> committing.Passed:
    """Leave all commits to what reads their rows."""
    return {}


_take, _lose = rules.take, rules.lose


def _take_again(hot: RunHot, want: ClaimWant, now: datetime) -> RunHot:
    """Give whoever claims a run after a lost lease the token that was lost."""
    taken = _take(hot, want, now)
    return replace(taken, lease_token=hot.lease_token) if hot.faults > 0 else taken


def _lose_and_keep(run_id: str, hot: RunHot, now: datetime, *, closing: bool) -> RunHot:
    return replace(_lose(run_id, hot, now, closing=closing), lease_token=hot.lease_token)


async def _answer_by_order(core: Core, tenant_id: str, interrupt_id: str, reply: Reply) -> Answered:
    """Answer the oldest open question of the run, whichever was meant."""
    named = await core.reader.find_interrupt(tenant_id, interrupt_id)
    if named is not None and named.status is InterruptStatus.PENDING:
        where = InterruptFilter(status=InterruptStatus.PENDING, run_id=named.run_id)
        rows = await core.reader.list_interrupts(tenant_id, where, after=None, limit=100)
        alike = [row for row in rows if row.kind is named.kind]
        if alike:
            interrupt_id = min(alike, key=lambda row: row.opened_seq).interrupt_id
    return await answer_interrupt(core, tenant_id, interrupt_id, reply)


def _never_moved(new: NewStateValue, version: int | None) -> bool:
    """Let a run leave what it has, whatever others have left meanwhile."""
    return False


async def _nothing_kept(core: Core, facts: RunFacts) -> dict[str, JsonValue]:
    """Take all that is shared for writes that nobody has left."""
    return {}


PLANTED: tuple[Planted, ...] = (
    Planted(
        name="fence-dropped",
        patches=(
            (applying, "judge", _unfenced),
            (committing, "_advance", _advance_unfenced),
            (committing, "_pass", _pass_nobody),
        ),
    ),
    Planted(name="acknowledged-before-commit", acknowledge_early=True, profile="commits"),
    Planted(name="resumed-by-order", answer=_answer_by_order),
    Planted(name="cancel-by-signal-only", cancel_by_signal=True),
    Planted(
        name="token-reused",
        patches=((rules, "take", _take_again), (rules, "lose", _lose_and_keep)),
    ),
    Planted(
        name="update-lost",
        patches=(
            (memory_values, "has_moved", _never_moved),
            (sqlite_values, "has_moved", _never_moved),
        ),
        profile="fields",
    ),
    Planted(
        name="left-twice",
        patches=((fields_read, "_kept_by_origins", _nothing_kept),),
        profile="fields",
    ),
)
"""What each of them breaks: the guard of a commit, its answer, the address of an answer, the
reach of a cancel, the uniqueness of tokens, and for fields that outlive their runs the version that
a value is merged over, and that a fork does not leave again what its origin has left."""
