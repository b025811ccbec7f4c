"""Rules of what is kept: histories and content that may go, and what is a repetition."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from perdure.protocol.codec import digest
from perdure.protocol.records import MessageRow, ThreadRow
from perdure.protocol.runs import RunHot
from perdure.protocol.states import (
    TERMINAL,
)
from perdure.store.commits import Commit
from perdure.store.requests import LateKept, LateResult, RetentionRule


def lasting_digests(commit: Commit) -> frozenset[str]:
    """Return the content of a commit that outlives its run's history: artifacts and the answer."""
    kept = {artifact.digest for artifact in commit.artifacts}
    if commit.hot.state in TERMINAL:
        kept |= {blob.digest for blob in commit.blobs}
    return frozenset(kept)


def history_is_due(
    hot: RunHot, tenant_id: str, keep: Sequence[RetentionRule], now: datetime
) -> bool:
    """Tell whether an ended run's history may go, and has not gone yet."""
    if hot.finished_at is None or hot.terminal_seq is None:
        return False
    if hot.retained_from_seq >= hot.terminal_seq:
        return False
    mine = [rule for rule in keep if rule.state is hot.state]
    own = [rule for rule in mine if rule.tenant_id == tenant_id]
    general = [rule for rule in mine if rule.tenant_id is None]
    times = [rule.older_than_s for rule in own or general if rule.older_than_s is not None]
    return any(hot.finished_at + timedelta(seconds=seconds) <= now for seconds in times)


def shortest_keep_s(keep: Sequence[RetentionRule]) -> float | None:
    """Return the age below which no rule lets a history go; None when none ever goes."""
    return min((rule.older_than_s for rule in keep if rule.older_than_s is not None), default=None)


EVENTS_AT_ONCE = 20_000
"""How many events one transaction of a sweep deletes, unless a single history has more."""


def histories_at_once(sizes: Sequence[int]) -> int:
    """Return how many of these histories, by their numbers of events, go in one transaction."""
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > EVENTS_AT_ONCE:
            return count
    return len(sizes)


def drop_history(hot: RunHot) -> RunHot:
    """Return the row of an ended run whose history went."""
    assert hot.terminal_seq is not None, "only ended runs lose their history"
    return replace(hot, retained_from_seq=hot.terminal_seq, checkpoint_seq=None)


LATE_PER_EXECUTION_MAX = 16
"""How many late results of one execution are kept: those that say something else."""


def late_digest(late: LateResult) -> str:
    """Return the digest by which a late result of an execution is the same as another."""
    ref = None if late.output_ref is None else late.output_ref.digest
    return digest([late.status, late.output, ref, late.external_ref])


def what_of_late(known: Collection[str], given: str) -> LateKept:
    """Return what becomes of a late result, with the digests of those of its execution."""
    if given in known:
        return LateKept.KNOWN
    full = len(known) >= LATE_PER_EXECUTION_MAX
    return LateKept.LEFT_OUT if full else LateKept.RECORDED


def is_same_thread(found: ThreadRow, given: ThreadRow) -> bool:
    """Tell whether a thread is the one given, whatever happened on it since."""
    fresh = replace(
        found,
        active_run_id=given.active_run_id,
        last_position=given.last_position,
        updated_at=given.updated_at,
    )
    return fresh == given


def is_same_message(found: MessageRow, given: MessageRow) -> bool:
    """Tell whether a message is the one given; its place and time are the store's."""
    return replace(found, position=given.position, created_at=given.created_at) == given
