"""Ports of a worker that looks after the drill's own runs only.

A worker sweeps for all runs of its database: it ends what is to be ended, and deletes what is kept
no longer. Those of a drill leave the installation's runs to the installation. Taking expired leases
away is all they do for everybody: it is the same whoever does it.
"""

from collections.abc import Sequence
from typing import Any, cast

from perdure.store.commits import SweptContent, Unmoved
from perdure.store.ports import Store
from perdure.store.reader import Reader
from perdure.store.requests import DueTimer, RetentionRule, Swept

PAGES_MAX = 100


class _OwnReader:
    """A reader that tells timers of a few runs only."""

    def __init__(self, inner: Reader, run_ids: set[str]) -> None:
        self._inner = inner
        self._run_ids = run_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def due_timers(self, limit: int, after: DueTimer | None = None) -> list[DueTimer]:
        """Return due timers of these runs."""
        found: list[DueTimer] = []
        for _ in range(PAGES_MAX):
            page = await self._inner.due_timers(limit, after)
            found += [timer for timer in page if timer.run_id in self._run_ids]
            if len(page) < limit or len(found) >= limit:
                break
            after = page[-1]
        return found[:limit]

    async def unmoved_runs(self, *, after: str | None, limit: int) -> Unmoved:
        """Return none: a stuck run is the installation's to find."""
        del after, limit
        return Unmoved(seqs={}, after=None)


class _OwnStore:
    """A store that deletes nothing by age."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def expire_history(
        self, keep: Sequence[RetentionRule], *, after: str | None, limit: int
    ) -> Swept:
        """Drop nothing."""
        del keep, after, limit
        return Swept(runs=0, after=None)

    async def expire_blobs(
        self, older_than_s: float, *, after: str | None, limit: int
    ) -> SweptContent:
        """Delete nothing."""
        del older_than_s, after, limit
        return SweptContent(deleted=0, after=None)

    async def expire_deleted(
        self, thread_id: str | None, *, after: str | None, limit: int
    ) -> Swept:
        """Drop nothing."""
        del thread_id, after, limit
        return Swept(runs=0, after=None)


def own_reader(inner: Reader, run_ids: set[str]) -> Reader:
    """Return a reader whose timers are those of these runs."""
    return cast("Reader", _OwnReader(inner, run_ids))


def own_store(inner: Store) -> Store:
    """Return a store for a worker that deletes nothing by age."""
    return cast("Store", _OwnStore(inner))
