"""What is no longer kept: the history of ended runs, and content that nothing uses (R-6.8)."""

from collections.abc import Sequence

from perdure.protocol.base import to_micros
from perdure.store import keeping
from perdure.store.commits import SweptContent
from perdure.store.requests import RetentionRule, Swept
from perdure.store.sqlite.rows import pack_id
from perdure.store.sqlite.transaction import Transaction


def expire_history(
    tx: Transaction, keep: Sequence[RetentionRule], after: str | None, limit: int
) -> Swept:
    """Drop what is due of the next runs."""
    older_than_s = keeping.shortest_keep_s(keep)
    if older_than_s is None:
        return Swept(runs=0, after=None)
    until = to_micros(tx.now) - round(older_than_s * 1_000_000)
    page = tx.all("page_of_runs", b"" if after is None else pack_id(after), limit, until)
    last = page[-1][0] if len(page) == limit else None
    due = [row for row in page if row[2] is not None and row[2] > 0]
    count = keeping.histories_at_once([events for _, _, events in due])
    if count < len(due):
        last = due[count - 1][0]
    dropped = sum(_drop(tx, run, tenant, keep) for run, tenant, _ in due[:count])
    return Swept(runs=dropped, after=None if last is None else f"run_{last.hex()}")


def _drop(tx: Transaction, run: bytes, tenant_id: str, keep: Sequence[RetentionRule]) -> bool:
    kept = tx.load_one_of_many(run)
    if kept is None or not keeping.history_is_due(kept.hot, tenant_id, keep, tx.now):
        return False
    if tx.one("find_sharer", run) is not None:
        return False
    drop(tx, run, keeping.drop_history(kept.hot).retained_from_seq)
    return True


def drop(tx: Transaction, run: bytes, seq: int) -> None:
    """Drop the history of an ended run before its terminal event."""
    tx.run("delete_history", run, seq)
    tx.run("delete_checkpoints", run)
    tx.run("delete_blob_uses", run)
    tx.run("set_retained", run, seq)


def expire_blobs(
    tx: Transaction, older_than_s: float, after: str | None, limit: int
) -> SweptContent:
    """Delete, of the next content by rowid, what no run uses."""
    start = 0 if after is None else int(after)
    page = tx.one("page_of_blobs", start, limit)
    seen, last = page if page is not None else (0, None)
    if last is None:
        return SweptContent(deleted=0, after=None)
    until = to_micros(tx.now) - round(older_than_s * 1_000_000)
    deleted = tx.run("delete_blobs", start, last, until)
    return SweptContent(deleted=deleted, after=str(last) if seen == limit else None)
