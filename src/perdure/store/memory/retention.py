"""What is no longer kept: the history of ended runs, and content that nothing uses (R-6.8)."""

from collections.abc import Sequence
from datetime import timedelta

from perdure.store import keeping
from perdure.store.commits import SweptContent
from perdure.store.memory.tables import Run, Tables
from perdure.store.requests import RetentionRule, Swept


def expire_history(
    tables: Tables, keep: Sequence[RetentionRule], after: str | None, limit: int
) -> Swept:
    """Drop what is due of the next runs."""
    now = tables.clock()
    later = sorted(run_id for run_id in tables.runs if after is None or run_id > after)
    page = [tables.runs[run_id] for run_id in later[:limit]]
    due = [
        run
        for run in page
        if keeping.history_is_due(run.hot, run.facts.tenant_id, keep, now)
        and not _is_shared(tables, run)
    ]
    count = keeping.histories_at_once([_size(run) for run in due])
    for run in due[:count]:
        _drop(tables, run)
    if count < len(due):
        return Swept(runs=count, after=due[count - 1].facts.run_id)
    return Swept(runs=count, after=later[limit - 1] if len(later) > limit else None)


def _size(run: Run) -> int:
    return (run.hot.terminal_seq or 0) - run.hot.retained_from_seq


def drop_if_free(tables: Tables, run: Run) -> bool:
    """Drop the history of an ended run that has it still and that no other run shares."""
    ended = run.hot.terminal_seq
    if ended is None or run.hot.retained_from_seq >= ended or _is_shared(tables, run):
        return False
    _drop(tables, run)
    return True


def _is_shared(tables: Tables, run: Run) -> bool:
    return any(
        other.facts.origin_run_id == run.facts.run_id and other.hot.retained_from_seq == 1
        for other in tables.runs.values()
    )


def _drop(tables: Tables, run: Run) -> None:
    run_id = run.facts.run_id
    run.hot = keeping.drop_history(run.hot)
    tables.events[run_id] = [
        event for event in tables.events[run_id] if event.seq >= run.hot.retained_from_seq
    ]
    for key in [key for key, row in tables.checkpoints.items() if row.run_id == run_id]:
        del tables.checkpoints[key]
    for use in [use for use, lasts in tables.blob_uses.items() if use[2] == run_id and not lasts]:
        del tables.blob_uses[use]


def expire_blobs(
    tables: Tables, older_than_s: float, after: str | None, limit: int
) -> SweptContent:
    """Delete, of the next content, what no run uses."""
    until = tables.clock() - timedelta(seconds=older_than_s)
    used = {(tenant_id, digest) for tenant_id, digest, _ in tables.blob_uses}
    later = sorted((":".join(key), key) for key in tables.blobs)
    later = [(place, key) for place, key in later if after is None or place > after]
    page = later[:limit]
    idle = [
        key for _, key in page if key not in used and tables.blobs[key].last_referenced_at < until
    ]
    for key in idle:
        del tables.blobs[key]
    return SweptContent(deleted=len(idle), after=page[-1][0] if len(later) > limit else None)
