"""Verification holds the rows of a few runs at a time, however many there are (memory, not time)."""

import gc
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import anyio.lowlevel
import pytest

from perdure.ops.verify import verifier
from perdure.ops.verify.record import RunRecord
from perdure.protocol.runs import RunRow
from perdure.store.memory import MemoryDatabase
from perdure.store.reader import Reader
from perdure.testing import builders as make

NOTES = 20
SIZE = NOTES + 10
"""No run of `_grow` has more events by default."""


class Held:
    """How many events the records hold that are being read, or that are still in use."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.most = 0
        self.records = 0
        self._read = verifier.settled_record
        patch.setattr(verifier, "settled_record", self._counted)

    async def _counted(self, reader: Reader, row: RunRow, **given: Any) -> RunRecord | None:
        self._add(row.hot.last_seq)
        await anyio.lowlevel.checkpoint()  # the others of the batch are read meanwhile
        record = await self._read(reader, row, **given)
        assert record is not None
        self.records += 1
        weakref.finalize(record, self._add, -row.hot.last_seq)
        return record

    def _add(self, events: int) -> None:
        self.now += events
        self.most = max(self.most, self.now)


@pytest.fixture
async def database() -> AsyncGenerator[MemoryDatabase]:
    async with MemoryDatabase() as opened:
        yield opened


async def _grow(database: MemoryDatabase, runs: int, notes: int = NOTES) -> None:
    """Add ended runs, each with so many events beside those that every run has."""
    for _ in range(runs):
        row = (await make.claimed(database.store)).row
        wish = make.commit_of(row, *(make.note() for _ in range(notes)))
        await make.advanced(database.store, database.reader, wish)
        await make.finish(database.store, database.reader, row.facts.run_id)


async def _verify(database: MemoryDatabase) -> None:
    await verifier.verify(database.reader, on_finding=lambda _: None)
    gc.collect()


async def test_the_rows_held_do_not_grow_with_the_number_of_runs(
    database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 4, part 1: millions of rows in bounded memory."""
    held = Held(monkeypatch)
    for more, runs in ((10, 10), (70, 80)):
        await _grow(database, more)
        held.records = 0
        await _verify(database)
        assert held.records == runs
        assert 0 < held.most <= verifier.AT_ONCE * SIZE
        assert held.now == 0


async def test_large_runs_are_held_one_at_a_time(
    database: MemoryDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 4, part 1: the bound is that of the largest run, not of several."""
    large = 100
    await _grow(database, verifier.AT_ONCE, large)
    held = Held(monkeypatch)
    await _verify(database)
    assert held.most > 2 * large
    monkeypatch.setattr(verifier, "EVENTS_AT_ONCE", large)
    held.most = 0
    await _verify(database)
    assert large < held.most < 2 * large
